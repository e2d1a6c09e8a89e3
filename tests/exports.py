"""Drafters of small and telling shapes, and their exports, that tests share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from dflash_pipeline.train.drafter import Drafter
from dflash_pipeline.train.export import write_speculators, write_zlab
from dflash_pipeline.train.shape import DrafterShape
from shapes import small_shape

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


def shape(**changes: Any) -> DrafterShape:
    """Its numbers differ from one another wherever they can: a mixed-up one shows."""
    fields: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_heads": 4,
        "num_kv_heads": 2,
        "vocab_size": 40,
        "mask_token_id": 39,
        "layer_ids": (1, 3, 4),
        "rms_norm_eps": 1e-5,
        "rope_theta": 5e5,
        "max_position_embeddings": 256,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    return small_shape(**(fields | changes))


SLIDING = {"layer_types": ("sliding_attention",) * 2, "sliding_window": 32}
MIXED = {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 32}
GEMMA = {"input_embedding_scale": 4.0, "output_multiplier": 0.5, "final_logit_softcapping": 30.0}


def tensors(of: DrafterShape) -> dict[str, torch.Tensor]:
    """Fresh weights of that shape, by the drafter's names."""
    drafter = Drafter(of)
    drafter.initialise(seed=3)
    return {name: parameter.detach() for name, parameter in drafter.named_parameters()}


def speculators(path: Path, of: DrafterShape, body: dict[str, torch.Tensor]) -> None:
    """An export in the speculators layout, of a target with a tied head."""
    matrix_VH = torch.randn(of.vocab_size, of.hidden_size).bfloat16()
    # a tied target hands out one matrix twice
    write_speculators(path, of, body, matrix_VH, matrix_VH, "org/target", ["Qwen3ForCausalLM"])


def config_of(path: Path) -> Any:
    """Its config.json."""
    return json.loads((path / "config.json").read_text())


def written(tmp_path: Path) -> Path:
    """An export of `shape()` in z-lab's layout."""
    write_zlab(tmp_path / "out", shape(), tensors(shape()))
    return tmp_path / "out"
