"""The whole capture on a tiny random twin of the target, before anything large is read.

The twin is a model of the target's own class, tokenizer and vocabulary with two layers (one of each
kind) and narrow ones; the first conversations go through template, plan, forward, pack, store, gate
and verify in a temporary directory. What a setting breaks, it breaks here, in seconds.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from dflash_pipeline.capture.construction import NothingLeftError, build_store
from dflash_pipeline.capture.model import TargetFiles, resolve
from dflash_pipeline.capture.samples import Conversation, Dropped
from dflash_pipeline.capture.stop import Stop
from dflash_pipeline.capture.target import Target
from dflash_pipeline.capture.worker import capture, seal
from dflash_pipeline.configs.schema import Run
from dflash_pipeline.store.check import verify

MAX_LEN = 256
# what makes a configuration small; head widths stay, RoPE settings depend on them
SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
# in case the first rows of the data are none that can be used
CONVERSATION = (
    {"role": "user", "content": "Count to three."},
    {"role": "assistant", "content": "One, two, three."},
)

# not annotated by transformers
_loader: Any = AutoModelForCausalLM
_logging: Any = transformers_logging


def check(run: Run, files: TargetFiles, conversations: Sequence[Conversation]) -> None:
    """Raise ValueError if `run` would not get through a capture. Takes seconds, on the CPU.

    A target whose class comes as its own code is not tried: nobody knows how to make it small.
    """
    if files.trust_remote_code:
        return
    with tempfile.TemporaryDirectory(prefix="dflash-preflight-") as temporary:
        directory = Path(temporary) / "twin"
        num_layers = write_twin(files, directory)
        twin_run = replace(
            run,
            target=replace(
                run.target,
                id=str(directory),
                dtype="fp32",
                layer_ids=tuple(range(num_layers - 1)),
                mask_token_id=files.mask_token_id(run.target),
            ),
            data=replace(
                run.data,
                max_len=min(run.data.max_len, MAX_LEN),
                overlong="truncate",
                heldout=0.0,
                max_bad_share=1.0,
            ),
            store=replace(run.store, path=str(Path(temporary) / "store"), shard_bytes=1),
            # random rows say nothing about the errors of int8 and int4, and no other store has them
            capture=replace(run.capture, max_bad_share=0.0, force=True, calibration_from=""),
        )
        dropped = Dropped(num_rows=len(conversations) + 1)
        tried = [*conversations, _conversation()]
        try:
            _capture(twin_run, resolve(twin_run.target), tried, dropped)
        except NothingLeftError as error:
            # all too short a cut: the plan goes on to the rows after these
            if dropped.num_bad:
                raise ValueError(
                    f"target {files.name}: neither the first {len(conversations)} rows nor a plain "
                    f"question and answer can be rendered: {'; '.join(sorted(dropped.counts))}"
                ) from error


def write_twin(files: TargetFiles, directory: Path) -> int:
    """Write a small random model of the target's class with its tokenizer; its layers."""
    config = _small_config(files)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        try:
            model = _loader.from_config(config, dtype=torch.float32)
            # all-ones norms would hide a norm that is missing or done twice
            for name, parameter in model.named_parameters():
                if "norm" in name and parameter.ndim == 1:
                    torch.nn.init.uniform_(parameter, 0.5, 1.5)
        except (ValueError, TypeError, RuntimeError, KeyError, AttributeError) as error:
            raise ValueError(
                f"target {files.name}: no small twin of model type {config.model_type!r} can be "
                f"made, so this family is not supported: {error}"
            ) from error
    _logging.disable_progress_bar()
    model.save_pretrained(directory)
    for name, data in files.files_for_store().items():
        if name != "config.json":
            (directory / name).write_bytes(data)
    return int(config.num_hidden_layers)


def _small_config(files: TargetFiles) -> Any:
    text = files.config.get_text_config(decoder=True)
    values = {**files.text_config, "tie_word_embeddings": files.is_tied, "initializer_range": 0.3}
    for key in ("quantization_config", "architectures", "auto_map"):
        values.pop(key, None)
    heads = values["num_attention_heads"]
    kv_heads = values.get("num_key_value_heads") or heads
    head_dim = values.get("head_dim") or values["hidden_size"] // heads
    chosen = _layers(values)
    for key, value in list(values.items()):
        if isinstance(value, list) and len(value) == files.num_layers:
            values[key] = [value[layer] for layer in chosen]
        elif key in SMALL and isinstance(value, int) and value > SMALL[key]:
            values[key] = SMALL[key]
    values |= {
        "num_hidden_layers": len(chosen),
        "num_attention_heads": 2,
        "num_key_value_heads": 1 if kv_heads < heads else 2,
        "head_dim": head_dim,
    }
    return type(text).from_dict(values)


def _layers(values: dict[str, Any]) -> list[int]:
    """Two layers of the target, or the first of each kind where it has more kinds."""
    kinds = values.get("layer_types") or []
    first = sorted({kind: kinds.index(kind) for kind in kinds}.values())
    return sorted({*first, *(range(2) if len(first) < 2 else ())})


def _conversation() -> Conversation:
    return Conversation(
        key="preflight",
        source=0,
        row=0,
        domain="",
        messages=CONVERSATION,
        text="",
        token_ids=(),
        loss_spans=(),
    )


def _capture(
    run: Run, files: TargetFiles, conversations: Sequence[Conversation], dropped: Dropped
) -> None:
    store = build_store(run, files, "cpu", conversations, dropped, "", 1, _say_nothing)
    target = Target.load(files, store.spec.layer_ids, "cpu", torch.float32)
    with Stop() as stop:
        store = capture(store, target, run.capture, _Silence(), stop)
    seal(store)
    problems = verify(store.path, deep=True).problems
    if problems:
        raise ValueError(f"preflight: the trial store is damaged: {'; '.join(problems)}")


def _say_nothing(_text: str) -> None:
    """Nobody wants to read about the twin."""


class _Silence:
    """A run log without a reader."""

    def say(self, text: str) -> None:
        """Nothing."""

    def state(self, state: str) -> None:
        """Nothing."""

    def progress(self, done: float, total: float, unit: str, **numbers: float) -> None:
        """Nothing."""
