"""The plan's columns and the small rules that stages share."""

from __future__ import annotations

import dataclasses
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from dflash_pipeline.store.spec import ShardId
from dflash_pipeline.store.table import (
    build_table,
    claim_order,
    hash64,
    teacher_positions,
    valid_anchors,
)


def test_an_anchor_needs_itself_and_its_next_token_supervised() -> None:
    assert valid_anchors(np.array([0, 1, 1, 0, 1, 1, 1], np.uint8)).tolist() == [1, 4, 5]
    assert valid_anchors(np.array([1], np.uint8)).tolist() == []


def test_the_teacher_stands_before_each_supervised_token() -> None:
    mask_T = np.array([1, 0, 1, 1, 0, 0, 1], np.uint8)
    assert teacher_positions(mask_T, "teacher").tolist() == [1, 2, 5]
    assert teacher_positions(mask_T, "all").tolist() == [0, 1, 2, 3, 4, 5, 6]


def test_each_prefix_of_the_claim_order_holds_every_bucket_in_proportion() -> None:
    num_shards = (3, 40, 17)
    order = claim_order(num_shards)
    assert sorted(order) == [ShardId(b, s) for b, n in enumerate(num_shards) for s in range(n)]
    for length in range(1, len(order) + 1):
        for bucket, number in enumerate(num_shards):
            found = sum(shard_id.bucket == bucket for shard_id in order[:length])
            assert abs(found - length * number / sum(num_shards)) < 1.5


def test_a_shard_stands_in_the_claim_order_where_its_middle_is_in_its_bucket() -> None:
    for num_shards in ((3, 40, 17), (0, 5, 0), (1,), (7, 7, 7), (1000, 3)):
        ids = [ShardId(b, s) for b, n in enumerate(num_shards) for s in range(n)]
        ids.sort(key=lambda one: ((one.shard + 0.5) / num_shards[one.bucket], one.bucket))
        assert list(claim_order(num_shards)) == ids


def test_a_shard_beyond_its_bucket_is_no_shard_of_the_next(plan: Any) -> None:
    for shard_id in (ShardId(0, plan.layout.num_shards[0]), ShardId(2, 0), ShardId(0, -1)):
        for look in (plan.table.of_shard, plan.table.rows_of):
            with pytest.raises(KeyError):
                look(shard_id)


def test_samples_of_a_shard_are_contiguous_and_so_are_its_batches(plan: Any) -> None:
    table, seen = plan.table, []
    for shard_id in plan.layout.shard_ids():
        samples = range(len(table))[table.of_shard(shard_id)]
        assert {table.shard_id(i) for i in samples} == {shard_id}
        assert [i for s in table.batches_of(shard_id) for i in range(len(table))[s]] == [*samples]
        rows = sum(int(table.num_tokens[i]) for i in samples)
        assert table.rows_of(shard_id)[0] == rows <= plan.layout.rows_per_shard
        seen += samples
    assert seen == list(range(len(table)))


def test_rows_of_samples_follow_each_other(plan: Any) -> None:
    table = plan.table
    for i in range(1, len(table)):
        if table.shard_id(i) == table.shard_id(i - 1):
            assert table.start[i] == table.start[i - 1] + table.num_tokens[i - 1]
            assert table.last_start[i] == table.last_start[i - 1] + table.num_teacher[i - 1]
        else:
            assert table.start[i] == table.shard[i] * plan.layout.rows_per_shard


def test_a_key_leads_to_its_sample_and_back(plan: Any) -> None:
    for i in range(len(plan.table)):
        assert plan.table.find(plan.table.key(i)) == i
        assert plan.table.sample_id[i] == hash64(plan.table.key(i).encode())
    with pytest.raises(KeyError):
        plan.table.find("nobody")


@pytest.mark.parametrize(
    ("column", "value", "text"),
    [
        ("start", 7, "leaves gaps"),
        ("bucket", 5, "bucket"),
        ("shard", -1, "shard"),
        ("domain", 2, "domain"),
        ("num_tokens", 0, "no tokens"),
        ("num_teacher", 9999, "num_teacher"),
        ("split", 2, "split"),
        ("key_end", 0, "key_end"),
    ],
)
def test_contradictions_are_refused(plan: Any, column: str, value: int, text: str) -> None:
    changed = getattr(plan.table, column).copy()
    changed[0] = value
    with pytest.raises(ValueError, match=text):
        dataclasses.replace(plan.table, **{column: changed}).check(plan.layout)


def test_two_samples_cannot_share_a_key(tiny: ModuleType, plan: Any) -> None:
    columns = plan.table.columns()
    for name in ("sample_id", "start", "last_start", "key_bytes", "key_end"):
        del columns[name]
    keys = ["same"] * len(plan.table)
    with pytest.raises(ValueError, match="same key"):
        build_table(keys, columns, plan.layout, ("a", "b"), ("f",))
