"""The stored form of a row: one fixed-size record for each token and layer, in plain numpy.

Mode bf16 keeps H little-endian bfloat16 numbers, R = 2 H bytes, without loss for a bf16 target;
int8 and int4 are those of `quantise`, and need the calibration of each layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dflash_pipeline.store import quantise
from dflash_pipeline.store.bf16 import bf16_bits, bf16_to_float32
from dflash_pipeline.store.quantise import Calibration

Bytes = NDArray[np.uint8]

MODES = ("bf16", *quantise.MODES)


def row_bytes(mode: str, hidden_size: int) -> int:
    """R, the bytes of one stored row."""
    _known(mode)
    if mode == "bf16":
        return 2 * hidden_size
    return quantise.row_bytes(mode, hidden_size, quantise.NUM_KEPT)


def encode(values: NDArray[Any], mode: str, calibrations: Sequence[Calibration] = ()) -> Bytes:
    """Stored rows uint8 [..., R] of float32 values or raw bf16 bits (uint16) [..., H].

    `calibrations`: none for bf16; one that all rows share, or one for each layer of [..., K, H].
    """
    _known(mode)
    if mode == "bf16":
        bits = values if values.dtype == np.uint16 else bf16_bits(values)
        return np.ascontiguousarray(bits, "<u2").view(np.uint8)
    layers = _layers(values, mode, calibrations)
    return _joined([quantise.encode(layer, one) for layer, one in layers])


def decode(rows: Bytes, mode: str, calibrations: Sequence[Calibration] = ()) -> NDArray[np.float32]:
    """Values float32 [..., H] of stored rows uint8 [..., R]; `calibrations` as for `encode`."""
    _known(mode)
    if mode == "bf16":
        return bf16_to_float32(np.ascontiguousarray(rows).view("<u2"))
    layers = _layers(rows, mode, calibrations)
    return _joined([quantise.decode(layer, one) for layer, one in layers])


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


def _joined(layers: list[NDArray[Any]]) -> NDArray[Any]:
    return layers[0] if len(layers) == 1 else np.stack(layers, axis=-2)


def _known(mode: str) -> None:
    if mode not in MODES:
        raise ValueError(f"row mode {mode!r} is none of {MODES}: update dflash-pipeline")
