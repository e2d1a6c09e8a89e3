"""bfloat16 as its bits, in plain numpy, which has no such type."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


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
