"""Randomness that is a function of its arguments alone: no state to save, none to restore.

numpy's and torch's generators may change between versions; this is integer arithmetic.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]


def hashed(*parts: int | npt.NDArray[np.integer]) -> Words:
    """One well-mixed 64-bit word for each combination of the (broadcast) parts: splitmix64."""
    mixed = np.zeros(1, np.uint64)
    for part in parts:
        mixed = _mix(mixed ^ _word(part))
    return mixed


def _word(part: int | npt.NDArray[np.integer]) -> Words:
    if isinstance(part, np.ndarray):
        return part.astype(np.uint64)
    return np.array([part & 0xFFFFFFFFFFFFFFFF], np.uint64)


def _mix(word: Words) -> Words:
    # array arithmetic wraps silently, as splitmix64 wants
    word = word + np.uint64(0x9E3779B97F4A7C15)
    word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return word ^ (word >> np.uint64(31))
