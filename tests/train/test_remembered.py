"""What a drafter remembers tells targets apart."""

from __future__ import annotations

import numpy as np
import pytest

from dflash_pipeline.train.remembered import embedding_hash


@pytest.mark.parametrize("row", [0, 50, 96])
def test_any_row_of_a_small_embedding_tells_it_from_another(row: int) -> None:
    bits_VH = np.arange(97 * 8, dtype=np.uint16).reshape(97, 8)
    changed_VH = bits_VH.copy()
    changed_VH[row, 3] ^= 1
    assert embedding_hash(changed_VH) != embedding_hash(bits_VH)
    assert embedding_hash(bits_VH.copy()) == embedding_hash(bits_VH)


def test_rows_from_all_over_a_large_embedding_are_hashed() -> None:
    bits_VH = np.zeros((10_000, 2), np.uint16)
    for begin in (0, 5_000, 9_800):
        changed_VH = bits_VH.copy()
        changed_VH[begin : begin + 100] = 1
        assert embedding_hash(changed_VH) != embedding_hash(bits_VH)
