"""From a tiny target through capture and training to the score, for each way to store rows."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dflash_pipeline.capture import worker as capture_worker
from dflash_pipeline.capture.construction import build_store
from dflash_pipeline.capture.decoder import Decoder
from dflash_pipeline.capture.model import resolve
from dflash_pipeline.capture.samples import Conversation, Dropped
from dflash_pipeline.capture.target import Target
from dflash_pipeline.configs.errors import UsageError
from dflash_pipeline.configs.mounts import root_of
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
from dflash_pipeline.store.merge import merge
from dflash_pipeline.store.reader import open_store
from dflash_pipeline.train import worker as train_worker
from dflash_pipeline.train.decode import Task, decode, decode_plainly
from dflash_pipeline.train.drafter import Drafter
from dflash_pipeline.train.drafting import ModelDrafting, as_stored
from dflash_pipeline.train.head import TargetHead
from dflash_pipeline.train.journal import Journal
from dflash_pipeline.train.loading import read_checkpoint
from dflash_pipeline.train.replay import replay
from dflash_pipeline.train.tally import Tally
from places import cpu_place
from tiny_targets import save_target

EOS = {258}
NUM_NEW = 40
LAYER_IDS = (0, 2, 4)


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    parent = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=parent) as directory:
        yield Path(directory)


@pytest.fixture(scope="module")
def target_dir(folder: Path) -> Path:
    save_target(folder / "target", "qwen3")
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
    answers = [
        decode_plainly(decoder, [Task(ids_T=prompt_T, max_new_tokens=NUM_NEW)], EOS)[0]
        for prompt_T in prompts
    ]
    _capture(
        run,
        [
            _conversation(f"sample-{row}", row, prompt_T.tolist(), list(answer.tokens))
            for row, (prompt_T, answer) in enumerate(zip(prompts, answers, strict=True))
        ],
    )
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
        answer = decode(
            decoder,
            ModelDrafting(drafter, head, rounding),
            [Task(ids_T=prompt_T, max_new_tokens=NUM_NEW)],
            EOS,
        )[0]
        assert answer.tokens == answers[row].tokens
        decoded.add(answer.cycles)
        index = store.table.find(f"sample-{row}")
        replayed.merge(replay(store, [index], drafter, head, None))
    assert replayed == decoded
    # else the test would hold for a drafter that learned nothing
    assert decoded.num_kept - decoded.num_cycles > 10


def test_a_second_store_is_trained_on_with_the_first_and_merged_with_it(
    folder: Path,
    target_dir: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """New data joins a quantised store: the day after the first run."""
    path, drawn, note = folder / "day-two", [], Journal.note

    def noting(self: Journal, step: int, draw: Any) -> None:
        drawn.extend(self._key(int(place)) for batch in draw.batches for place in batch)
        note(self, step, draw)

    monkeypatch.setattr(Journal, "note", noting)
    random = np.random.default_rng(0)
    runs = []
    # the second one lies on two mounts
    for name, where, num_samples in (
        ("a", str(path / "a"), 8),
        ("b", f"{path / 'b'},{path / 'further'}", 5),
    ):
        run = Run(
            target=TargetConfig(id=str(target_dir), layer_ids=LAYER_IDS),
            data=DataConfig(files=("data.jsonl",), max_len=96, heldout=0.0),
            store=StoreConfig(path=where, hidden_mode="int8", last_mode="int8", shard_bytes=4_000),
            capture=CaptureConfig(
                token_budget=192,
                pad_multiple=16,
                num_buckets=1,
                force=True,
                calibration_from=runs[0].store.path if runs else "",
            ),
        )
        runs.append(run)
        conversations = []
        for row in range(num_samples):
            ids = random.integers(0, 256, random.integers(24, 60)).tolist()
            conversations.append(_conversation(f"{name}-{row}", row, ids[:10], ids[10:]))
        _capture(run, conversations)
    stores = [run.store.path for run in runs]
    assert list((path / "further").rglob("hidden/c/*/0/0"))
    assert verify(stores[1], deep=True).problems == []
    train = TrainConfig(
        stores=(stores[0], f"{stores[1]}:0.4"),
        epochs=1,
        batch_anchors=32,
        anchors_per_sample=8,
        validate_every=0,
    )
    run = Run(drafter=DrafterConfig(num_layers=1, block_size=4), train=train)
    run = replace(run, train=replace(train, out=str(path / "both")))
    train_worker.main(run, _place(path, "train"), {"resume": False})
    # all 8 of the first store, and 2 of 5 of the second
    assert sorted(key[0] for key in drawn) == 8 * ["a"] + 2 * ["b"]
    drawn.clear()
    merge(path / "ab", stores, deep=True, say=print, progress=lambda _done, _total: None)
    assert "13 samples of 2 stores" in capsys.readouterr().out
    assert verify(path / "ab", deep=True).problems == []
    run = replace(run, train=replace(train, out=str(path / "one"), stores=(str(path / "ab"),)))
    train_worker.main(run, _place(path, "train"), {"resume": False})
    assert len(set(drawn)) == len(drawn) == 13
    # the same without the calibration taken over
    anew = replace(runs[1], store=replace(runs[1].store, path=str(path / "anew")))
    anew = replace(anew, capture=replace(anew.capture, calibration_from=""))
    _capture(anew, conversations)
    stores = [stores[0], anew.store.path]
    run = replace(run, train=replace(train, out=str(path / "no"), stores=tuple(stores)))
    with pytest.raises(UsageError, match=r"cannot be trained together: calibration_hash: "):
        train_worker.main(run, _place(path, "train"), {"resume": False})


def _conversation(key: str, row: int, prompt: list[int], answer: list[int]) -> Conversation:
    return Conversation(
        key=key,
        source=0,
        row=row,
        domain="chat",
        messages=({"role": "user", "content": f"prompt {row}"},),
        text="",
        token_ids=(*prompt, *answer),
        loss_spans=((len(prompt), len(prompt) + len(answer)),),
    )


def _capture(run: Run, conversations: list[Conversation]) -> None:
    dropped, files = Dropped(num_rows=len(conversations)), resolve(run.target)
    build_store(run, files, "cpu", conversations, dropped, "", 1, lambda _text: None)
    capture_worker.main(run, _place(Path(f"{root_of(run.store.path)}-run"), "capture"), {})


def _place(path: Path, stage: str) -> Place:
    return cpu_place(path / f"{stage}-logs", stage)
