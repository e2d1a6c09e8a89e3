"""Rotary positions: absolute, with frequencies that stay fp32.

The trap: casting a model to bf16 rounds the frequencies too, and the error grows with the position
until training and serving no longer agree; so `.to(dtype)` never touches them here.

Shape letters: N packed tokens, D width of a head.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn


def inverse_frequencies(
    head_dim: int,
    theta: float,
    scaling: Mapping[str, Any] | None,
    max_position_embeddings: int,
) -> tuple[Tensor, float]:
    """Radians a position for each pair of a head, fp32 [D / 2], and the factor of cos and sin.

    `scaling` is the target's RoPE scaling (linear, llama3 or yarn; None: none), read as
    transformers reads it. ValueError for a kind that is not known.
    """
    # on the CPU, wherever new tensors go: a power is rounded differently on another device
    pair = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
    plain = 1.0 / (theta**pair)
    if scaling is None:
        return plain, 1.0
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return plain, 1.0
    if kind == "linear":
        return plain / float(scaling["factor"]), 1.0
    if kind == "llama3":
        return _llama3(plain, scaling), 1.0
    if kind == "yarn":
        return _yarn(plain, head_dim, theta, scaling, max_position_embeddings)
    raise ValueError(f"RoPE scaling {kind!r} is not known here: expected linear, llama3 or yarn")


def _llama3(plain: Tensor, scaling: Mapping[str, Any]) -> Tensor:
    """Long wavelengths slowed by `factor`, short ones kept, a linear ramp between them."""
    factor = float(scaling["factor"])
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    turns = float(scaling["original_max_position_embeddings"]) * plain / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - kept) * plain / factor + kept * plain


def _yarn(
    plain: Tensor,
    head_dim: int,
    theta: float,
    scaling: Mapping[str, Any],
    max_position_embeddings: int,
) -> tuple[Tensor, float]:
    """NTK by parts (arXiv 2309.00071)."""
    original = float(scaling.get("original_max_position_embeddings") or max_position_embeddings)
    factor = float(scaling.get("factor") or max_position_embeddings / original)

    def pair_of(num_turns: float) -> float:
        turns = original / (num_turns * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(theta))

    first = pair_of(float(scaling.get("beta_fast") or 32))
    last = pair_of(float(scaling.get("beta_slow") or 1))
    if scaling.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    if first == last:
        last += 0.001  # transformers' guard: a ramp of width 0 divides by 0
    pair = torch.arange(head_dim // 2, dtype=torch.float32, device="cpu")
    slowed = ((pair - first) / (last - first)).clamp(0.0, 1.0)
    return slowed * plain / factor + (1 - slowed) * plain, _yarn_attention(factor, scaling)


def _yarn_attention(factor: float, scaling: Mapping[str, Any]) -> float:
    stated = scaling.get("attention_factor")
    if stated is not None:
        return float(stated)

    def scale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return scale(float(scaling["mscale"])) / scale(float(scaling["mscale_all_dim"]))
    return scale(1.0)


class Rotary(nn.Module):
    """Cosines and sines of positions. Follows a move to another device, never one to a dtype."""

    frequency: Tensor

    def __init__(
        self,
        head_dim: int,
        theta: float,
        scaling: Mapping[str, Any] | None,
        max_position_embeddings: int,
    ) -> None:
        super().__init__()
        frequency, self._scale = inverse_frequencies(
            head_dim, theta, scaling, max_position_embeddings
        )
        self.register_buffer("frequency", frequency, persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        exact = self.frequency
        move: Any = super()._apply
        move(fn, recurse)
        self.frequency = exact.to(self.frequency.device)
        return self

    def forward(self, position_N: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(cos, sin), each [N, 1, D], computed in fp32 and then rounded to `dtype`."""
        angle_ND = position_N.to(torch.float32)[:, None] * self.frequency
        angle_ND = torch.cat((angle_ND, angle_ND), dim=-1)[:, None]
        return (angle_ND.cos() * self._scale).to(dtype), (angle_ND.sin() * self._scale).to(dtype)


def rotate(state_NGD: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    """Turn each head's pairs (i, i + D / 2) by their position: the layout of Qwen3 and Llama."""
    cos, sin = turn
    first, second = state_NGD.chunk(2, dim=-1)
    return state_NGD * cos + torch.cat((-second, first), dim=-1) * sin
