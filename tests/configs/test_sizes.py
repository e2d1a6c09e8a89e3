"""Sizes as people write them."""

from __future__ import annotations

import pytest

from dflash_pipeline.configs.schema import CaptureConfig
from dflash_pipeline.configs.sizes import parse_size, size_text


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("", 0),
        ("4000", 4000),
        ("4TB", 4 * 10**12),
        ("1.5 GiB", 3 << 29),
        ("500gb", 5 * 10**11),
        ("2kB", 2000),
    ],
)
def test_a_size_is_a_number_and_a_unit(text: str, num_bytes: int) -> None:
    assert parse_size(text) == num_bytes


@pytest.mark.parametrize("text", ["4T", "TB", "-1GB", "4 TB please", "1e9"])
def test_another_text_is_refused_by_the_schema(text: str) -> None:
    with pytest.raises(ValueError, match="is no size: write 4TB"):
        CaptureConfig(quota=text)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(999, "999 B"), (999.6, "1 KB"), (4.21e12, "4.21 TB"), (0, "0 B"), (2.5e15, "2.5 PB")],
)
def test_a_size_is_told_in_three_digits(num_bytes: float, text: str) -> None:
    assert size_text(num_bytes) == text
