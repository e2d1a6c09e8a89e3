"""Triton: logits -> the next token of each row, in one pass; one program a tile of a row.

The truth is `draw.chosen_reference`: the same fp32 operations in the same order, so that tokens are
equal. Trap: a fused multiply-add or a rough division or logarithm breaks that, hence
`enable_fp_fusion=False` and `div_rn`; near 1 the noise is nothing but the logarithm's last bits.

Letters: B sequences, V vocabulary, S tiles of a row, X tokens of a tile.
"""

# mypy: allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl

TILE = 4096
NUM_WARPS = 8
# of splitmix64
_STEP = tl.constexpr(0x9E3779B97F4A7C15)
_FIRST = tl.constexpr(0xBF58476D1CE4E5B9)
_SECOND = tl.constexpr(0x94D049BB133111EB)
_BELOW_ONE = tl.constexpr(1 - 2**-24)


@triton.jit
def _mixed(value: tl.tensor) -> tl.tensor:
    value = value + _STEP
    value = (value ^ (value >> 30)) * _FIRST
    value = (value ^ (value >> 27)) * _SECOND
    return value ^ (value >> 31)


# a new step or temperature is no reason to compile anew
@triton.jit(do_not_specialize=["step", "temperature"])
def draw_kernel(
    logits_BV: tl.tensor,
    logits_stride: tl.tensor,
    seed_B: tl.tensor,
    step: tl.tensor,
    temperature: tl.tensor,
    score_BS: tl.tensor,
    token_BS: tl.tensor,
    largest_BS: tl.tensor,
    V: tl.constexpr,
    S: tl.constexpr,
    X: tl.constexpr,
    IS_SAMPLED: tl.constexpr,
) -> None:
    """Of a tile: its best score, whose token that is, and its largest logit, NaN if any is."""
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    token_X = tile * X + tl.arange(0, X)
    logits_X = tl.load(
        logits_BV + row * logits_stride + token_X, mask=token_X < V, other=float("-inf")
    ).to(tl.float32)
    score_X = logits_X
    if IS_SAMPLED:
        seed = tl.load(seed_B + row).to(tl.uint64)
        noise_row = _mixed(_mixed(seed) + step.to(tl.uint64))
        bits_X = _mixed(noise_row + token_X.to(tl.uint64)) >> 40
        # a product with a power of two is exact, as the quotient is
        uniform_X = (bits_X.to(tl.int32).to(tl.float32) + 0.5) * 5.9604644775390625e-08
        noise_X = -tl.log(-tl.log(tl.minimum(uniform_X, _BELOW_ONE)))
        score_X = tl.div_rn(logits_X, temperature) + noise_X
    score, place = tl.max(score_X, axis=0, return_indices=True, return_indices_tie_break_left=True)
    is_odd = tl.max((logits_X != logits_X).to(tl.int32), axis=0) != 0
    largest = tl.where(is_odd, float("nan"), tl.max(logits_X, axis=0))
    out = row * S + tile
    tl.store(score_BS + out, score)
    # among NaNs the place may be behind the last token, which the target could not take
    tl.store(token_BS + out, tl.minimum(tile * X + place, V - 1).to(tl.int64))
    tl.store(largest_BS + out, largest)


def launch_draw(
    logits_BV: torch.Tensor, seed_B: torch.Tensor, step: int, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`draw.chosen_reference` on the current stream. Logits of a row touch; among those that are no
    numbers any token may be chosen."""
    num_rows, vocab_size = logits_BV.shape
    num_tiles = triton.cdiv(vocab_size, TILE)
    score_BS = torch.empty((num_rows, num_tiles), dtype=torch.float32, device=logits_BV.device)
    token_BS = torch.empty_like(score_BS, dtype=torch.int64)
    largest_BS = torch.empty_like(score_BS)
    # the logits of a target that is spread over several GPUs are not all on the current one
    with torch.cuda.device_of(logits_BV):
        draw_kernel[(num_rows, num_tiles)](
            logits_BV,
            logits_BV.stride(0),
            seed_B,
            step,
            # as fp32 divides by it, also where this is only asked whether there is any
            float(temperature),
            score_BS,
            token_BS,
            largest_BS,
            V=vocab_size,
            S=num_tiles,
            X=TILE,
            IS_SAMPLED=temperature > 0,
            num_warps=NUM_WARPS,
            enable_fp_fusion=False,
        )
    # the first of equal tiles, which has the first of equal tokens
    best_B1 = score_BS.argmax(1, keepdim=True)
    return token_BS.gather(1, best_B1)[:, 0], largest_BS.amax(1).isfinite()
