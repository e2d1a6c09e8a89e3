"""Rotary positions of one new token in one kernel while a target answers.

transformers rotates query and key in ten operations a layer; at one token a row each of them is
nothing but its launch. On a GPU one kernel gives the same bits; a CPU goes on as it did.
Letters: B sequences, H query heads, G key heads, D head dimension.
Trap: families pair the channels otherwise, or rotate some of them only; each is tried first.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

Rotate = Callable[..., tuple[torch.Tensor, torch.Tensor]]

# in the file of each family that has rotary positions
_NAME = "apply_rotary_pos_emb"


@contextmanager
def fused_rope(model: nn.Module) -> Iterator[None]:
    """Within it the model's rotation is one kernel where it is the plain one of halves. In one
    thread: the functions are those of the family's file, whoever's model it is."""
    files = {sys.modules.get(type(module).__module__) for module in model.modules()}
    plain: dict[Any, Rotate] = {
        file: getattr(file, _NAME) for file in files if hasattr(file, _NAME)
    }
    try:
        for file, rotate in plain.items():
            if turns_halves(rotate):
                setattr(file, _NAME, partial(rotated, rotate))
        yield
    finally:
        for file, rotate in plain.items():
            setattr(file, _NAME, rotate)


def rotated(
    plain: Rotate,
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *others: Any,
    **settings: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The family's own function, or for one token on a GPU the kernel."""
    if not others and not settings and q.is_cuda and can_fuse(q, k, cos, sin):
        # triton has no build for each platform that has a CPU
        from dflash_pipeline.capture.rope_kernel import launch_rotate

        return launch_rotate(q, k, cos, sin)
    return plain(q, k, cos, sin, *others, **settings)


def can_fuse(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> bool:
    """Whether these are one token of each row with all channels rotated, laid out as needed."""
    num_rows, _, num_new, size = q.shape
    return (
        num_new == k.shape[2] == 1
        and size % 2 == 0
        and k.shape[0] == num_rows
        and cos.shape == sin.shape == (num_rows, 1, size)
        and k.shape[3] == size
        and q.dtype == k.dtype == cos.dtype == sin.dtype
        and q.stride(3) == k.stride(3) == cos.stride(2) == sin.stride(2) == 1
        and cos.stride(0) == sin.stride(0)
    )


def rotated_reference(
    query_BH1D: torch.Tensor, key_BG1D: torch.Tensor, cos_B1D: torch.Tensor, sin_B1D: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """x cos + y sin for query and key, where y is x's second half, negated, and then its first."""

    def turned(x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, dim=-1)
        return x * cos_B1D[:, None] + torch.cat((-second, first), dim=-1) * sin_B1D[:, None]

    return turned(query_BH1D), turned(key_BG1D)


@torch.inference_mode()
def turns_halves(rotate: Rotate) -> bool:
    """Whether a family's function is `rotated_reference`, bit for bit, for one token of a row."""
    # some families round once: equal in fp32 alone
    return all(map(partial(_is_reference, rotate), (torch.float32, torch.bfloat16, torch.float16)))


def _is_reference(rotate: Rotate, dtype: torch.dtype) -> bool:
    generator = torch.Generator().manual_seed(0)
    # cosines of two halves that differ: where a family has only one half of them, or pairs
    # neighbours, something else comes out
    shapes = ((2, 3, 1, 8), (2, 1, 1, 8), (2, 1, 8), (2, 1, 8))
    query, key, cos, sin = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    try:
        found = rotate(query, key, cos, sin)
    except (TypeError, ValueError, RuntimeError):
        # made for other arguments
        return False
    return all(map(torch.equal, found, rotated_reference(query, key, cos, sin)))
