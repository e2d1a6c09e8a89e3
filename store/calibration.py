"""What int8 and int4 need to know of a target, and whether they serve it: calibrate, then guard.

Made once a store, from rows of at least NUM_SAMPLES samples in plan order, and kept in the group
`calibration/`. One entry for each captured layer, then one for `last` when it is stored; a layer
stored as bf16 has None.

Letters: S samples, N rows, K captured layers, L = K and one for `last`, H hidden, V vocabulary,
k kept channels.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dflash_pipeline.store.quantise import (
    GROUP_SIZES,
    MODES,
    NUM_KEPT,
    Calibration,
    decode,
    encode,
    rotation_block,
)
from dflash_pipeline.store.rows import bf16_bits, bf16_to_float32

Float = NDArray[np.float32]
Calibrations = list[Calibration | None]

NUM_SAMPLES = 64
"""Samples to calibrate from, in plan order across buckets and domains, or all of a smaller plan."""
NUM_ROWS = 4096
"""Rows to calibrate from: about 1,000 settled the kept channels of SmolLM2-135M."""
NUM_HEAD_ROWS = 256
"""Rows of `last` that go through the head, which is by far the dearest part of the guard."""
NUM_FIRST = 4
"""First positions of each sample that are always among the rows: attention sinks stand there."""
VOCAB_CHUNK = 8192


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
    """What a mode must keep to; beyond it the mode is refused."""

    error_median: float
    """Median over rows of the relative L2 error, at most."""
    top1: float
    """Share of rows whose most likely token stays the same, at least."""
    kl: float
    """Mean Kullback-Leibler divergence of the next-token distribution in nats, at most."""


BOUNDS = {
    # SmolLM2-135M measured 0.49 %, 99.6 %, 0.0002 and 4.9 %, 93.4 %, 0.017 (H 576)
    "int8": Bounds(error_median=0.012, top1=0.98, kl=0.002),
    "int4": Bounds(error_median=0.075, top1=0.88, kl=0.06),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerReport:
    """How well the rows of one layer come back."""

    name: str
    mode: str
    num_rows: int
    error_median: float
    """Relative L2 error of a row, the median over rows."""
    error_p99: float
    cosine_median: float
    cosine_min: float
    amax: float
    """Largest |x|."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadReport:
    """What storing `last` does to the target's next-token distribution."""

    mode: str
    num_rows: int
    top1: float
    kl: float


def calibration_positions(num_tokens_S: Sequence[int]) -> list[NDArray[np.int64]]:
    """Positions of each sample to calibrate from: the first few, then evenly spread."""
    share = max(2 * NUM_FIRST, NUM_ROWS // max(1, len(num_tokens_S)))
    positions = []
    for num_tokens in num_tokens_S:
        spread = np.linspace(0, num_tokens - 1, min(share, num_tokens)).round().astype(np.int64)
        positions.append(np.union1d(np.arange(min(NUM_FIRST, num_tokens)), spread))
    return positions


def calibrate(
    rows_NKH: Float, last_NH: Float | None, hidden_mode: str, last_mode: str
) -> Calibrations:
    """One calibration for each captured layer, then one for `last` unless it is None.

    Centre: the channel's median over the rows. Kept: the channels with the largest share of a
    row's energy |x - centre|^2, on average. (By the largest |x - centre| alone, the int4 error of
    SmolLM2-135M is 5.1 %, by energy 4.9 %: a few sinks would choose for all.)
    """
    layers = [(rows_NKH[:, place], hidden_mode) for place in range(rows_NKH.shape[1])]
    if last_NH is not None:
        layers.append((last_NH, last_mode))
    return [_calibration(rows_NH, mode) if mode in MODES else None for rows_NH, mode in layers]


def _calibration(rows_NH: Float, mode: str) -> Calibration:
    if not len(rows_NH) or not np.isfinite(rows_NH).all():
        raise ValueError(f"{len(rows_NH)} rows to calibrate {mode} from, expected finite rows")
    hidden_size = rows_NH.shape[1]
    centre_H = bf16_bits(np.median(rows_NH, axis=0).astype(np.float32))
    square_NH = np.square(rows_NH - bf16_to_float32(centre_H))
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


def layer_report(name: str, rows_NH: Float, calibration: Calibration) -> LayerReport:
    """Errors of the rows after `encode` and `decode`; rows of zeros are left out."""
    norm_N = np.linalg.norm(rows_NH, axis=1)
    rows_NH, norm_N = rows_NH[norm_N > 0], norm_N[norm_N > 0]
    if not len(rows_NH):
        raise ValueError(f"{name}: no row to judge {calibration.mode} by")
    stored_NH = decode(encode(rows_NH, calibration), calibration)
    error_N = np.linalg.norm(stored_NH - rows_NH, axis=1) / norm_N
    # the centre alone may be 0, and so may a stored row
    stored_norm_N = np.maximum(np.linalg.norm(stored_NH, axis=1), np.finfo(np.float32).tiny)
    cosine_N = np.einsum("nh,nh->n", stored_NH, rows_NH) / stored_norm_N / norm_N
    return LayerReport(
        name=name,
        mode=calibration.mode,
        num_rows=len(rows_NH),
        error_median=float(np.median(error_N)),
        error_p99=float(np.quantile(error_N, 0.99)),
        cosine_median=float(np.median(cosine_N)),
        cosine_min=float(cosine_N.min()),
        amax=float(np.abs(rows_NH).max()),
    )


def layer_reports(
    rows_NKH: Float, last_NH: Float | None, layer_ids: Sequence[int], calibrations: Calibrations
) -> list[LayerReport]:
    """A report for each calibrated layer, named by its id, and for `last`."""
    names = [f"layer {layer_id}" for layer_id in layer_ids]
    layers = [rows_NKH[:, place] for place in range(rows_NKH.shape[1])]
    if last_NH is not None:
        names, layers = [*names, "last"], [*layers, last_NH]
    return [
        layer_report(name, rows_NH, calibration)
        for name, rows_NH, calibration in zip(names, layers, calibrations, strict=True)
        if calibration is not None
    ]


def head_report(
    last_NH: Float,
    calibration: Calibration,
    head_VH: NDArray[np.uint16],
    multiplier: float,
    soft_cap: float,
) -> HeadReport:
    """Top-1 agreement and KL of the target's head (bf16 bits) on stored against true rows.

    Logits are multiplied, then soft-capped where `soft_cap` is not 0. The vocabulary passes in
    chunks with running maxima, so memory is O(N VOCAB_CHUNK).
    """
    stored_NH = decode(encode(last_NH, calibration), calibration)
    truth, found = _Softmax(len(last_NH)), _Softmax(len(last_NH))
    # sum over v of exp(truth_v - max) (truth_v - found_v)
    gap_N = np.zeros(len(last_NH))
    for begin in range(0, len(head_VH), VOCAB_CHUNK):
        weight_HV = bf16_to_float32(np.asarray(head_VH[begin : begin + VOCAB_CHUNK])).T
        truth_NV = _logits(last_NH @ weight_HV, multiplier, soft_cap)
        found_NV = _logits(stored_NH @ weight_HV, multiplier, soft_cap)
        shrink_N, exp_NV = truth.add(begin, truth_NV)
        found.add(begin, found_NV)
        gap_N = gap_N * shrink_N + (exp_NV * (truth_NV - found_NV)).sum(axis=1)
    kl_N = gap_N / truth.sum_N - truth.log_sum_N + found.log_sum_N
    return HeadReport(
        mode=calibration.mode,
        num_rows=len(last_NH),
        top1=float((truth.best_N == found.best_N).mean()),
        kl=float(kl_N.mean()),
    )


class _Softmax:
    """Running maximum, its place, and sum of exponentials of each row."""

    def __init__(self, num_rows: int) -> None:
        self.max_N = np.full(num_rows, -np.inf)
        self.sum_N = np.zeros(num_rows)
        self.best_N = np.zeros(num_rows, np.int64)

    def add(
        self, begin: int, logits_NV: NDArray[np.float64]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Take in the logits from token `begin` on.

        Returns what earlier sums shrink by, and exp(logits - the new maximum).
        """
        highest_N = logits_NV.max(axis=1)
        self.best_N = np.where(
            highest_N > self.max_N, begin + logits_NV.argmax(axis=1), self.best_N
        )
        max_N = np.maximum(self.max_N, highest_N)
        shrink_N, exp_NV = np.exp(self.max_N - max_N), np.exp(logits_NV - max_N[:, None])
        self.sum_N = self.sum_N * shrink_N + exp_NV.sum(axis=1)
        self.max_N = max_N
        return shrink_N, exp_NV

    @property
    def log_sum_N(self) -> NDArray[np.float64]:
        return np.log(self.sum_N) + self.max_N


def _logits(raw_NV: Float, multiplier: float, soft_cap: float) -> NDArray[np.float64]:
    logits_NV = raw_NV.astype(np.float64) * multiplier
    return soft_cap * np.tanh(logits_NV / soft_cap) if soft_cap else logits_NV


def violations(layers: Sequence[LayerReport], head: HeadReport | None) -> list[str]:
    """Each bound that is missed, with the figure and the bound; empty: the modes serve."""
    missed = [
        f"{layer.name} as {layer.mode}: median error {layer.error_median:.2%}, "
        f"at most {BOUNDS[layer.mode].error_median:.2%} is accepted"
        for layer in layers
        if not layer.error_median <= BOUNDS[layer.mode].error_median
    ]
    if head is None:
        return missed
    bounds = BOUNDS[head.mode]
    if not head.top1 >= bounds.top1:
        missed.append(
            f"last as {head.mode}: the head's first choice stays the same in {head.top1:.1%}, "
            f"at least {bounds.top1:.1%} is accepted"
        )
    if not head.kl <= bounds.kl:
        missed.append(
            f"last as {head.mode}: KL {head.kl:.4f} nats, at most {bounds.kl:.4f} is accepted"
        )
    return missed


def report_record(layers: Sequence[LayerReport], head: HeadReport | None) -> dict[str, Any]:
    """The reports as plain JSON values."""
    return {
        "layers": [asdict(layer) for layer in layers],
        "head": None if head is None else asdict(head),
    }


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
