"""verify --repair: what was damaged is captured again, to the same bytes; nothing else changes."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from dflash_pipeline.configs.errors import UsageError
from dflash_pipeline.store import paths
from dflash_pipeline.store.check import fail, verify
from dflash_pipeline.store.lease import Leases
from dflash_pipeline.store.merge import merge
from dflash_pipeline.store.reader import Store, open_store
from dflash_pipeline.store.repair import main, repair
from dflash_pipeline.store.spec import ShardId

Flip = Callable[[Path, int], None]
HIT = ShardId(1, 2)

DAMAGES: dict[str, Callable[[Path, Flip], None]] = {
    "row of hidden": lambda path, flip: flip(path / paths.hidden_file(HIT), 77),
    "row of last": lambda path, flip: flip(path / paths.last_file(HIT), 77),
    "index": lambda path, flip: flip(path / paths.hidden_file(HIT), -3),
    "truncated": lambda path, _flip: os.truncate(path / paths.hidden_file(HIT), 100),
    "file gone": lambda path, _flip: (path / paths.last_file(HIT)).unlink(),
    "commit record": lambda path, flip: flip(path / paths.commit_file(HIT), 30),
    "record gone": lambda path, _flip: (path / paths.commit_file(HIT)).unlink(),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_shard_is_redone_by_the_same_capture(
    name: str, store: Store, plan: Any, tiny: ModuleType, flip: Flip
) -> None:
    whole = tiny.digest(store.path)
    DAMAGES[name](store.path, flip)
    damaged = tiny.digest(store.path)
    report = verify(store.path, deep=True)
    assert report.damaged_shards == [HIT]
    done = repair(store.path, report)
    assert done[0] == "the seal was removed: the capture seals the store again"
    taken = [] if name == "record gone" else [f"shard {HIT} is uncommitted: the capture redoes it"]
    assert done[1:] == taken
    # the record and the seal are gone, and every other byte is as it was
    removed = {paths.commit_file(HIT), paths.SEALED_FILE}
    assert tiny.digest(store.path) == {k: v for k, v in damaged.items() if k not in removed}
    assert verify(store.path, deep=True).problems == []
    again = open_store(store.path)
    assert tiny.capture(plan, again) == 1
    again.seal()
    assert tiny.digest(store.path) == whole


def test_a_damaged_seal_alone_is_removed(store: Store, tiny: ModuleType, flip: Flip) -> None:
    whole = tiny.digest(store.path)
    flip(store.path / paths.SEALED_FILE, 5)
    report = verify(store.path, deep=False)
    assert (report.damaged_shards, report.is_seal_damaged) == ([], True)
    assert len(repair(store.path, report)) == 1
    open_store(store.path).seal()
    assert tiny.digest(store.path) == whole


def test_what_the_plan_fixed_is_not_touched_and_stays_named(
    store: Store, tiny: ModuleType, flip: Flip, capsys: pytest.CaptureFixture[str]
) -> None:
    for file in (
        paths.token_file(HIT, "input_ids"),
        paths.column_file("domain"),
        paths.EMBED_FILE,
        paths.token_crc_file(1),
    ):
        flip(store.path / file, 1)
        before = tiny.digest(store.path)
        extra = {"path": str(store.path), "deep": True, "json": False}
        with pytest.raises(ValueError, match=file):
            main(None, None, extra)
        assert "repair:" not in capsys.readouterr().out
        assert tiny.digest(store.path) == before
        flip(store.path / file, 1)


def test_the_command_says_what_it_did(
    store: Store, flip: Flip, capsys: pytest.CaptureFixture[str]
) -> None:
    extra: dict[str, Any] = {"path": str(store.path), "deep": True, "json": False}
    main(None, None, extra)
    assert capsys.readouterr().out == ("nothing to repair\n")
    flip(store.path / paths.hidden_file(HIT), 0)
    main(None, None, extra)
    out = capsys.readouterr().out
    assert "chunk 0 does not match" in out
    assert "repair: shard b1/2 is uncommitted: the capture redoes it" in out
    assert "redoes 1 of 8 shards" in out
    flip(store.path / paths.hidden_file(ShardId(1, 3)), 0)
    main(None, None, extra | {"json": True})
    told = json.loads(capsys.readouterr().out)
    assert told["before"]["damaged_shards"] == [[1, 3]]
    assert told["after"]["problems"] == []
    assert len(told["done"]) == 1


def test_a_shard_that_a_capture_holds_is_left_alone(store: Store, plan: Any, flip: Flip) -> None:
    flip(store.path / paths.hidden_file(HIT), 0)
    report = verify(store.path, deep=True)
    with Leases(store.path, plan.layout, heartbeat_s=1, hung_s=60) as leases:
        assert leases.acquire(HIT) is not None
        assert repair(store.path, report)[-1].endswith("written by a capture: left alone")
    assert (store.path / paths.commit_file(HIT)).exists()


def test_a_merged_store_is_not_repaired(tiny: ModuleType, tmp_path: Path, flip: Flip) -> None:
    inputs = []
    for name, offset in (("a", 0), ("b", 100)):
        plan = tiny.make_plan(4, offset=offset)
        plan.attributes = replace(plan.attributes, run={})
        store = tiny.build(plan, tmp_path / name)
        tiny.capture(plan, store)
        store.seal()
        inputs.append(str(store.path))
    path = tmp_path / "ab"
    merge(path, inputs, deep=False, say=lambda _text: None, progress=lambda _d, _t: None)
    flip(path / paths.hidden_file(ShardId(0, 0)), 0)
    before = tiny.digest(path)
    report = verify(path, deep=True)
    with pytest.raises(UsageError, match=r"made by dflash merge.*merge the stores again"):
        repair(path, report)
    # and --repair is not proposed
    with pytest.raises(ValueError, match=r"1 problem in .*: .*merge the stores again$"):
        fail(report)
    assert tiny.digest(path) == before
