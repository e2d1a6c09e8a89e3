"""Whether int8 or int4 serves a target: errors of each layer, and of the head on `last`.

Letters: N rows, K captured layers, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dflash_pipeline.configs.threads import Threads
from dflash_pipeline.store.bf16 import bf16_to_float32
from dflash_pipeline.store.calibration import Calibrations
from dflash_pipeline.store.quantise import Calibration, decode, encode
from dflash_pipeline.store.rows import ROWS_AT_ONCE

Float = NDArray[np.float32]
Double = NDArray[np.float64]

NUM_HEAD_ROWS = 512
"""Rows of `last` that go through the head, which is by far the dearest part of the guard."""
VOCAB_CHUNK = 2048
_ONE = Threads()


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


def layer_report(
    name: str, rows_NH: Float, calibration: Calibration, threads: Threads = _ONE
) -> LayerReport:
    """Errors of the rows after `encode` and `decode`; rows of zeros are left out."""
    (report,) = _reports([(name, rows_NH, calibration)], threads)
    return report


def layer_reports(
    rows_NKH: Float,
    last_NH: Float | None,
    layer_ids: Sequence[int],
    calibrations: Calibrations,
    threads: Threads = _ONE,
) -> list[LayerReport]:
    """A report for each calibrated layer, named by its id, and for `last`."""
    names = [f"layer {layer_id}" for layer_id in layer_ids]
    layers = [rows_NKH[:, place] for place in range(rows_NKH.shape[1])]
    if last_NH is not None:
        names, layers = [*names, "last"], [*layers, last_NH]
    calibrated = [
        (name, rows_NH, calibration)
        for name, rows_NH, calibration in zip(names, layers, calibrations, strict=True)
        if calibration is not None
    ]
    return _reports(calibrated, threads)


def _reports(
    layers: Sequence[tuple[str, Float, Calibration]], threads: Threads
) -> list[LayerReport]:
    parts = [
        (rows_NH[begin : begin + ROWS_AT_ONCE], calibration)
        for _, rows_NH, calibration in layers
        for begin in range(0, len(rows_NH), ROWS_AT_ONCE)
    ]
    compared = iter(threads.map(lambda part: _compared(*part), parts))
    reports = []
    for name, rows_NH, calibration in layers:
        found = [next(compared) for _ in range(0, len(rows_NH), ROWS_AT_ONCE)]
        error_N = np.concatenate([one.error_N for one in found])
        if not len(error_N):
            raise ValueError(f"{name}: no row to judge {calibration.mode} by")
        cosine_N = np.concatenate([one.cosine_N for one in found])
        report = LayerReport(
            name=name,
            mode=calibration.mode,
            num_rows=len(error_N),
            error_median=float(np.median(error_N)),
            error_p99=float(np.quantile(error_N, 0.99)),
            cosine_median=float(np.median(cosine_N)),
            cosine_min=float(cosine_N.min()),
            amax=max(one.amax for one in found),
        )
        reports.append(report)
    return reports


@dataclass(frozen=True, slots=True, eq=False)
class _Compared:
    """Rows of a layer beside what is stored of them; those of zeros left out."""

    error_N: Float
    cosine_N: Float
    amax: float


def _compared(rows_NH: Float, calibration: Calibration) -> _Compared:
    norm_N = np.linalg.norm(rows_NH, axis=1)
    rows_NH, norm_N = rows_NH[norm_N > 0], norm_N[norm_N > 0]
    stored_NH = decode(encode(rows_NH, calibration), calibration)
    error_N = np.linalg.norm(stored_NH - rows_NH, axis=1) / norm_N
    # the centre alone may be 0, and so may a stored row
    stored_norm_N = np.maximum(np.linalg.norm(stored_NH, axis=1), np.finfo(np.float32).tiny)
    cosine_N = np.einsum("nh,nh->n", stored_NH, rows_NH) / stored_norm_N / norm_N
    return _Compared(error_N, cosine_N, float(np.abs(rows_NH).max(initial=0)))


def head_report(
    last_NH: Float,
    calibration: Calibration,
    head_VH: NDArray[np.uint16],
    multiplier: float,
    soft_cap: float,
    threads: Threads = _ONE,
) -> HeadReport:
    """Top-1 agreement and KL of the target's head (bf16 bits) on stored against true rows.

    Logits are multiplied, then soft-capped where `soft_cap` is not 0. The vocabulary passes in
    chunks, whose maxima and sums are joined, so memory is O(N VOCAB_CHUNK) a thread.
    """
    stored_NH = decode(encode(last_NH, calibration), calibration)

    def chunk(begin: int) -> tuple[_Softmax, _Softmax, Double]:
        weight_HV = bf16_to_float32(np.asarray(head_VH[begin : begin + VOCAB_CHUNK])).T
        truth_NV = _logits(last_NH @ weight_HV, multiplier, soft_cap)
        found_NV = _logits(stored_NH @ weight_HV, multiplier, soft_cap)
        gap_NV = truth_NV - found_NV
        truth, exp_NV = _softmax(truth_NV, begin)
        found, _ = _softmax(found_NV, begin)
        # sum over v of exp(truth_v - max) (truth_v - found_v)
        return truth, found, np.einsum("nv,nv->n", exp_NV, gap_NV)

    chunks = threads.map(chunk, range(0, len(head_VH), VOCAB_CHUNK))
    truth, found = _joined([one for one, _, _ in chunks]), _joined([one for _, one, _ in chunks])
    gap_N = np.zeros(len(last_NH))
    for one, _, own_gap_N in chunks:
        gap_N += own_gap_N * np.exp(one.max_N - truth.max_N)
    kl_N = gap_N / truth.sum_N - truth.log_sum_N + found.log_sum_N
    return HeadReport(
        mode=calibration.mode,
        num_rows=len(last_NH),
        top1=float((truth.best_N == found.best_N).mean()),
        kl=float(kl_N.mean()),
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Softmax:
    """Of each row, over a part of the vocabulary."""

    max_N: Double
    sum_N: Double
    """Of exp(logit - max)."""
    best_N: NDArray[np.int64]
    """Where the maximum is first."""

    @property
    def log_sum_N(self) -> Double:
        log_sum_N: Double = np.log(self.sum_N) + self.max_N
        return log_sum_N


def _softmax(logits_NV: Double, begin: int) -> tuple[_Softmax, Double]:
    """Of the tokens from `begin` on, and exp(logits - max) in the logits' memory."""
    best_N = logits_NV.argmax(axis=1)
    max_N = np.take_along_axis(logits_NV, best_N[:, None], axis=1)[:, 0]
    exp_NV = np.subtract(logits_NV, max_N[:, None], out=logits_NV)
    np.exp(exp_NV, out=exp_NV)
    return _Softmax(max_N, exp_NV.sum(axis=1), begin + best_N), exp_NV


def _joined(parts: Sequence[_Softmax]) -> _Softmax:
    """Of all of the vocabulary, its parts in order."""
    max_PN = np.stack([one.max_N for one in parts])
    max_N, first_N = max_PN.max(axis=0), max_PN.argmax(axis=0)
    sum_PN = np.stack([one.sum_N for one in parts]) * np.exp(max_PN - max_N)
    best_PN = np.stack([one.best_N for one in parts])
    best_N = np.take_along_axis(best_PN, first_N[None], axis=0)[0]
    return _Softmax(max_N, sum_PN.sum(axis=0), best_N)


def _logits(raw_NV: Float, multiplier: float, soft_cap: float) -> Double:
    logits_NV: Double = raw_NV.astype(np.float64)
    if multiplier != 1.0:
        logits_NV *= multiplier
    if soft_cap:
        logits_NV /= soft_cap
        np.tanh(logits_NV, out=logits_NV)
        logits_NV *= soft_cap
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
