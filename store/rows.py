"""The stored form of a row: one fixed-size record for each token and layer, in plain numpy.

Mode bf16 keeps H little-endian bfloat16 numbers, R = 2 H bytes, without loss for a bf16 target.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]


def row_bytes(mode: str, hidden_size: int) -> int:
    """R, the bytes of one stored row."""
    _known(mode)
    return 2 * hidden_size


def bf16_bits(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Upper half of float32, rounded to nearest even; NaN stays NaN, quiet."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = ((bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16).astype(np.uint16)
    # rounding up would carry a NaN's mantissa into the sign
    quiet = (bits >> 16).astype(np.uint16) | np.uint16(0x40)
    return np.where((bits & 0x7FFFFFFF) > 0x7F800000, quiet, rounded)


def bf16_to_float32(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """The value of each bfloat16, exactly."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def encode(values: NDArray[Any], mode: str) -> Bytes:
    """Stored rows uint8 [..., R] of float32 values or raw bf16 bits (uint16) [..., H]."""
    _known(mode)
    bits = values if values.dtype == np.uint16 else bf16_bits(values)
    return np.ascontiguousarray(bits, "<u2").view(np.uint8)


def decode(rows: Bytes, mode: str) -> NDArray[np.float32]:
    """Values float32 [..., H] of stored rows uint8 [..., R]."""
    _known(mode)
    return bf16_to_float32(np.ascontiguousarray(rows).view("<u2"))


def _known(mode: str) -> None:
    if mode != "bf16":
        raise ValueError(f"row mode {mode!r} is not known here (bf16 is): update dflash-pipeline")
