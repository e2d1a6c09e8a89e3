"""The stored form of a row: one fixed-size record for each token and layer, in plain numpy.

Mode bf16 keeps H little-endian bfloat16 numbers, R = 2 H bytes, without loss for a bf16 target;
int8 and int4 are those of `quantise`, and need the calibration of each layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dflash_pipeline.configs.threads import Threads
from dflash_pipeline.store import quantise
from dflash_pipeline.store.bf16 import bf16_bits, bf16_to_float32
from dflash_pipeline.store.quantise import Calibration

Bytes = NDArray[np.uint8]

MODES = ("bf16", *quantise.MODES)
ROWS_AT_ONCE = 64
"""Quantised or restored in one go: their steps then find them in the processor's cache."""
_ONE = Threads()


def row_bytes(mode: str, hidden_size: int) -> int:
    """R, the bytes of one stored row."""
    _known(mode)
    if mode == "bf16":
        return 2 * hidden_size
    return quantise.row_bytes(mode, hidden_size, quantise.NUM_KEPT)


def encode(
    values: NDArray[Any],
    mode: str,
    calibrations: Sequence[Calibration] = (),
    threads: Threads = _ONE,
) -> Bytes:
    """Stored rows uint8 [..., R] of float32 values or raw bf16 bits (uint16) [..., H].

    `calibrations`: none for bf16; one that all rows share, or one for each layer of [..., K, H].
    """
    _known(mode)
    if mode == "bf16":
        bits = values if values.dtype == np.uint16 else bf16_bits(values)
        return np.ascontiguousarray(bits, "<u2").view(np.uint8)
    return _by_parts(quantise.encode, _layers(values, mode, calibrations), threads)


def decode(
    rows: Bytes,
    mode: str,
    calibrations: Sequence[Calibration] = (),
    threads: Threads = _ONE,
) -> NDArray[np.float32]:
    """Values float32 [..., H] of stored rows uint8 [..., R]; `calibrations` as for `encode`."""
    _known(mode)
    if mode == "bf16":
        return bf16_to_float32(np.ascontiguousarray(rows).view("<u2"))
    return _by_parts(quantise.decode, _layers(rows, mode, calibrations), threads)


def _layers(
    array: NDArray[Any], mode: str, calibrations: Sequence[Calibration]
) -> list[tuple[NDArray[Any], Calibration]]:
    if {one.mode for one in calibrations} != {mode}:
        raise ValueError(f"{mode} rows need the calibration of their layers")
    if len(calibrations) == 1:
        return [(array, calibrations[0])]
    if array.ndim < 2 or array.shape[-2] != len(calibrations):
        raise ValueError(f"rows {array.shape} for {len(calibrations)} calibrated layers")
    return [(array[..., place, :], one) for place, one in enumerate(calibrations)]


def _by_parts(
    convert: Callable[[NDArray[Any], Calibration], NDArray[Any]],
    layers: Sequence[tuple[NDArray[Any], Calibration]],
    threads: Threads,
) -> NDArray[Any]:
    """Each layer's rows converted, a few at a time; a row does not depend on those beside it."""
    lead = layers[0][0].shape[:-1]
    flat = [(array.reshape(math.prod(lead), array.shape[-1]), one) for array, one in layers]
    parts = [
        (rows_NX[begin : begin + ROWS_AT_ONCE], one)
        for rows_NX, one in flat
        for begin in range(0, max(1, len(rows_NX)), ROWS_AT_ONCE)
    ]
    converted = threads.map(lambda part: convert(*part), parts)
    each = len(parts) // len(layers)
    joined = [np.concatenate(converted[i : i + each]) for i in range(0, len(parts), each)]
    whole = joined[0] if len(joined) == 1 else np.stack(joined, axis=-2)
    return whole.reshape(*lead, *whole.shape[1:])


def _known(mode: str) -> None:
    if mode not in MODES:
        raise ValueError(f"row mode {mode!r} is none of {MODES}: update dflash-pipeline")
