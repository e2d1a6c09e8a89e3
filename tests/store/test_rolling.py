"""How many training runs must follow a rolling store before its first shard goes."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from dflash_pipeline.configs.errors import UsageError
from dflash_pipeline.store import consumers, durable, glance, paths
from dflash_pipeline.store.check import verify
from dflash_pipeline.store.consumers import Consumer
from dflash_pipeline.store.describe import describe
from dflash_pipeline.store.drop import drop
from dflash_pipeline.store.lease import Leases
from dflash_pipeline.store.quota import Room, fixed_bytes
from dflash_pipeline.store.reader import Store
from dflash_pipeline.store.release import Releases
from dflash_pipeline.store.report import render
from dflash_pipeline.store.rolling import (
    Gathering,
    awaited_text,
    consumer_lines,
    gather,
    gathering_of,
    make_rolling,
    num_missing,
    stopped_runs,
)
from dflash_pipeline.store.table import claim_order


@pytest.fixture
def store_of_two(tiny: ModuleType, plan: Any, empty_store: Store) -> Store:
    """Two shards captured, released once two runs have come together and used them."""
    make_rolling(empty_store.path, empty_store.layout, 2)
    tiny.capture(plan, empty_store, most=2)
    return empty_store


def _follow(store: Store, slot: int, has_used: bool) -> Consumer:
    order = claim_order(store.layout.num_shards)[:2]
    used = np.array([has_used and one in order for one in store.layout.shard_ids()])
    row = Consumer(slot, f"id-{slot}", f"/runs/{slot}", used)
    consumers.write_row(store.path, row)
    return row


def test_one_run_alone_lets_nothing_go_until_the_second_has_used_it_too(
    store_of_two: Store,
) -> None:
    store = store_of_two
    assert num_missing(store.path, store.layout) == 2
    _follow(store, 0, has_used=True)
    assert Releases(store).run() == []
    assert num_missing(store.path, store.layout) == 1
    _follow(store, 1, has_used=False)
    assert Releases(store).run() == []
    assert num_missing(store.path, store.layout) == 0
    _follow(store, 1, has_used=True)
    assert len(Releases(store).run()) == 2
    assert verify(store.path, deep=True).problems == []


def test_a_new_run_is_not_proposed_where_it_would_be_refused(
    plan: Any, store_of_two: Store
) -> None:
    """Once shards were released, only a run that used them can go on."""
    store = store_of_two
    rows = [_follow(store, slot, has_used=True) for slot in (0, 1)]
    with Leases(store.path, plan.layout, heartbeat_s=1, hung_s=60) as leases:
        room = Room(store, leases, fixed_bytes(store))
        room.release()
        assert store.num_released == 2
        assert not glance.followers(str(store.path)).are_gone
        for row in rows:
            consumers.remove_row(store.path, row)
        said = room.waiting_text()
    assert "no training run uses them, and a new one would miss the released shards" in said
    assert "start dflash train" not in said.lower()
    assert glance.followers(str(store.path)).are_gone


def test_only_runs_without_a_process_are_stopped(store_of_two: Store) -> None:
    store = store_of_two
    rows = [_follow(store, slot, has_used=False) for slot in (0, 1)]
    presence = consumers.Presence(store.path, rows[1].id)
    assert stopped_runs(store.path, store.layout) == ["/runs/0"]
    presence.close()
    assert stopped_runs(store.path, store.layout) == ["/runs/0", "/runs/1"]


@pytest.mark.parametrize("how", ["ended", "dropped"])
def test_a_run_that_was_there_is_not_waited_for_again(how: str, store_of_two: Store) -> None:
    store = store_of_two
    _follow(store, 0, has_used=True)
    other = _follow(store, 1, has_used=False)
    # what a run does when it registers
    assert gather(store.path, store.layout)
    if how == "ended":
        consumers.remove_row(store.path, other)
    else:
        drop(store.path, store.layout, "/runs/1")
    assert num_missing(store.path, store.layout) == 0
    assert len(Releases(store).run()) == 2


def test_a_run_that_left_before_the_others_came_is_none_of_them(store_of_two: Store) -> None:
    store = store_of_two
    first = _follow(store, 0, has_used=True)
    assert not gather(store.path, store.layout)
    consumers.remove_row(store.path, first)
    _follow(store, 1, has_used=True)
    assert Releases(store).run() == []
    assert num_missing(store.path, store.layout) == 1


def test_what_is_awaited_is_said_by_capture_status_and_inspect(
    plan: Any, store_of_two: Store
) -> None:
    store = store_of_two
    text = "no shard is released before 2 training runs follow (--consumers 2): 1 more to start"
    _follow(store, 0, has_used=True)
    assert glance.followers(str(store.path)).num_awaited == 1
    assert awaited_text(store.path, store.layout) == text
    assert consumer_lines(store.path)[-1] == text
    assert text in render(describe(store.path)).splitlines()
    with Leases(store.path, plan.layout, heartbeat_s=1, hung_s=60) as leases:
        room = Room(store, leases, fixed_bytes(store))
        assert room.claim(3) is None
        assert room.is_full
        room.release()
        assert store.num_released == 0
        said = room.waiting_text()
        assert f"{text}; /runs/0 do. Start dflash train --store {store.path} --epochs 1" in said
        _follow(store, 1, has_used=False)
        assert "waiting for /runs/1 (2 shards to go" in room.waiting_text()
    assert awaited_text(store.path, store.layout) == ""
    assert len(consumer_lines(store.path)) == 2


def test_the_number_may_change_and_the_same_line_again_changes_nothing(
    store_of_two: Store,
) -> None:
    store = store_of_two
    _follow(store, 0, has_used=True)
    _follow(store, 1, has_used=False)
    gather(store.path, store.layout)
    make_rolling(store.path, store.layout, 2)
    assert gathering_of(store.path) == Gathering(2, is_over=True)
    make_rolling(store.path, store.layout, 3)
    assert gathering_of(store.path) == Gathering(3, is_over=False)
    assert num_missing(store.path, store.layout) == 1
    make_rolling(store.path, store.layout, 1)
    assert num_missing(store.path, store.layout) == 0
    assert verify(store.path, deep=True).problems == []
    with pytest.raises(UsageError, match="--consumers 65: at most 64 runs"):
        make_rolling(store.path, store.layout, 65)


def test_one_is_what_a_store_waits_for_whose_array_does_not_say(empty_store: Store) -> None:
    make_rolling(empty_store.path, empty_store.layout, 1)
    document = empty_store.path / paths.CONSUMERS / "zarr.json"
    assert b"num_consumers" not in document.read_bytes()
    assert num_missing(empty_store.path, empty_store.layout) == 1
    # whoever it is: told of as no run at all, not as one of several
    assert awaited_text(empty_store.path, empty_store.layout) == ""


@pytest.mark.parametrize(
    ("old", "new"),
    [(b'"num_consumers":2', b'"num_consumers":0'), (b"false", b'"no"'), (b"{", b"[")],
)
def test_a_damaged_document_is_named_and_nothing_goes(
    old: bytes, new: bytes, store_of_two: Store
) -> None:
    store = store_of_two
    for slot in range(2):
        _follow(store, slot, has_used=True)
    document: Path = store.path / paths.CONSUMERS / "zarr.json"
    document.write_bytes(document.read_bytes().replace(old, new, 1))
    with pytest.raises(ValueError, match=r"consumers/zarr\.json is damaged .*nothing is released"):
        Releases(store).run()
    named = f"{document} is damaged"
    assert any(named in text for text in verify(store.path, deep=False).problems)
    assert any(named in text for text in describe(store.path)["problems"])
    assert store.num_released == 0


def test_what_a_killed_writer_of_the_document_left_goes(store_of_two: Store) -> None:
    store = store_of_two
    left = durable.temporary_name(store.path / paths.CONSUMERS / "zarr.json")
    left.write_bytes(b"{")
    make_rolling(store.path, store.layout, 3)
    assert not left.exists()
