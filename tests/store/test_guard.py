"""The guard's reports and bounds."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from heavy_states import HIDDEN, layers, states

from dflash_pipeline.configs.threads import Threads
from dflash_pipeline.store import guard
from dflash_pipeline.store.bf16 import bf16_bits, bf16_to_float32
from dflash_pipeline.store.calibration import calibrate
from dflash_pipeline.store.guard import (
    HeadReport,
    LayerReport,
    head_report,
    layer_report,
    layer_reports,
    report_lines,
    report_record,
    violations,
)
from dflash_pipeline.store.quantise import decode, encode


@pytest.mark.parametrize(("mode", "bound"), [("int8", 0.009), ("int4", 0.075)])
def test_errors_on_heavy_tailed_states_stay_near_those_of_a_real_target(mode, bound):
    calibrations = calibrate(layers(), states(), mode, mode)
    fresh_NKH = np.stack([states(seed=20), states(seed=21)], axis=1)
    reports = layer_reports(fresh_NKH, states(seed=22), (1, 27), calibrations)
    assert [report.name for report in reports] == ["layer 1", "layer 27", "last"]
    for report in reports:
        # the massive channels are exact and carry most of the norm: a loose bound would say nothing
        assert 0 < report.error_median < bound
        assert report.error_median <= report.error_p99 < 3 * bound
        assert 0.99 < report.cosine_min <= report.cosine_median <= 1 + 1e-6
        assert report.amax == 25000
        assert report.num_rows == 400


def test_rows_of_zeros_are_left_out_of_a_report():
    (calibration,) = calibrate(layers(1), None, "int8", "none")
    rows_NH = states()
    rows_NH[:5] = 0
    assert layer_report("last", rows_NH, calibration).num_rows == 395
    with pytest.raises(ValueError, match="no row"):
        layer_report("last", rows_NH[:5], calibration)


@pytest.mark.parametrize(("multiplier", "soft_cap"), [(1.0, 0.0), (0.25, 0.0), (1.0, 30.0)])
def test_the_chunked_head_report_equals_the_plain_softmax(monkeypatch, multiplier, soft_cap):
    monkeypatch.setattr(guard, "VOCAB_CHUNK", 7)
    last_NH = states(60)[4:]
    (calibration,) = calibrate(last_NH[:, None], None, "int4", "none")
    head_VH = bf16_bits(np.random.default_rng(3).normal(0, 0.02, (40, HIDDEN)).astype(np.float32))
    found = head_report(last_NH, calibration, head_VH, multiplier, soft_cap)

    def log_softmax(rows_NH):
        logits = (rows_NH @ bf16_to_float32(head_VH).T).astype(np.float64) * multiplier
        logits = soft_cap * np.tanh(logits / soft_cap) if soft_cap else logits
        return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))

    truth = log_softmax(last_NH)
    stored = log_softmax(decode(encode(last_NH, calibration), calibration))
    assert found.num_rows == 56
    assert found.top1 == (truth.argmax(1) == stored.argmax(1)).mean()
    assert found.kl == pytest.approx((np.exp(truth) * (truth - stored)).sum(1).mean(), rel=1e-4)
    assert found.kl > 0


def layer(**changed):
    report = LayerReport(
        name="layer 3",
        mode="int4",
        num_rows=9,
        error_median=0.05,
        error_p99=0.07,
        cosine_median=0.998,
        cosine_min=0.99,
        amax=10.0,
    )
    return dataclasses.replace(report, **changed)


def test_the_guard_names_each_missed_bound_with_its_figures():
    good_head = HeadReport(mode="int8", num_rows=9, top1=0.99, kl=0.0001)
    assert violations([layer(), layer(mode="int8", error_median=0.005)], good_head) == []
    assert violations([layer()], None) == []
    bad_head = HeadReport(mode="int4", num_rows=9, top1=0.5, kl=0.5)
    missed = violations([layer(error_median=0.2)], bad_head)
    assert missed == [
        "layer 3 as int4: median error 20.00%, at most 7.50% is accepted",
        "last as int4: the head's first choice stays the same in 50.0%, at least 88.0% is accepted",
        "last as int4: KL 0.5000 nats, at most 0.0600 is accepted",
    ]
    assert violations([layer(error_median=float("nan"))], None)
    record = report_record([layer(error_median=0.0123456)], bad_head, missed)
    assert record["layers"][0]["error_median"] == 0.01235
    lines = report_lines(record)
    assert lines[0].startswith("layer 3 as int4: error 1.23% (p99 ")
    assert lines[1] == "head on last as int4: first choice kept in 50.0%, KL 0.5000 nats, 9 rows"
    assert lines[2:] == [f"accepted by --force: {text}" for text in missed]
    assert report_lines(report_record([], None, [])) == report_lines({}) == []


def test_reports_do_not_depend_on_the_threads(monkeypatch):
    monkeypatch.setattr(guard, "VOCAB_CHUNK", 7)
    calibrations = calibrate(layers(), states(), "int4", "int4")
    rows_NKH, last_NH = layers(), states(seed=22)
    rows_NKH[5] = 0
    head_VH = bf16_bits(np.random.default_rng(3).normal(0, 0.02, (40, HIDDEN)).astype(np.float32))

    def found(threads):
        reports = layer_reports(rows_NKH, last_NH, (1, 27), calibrations, threads)
        return reports, head_report(last_NH, calibrations[-1], head_VH, 1.0, 30.0, threads)

    expected = found(Threads())
    assert [report.num_rows for report in expected[0]] == [399, 399, 400]
    assert found(Threads(1, lambda: None)) == found(Threads(3)) == expected
    rows_NKH[:] = 0
    with pytest.raises(ValueError, match="layer 1: no row to judge int4 by"):
        found(Threads(3))


def test_a_report_is_that_of_all_rows_at_once():
    (calibration,) = calibrate(layers(1), None, "int4", "none")
    rows_NH = states(seed=9)
    stored_NH = decode(encode(rows_NH, calibration), calibration)
    error_N = np.linalg.norm(stored_NH - rows_NH, axis=1) / np.linalg.norm(rows_NH, axis=1)
    found = layer_report("last", rows_NH, calibration)
    assert found.error_median == np.median(error_N)
    assert found.error_p99 == np.quantile(error_N, 0.99)
    assert found.amax == np.abs(rows_NH).max()
