"""Whether int8 or int4 serves a target: errors of each layer, and of the head on `last`.

Letters: N rows, K captured layers, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dflash_pipeline.store.bf16 import bf16_to_float32
from dflash_pipeline.store.calibration import Calibrations
from dflash_pipeline.store.quantise import Calibration, decode, encode

Float = NDArray[np.float32]

NUM_HEAD_ROWS = 512
"""Rows of `last` that go through the head, which is by far the dearest part of the guard."""
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
    # SmolLM2-135M (H 576): 0.48 %, 99.0 %, 0.0002 and 4.9 %, 92.4 %, 0.016; NUM_HEAD_ROWS rows
    # leave the top-1 share uncertain by 0.5 and 1.2 points
    "int8": Bounds(error_median=0.012, top1=0.97, kl=0.002),
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
        log_sum_N: NDArray[np.float64] = np.log(self.sum_N) + self.max_N
        return log_sum_N


def _logits(raw_NV: Float, multiplier: float, soft_cap: float) -> NDArray[np.float64]:
    logits_NV: NDArray[np.float64] = raw_NV.astype(np.float64) * multiplier
    if soft_cap:
        logits_NV = soft_cap * np.tanh(logits_NV / soft_cap)
    return logits_NV


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


def report_record(
    layers: Sequence[LayerReport], head: HeadReport | None, missed: Sequence[str]
) -> dict[str, Any]:
    """The reports, and the bounds that were missed, as plain JSON values.

    Rounded to four digits: sums in another order, on another machine, shall read the same.
    """
    return {
        "layers": [_rounded(asdict(layer)) for layer in layers],
        "head": None if head is None else _rounded(asdict(head)),
        "missed": list(missed),
    }


def _rounded(values: dict[str, Any]) -> dict[str, Any]:
    return {
        name: float(f"{value:.4g}") if isinstance(value, float) else value
        for name, value in values.items()
    }


def report_lines(record: Mapping[str, Any]) -> list[str]:
    """A record as lines for a person; none for a store of bf16."""
    lines = [
        f"{layer['name']} as {layer['mode']}: error {layer['error_median']:.2%} "
        f"(p99 {layer['error_p99']:.2%}), cosine {layer['cosine_median']:.5f} "
        f"(least {layer['cosine_min']:.4f}), amax {layer['amax']:.4g}, {layer['num_rows']} rows"
        for layer in record.get("layers", [])
    ]
    head = record.get("head")
    if head:
        lines.append(
            f"head on last as {head['mode']}: first choice kept in {head['top1']:.1%}, "
            f"KL {head['kl']:.4f} nats, {head['num_rows']} rows"
        )
    return lines + [f"accepted by --force: {text}" for text in record.get("missed", [])]
