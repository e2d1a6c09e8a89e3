"""Triton: one AdamW step over all parameters as one flat run, and their rounding, in one pass.

Moves 30 bytes a parameter: what torch's fused step and the rounding after it would read and write a
second time is never stored. `train/optim.py` has the plain way.
"""

# mypy: allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dflash_pipeline.configs.schema import OptimConfig

TILE = 2048
NUM_WARPS = 8


@triton.jit(do_not_specialize=["num_decayed", "lr"])
def adamw_kernel(
    master: tl.tensor,
    average: tl.tensor,
    square: tl.tensor,
    gradient: tl.tensor,
    rounded: tl.tensor,
    numbers: tl.tensor,
    size: tl.tensor,
    num_decayed: tl.tensor,
    lr: tl.tensor,
    BETA1: tl.constexpr,
    BETA2: tl.constexpr,
    EPS: tl.constexpr,
    DECAY: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """`numbers`: is the step bad, 1 / scale of the gradient, lr / (1 - beta1^t),
    1 / sqrt(1 - beta2^t). A bad step changes nothing. The first `num_decayed` decay."""
    if tl.load(numbers) != 0:
        return
    place = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    is_inside = place < size
    value = tl.load(master + place, mask=is_inside)
    slope = tl.load(gradient + place, mask=is_inside) * tl.load(numbers + 1)
    mean = tl.load(average + place, mask=is_inside)
    mean_square = tl.load(square + place, mask=is_inside)
    value = value * tl.where(place < num_decayed, 1.0 - lr * DECAY, 1.0)
    mean = mean + (slope - mean) * (1.0 - BETA1)
    mean_square = mean_square * BETA2 + slope * slope * (1.0 - BETA2)
    size_of_step = tl.sqrt(mean_square) * tl.load(numbers + 3) + EPS
    value = value - mean / size_of_step * tl.load(numbers + 2)
    tl.store(master + place, value, mask=is_inside)
    tl.store(average + place, mean, mask=is_inside)
    tl.store(square + place, mean_square, mask=is_inside)
    tl.store(rounded + place, value.to(rounded.dtype.element_ty), mask=is_inside)


@triton.jit
def add_kernel(
    first: tl.tensor, second: tl.tensor, out: tl.tensor, size: tl.tensor, TILE: tl.constexpr
) -> None:
    """out = first + second in the type of `out`."""
    place = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    is_inside = place < size
    one = tl.load(first + place, mask=is_inside).to(out.dtype.element_ty)
    two = tl.load(second + place, mask=is_inside).to(out.dtype.element_ty)
    tl.store(out + place, one + two, mask=is_inside)


def add_two(first: torch.Tensor, second: torch.Tensor, out: torch.Tensor) -> None:
    """out = first + second, all of one shape; `out` fp32 and contiguous."""
    size = out.numel()
    add_kernel[(triton.cdiv(size, TILE),)](
        first.contiguous(),
        second.contiguous(),
        out,
        size,
        TILE=TILE,
        num_warps=NUM_WARPS,
        # without products it changes nothing; left out, Triton 3.9 warns of its default
        enable_fp_fusion=True,
    )


def adamw_step(
    master: torch.Tensor,
    average: torch.Tensor,
    square: torch.Tensor,
    gradient: torch.Tensor,
    rounded: torch.Tensor,
    numbers: torch.Tensor,
    num_decayed: int,
    lr: float,
    config: OptimConfig,
) -> None:
    """All [size], fp32 but for `rounded`; `numbers` as the kernel says. In place, waits for
    nothing."""
    adamw_kernel[(triton.cdiv(len(master), TILE),)](
        master,
        average,
        square,
        gradient,
        rounded,
        numbers,
        len(master),
        num_decayed,
        lr,
        BETA1=config.beta1,
        BETA2=config.beta2,
        EPS=config.eps,
        DECAY=config.weight_decay,
        TILE=TILE,
        num_warps=NUM_WARPS,
        # said aloud: its default differs between versions of Triton
        enable_fp_fusion=True,
    )
