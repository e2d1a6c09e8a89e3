"""Triton: query and key heads of one token a row, rotated by its position, in one launch.

The truth is `decode_rope.rotated_reference`: the same operations in the same order, each rounded to
the type of the heads, so that the bits are equal. Trap: a fused multiply-add breaks that, hence
`enable_fp_fusion=False`.

Letters: B sequences, H query heads, G key heads, D head dimension, P heads of either rounded up to
a power of two, X half of D rounded up so.
"""

# mypy: allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl

NUM_WARPS = 4


@triton.jit
def _product(x: tl.tensor, y: tl.tensor) -> tl.tensor:
    """As a tensor of their type would hold it."""
    return (x.to(tl.float32) * y.to(tl.float32)).to(x.dtype).to(tl.float32)


@triton.jit
def _rotate(
    source: tl.tensor,
    head_stride: tl.tensor,
    target: tl.tensor,
    cos_D: tl.tensor,
    sin_D: tl.tensor,
    NUM_HEADS: tl.constexpr,
    D: tl.constexpr,
    P: tl.constexpr,
    X: tl.constexpr,
) -> None:
    head_P1 = tl.arange(0, P)[:, None]
    pair_1X = tl.arange(0, X)[None]
    is_pair = pair_1X < D // 2
    is_own = (head_P1 < NUM_HEADS) & is_pair
    place = source + head_P1 * head_stride + pair_1X
    first = tl.load(place, mask=is_own, other=0.0)
    second = tl.load(place + D // 2, mask=is_own, other=0.0)
    cos_first = tl.load(cos_D + pair_1X, mask=is_pair, other=0.0)
    cos_second = tl.load(cos_D + D // 2 + pair_1X, mask=is_pair, other=0.0)
    sin_first = tl.load(sin_D + pair_1X, mask=is_pair, other=0.0)
    sin_second = tl.load(sin_D + D // 2 + pair_1X, mask=is_pair, other=0.0)
    out = target + head_P1 * D + pair_1X
    turned = _product(first, cos_first) - _product(second, sin_first)
    tl.store(out, turned.to(first.dtype), mask=is_own)
    turned = _product(second, cos_second) + _product(first, sin_second)
    tl.store(out + D // 2, turned.to(first.dtype), mask=is_own)


@triton.jit
def rotate_kernel(
    query: tl.tensor,
    query_stride: tl.tensor,
    query_head_stride: tl.tensor,
    key: tl.tensor,
    key_stride: tl.tensor,
    key_head_stride: tl.tensor,
    cos_BD: tl.tensor,
    sin_BD: tl.tensor,
    position_stride: tl.tensor,
    turned_query: tl.tensor,
    turned_key: tl.tensor,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    P: tl.constexpr,
    X: tl.constexpr,
) -> None:
    """Of row `program_id(0)` its query heads or its key heads."""
    row = tl.program_id(0).to(tl.int64)
    cos_D = cos_BD + row * position_stride
    sin_D = sin_BD + row * position_stride
    if tl.program_id(1) == 0:
        source, target = query + row * query_stride, turned_query + row * H * D
        _rotate(source, query_head_stride, target, cos_D, sin_D, H, D, P, X)
    else:
        source, target = key + row * key_stride, turned_key + row * G * D
        _rotate(source, key_head_stride, target, cos_D, sin_D, G, D, P, X)


def launch_rotate(
    query_BH1D: torch.Tensor, key_BG1D: torch.Tensor, cos_B1D: torch.Tensor, sin_B1D: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`decode_rope.rotated_reference` on the current stream.

    The channels of a head touch; cosines and sines of a row lie equally far apart.
    """
    num_rows, num_heads, _, size = query_BH1D.shape
    num_groups = key_BG1D.shape[1]
    turned_query = torch.empty_like(query_BH1D, memory_format=torch.contiguous_format)
    turned_key = torch.empty_like(key_BG1D, memory_format=torch.contiguous_format)
    # layers of a target that is spread over several GPUs are not all on the current one
    with torch.cuda.device_of(query_BH1D):
        rotate_kernel[(num_rows, 2)](
            query_BH1D,
            query_BH1D.stride(0),
            query_BH1D.stride(1),
            key_BG1D,
            key_BG1D.stride(0),
            key_BG1D.stride(1),
            cos_B1D,
            sin_B1D,
            cos_B1D.stride(0),
            turned_query,
            turned_key,
            H=num_heads,
            G=num_groups,
            D=size,
            P=triton.next_power_of_2(max(num_heads, num_groups)),
            X=triton.next_power_of_2(size // 2),
            num_warps=NUM_WARPS,
            enable_fp_fusion=False,
        )
    return turned_query, turned_key
