"""From a tiny target through capture and training to the score, for each way to store rows."""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from dflash_pipeline.capture import worker as capture_worker
from dflash_pipeline.capture.construction import build_store
from dflash_pipeline.capture.decoder import Decoder
from dflash_pipeline.capture.model import resolve
from dflash_pipeline.capture.samples import Conversation, Dropped
from dflash_pipeline.capture.target import Target
from dflash_pipeline.configs.place import Place
from dflash_pipeline.configs.schema import (
    CaptureConfig,
    DataConfig,
    DrafterConfig,
    LossConfig,
    OptimConfig,
    Run,
    StoreConfig,
    TargetConfig,
    TrainConfig,
)
from dflash_pipeline.store.check import verify
from dflash_pipeline.store.reader import open_store
from dflash_pipeline.train import worker as train_worker
from dflash_pipeline.train.decode import ModelDrafting, Tally, as_stored, decode, decode_plainly
from dflash_pipeline.train.drafter import Drafter
from dflash_pipeline.train.export import read_checkpoint
from dflash_pipeline.train.head import TargetHead
from dflash_pipeline.train.replay import replay

EOS = {258}
NUM_NEW = 40
LAYER_IDS = (0, 2, 4)


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    parent = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=parent) as directory:
        yield Path(directory)


def _targets() -> ModuleType:
    """The tiny targets of tests/capture."""
    path = Path(__file__).parent / "capture" / "conftest.py"
    spec = importlib.util.spec_from_file_location("targets_of_modes", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def target_dir(folder: Path) -> Path:
    targets = _targets()
    targets.tiny_model("qwen3").save_pretrained(folder / "target")
    targets.tiny_tokenizer().save_pretrained(folder / "target")
    return folder / "target"


@pytest.mark.parametrize(("hidden_mode", "last_mode"), [("int8", "int8"), ("int4", "int8")])
def test_a_drafter_trained_on_quantised_rows_replays_as_it_decodes(
    hidden_mode: Any, last_mode: Any, folder: Path, target_dir: Path
) -> None:
    path = folder / hidden_mode
    run = Run(
        target=TargetConfig(id=str(target_dir), layer_ids=LAYER_IDS),
        data=DataConfig(files=("data.jsonl",), max_len=96),
        store=StoreConfig(path=str(path / "hs"), hidden_mode=hidden_mode, last_mode=last_mode),
        capture=CaptureConfig(token_budget=192, pad_multiple=16, num_buckets=1, force=True),
        drafter=DrafterConfig(num_layers=2, block_size=4),
        loss=LossConfig(ce=0.5, kl=0.5, gamma=4.0),
        optim=OptimConfig(lr=3e-3),
        train=TrainConfig(
            out=str(path / "out"),
            stores=(str(path / "hs"),),
            epochs=20,
            batch_anchors=32,
            anchors_per_sample=8,
            validate_every=0,
        ),
    )
    # the target's own greedy answers, so that replay is decoding itself
    files = resolve(run.target)
    decoder = Decoder(Target.load(files, (), "cpu", torch.float32), LAYER_IDS)
    torch.manual_seed(1)
    prompts = [torch.randint(0, 256, (length,)) for length in (3, 9, 17, 5, 12, 7)]
    answers = [decode_plainly(decoder, prompt_T, NUM_NEW, EOS) for prompt_T in prompts]
    conversations = [
        Conversation(
            key=f"sample-{row}",
            source=0,
            row=row,
            domain="chat",
            messages=({"role": "user", "content": f"prompt {row}"},),
            text="",
            token_ids=(*prompt_T.tolist(), *answer.tokens),
            loss_spans=((len(prompt_T), len(prompt_T) + len(answer.tokens)),),
        )
        for row, (prompt_T, answer) in enumerate(zip(prompts, answers, strict=True))
    ]
    dropped = Dropped(num_rows=len(conversations))
    build_store(run, files, "cpu", conversations, dropped, "", 1, lambda _text: None)
    capture_worker.main(run, _place(path, "capture"), {})
    assert verify(run.store.path, deep=True).problems == []
    train_worker.main(run, _place(path, "train"), {"resume": False})
    store, checkpoint = open_store(run.store.path), read_checkpoint(run.train.out)
    drafter = Drafter(checkpoint.shape)
    drafter.load_state_dict(checkpoint.tensors)
    drafter.float().requires_grad_(False)
    head = TargetHead.from_store(store, checkpoint.shape, "cpu", torch.float32)
    rounding = partial(as_stored, mode=hidden_mode, calibrations=store.calibration.hidden)
    decoded, replayed = (Tally(num_drafts=3) for _ in range(2))
    for row, prompt_T in enumerate(prompts):
        answer = decode(decoder, ModelDrafting(drafter, head, rounding), prompt_T, NUM_NEW, EOS)
        assert answer.tokens == answers[row].tokens
        decoded.add(answer.cycles)
        index = store.table.find(f"sample-{row}")
        replayed.merge(replay(store, [index], drafter, head, checkpoint.shape, None))
    assert replayed == decoded
    # else the test would hold for a drafter that learned nothing
    assert decoded.num_kept - decoded.num_cycles > 10


def _place(path: Path, stage: str) -> Place:
    return Place(
        rank=0,
        world=1,
        device="cpu",
        kind="cpu",
        log_dir=str(path / f"{stage}-logs"),
        stage=stage,
        rendezvous="",
        threads=1,
    )
