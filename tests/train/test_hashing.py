"""Randomness without state."""

from __future__ import annotations

import numpy as np

from dflash_pipeline.train.hashing import hashed


def test_words_are_those_of_this_version_forever() -> None:
    # a run that is resumed after an upgrade must draw the same
    assert hashed(0).tolist() == [0xE220A8397B1DCDAF]
    assert hashed(1, 2, np.array([3, 4])).tolist() == [15020427595393229491, 14056738641343212577]


def test_each_part_matters_and_so_does_the_order() -> None:
    words = [int(hashed(*parts)[0]) for parts in ((1, 2, 3), (1, 3, 2), (2, 1, 3), (1, 2, 4))]
    assert len(set(words)) == 4


def test_bits_are_even() -> None:
    words = hashed(7, np.arange(4096))
    shares = [float(((words >> np.uint64(bit)) & np.uint64(1)).mean()) for bit in range(64)]
    assert min(shares) > 0.45
    assert max(shares) < 0.55
