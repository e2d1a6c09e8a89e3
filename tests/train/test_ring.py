"""How batches are padded."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dflash_pipeline.configs.schema import TrainConfig
from dflash_pipeline.store.reader import Store
from dflash_pipeline.train.mask import TILE
from dflash_pipeline.train.ring import Sizes
from dflash_pipeline.train.shape import DrafterShape

CONFIG = TrainConfig(batch_tokens=3000, batch_anchors=100, anchors_per_sample=8)


def test_batches_are_left_as_they_are_where_nothing_is_compiled(
    whole_store: Store, shape: DrafterShape
) -> None:
    sizes = Sizes.of(CONFIG, whole_store.spec, shape, False, padded=False)
    assert (sizes.num_tokens, sizes.num_anchors, sizes.num_rows) == (3000, 100, 300)
    assert (sizes.padded(7, 3), sizes.last_row_bytes) == ((7, 3), 0)


@pytest.mark.parametrize(
    ("block_size", "num_anchors"), [(16, 104), (10, 128), (8, 112), (7, 128), (4, 128)]
)
def test_compiled_batches_come_in_whole_tiles_and_few_shapes(
    block_size: int, num_anchors: int, whole_store: Store, shape: DrafterShape
) -> None:
    shape = replace(shape, block_size=block_size)
    sizes = Sizes.of(CONFIG, whole_store.spec, shape, True, padded=True)
    assert sizes.num_anchors == num_anchors
    assert num_anchors * block_size % TILE == 0
    found = [sizes.padded(num_tokens, 3) for num_tokens in range(1, CONFIG.batch_tokens + 1)]
    assert {anchors for _, anchors in found} == {num_anchors}
    lengths = sorted({length for length, _ in found})
    assert all(length % TILE == 0 for length in lengths)
    # of a single tile the compiler would make a case of its own
    assert lengths[0] >= 2 * TILE
    assert lengths[-1] == sizes.num_tokens >= CONFIG.batch_tokens
    assert len(lengths) <= 8


def test_a_small_budget_still_holds_the_least_batch(
    whole_store: Store, shape: DrafterShape
) -> None:
    config = replace(CONFIG, batch_tokens=200)
    sizes = Sizes.of(config, whole_store.spec, shape, True, padded=True)
    assert sizes.padded(1, 1)[0] == sizes.padded(200, 1)[0] == sizes.num_tokens == 2 * TILE
