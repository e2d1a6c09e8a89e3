"""The commit record: words and back, and each reason for which it is not one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from dflash_pipeline.store import commit, paths
from dflash_pipeline.store.checksum import crc32c
from dflash_pipeline.store.commit import Commit, pack, problem, state_codes, unpack
from dflash_pipeline.store.reader import Store, open_store
from dflash_pipeline.store.spec import ShardId


def record(num_states: int) -> Commit:
    return Commit(
        rows=300,
        last_rows=10,
        hidden_bytes=(5 << 32) + 7,
        last_bytes=9,
        token_crcs=(0xFFFFFFFF, 1),
        amax=np.array([1.5, 2, 3, 4], np.float32),
        clipped=np.arange(4, dtype=np.uint32),
        hidden_crcs=np.array([8, 9], np.uint32),
        last_crcs=np.array([7], np.uint32),
        states=np.arange(num_states, dtype=np.uint8) % 4,
        is_halved=True,
        is_compiled=False,
    )


def test_a_record_survives_its_words(plan: Any) -> None:
    before = record(3)
    words = pack(before, plan.spec, plan.layout, 1)
    after = unpack(words, plan.spec, plan.layout, 1)
    assert len(words) == commit.width(plan.spec, plan.layout, 1)
    assert after.states[:3].tolist() == [0, 1, 2]
    for name in ("rows", "last_rows", "hidden_bytes", "last_bytes", "token_crcs"):
        assert getattr(after, name) == getattr(before, name)
    for name in ("amax", "clipped", "hidden_crcs", "last_crcs"):
        assert getattr(after, name).tolist() == getattr(before, name).tolist()


@pytest.mark.parametrize("is_halved", [False, True])
@pytest.mark.parametrize("is_compiled", [False, True])
def test_the_marks_of_a_shard_are_told_apart(is_halved: bool, is_compiled: bool, plan: Any) -> None:
    marked = replace(record(3), is_halved=is_halved, is_compiled=is_compiled)
    found = unpack(pack(marked, plan.spec, plan.layout, 1), plan.spec, plan.layout, 1)
    assert (found.is_halved, found.is_compiled) == (is_halved, is_compiled)


def test_each_changed_byte_is_seen(plan: Any) -> None:
    words = pack(record(3), plan.spec, plan.layout, 1)
    assert problem(words, len(words), (300, 10)) == ""
    for place in range(words.nbytes):
        changed = words.copy()
        changed.view(np.uint8)[place] ^= 1
        assert "checksum" in problem(changed, len(words), (300, 10))


def test_records_judged_together_are_judged_as_one_by_one(plan: Any) -> None:
    whole = np.stack([pack(record(3), plan.spec, plan.layout, 1)] * 3)
    rows = np.array([300] * 3), np.array([10] * 3)
    assert commit.are_whole(whole, *rows)
    released = whole.copy()
    released[1] = commit.with_state(whole[1], commit.RELEASED)
    assert commit.are_whole(released, *rows)
    for place in range(whole[1].nbytes):
        changed = whole.copy()
        changed[1].view(np.uint8)[place] ^= 1
        assert not commit.are_whole(changed, *rows), place
    for place in range(5):
        # another number under a fitting checksum: state, version and rows are judged themselves
        changed = whole.copy()
        changed[1, place] += 7
        changed[1, -1] = crc32c(changed[1, :-1].view(np.uint8))
        alone = problem(changed[1], whole.shape[1], (300, 10))
        assert commit.are_whole(changed, *rows) == (alone == ""), (place, alone)


def test_a_whole_record_of_something_else_is_no_record(plan: Any) -> None:
    words = pack(record(3), plan.spec, plan.layout, 1)
    assert "bytes" in problem(words[:-1], len(words), (300, 10))
    assert "the plan 299" in problem(words, len(words), (299, 10))


def test_a_reason_without_a_code_is_not_taken_for_good() -> None:
    bad = {5: "zero_rows", 7: "cosmic ray", 6: "ok"}
    assert state_codes(bad, 5, 4).tolist() == [2, 3, 3, 0]
    with pytest.raises(ValueError, match="not in this shard"):
        state_codes({4: "other"}, 5, 4)


def test_a_damaged_record_is_named_on_opening(
    store: Store, flip: Callable[[Path, int], None]
) -> None:
    (store.path / paths.SEALED_FILE).unlink()
    flip(store.path / paths.commit_file(ShardId(1, 2)), 9)
    with pytest.raises(ValueError, match=r"b1/commit/c/2/0 does not match its own checksum"):
        open_store(store.path)


def test_the_merged_records_are_the_records(store: Store, plan: Any) -> None:
    merged = (store.path / paths.SEALED_FILE).read_bytes()
    files = [store.path / paths.commit_file(shard_id) for shard_id in plan.layout.shard_ids()]
    assert merged == b"".join(file.read_bytes() for file in files)
    for file in files:
        file.unlink()
    again = open_store(store.path)
    assert again.is_complete
    assert again.readable_N.all()


@pytest.mark.parametrize("shard_id", [ShardId(0, 0), ShardId(1, 0), ShardId(1, 5)])
def test_a_damaged_merged_record_is_named_on_opening(
    shard_id: ShardId, store: Store, plan: Any, flip: Callable[[Path, int], None]
) -> None:
    shard_ids = plan.layout.shard_ids()
    before = shard_ids[: shard_ids.index(shard_id)]
    place = 4 * sum(commit.width(plan.spec, plan.layout, one.bucket) for one in before)
    flip(store.path / paths.SEALED_FILE, place + 9)
    with pytest.raises(ValueError, match=f"of {shard_id} in .* does not match its own checksum"):
        open_store(store.path)


def test_merged_records_tell_of_each_sample_what_single_ones_tell(
    tiny: ModuleType, plan: Any, empty_store: Store
) -> None:
    bad = {2: "zero_rows", 9: "not_finite", len(plan.table) - 1: "other"}
    tiny.capture(plan, empty_store, bad=bad)
    single = open_store(empty_store.path)
    empty_store.seal()
    merged = open_store(empty_store.path)
    assert np.flatnonzero(single.state_N).tolist() == sorted(bad)
    for name in ("state_N", "readable_N", "captured_N"):
        assert getattr(merged, name).tolist() == getattr(single, name).tolist()
    for shard_id in plan.layout.shard_ids():
        one, two = single.commit_of(shard_id), merged.commit_of(shard_id)
        assert one is not None
        assert two is not None
        assert pack(one, plan.spec, plan.layout, shard_id.bucket).tolist() == (
            pack(two, plan.spec, plan.layout, shard_id.bucket).tolist()
        )


def test_an_incomplete_store_is_not_sealed(empty_store: Store) -> None:
    with pytest.raises(ValueError, match="8 shards are not committed, the first b0/0"):
        empty_store.seal()
    assert not empty_store.is_sealed
