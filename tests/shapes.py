"""Drafter shapes that benchmarks and tests share."""

from __future__ import annotations

from dflash_pipeline.train.shape import FULL, DrafterShape


def wide_shape(
    hidden_size: int,
    intermediate_size: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    vocab_size: int,
) -> DrafterShape:
    """Five layers and blocks of 16 for a target of 36 layers, as the published ones have."""
    return DrafterShape(
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
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        rope_scaling=None,
        max_position_embeddings=40960,
        layer_types=(FULL,) * 5,
        sliding_window=0,
        input_embedding_scale=1.0,
        output_multiplier=1.0,
        final_logit_softcapping=0.0,
        init_std=0.02,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )


HEADLINE = wide_shape(4096, 12288, 32, 8, 128, 151936)
"""Of the drafter of Qwen3-8B: 1.05 B parameters."""
