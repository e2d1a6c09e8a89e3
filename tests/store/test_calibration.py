"""What is calibrated, and how it is kept."""

from __future__ import annotations

import numpy as np
import pytest
from heavy_states import HIDDEN, MASSIVE, layers, states

from dflash_pipeline.configs.threads import Threads
from dflash_pipeline.store.bf16 import bf16_bits
from dflash_pipeline.store.calibration import (
    _median,
    calibrate,
    calibration_hash,
    calibration_positions,
    from_arrays,
    to_arrays,
)
from dflash_pipeline.store.quantise import encode


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


@pytest.mark.parametrize("num_rows", [1, 2, 3, 64, 65])
def test_the_centre_is_numpys_median_bit_for_bit(num_rows):
    rows_NH = np.random.default_rng(num_rows).standard_normal((num_rows, 3, 130), np.float32)[:, 1]
    rows_NH[:, :9] = np.round(rows_NH[:, :9])
    expected_H = np.median(rows_NH, axis=0)
    np.testing.assert_array_equal(_median(rows_NH), expected_H, strict=True)


def test_several_threads_calibrate_the_same():
    expected = calibrate(layers(), states(), "int4", "int8")
    for threads in (Threads(1, lambda: None), Threads(3)):
        found = calibrate(layers(), states(), "int4", "int8", threads)
        assert calibration_hash(found) == calibration_hash(expected)
    rows_NKH = layers()
    rows_NKH[3, 1, 5] = np.nan
    with pytest.raises(ValueError, match="expected finite rows"):
        calibrate(rows_NKH, None, "int4", "none", Threads(3))
