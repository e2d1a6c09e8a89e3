"""Drafter shapes that benchmarks and tests share."""

from __future__ import annotations

from typing import Any

from dflash_pipeline.train.shape import FULL, DrafterShape


def small_shape(**changes: Any) -> DrafterShape:
    """Two full layers, three features of width 8, blocks of 4: what `tiny_store` has rows for."""
    values: dict[str, Any] = {
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_layers": 2,
        "num_heads": 2,
        "num_kv_heads": 1,
        "head_dim": 8,
        "vocab_size": 97,
        "block_size": 4,
        "mask_token_id": 96,
        "layer_ids": (1, 3, 5),
        "num_target_layers": 8,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e4,
        "rope_scaling": None,
        "max_position_embeddings": 512,
        "layer_types": (FULL,) * changes.get("num_layers", 2),
        "sliding_window": 0,
        "input_embedding_scale": 1.0,
        "output_multiplier": 1.0,
        "final_logit_softcapping": 0.0,
        "init_std": 0.02,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    return DrafterShape(**(values | changes))


def wide_shape(
    hidden_size: int,
    intermediate_size: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    vocab_size: int,
) -> DrafterShape:
    """Five layers and blocks of 16 for a target of 36 layers, as the published ones have."""
    return small_shape(
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_layers=5,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=vocab_size,
        block_size=16,
        mask_token_id=vocab_size - 1,
        layer_ids=(1, 9, 17, 25, 33),
        num_target_layers=36,
        rope_theta=1e6,
        max_position_embeddings=40960,
    )


HEADLINE = wide_shape(4096, 12288, 32, 8, 128, 151936)
"""Of the drafter of Qwen3-8B: 1.05 B parameters."""
