"""bf16 rows: bits, rounding, and nothing lost."""

from __future__ import annotations

import numpy as np
import pytest

from dflash_pipeline.configs.threads import Threads
from dflash_pipeline.store import quantise
from dflash_pipeline.store.bf16 import bf16_bits, bf16_to_float32
from dflash_pipeline.store.calibration import calibrate
from dflash_pipeline.store.rows import ROWS_AT_ONCE, decode, encode, row_bytes


def test_rounding_is_to_nearest_even_and_keeps_what_is_special() -> None:
    values = np.array([1.0, 1.00390625, 1.01171875, -0.0, np.inf, -np.inf, 3.4e38, 1e-40])
    bits = bf16_bits(values.astype(np.float32)).tolist()
    assert bits == [0x3F80, 0x3F80, 0x3F82, 0x8000, 0x7F80, 0xFF80, 0x7F80, 0x0001]


def test_each_nan_stays_a_nan() -> None:
    patterns = np.array([0x7F800001, 0xFF800001, 0x7FFFFFFF, 0xFFFFFFFF], np.uint32)
    assert np.isnan(bf16_to_float32(bf16_bits(patterns.view(np.float32)))).all()


def test_all_65536_patterns_come_back_from_their_rows() -> None:
    bits = np.arange(1 << 16, dtype=np.uint16).reshape(-1, 4, 8)
    rows = encode(bits, "bf16")
    assert rows.shape == (2048, 4, row_bytes("bf16", 8))
    assert (decode(rows, "bf16").view(np.uint32) >> 16 == bits).all()


def test_float32_and_its_bits_encode_alike() -> None:
    values = np.random.default_rng(0).standard_normal((5, 3, 8), np.float32)
    assert (encode(values, "bf16") == encode(bf16_bits(values), "bf16")).all()


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ValueError, match="update dflash-pipeline"):
        row_bytes("int2", 8)


def test_each_layer_is_stored_by_its_own_calibration() -> None:
    values_NKH = np.random.default_rng(0).standard_normal((40, 3, 32), np.float32)
    values_NKH *= np.array([1, 10, 100], np.float32)[:, None]
    calibrations = [one for one in calibrate(values_NKH, None, "int4", "none") if one]
    rows_NKR = encode(values_NKH, "int4", calibrations)
    assert rows_NKR.shape == (40, 3, row_bytes("int4", 32))
    found_NKH = decode(rows_NKR, "int4", calibrations)
    for layer, one in enumerate(calibrations):
        alone_NH = decode(rows_NKR[:, layer], "int4", [one])
        assert (alone_NH == found_NKH[:, layer]).all()
    with pytest.raises(ValueError, match="need the calibration"):
        decode(rows_NKR, "int4")
    with pytest.raises(ValueError, match="for 2 calibrated layers"):
        decode(rows_NKR, "int4", calibrations[:2])


@pytest.mark.parametrize("mode", ["int8", "int4"])
@pytest.mark.parametrize(
    "lead", [(), (1,), (0,), (ROWS_AT_ONCE,), (2 * ROWS_AT_ONCE + 5,), (3, 70)]
)
def test_rows_in_parts_and_threads_are_those_of_one_go(mode: str, lead: tuple[int, ...]) -> None:
    random = np.random.default_rng(0)
    (calibration,) = calibrate(random.standard_normal((40, 1, 32), np.float32), None, mode, "none")
    assert calibration is not None
    values = random.standard_normal((*lead, 32), np.float32)
    expected = quantise.encode(values, calibration)
    for threads in (Threads(), Threads(1, lambda: None), Threads(3)):
        rows = encode(values, mode, [calibration], threads)
        np.testing.assert_array_equal(rows, expected, strict=True)
        found = decode(rows, mode, [calibration], threads)
        np.testing.assert_array_equal(found, quantise.decode(expected, calibration), strict=True)


def test_an_error_of_one_part_surfaces() -> None:
    values_NKH = np.random.default_rng(0).standard_normal((200, 2, 32), np.float32)
    calibrations = [one for one in calibrate(values_NKH, None, "int4", "none") if one]
    with pytest.raises(ValueError, match="reshape"):
        decode(np.zeros((200, 2, 5), np.uint8), "int4", calibrations, Threads(2))
