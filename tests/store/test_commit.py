"""The commit record: words and back, and each reason for which it is not one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_pipeline.store import commit, paths
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
    )


def test_a_record_survives_its_words(plan: Any) -> None:
    before = record(3)
    words = pack(before, plan.spec, plan.layout, 1)
    after = unpack(words, plan.spec, plan.layout, 1)
    assert len(words) == commit.width(plan.spec, plan.layout, 1)
    assert after.states[:3].tolist() == [0, 1, 2]
    for name in ("rows", "last_rows", "hidden_bytes", "last_bytes", "token_crcs", "is_halved"):
        assert getattr(after, name) == getattr(before, name)
    for name in ("amax", "clipped", "hidden_crcs", "last_crcs"):
        assert getattr(after, name).tolist() == getattr(before, name).tolist()


def test_each_changed_byte_is_seen(plan: Any) -> None:
    words = pack(record(3), plan.spec, plan.layout, 1)
    assert problem(words, len(words), (300, 10)) == ""
    for place in range(words.nbytes):
        changed = words.copy()
        changed.view(np.uint8)[place] ^= 1
        assert "checksum" in problem(changed, len(words), (300, 10))


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


def test_an_incomplete_store_is_not_sealed(empty_store: Store) -> None:
    with pytest.raises(ValueError, match="8 shards are not committed, the first b0/0"):
        empty_store.seal()
    assert not empty_store.is_sealed
