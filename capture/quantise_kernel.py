"""Triton: states of the target -> int8 or int4 records, one program a row.

The truth is `store.quantise.encode`: the same float32 operations in the same order, so that the
bytes are equal. Trap: a fused multiply-add or an approximate division breaks that, hence
`enable_fp_fusion=False` and `div_rn`.

Letters: M places of a padded batch, N rows, H hidden, P = H rounded up to a power of two.
"""

# mypy: allow-untyped-decorators

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from dflash_pipeline.store import quantise
from dflash_pipeline.store.quantise import Calibration

LARGEST = tl.constexpr(quantise.LARGEST)
FAINTEST = tl.constexpr(quantise.FAINTEST)
INT8_MAX = tl.constexpr(quantise.INT8_MAX)
INT4_EXTREME = tl.constexpr(quantise.INT4_EXTREME)
E4M3_MAX = tl.constexpr(quantise.E4M3_MAX)
E4M3_MAX_CODE = tl.constexpr(quantise.E4M3_MAX_CODE)
# adding and subtracting 1.5 * 2**23 leaves the nearest integer, ties to even
ROUND = tl.constexpr(12582912.0)


@triton.jit
def _butterfly(x_P: tl.tensor, P: tl.constexpr, STRIDE: tl.constexpr) -> tl.tensor:
    pairs = tl.permute(tl.reshape(x_P, (P // (2 * STRIDE), 2, STRIDE)), (0, 2, 1))
    first, second = tl.split(pairs)
    pairs = tl.permute(tl.join(first + second, first - second), (0, 2, 1))
    return tl.reshape(pairs, (P,))


@triton.jit
def _rotate(x_P: tl.tensor, P: tl.constexpr, BLOCK: tl.constexpr) -> tl.tensor:
    x_P = _butterfly(x_P, P, 1)
    x_P = _butterfly(x_P, P, 2)
    x_P = _butterfly(x_P, P, 4)
    x_P = _butterfly(x_P, P, 8)
    if BLOCK >= 32:
        x_P = _butterfly(x_P, P, 16)
    if BLOCK >= 64:
        x_P = _butterfly(x_P, P, 32)
    return x_P


@triton.jit
def _float32(x: tl.tensor) -> tl.tensor:
    """float32 as it is, or the value of bf16 bits in int16."""
    if x.dtype == tl.int16:
        x = (x.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return x


@triton.jit
def _nearest(x: tl.tensor) -> tl.tensor:
    return (x + ROUND) - ROUND


@triton.jit
def _reciprocal(scale: tl.tensor) -> tl.tensor:
    is_zero = scale == 0.0
    return tl.where(is_zero, 0.0, tl.div_rn(1.0, tl.where(is_zero, 1.0, scale)))


@triton.jit
def _e4m3_codes(ratio: tl.tensor) -> tl.tensor:
    bits = ratio.to(tl.int32, bitcast=True)
    normal = ((bits + ((bits >> 20) & 1) + 0x7FFFF) >> 20) - 960
    subnormal = _nearest(ratio * 512.0).to(tl.int32)
    return tl.where(ratio < 0.015625, subnormal, tl.minimum(normal, E4M3_MAX_CODE))


@triton.jit
def _e4m3_magnitudes(codes: tl.tensor) -> tl.tensor:
    normal = ((codes + 960) << 20).to(tl.float32, bitcast=True)
    return tl.where(codes < 8, codes.to(tl.float32) * 0.001953125, normal)


# the layers of [N, K] bounds, and the index of a batch's second half, start at any alignment: one
# compilation for all
@triton.jit(
    do_not_specialize=["largest_stride"], do_not_specialize_on_alignment=["index_N", "largest_N"]
)
def encode_kernel(
    hidden_MH: tl.tensor,
    hidden_stride: tl.tensor,
    index_N: tl.tensor,
    centre_H: tl.tensor,
    inlier_H: tl.tensor,
    kept_k: tl.tensor,
    rows_NR: tl.tensor,
    rows_stride: tl.tensor,
    largest_N: tl.tensor,
    largest_stride: tl.tensor,
    H: tl.constexpr,
    P: tl.constexpr,
    BLOCK: tl.constexpr,
    FACTOR: tl.constexpr,
    GROUP: tl.constexpr,
    NUM_KEPT: tl.constexpr,
    NUM_KEPT_BYTES: tl.constexpr,
    SCALES: tl.constexpr,
    ROW_SCALE: tl.constexpr,
    KEPT: tl.constexpr,
    R: tl.constexpr,
) -> None:
    """Write record `program_id(0)`; SCALES, ROW_SCALE and KEPT are byte offsets in it."""
    row = tl.program_id(0).to(tl.int64)
    source = hidden_MH + tl.load(index_N + row).to(tl.int64) * hidden_stride
    record = rows_NR + row * rows_stride
    channel = tl.arange(0, P)
    x = _float32(tl.load(source + channel, mask=channel < H, other=0))
    is_storable = tl.abs(x) <= LARGEST
    # infinite if any value is not storable; a NaN is not smaller than anything
    largest = tl.max(tl.where(is_storable, tl.abs(x), float("inf")), axis=0)
    tl.store(largest_N + row * largest_stride, largest)
    x = tl.where(is_storable, x, 0.0)
    centre = _float32(tl.load(centre_H + channel, mask=channel < H, other=0))
    is_inlier = tl.load(inlier_H + channel, mask=channel < H, other=0) != 0
    y = _rotate(tl.where(is_inlier, x - centre, 0.0), P, BLOCK) * FACTOR
    y_largest = tl.max(tl.abs(y), axis=0)
    is_faint = y_largest < FAINTEST
    if GROUP == 0:
        row_scale = tl.where(is_faint, 0.0, tl.div_rn(y_largest, INT8_MAX))
        q = _nearest(y * _reciprocal(row_scale)).to(tl.int32)
        tl.store(record + channel, q.to(tl.uint8), mask=channel < H)
    else:
        y = tl.reshape(y, (P // GROUP, GROUP))
        highest, lowest = tl.max(y, axis=1), -tl.min(y, axis=1)
        row_scale = tl.where(is_faint, 0.0, tl.div_rn(y_largest, INT4_EXTREME * E4M3_MAX))
        eighth = tl.maximum(highest, lowest) * (1.0 / INT4_EXTREME)
        ratio = tl.div_rn(eighth, tl.where(is_faint, 1.0, row_scale))
        codes = tl.where(is_faint, 0, _e4m3_codes(ratio))
        is_negative = (highest >= lowest) & (codes > 0)
        magnitude = _e4m3_magnitudes(codes) * row_scale
        scale = tl.where(is_negative, -magnitude, magnitude)
        q = _nearest(y * _reciprocal(scale)[:, None])
        q = tl.minimum(tl.maximum(q, -8.0), 7.0).to(tl.int32) & 15
        low, high = tl.split(tl.reshape(q, (P // 2, 2)))
        pair = tl.arange(0, P // 2)
        tl.store(record + pair, (low | (high << 4)).to(tl.uint8), mask=pair < H // 2)
        group = tl.arange(0, P // GROUP)
        codes = codes | tl.where(is_negative, 0x80, 0)
        tl.store(record + SCALES + group, codes.to(tl.uint8), mask=group < H // GROUP)
    byte = tl.arange(0, 4)
    scale_bits = row_scale.to(tl.int32, bitcast=True)
    tl.store(record + ROW_SCALE + byte, (scale_bits >> (8 * byte)).to(tl.uint8))
    _store_kept(source, kept_k, record + KEPT, NUM_KEPT, NUM_KEPT_BYTES)
    padding = KEPT + 2 * NUM_KEPT + tl.arange(0, 16)
    tl.store(record + padding, tl.zeros((16,), tl.uint8), mask=padding < R)


@triton.jit
def _store_kept(
    source: tl.tensor,
    kept_k: tl.tensor,
    target: tl.tensor,
    NUM_KEPT: tl.constexpr,
    NUM_KEPT_BYTES: tl.constexpr,
) -> None:
    """The kept channels as bfloat16, byte by byte: records are aligned, their fields are not."""
    byte = tl.arange(0, NUM_KEPT_BYTES)
    is_used = byte < 2 * NUM_KEPT
    channel = tl.load(kept_k + byte // 2, mask=is_used, other=0)
    x = _float32(tl.load(source + channel, mask=is_used, other=0))
    bits = tl.where(tl.abs(x) <= LARGEST, x, 0.0).to(tl.int32, bitcast=True)
    # to the nearest, ties to even
    bits = (bits + ((bits >> 16) & 1) + 0x7FFF) >> 16
    tl.store(target + byte, (bits >> (8 * (byte % 2))).to(tl.uint8), mask=is_used)


def launch_encode(
    hidden_MH: torch.Tensor,
    index_N: torch.Tensor,
    centre_H: torch.Tensor,
    inlier_H: torch.Tensor,
    kept_k: torch.Tensor,
    rows_NR: torch.Tensor,
    largest_N: torch.Tensor,
    calibration: Calibration,
) -> None:
    """Start the kernel on the current stream.

    `hidden_MH`: fp32 or bf16; `centre_H`: bf16. Channels of a state and bytes of a row touch.
    """
    constants = encode_constants(calibration)
    if hidden_MH.dtype == torch.bfloat16:
        # as bits: Triton's interpreter loses subnormals when it widens bf16
        hidden_MH = hidden_MH.view(torch.int16)
    encode_kernel[(len(index_N),)](
        hidden_MH,
        hidden_MH.stride(0),
        index_N,
        centre_H.view(torch.int16),
        inlier_H,
        kept_k,
        rows_NR,
        rows_NR.stride(0),
        largest_N,
        largest_N.stride(0),
        **constants,
        num_warps=num_warps(constants["P"]),
        enable_fp_fusion=False,
    )


def encode_constants(calibration: Calibration) -> dict[str, Any]:
    """The kernel's compile-time arguments."""
    return {
        "H": calibration.hidden_size,
        "P": triton.next_power_of_2(calibration.hidden_size),
        "BLOCK": calibration.block,
        "FACTOR": calibration.encode_factor,
        "GROUP": calibration.group,
        "NUM_KEPT": calibration.num_kept,
        "NUM_KEPT_BYTES": triton.next_power_of_2(2 * calibration.num_kept),
        "SCALES": calibration.scales_offset,
        "ROW_SCALE": calibration.row_scale_offset,
        "KEPT": calibration.kept_offset,
        "R": calibration.row_bytes,
    }


def num_warps(padded_size: int) -> int:
    """Warps of a program: 32 channels a thread were fastest on an H200 at H 4096."""
    return max(2, min(8, padded_size // 1024))
