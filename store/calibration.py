"""What int8 and int4 need to know of a target: centres and kept channels.

Made once a store, from rows of at least NUM_SAMPLES samples in plan order, and kept in the group
`calibration/`. One entry for each captured layer, then one for `last` when it is stored; a layer
stored as bf16 has None.

Letters: S samples, N rows, K captured layers, L = K and one for `last`, H hidden, k kept
channels.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dflash_pipeline.configs.threads import Threads
from dflash_pipeline.store.bf16 import bf16_bits, bf16_to_float32
from dflash_pipeline.store.quantise import (
    GROUP_SIZES,
    MODES,
    NUM_KEPT,
    Calibration,
    rotation_block,
)

Float = NDArray[np.float32]
Calibrations = list[Calibration | None]

NUM_SAMPLES = 64
"""Samples to calibrate from, in plan order across buckets and domains, or all of a smaller plan."""
NUM_ROWS = 4096
"""Rows to calibrate from: about 1,000 settled the kept channels of SmolLM2-135M."""
_MEDIAN_CHANNELS = 64
_ONE = Threads()
NUM_FIRST = 4
"""First positions of each sample that are always among the rows: attention sinks stand there."""


@dataclass(frozen=True, slots=True, eq=False)
class Calibrated:
    """The calibrations of a store as its readers and writers take them."""

    hidden: tuple[Calibration, ...] = ()
    """One a captured layer; empty where `hidden` is bf16."""
    last: tuple[Calibration, ...] = ()
    """The one of `last`; empty where it is bf16 or not stored."""
    report: Mapping[str, Any] = field(default_factory=dict)
    """The guard's findings, plain JSON values."""

    @classmethod
    def of(
        cls, calibrations: Calibrations, num_layers: int, report: Mapping[str, Any]
    ) -> Calibrated:
        """From one entry a captured layer, then one for `last` where it is stored."""
        hidden, last = calibrations[:num_layers], calibrations[num_layers:]
        return cls(
            tuple(entry for entry in hidden if entry is not None),
            tuple(entry for entry in last if entry is not None),
            report,
        )

    def entries(self, num_layers: int, has_last: bool) -> Calibrations:
        """The inverse of `of`."""
        entries: Calibrations = [*(self.hidden or [None] * num_layers)]
        if has_last:
            entries.append(self.last[0] if self.last else None)
        return entries


def calibration_positions(num_tokens_S: Sequence[int]) -> list[NDArray[np.int64]]:
    """Positions of each sample to calibrate from: the first few, then evenly spread."""
    share = max(2 * NUM_FIRST, NUM_ROWS // max(1, len(num_tokens_S)))
    positions = []
    for num_tokens in num_tokens_S:
        spread = np.linspace(0, num_tokens - 1, min(share, num_tokens)).round().astype(np.int64)
        positions.append(np.union1d(np.arange(min(NUM_FIRST, num_tokens)), spread))
    return positions


def calibrate(
    rows_NKH: Float,
    last_NH: Float | None,
    hidden_mode: str,
    last_mode: str,
    threads: Threads = _ONE,
) -> Calibrations:
    """One calibration for each captured layer, then one for `last` unless it is None.

    Centre: the channel's median over the rows. Kept: the channels with the largest share of a
    row's energy |x - centre|^2, on average. (By the largest |x - centre| alone, the int4 error of
    SmolLM2-135M is 5.1 %, by energy 4.9 %: a few sinks would choose for all.)
    """
    layers = [(rows_NKH[:, place], hidden_mode) for place in range(rows_NKH.shape[1])]
    if last_NH is not None:
        layers.append((last_NH, last_mode))
    return threads.map(
        lambda layer: _calibration(*layer) if layer[1] in MODES else None,
        layers,
    )


def _calibration(rows_NH: Float, mode: str) -> Calibration:
    if not len(rows_NH) or not np.isfinite(rows_NH).all():
        raise ValueError(f"{len(rows_NH)} rows to calibrate {mode} from, expected finite rows")
    hidden_size = rows_NH.shape[1]
    centre_H = bf16_bits(_median(rows_NH))
    square_NH = rows_NH - bf16_to_float32(centre_H)
    np.square(square_NH, out=square_NH)
    energy_N = square_NH.sum(axis=1)
    share_H = np.divide(1, energy_N, out=np.zeros_like(energy_N), where=energy_N > 0) @ square_NH
    # stable: equal channels are taken in order, on each machine alike
    largest_k = np.argsort(-share_H, kind="stable")[:NUM_KEPT]
    return Calibration(
        mode=mode,
        hidden_size=hidden_size,
        group=GROUP_SIZES[mode],
        block=rotation_block(hidden_size),
        kept_k=np.sort(largest_k).astype(np.int32),
        centre_H=centre_H,
    )


def _median(rows_NH: Float) -> Float:
    """`np.median` of each channel, a few channels at a time: 0.17 s instead of 0.46 of 4,096 rows
    of 4,096 channels."""
    median_H, middle = np.empty(rows_NH.shape[1], np.float32), len(rows_NH) // 2
    for begin in range(0, len(median_H), _MEDIAN_CHANNELS):
        part = slice(begin, begin + _MEDIAN_CHANNELS)
        values_HN = rows_NH[:, part].T.copy()
        values_HN.partition(middle, axis=1)
        middles = [values_HN[:, middle]]
        if len(rows_NH) % 2 == 0:
            middles.append(values_HN[:, :middle].max(axis=1))
        median_H[part] = np.mean(middles, axis=0)
    return median_H


def to_arrays(
    calibrations: Calibrations,
) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
    """Arrays and attributes of the group `calibration/`; at least one entry is calibrated."""
    first = next(entry for entry in calibrations if entry is not None)
    size = first.hidden_size
    arrays: dict[str, NDArray[Any]] = {
        "kept": np.zeros((len(calibrations), NUM_KEPT), np.int32),
        "centre": np.zeros((len(calibrations), size), np.uint16),
    }
    for place, entry in enumerate(calibrations):
        if entry is not None:
            arrays["kept"][place], arrays["centre"][place] = entry.kept_k, entry.centre_H
    attributes = {
        "modes": ["bf16" if entry is None else entry.mode for entry in calibrations],
        "groups": [0 if entry is None else entry.group for entry in calibrations],
        "block": first.block,
    }
    return arrays, attributes


def from_arrays(arrays: Mapping[str, NDArray[Any]], attributes: Mapping[str, Any]) -> Calibrations:
    """The inverse of `to_arrays`; anything else raises ValueError that says what is wrong."""
    if set(arrays) != {"kept", "centre"} or set(attributes) != {"modes", "groups", "block"}:
        raise ValueError(
            f"calibration holds {sorted(arrays)} and {sorted(attributes)}, expected centre, kept "
            "and block, groups, modes"
        )
    modes, groups, block = attributes["modes"], attributes["groups"], attributes["block"]
    kept_Lk, centre_LH = arrays["kept"], arrays["centre"]
    num = len(modes) if isinstance(modes, list) else -1
    if (
        not isinstance(groups, list)
        or kept_Lk.ndim != 2
        or centre_LH.ndim != 2
        or not num == len(groups) == len(kept_Lk) == len(centre_LH)
    ):
        raise ValueError(
            f"calibration of {num} modes has kept {kept_Lk.shape} and centre {centre_LH.shape}"
        )
    return [
        None
        if mode == "bf16"
        else Calibration(
            mode=mode,
            hidden_size=centre_LH.shape[1],
            group=group,
            block=block,
            kept_k=np.asarray(kept_Lk[place]),
            centre_H=np.asarray(centre_LH[place]),
        )
        for place, (mode, group) in enumerate(zip(modes, groups, strict=True))
    ]


def calibration_hash(calibrations: Calibrations) -> str:
    """sha256 of all that `encode` depends on; empty where every layer is bf16."""
    if not any(calibrations):
        return ""
    arrays, attributes = to_arrays(calibrations)
    digest = hashlib.sha256(json.dumps(attributes, sort_keys=True).encode())
    for name in sorted(arrays):
        digest.update(f"{name}{arrays[name].shape}".encode())
        digest.update(arrays[name].astype(arrays[name].dtype.newbyteorder("<")).tobytes())
    return digest.hexdigest()


def to_configuration(calibrations: Sequence[Calibration]) -> dict[str, Any]:
    """What the codec of an array needs to know: plain JSON, the centres as base64 of their bits."""
    first = calibrations[0]
    return {
        "mode": first.mode,
        "group": first.group,
        "block": first.block,
        "layers": [
            {
                "kept": entry.kept_k.tolist(),
                "centre": base64.b64encode(entry.centre_H.astype("<u2").tobytes()).decode(),
            }
            for entry in calibrations
        ],
    }


def from_configuration(configuration: Mapping[str, Any]) -> tuple[Calibration, ...]:
    """The inverse of `to_configuration`; anything else raises ValueError."""
    try:
        layers = [
            (np.array(layer["kept"], np.int32), base64.b64decode(layer["centre"], validate=True))
            for layer in configuration["layers"]
        ]
        fields = {"mode", "group", "block", "layers"}
        if set(configuration) != fields or not layers:
            raise ValueError(f"fields {sorted(configuration)}, expected {sorted(fields)}")
        return tuple(
            Calibration(
                mode=configuration["mode"],
                hidden_size=len(centre) // 2,
                group=configuration["group"],
                block=configuration["block"],
                kept_k=kept_k,
                centre_H=np.frombuffer(centre, "<u2").astype(np.uint16),
            )
            for kept_k, centre in layers
        )
    except (KeyError, TypeError, OverflowError, ValueError) as error:
        raise ValueError(f"calibration of rows in {sorted(configuration)}: {error}") from None
