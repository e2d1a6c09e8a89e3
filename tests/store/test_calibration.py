"""Calibration and its guard."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from dflash_pipeline.store import calibration as calibrating
from dflash_pipeline.store.calibration import (
    HeadReport,
    LayerReport,
    calibrate,
    calibration_hash,
    calibration_positions,
    from_arrays,
    head_report,
    layer_reports,
    to_arrays,
    violations,
)
from dflash_pipeline.store.quantise import decode, encode
from dflash_pipeline.store.rows import bf16_bits, bf16_to_float32

HIDDEN = 192
MASSIVE = [5, 17, 80, 150]


def states(num_rows=400, seed=0):
    """Heavy-tailed channels with a mean, four massive ones, and sinks in the first rows."""
    random = np.random.default_rng(seed)
    channels = np.random.default_rng(7)
    scale_H, mean_H = channels.lognormal(sigma=0.7, size=HIDDEN), channels.normal(size=HIDDEN)
    rows_NH = (random.standard_t(6, (num_rows, HIDDEN)) + mean_H) * scale_H
    rows_NH[:, MASSIVE] *= 40
    rows_NH[:4, 17] = 25000
    return rows_NH.astype(np.float32)


def layers(num=2):
    return np.stack([states(seed=seed) for seed in range(num)], axis=1)


def test_the_centre_is_the_median_and_the_massive_channels_are_kept():
    rows_NKH, last_NH = layers(), states(seed=9)
    found = calibrate(rows_NKH, last_NH, "int4", "int8")
    assert [entry.mode for entry in found] == ["int4", "int4", "int8"]
    assert [entry.kept_k.tolist() for entry in found] == [MASSIVE] * 3
    expected_H = bf16_bits(np.median(rows_NKH[:, 1], axis=0).astype(np.float32))
    assert np.array_equal(found[1].centre_H, expected_H)


def test_layers_stored_as_bf16_have_no_calibration():
    assert calibrate(layers(), states(), "bf16", "int8")[:2] == [None, None]
    assert calibrate(layers(), states(), "int4", "bf16")[2] is None
    assert len(calibrate(layers(), None, "int4", "none")) == 2


def test_rows_that_are_not_finite_do_not_calibrate():
    rows_NKH = layers()
    rows_NKH[3, 1, 0] = np.nan
    with pytest.raises(ValueError, match="finite"):
        calibrate(rows_NKH, None, "int4", "none")
    with pytest.raises(ValueError, match="0 rows"):
        calibrate(rows_NKH[:0], None, "int4", "none")


def test_channels_that_are_all_alike_are_kept_in_order():
    found = calibrate(np.zeros((8, 1, HIDDEN), np.float32), None, "int8", "none")
    assert found[0].kept_k.tolist() == [0, 1, 2, 3]


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
    assert calibrating.layer_report("last", rows_NH, calibration).num_rows == 395
    with pytest.raises(ValueError, match="no row"):
        calibrating.layer_report("last", rows_NH[:5], calibration)


@pytest.mark.parametrize(("multiplier", "soft_cap"), [(1.0, 0.0), (0.25, 0.0), (1.0, 30.0)])
def test_the_chunked_head_report_equals_the_plain_softmax(monkeypatch, multiplier, soft_cap):
    monkeypatch.setattr(calibrating, "VOCAB_CHUNK", 7)
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


def test_calibrations_survive_arrays_and_attributes():
    calibrations = calibrate(layers(), states(), "int4", "bf16")
    arrays, attributes = to_arrays(calibrations)
    assert arrays["kept"].shape == (3, 4)
    assert arrays["centre"].shape == (3, HIDDEN)
    found = from_arrays(arrays, attributes)
    assert found[2] is None
    assert calibration_hash(found) == calibration_hash(calibrations)
    rows_NH = states()
    assert np.array_equal(encode(rows_NH, found[1]), encode(rows_NH, calibrations[1]))


def test_the_hash_depends_on_each_part_and_is_empty_for_bf16():
    calibrations = calibrate(layers(), None, "int4", "none")
    truth = calibration_hash(calibrations)
    arrays, attributes = to_arrays(calibrations)
    moved = arrays | {"kept": np.sort((arrays["kept"] + 1) % HIDDEN, axis=1)}
    shifted = arrays | {"centre": arrays["centre"] ^ np.uint16(1)}
    others = [from_arrays(changed, attributes) for changed in (moved, shifted)]
    others += [calibrations[:1], calibrate(layers(), None, "int8", "none")]
    hashes = {truth, *(calibration_hash(other) for other in others)}
    assert len(hashes) == 5
    assert calibration_hash([None, None]) == ""


@pytest.mark.parametrize(
    ("arrays", "attributes", "message"),
    [
        ({"extra": np.zeros(1)}, {}, "holds"),
        ({}, {"more": 1}, "holds"),
        ({}, {"modes": "int4"}, "-1 modes"),
        ({}, {"modes": ["int4"]}, "1 modes"),
        ({}, {"groups": 16}, "2 modes"),
        ({}, {"modes": ["int4", ["int4"]]}, "not one of"),
        ({}, {"groups": [16, 1 << 40]}, "update"),
        ({}, {"block": "64"}, "update"),
        ({"kept": np.zeros((2, 4), np.int32)}, {}, "ascend"),
        ({"kept": np.zeros(2, np.int32)}, {}, "2 modes"),
        ({"centre": np.zeros((2, 7), np.uint16)}, {}, "multiple of 16"),
        ({"centre": np.full((2, HIDDEN), 0x7F80, np.uint16)}, {}, "not finite"),
    ],
)
def test_a_hostile_calibration_is_refused(arrays, attributes, message):
    true_arrays, true_attributes = to_arrays(calibrate(layers(), None, "int4", "none"))
    with pytest.raises(ValueError, match=message):
        from_arrays(true_arrays | arrays, true_attributes | attributes)


def test_calibration_takes_the_first_positions_and_an_even_spread():
    first, second, tiny = calibration_positions([1000, 37, 2])
    assert first[:4].tolist() == [0, 1, 2, 3]
    assert first[-1] == 999
    assert len(first) == 1000
    assert second.tolist() == list(range(37))
    assert tiny.tolist() == [0, 1]
    many = calibration_positions([2048] * 128)
    assert all(30 <= len(positions) <= 36 for positions in many)
    assert all((np.diff(positions) > 0).all() for positions in many)
