"""The int8 and int4 records in numpy."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from dflash_pipeline.store import quantise
from dflash_pipeline.store.bf16 import bf16_bits, bf16_to_float32
from dflash_pipeline.store.quantise import Calibration, decode, decode_rotated, encode

KEPT = np.array([3, 7, 50, 60], np.int32)


def make_calibration(mode, hidden_size, /, *, kept=KEPT, centre=None, **changed):
    centre_H = np.zeros(hidden_size, np.float32) if centre is None else centre
    settings = {
        "mode": mode,
        "hidden_size": hidden_size,
        "group": quantise.GROUP_SIZES[mode],
        "block": quantise.rotation_block(hidden_size),
        "kept_k": kept,
        "centre_H": bf16_bits(centre_H.astype(np.float32)),
    }
    return Calibration(**settings | changed)


def states(hidden_size, num_rows=64, seed=0):
    """Channels of different scale and mean, and two that are massive."""
    random = np.random.default_rng(seed)
    scale_H = np.exp(random.standard_normal(hidden_size))
    rows_NH = (random.standard_normal((num_rows, hidden_size)) + 0.5) * scale_H
    rows_NH[:, [3, 50]] *= 300
    return rows_NH.astype(np.float32)


def relative_error(found_NH, rows_NH):
    return np.linalg.norm(found_NH - rows_NH, axis=1) / np.linalg.norm(rows_NH, axis=1)


@pytest.mark.parametrize(
    ("mode", "hidden_size", "expected"),
    [
        ("int4", 4096, 2320),
        ("int8", 4096, 4112),
        ("int4", 576, 336),
        ("int8", 576, 592),
        ("int4", 96, 80),
        ("int8", 96, 112),
    ],
)
def test_record_sizes_are_those_of_the_format(mode, hidden_size, expected):
    calibration = make_calibration(mode, hidden_size)
    assert calibration.row_bytes == quantise.row_bytes(mode, hidden_size, 4) == expected
    assert encode(states(hidden_size, 2), calibration).shape == (2, expected)


@pytest.mark.parametrize(("hidden_size", "block"), [(96, 32), (576, 64), (2880, 64), (1040, 16)])
def test_rotation_block_is_the_largest_power_of_two_up_to_64_that_divides(hidden_size, block):
    assert quantise.rotation_block(hidden_size) == block
    calibration = make_calibration("int8", hidden_size)
    assert calibration.encode_factor * calibration.decode_factor == 1 / block


@pytest.mark.parametrize("hidden_size", [96, 576, 1040])
@pytest.mark.parametrize(("mode", "bound"), [("int8", 0.012), ("int4", 0.09)])
def test_rows_come_back_within_the_grid(mode, bound, hidden_size):
    rows_NH = states(hidden_size)
    calibration = make_calibration(mode, hidden_size, centre=np.median(rows_NH, axis=0))
    found_NH = decode(encode(rows_NH, calibration), calibration)
    assert found_NH.dtype == np.float32
    # the massive channels are exact and would hide the error of all others
    inlier_H = calibration.inlier_H
    error_N = relative_error(found_NH[:, inlier_H], rows_NH[:, inlier_H])
    assert np.median(error_N) < bound


@pytest.mark.parametrize("mode", quantise.MODES)
def test_kept_channels_are_the_bf16_of_the_original(mode):
    rows_NH = states(96)
    calibration = make_calibration(mode, 96, centre=rows_NH[0])
    found_NH = decode(encode(rows_NH, calibration), calibration)
    expected_Nk = bf16_to_float32(bf16_bits(rows_NH[:, KEPT]))
    assert np.array_equal(found_NH[:, KEPT], expected_Nk)


@pytest.mark.parametrize("mode", quantise.MODES)
def test_bf16_bits_and_their_float32_give_the_same_record(mode):
    bits_NH = bf16_bits(states(96))
    calibration = make_calibration(mode, 96)
    assert np.array_equal(
        encode(bits_NH, calibration), encode(bf16_to_float32(bits_NH), calibration)
    )


LAYOUTS = {
    "columns first": np.asfortranarray,
    "of a larger array": lambda rows_NX: np.repeat(rows_NX[:, None], 3, axis=1)[:, 1],
    "backwards": lambda rows_NX: rows_NX[::-1].copy()[::-1],
    "every second channel": lambda rows_NX: np.repeat(rows_NX, 2, axis=1)[:, ::2],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mode", quantise.MODES)
def test_records_and_values_do_not_depend_on_how_the_array_lies_in_memory(mode, layout):
    calibration = make_calibration(mode, 576)
    rows_NH = states(576)
    records_NR = encode(rows_NH, calibration)
    np.testing.assert_array_equal(encode(LAYOUTS[layout](rows_NH), calibration), records_NR)
    found_NH = decode(LAYOUTS[layout](records_NR), calibration)
    np.testing.assert_array_equal(found_NH, decode(records_NR, calibration))


@pytest.mark.parametrize("mode", quantise.MODES)
def test_leading_axes_are_kept_and_rows_do_not_touch_each_other(mode):
    rows_NH = states(96, 6)
    calibration = make_calibration(mode, 96)
    together = encode(rows_NH.reshape(2, 3, 96), calibration)
    assert together.shape == (2, 3, calibration.row_bytes)
    alone = np.stack([encode(row_H, calibration) for row_H in rows_NH])
    assert np.array_equal(together.reshape(6, -1), alone)
    assert decode(together, calibration).shape == (2, 3, 96)


@pytest.mark.parametrize("mode", quantise.MODES)
def test_no_rows_are_no_records(mode):
    calibration = make_calibration(mode, 96)
    records = encode(states(96, 0), calibration)
    assert records.shape == (0, calibration.row_bytes)
    assert decode(records, calibration).shape == (0, 96)


@pytest.mark.parametrize("mode", quantise.MODES)
def test_a_record_of_zeros_is_the_centre_with_zeros_on_the_kept_channels(mode):
    centre_H = states(96, 1)[0]
    calibration = make_calibration(mode, 96, centre=centre_H)
    record = np.zeros(calibration.row_bytes, np.uint8)
    expected_H = bf16_to_float32(calibration.centre_H)
    expected_H[KEPT] = 0
    assert np.array_equal(decode(record, calibration), expected_H)


@pytest.mark.parametrize("mode", quantise.MODES)
def test_a_row_equal_to_the_centre_comes_back_exactly(mode):
    calibration = make_calibration(mode, 96, centre=states(96, 1)[0])
    row_H = bf16_to_float32(calibration.centre_H)
    record = encode(row_H, calibration)
    assert not record[: calibration.kept_offset].any()
    assert np.array_equal(decode(record, calibration), row_H)


def rotated_rows(y_NH, calibration):
    """Rows whose rotated inliers are `y_NH`, small whole numbers."""
    rows_NH = y_NH.astype(np.float32)
    return quantise._rotated(rows_NH, calibration.block, calibration.decode_factor)


def test_a_groups_extreme_lands_on_minus_eight_whatever_its_sign():
    # kept channels beyond the first block, so that they do not disturb it
    calibration = make_calibration("int4", 128, kept=np.array([127], np.int32))
    y_NH = np.zeros((2, 128))
    y_NH[0, [0, 1, 17]] = [64, -32, 16]
    y_NH[1, [0, 1, 17]] = [-64, 32, 16]
    record_NR = encode(rotated_rows(y_NH, calibration), calibration)
    # nibbles: even channel low; -8 is 8, +4 is 4
    assert record_NR[:, 0].tolist() == [0x48, 0x48]
    assert record_NR[:, 8].tolist() == [0x80, 0x80]
    # 448 in e4m3 is 0x7e; 112 is 0x6e; negative scales for positive extremes
    assert record_NR[0, 64:66].tolist() == [0xFE, 0xEE]
    assert record_NR[1, 64:66].tolist() == [0x7E, 0xEE]
    found_NH, _ = decode_rotated(record_NR, calibration)
    np.testing.assert_allclose(found_NH, y_NH, rtol=1e-6, atol=0)


def test_a_tie_between_the_extremes_counts_as_positive():
    calibration = make_calibration("int4", 128, kept=np.array([127], np.int32))
    y_NH = np.zeros((1, 128))
    y_NH[0, :2] = [64, -64]
    record = encode(rotated_rows(y_NH, calibration), calibration)[0]
    # -8 for +64, and +8 is not among the 16 levels: 7
    assert (record[0], record[64]) == (0x78, 0xFE)


def test_e4m3_codes_are_the_nearest_and_saturate():
    values = quantise.e4m3_to_float32(np.arange(127, dtype=np.uint8)).astype(np.float64)
    assert values[1] == 2.0**-9
    assert values[126] == 448
    middle = ((values[1:] + values[:-1]) / 2).astype(np.float32)
    beside = [np.nextafter(middle, np.float32(limit)) for limit in (0, 500)]
    ratios = np.concatenate([values, middle, *beside, [449, 1000]]).astype(np.float32)
    distance = np.abs(values - ratios[:, None].astype(np.float64))
    # of two equally near codes the even one
    expected = np.lexsort((np.arange(127) % 2 + np.zeros_like(distance), distance), axis=1)[:, 0]
    assert np.array_equal(quantise._e4m3_codes(ratios), expected)


@pytest.mark.parametrize("mode", quantise.MODES)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e38])
def test_what_cannot_be_stored_counts_as_zero(mode, value):
    rows_NH = states(96, 2)
    calibration = make_calibration(mode, 96)
    expected = rows_NH.copy()
    rows_NH[0, [3, 20]], expected[0, [3, 20]] = value, 0
    assert np.array_equal(encode(rows_NH, calibration), encode(expected, calibration))


@pytest.mark.parametrize("mode", quantise.MODES)
@pytest.mark.parametrize("scale", [1e-42, 1e-36, 2.0**-99, 1e25])
def test_faint_and_huge_rows_stay_finite(mode, scale):
    rows_NH = (states(96, 4) * np.float64(scale)).astype(np.float32)
    calibration = make_calibration(mode, 96)
    found_NH = decode(encode(rows_NH, calibration), calibration)
    assert np.isfinite(found_NH).all()
    if scale > 2.0**-100:
        assert relative_error(found_NH.astype(np.float64), rows_NH.astype(np.float64)).max() < 0.1


@pytest.mark.parametrize("mode", quantise.MODES)
def test_any_bytes_decode_without_a_warning(mode):
    calibration = make_calibration(mode, 96)
    random = np.random.default_rng(0)
    damaged = random.integers(0, 256, (500, calibration.row_bytes), dtype=np.uint8)
    assert decode(damaged, calibration).shape == (500, 96)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("int8", "70394dbcb94ba371"),
        ("int4", "296f643d424d89e0"),
    ],
)
def test_records_and_values_are_those_of_format_1_for_ever(mode, expected):
    # whole numbers and quarters only: equal on each machine
    row, channel = np.mgrid[:32, :96]
    rows_NH = ((row * 37 + channel * 101) % 211 - 100).astype(np.float32) / 4
    calibration = make_calibration(mode, 96, centre=np.arange(96) / 4 - 12)
    record_NR = encode(rows_NH, calibration)
    digest = hashlib.sha256(record_NR.tobytes())
    digest.update(decode(record_NR, calibration).astype("<f4").tobytes())
    assert digest.hexdigest()[:16] == expected


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"mode": "int5", "group": 0}, "int5"),
        ({"hidden_size": 100}, "multiple of 16"),
        ({"hidden_size": 0}, "multiple of 16"),
        ({"group": 32}, "update dflash-pipeline"),
        ({"block": 64}, "update dflash-pipeline"),
        ({"kept_k": np.array([7, 3], np.int32)}, "ascend"),
        ({"kept_k": np.array([3, 3], np.int32)}, "ascend"),
        ({"kept_k": np.array([3, 96], np.int32)}, "ascend"),
        ({"kept_k": np.array([-1, 3], np.int32)}, "ascend"),
        ({"kept_k": np.array([3, 7], np.int64)}, "int64"),
        ({"kept_k": np.zeros(0, np.int32)}, "expected int32"),
        ({"centre_H": np.zeros(95, np.uint16)}, "centre"),
        ({"centre_H": np.full(96, 0x7FC0, np.uint16)}, "not finite"),
    ],
)
def test_an_impossible_calibration_is_refused(changed, message):
    with pytest.raises(ValueError, match=message):
        make_calibration("int4", 96, **changed)


@pytest.mark.parametrize("block", [16, 32, 64])
def test_the_rotation_is_the_butterfly_of_the_format_bit_for_bit(block):
    found_NH = states(192, 5)
    expected_NH = found_NH.copy()
    stride = 1
    while stride < block:
        for first in range(192):
            if first // stride % 2 == 0:
                a, b = expected_NH[:, first].copy(), expected_NH[:, first + stride].copy()
                expected_NH[:, first], expected_NH[:, first + stride] = a + b, a - b
        stride *= 2
    expected_NH *= np.float32(0.125)
    found_NH = quantise._rotated(found_NH, block, 0.125)
    assert np.array_equal(found_NH, expected_NH)


def test_a_groups_largest_and_smallest_are_numpys():
    values_NGg = states(96, 7).reshape(7, 6, 16)
    assert np.array_equal(quantise._folded(np.maximum, values_NGg), values_NGg.max(axis=2))
    assert np.array_equal(quantise._folded(np.minimum, values_NGg), values_NGg.min(axis=2))
