"""Which samples a step draws."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dflash_pipeline.configs.errors import UsageError
from dflash_pipeline.configs.schema import TrainConfig
from dflash_pipeline.configs.shares import StoreShare
from dflash_pipeline.store.spec import ShardId
from dflash_pipeline.train.order import (
    Catalog,
    catalog,
    planned_steps,
    rank_batches,
    segment_batches,
    shard_number,
    steps_of,
)

CONFIG = TrainConfig(anchors_per_sample=4, batch_anchors=8, batch_tokens=64, epochs=3)


def _table(num: int, first_id: int = 0) -> Any:
    random = np.random.default_rng(first_id + num)
    return SimpleNamespace(
        split=np.zeros(num, np.uint8),
        num_anchors=random.integers(1, 9, num).astype(np.int32),
        num_tokens=random.integers(4, 60, num).astype(np.int32),
        sample_id=np.arange(first_id, first_id + num, dtype=np.uint64),
        bucket=np.zeros(num, np.int16),
        shard=(np.arange(num) // 10).astype(np.int32),
    )


def _samples(*sizes: int, shares: tuple[float, ...] = ()) -> Catalog:
    stores = [
        StoreShare(f"s{index}", share) for index, share in enumerate(shares or (1.0,) * len(sizes))
    ]
    return catalog([_table(size, 1000 * i) for i, size in enumerate(sizes)], stores, CONFIG)


def _batches(samples: Catalog, epoch: int) -> list[Any]:
    return segment_batches(samples, np.arange(len(samples)), 0, epoch, 64, 8)


def test_each_sample_is_drawn_once_an_epoch_in_another_order_each_time() -> None:
    samples = _samples(50)
    first, second = (np.concatenate(_batches(samples, epoch)) for epoch in (0, 1))
    assert sorted(first.tolist()) == sorted(second.tolist()) == list(range(50))
    assert first.tolist() != second.tolist()
    assert np.concatenate(_batches(samples, 0)).tolist() == first.tolist()


def test_no_batch_exceeds_its_budgets() -> None:
    samples = _samples(80)
    batches = _batches(samples, 0)
    assert max(samples.num_tokens_C[batch].sum() for batch in batches) <= 64
    assert max(samples.num_anchors_C[batch].sum() for batch in batches) <= 8
    # an optimal packing is not promised, but half-empty batches would be waste
    assert len(batches) <= 1.35 * samples.num_anchors_C.sum() / 8 + 1 or (
        len(batches) <= 1.35 * samples.num_tokens_C.sum() / 64 + 1
    )


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_ranks_share_out_an_epoch_whatever_their_number(world: int) -> None:
    batches = _batches(_samples(50), 0)
    drawn = []
    for step in range(steps_of(len(batches), world, 2)):
        for rank in range(world):
            own = rank_batches(batches, step * world * 2, rank, world, 2)
            assert len(own) <= 2
            drawn += np.concatenate(own).tolist() if own else []
    assert sorted(drawn) == list(range(50))


def test_what_is_left_of_an_epoch_is_shared_out_too() -> None:
    batches = [np.array([number]) for number in range(9)]
    last = [[int(one[0]) for one in rank_batches(batches, 6, rank, 3, 2)] for rank in range(3)]
    assert last == [[6], [7], [8]]


def test_held_out_samples_and_those_without_anchor_are_never_drawn() -> None:
    table = _table(6)
    table.split[1] = 1
    table.num_anchors[2] = 0
    assert catalog([table], [StoreShare("s", 1.0)], CONFIG).sample_C.tolist() == [0, 3, 4, 5]


def test_where_nothing_is_left_to_train_on_the_reason_is_told() -> None:
    table = _table(6)
    table.num_anchors[:] = 0
    with pytest.raises(UsageError, match="s: no training sample has two supervised tokens"):
        catalog([table], [StoreShare("s", 1.0)], CONFIG)
    table = _table(6)
    table.split[:] = 1
    with pytest.raises(UsageError, match=r"s: every sample is held out \(data\.heldout\)"):
        catalog([table], [StoreShare("s", 1.0)], CONFIG)


def test_a_share_draws_that_part_of_a_store_anew_each_epoch() -> None:
    samples = _samples(40, 20, shares=(0.25, 1.0))
    first, second = (np.concatenate(_batches(samples, epoch)) for epoch in (0, 1))
    for drawn in (first, second):
        assert np.bincount(samples.store_C[drawn]).tolist() == [10, 20]
    assert set(first.tolist()) != set(second.tolist())


def test_planned_steps_count_the_whole_plan_and_obey_max_steps() -> None:
    samples = _samples(50)
    num_batches = len(_batches(samples, 0))
    assert planned_steps(samples, CONFIG, world=2) == 3 * -(-num_batches // 2)
    assert planned_steps(samples, replace(CONFIG, max_steps=5), world=2) == 5


def test_a_sample_longer_than_a_batch_is_refused_with_the_setting_to_change() -> None:
    table = _table(3)
    table.num_tokens[1] = 65
    with pytest.raises(UsageError, match=r"train\.batch_tokens to at least 65"):
        catalog([table], [StoreShare("s", 1.0)], CONFIG)


def test_a_shard_number_is_unique_per_bucket_and_shard() -> None:
    assert shard_number(ShardId(0, 5)) != shard_number(ShardId(5, 0))
