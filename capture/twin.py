"""A tiny random twin of the target, on which a command is tried before real weights load.

It is a model of the target's own class, tokenizer and vocabulary with two layers (one of each kind)
and narrow ones, written as files, so that it is found, read and loaded as the target will be.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from dflash_pipeline.capture.model import TargetFiles, resolve
from dflash_pipeline.configs.disk import write_whole
from dflash_pipeline.configs.schema import Run
from dflash_pipeline.configs.scratch import scratch

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

# not annotated by transformers
_loader: Any = AutoModelForCausalLM
_logging: Any = transformers_logging
# what transformers raises for a configuration that it can make no model of
_FAULTS = (ValueError, TypeError, RuntimeError, KeyError, AttributeError)


class NoTwinError(ValueError):
    """No small model of the target's class can be made."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Twin:
    """A run whose target is the twin."""

    run: Run
    files: TargetFiles
    layer_ids: tuple[int, ...]
    """All of its layers but the last."""
    directory: Path
    """Temporary; what a trial writes may go there too."""


@contextlib.contextmanager
def made(run: Run, files: TargetFiles, say: Callable[[str], None]) -> Iterator[Twin | None]:
    """The twin of `files`, for the time of the `with`. Raises NoTwinError for an unknown family.

    None, and a line said, when a model that brings its own code cannot be made small: nobody knows
    what its configuration means.
    """
    with scratch("preflight") as directory:
        try:
            num_layers = write_twin(files, directory / "twin")
        except NoTwinError as error:
            if not files.trust_remote_code:
                raise
            say(f"nothing is tried beforehand: {error}")
            yield None
            return
        layer_ids = tuple(range(num_layers - 1))
        target = replace(
            run.target,
            id=str(directory / "twin"),
            dtype="fp32",
            layer_ids=layer_ids,
            mask_token_id=files.mask_token_id(run.target),
        )
        trial = replace(run, target=target)
        yield Twin(run=trial, files=resolve(target), layer_ids=layer_ids, directory=directory)


def write_twin(files: TargetFiles, directory: Path) -> int:
    """Write a small random model of the target's class with its tokenizer; its layers.

    Raises NoTwinError.
    """
    # a model's own code may raise anything
    faults = (Exception,) if files.trust_remote_code else _FAULTS
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        try:
            model = _small_model(files)
        except faults as error:
            raise NoTwinError(
                f"target {files.name}: no small twin of model type {files.config.model_type!r} can "
                f"be made, so this family is not supported: {error}"
            ) from error
    _logging.disable_progress_bar()
    try:
        model.save_pretrained(directory)
    except SafetensorError as error:
        raise ValueError(
            f"the small target that is tried beforehand cannot be written to {directory} "
            f"({error}): free some space there, or set TMPDIR to another directory"
        ) from error
    for name, data in files.files_for_store().items():
        if name != "config.json":
            write_whole(directory / name, data)
    if files.trust_remote_code:
        for path in files.directory.glob("*.py"):
            shutil.copyfile(path, directory / path.name)
    return int(model.config.num_hidden_layers)


def _small_model(files: TargetFiles) -> Any:
    config = _small_config(files)
    # where a model's own code is looked for
    config.name_or_path = str(files.directory)
    model = _loader.from_config(
        config, dtype=torch.float32, trust_remote_code=files.trust_remote_code
    )
    # all-ones norms would hide a norm that is missing or done twice
    for name, parameter in model.named_parameters():
        if "norm" in name and parameter.ndim == 1:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    if files.trust_remote_code:
        # what its code makes of a small configuration must at least run
        model(torch.zeros((1, 4), dtype=torch.long))
    return model


def _small_config(files: TargetFiles) -> Any:
    text = files.config.get_text_config(decoder=True)
    values = {**files.text_config, "tie_word_embeddings": files.is_tied, "initializer_range": 0.3}
    for key in ("quantization_config", "architectures"):
        values.pop(key, None)
    if not files.trust_remote_code:
        values.pop("auto_map", None)
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
