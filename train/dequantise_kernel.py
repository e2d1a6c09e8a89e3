"""Triton: int8 or int4 records -> features, one program for a row of a layer.

The truth is `store.quantise.decode`: the same float32 operations in the same order, so that float32
features are equal to the last bit, and bf16 ones are those rounded to nearest even.

Letters: N rows, K layers, H hidden, P = H rounded up to a power of two, Z bytes of a stored row.
"""

# mypy: allow-untyped-decorators

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from dflash_pipeline.store.quantise import Calibration


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
def _e4m3(codes: tl.tensor) -> tl.tensor:
    magnitude = codes & 0x7F
    # exponent biases 127 - 7, in units of 3 mantissa bits
    normal = ((magnitude + 960) << 20).to(tl.float32, bitcast=True)
    value = tl.where(magnitude < 8, magnitude.to(tl.float32) * 0.001953125, normal)
    return tl.where(codes >= 0x80, -value, value)


@triton.jit
def _float32(bits: tl.tensor) -> tl.tensor:
    """The value of bf16 bits."""
    return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _store(target: tl.tensor, x: tl.tensor, mask: tl.tensor) -> None:
    """Into float32 as it is, into int16 as the bits of the nearest bf16, ties to even."""
    if target.dtype.element_ty == tl.int16:
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + ((bits >> 16) & 1) + 0x7FFF) >> 16
        tl.store(target, bits.to(tl.int16), mask=mask)
    else:
        tl.store(target, x, mask=mask)


@triton.jit(do_not_specialize=["num_layers"])
def decode_kernel(
    rows_NKZ: tl.tensor,
    centre_KH: tl.tensor,
    kept_Kk: tl.tensor,
    feature_NKH: tl.tensor,
    num_layers: tl.tensor,
    H: tl.constexpr,
    P: tl.constexpr,
    BLOCK: tl.constexpr,
    FACTOR: tl.constexpr,
    GROUP: tl.constexpr,
    NUM_KEPT: tl.constexpr,
    NUM_KEPT_PADDED: tl.constexpr,
    SCALES: tl.constexpr,
    ROW_SCALE: tl.constexpr,
    KEPT: tl.constexpr,
    Z: tl.constexpr,
) -> None:
    """Read record `program_id(0)`; SCALES, ROW_SCALE and KEPT are byte offsets in it."""
    place = tl.program_id(0).to(tl.int64)
    layer = place % num_layers
    record = rows_NKZ + place * Z
    byte = tl.arange(0, 4)
    scale_bytes = tl.load(record + ROW_SCALE + byte).to(tl.int32) << (8 * byte)
    # the four bytes share no bit, so their sum is their union
    row_scale = tl.sum(scale_bytes, axis=0).to(tl.float32, bitcast=True)
    channel = tl.arange(0, P)
    if GROUP == 0:
        q = tl.load(record + channel, mask=channel < H, other=0).to(tl.int8, bitcast=True)
        y = q.to(tl.float32) * row_scale
    else:
        pair = tl.arange(0, P // 2)
        nibbles = tl.load(record + pair, mask=pair < H // 2, other=0).to(tl.int32)
        # shifted up and back down, a nibble keeps its sign
        q = tl.join((nibbles << 28) >> 28, (nibbles << 24) >> 28)
        group = tl.arange(0, P // GROUP)
        codes = tl.load(record + SCALES + group, mask=group < H // GROUP, other=0).to(tl.int32)
        scale = _e4m3(codes) * row_scale
        y = tl.reshape(q, (P // GROUP, GROUP)).to(tl.float32) * scale[:, None]
        y = tl.reshape(y, (P,))
    kept = tl.arange(0, NUM_KEPT_PADDED)
    is_kept = kept < NUM_KEPT
    low = tl.load(record + KEPT + 2 * kept, mask=is_kept, other=0).to(tl.int32)
    high = tl.load(record + KEPT + 2 * kept + 1, mask=is_kept, other=0).to(tl.int32)
    kept_value = _float32(low | (high << 8))
    feature = feature_NKH + place * H
    is_channel = channel < H
    centre = _float32(tl.load(centre_KH + layer * H + channel, mask=is_channel, other=0))
    _store(feature + channel, _rotate(y, P, BLOCK) * FACTOR + centre, is_channel)
    # the program's own stores, in this order: a mask in their place would split the wide ones
    tl.debug_barrier()
    kept_channel = tl.load(kept_Kk + layer * NUM_KEPT + kept, mask=is_kept, other=0)
    _store(feature + kept_channel, kept_value, is_kept)


def launch_decode(
    rows_NKZ: torch.Tensor,
    centre_KH: torch.Tensor,
    kept_Kk: torch.Tensor,
    feature_NKH: torch.Tensor,
    calibration: Calibration,
) -> None:
    """Start the kernel on the current stream. All are contiguous.

    `calibration`: that of any layer, for the sizes that they share.
    """
    constants = decode_constants(calibration)
    decode_kernel[(rows_NKZ.shape[0] * rows_NKZ.shape[1],)](
        rows_NKZ,
        centre_KH.view(torch.int16),
        kept_Kk,
        _bits(feature_NKH),
        rows_NKZ.shape[1],
        **constants,
        num_warps=num_warps(constants["P"]),
        enable_fp_fusion=False,
    )


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """bf16 as int16: Triton's interpreter does not round to bf16 as the GPU does."""
    return tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor


def decode_constants(calibration: Calibration) -> dict[str, Any]:
    """The kernel's compile-time arguments."""
    return {
        "H": calibration.hidden_size,
        "P": triton.next_power_of_2(calibration.hidden_size),
        "BLOCK": calibration.block,
        "FACTOR": calibration.decode_factor,
        "GROUP": calibration.group,
        "NUM_KEPT": calibration.num_kept,
        "NUM_KEPT_PADDED": triton.next_power_of_2(calibration.num_kept),
        "SCALES": calibration.scales_offset,
        "ROW_SCALE": calibration.row_scale_offset,
        "KEPT": calibration.kept_offset,
        "Z": calibration.row_bytes,
    }


def num_warps(padded_size: int) -> int:
    """Warps of a program: 32 channels a thread were fastest on an H200 at H 4096."""
    return max(2, min(8, padded_size // 1024))
