"""Stores of one identity become one: every sample, bit for bit, or a refusal that says why."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import zarr

from dflash_pipeline.configs.errors import UsageError
from dflash_pipeline.store import paths
from dflash_pipeline.store.check import verify
from dflash_pipeline.store.completion import publish_calibration
from dflash_pipeline.store.describe import describe
from dflash_pipeline.store.lease import Leases
from dflash_pipeline.store.merge import merge
from dflash_pipeline.store.reader import Store, open_store
from dflash_pipeline.store.spec import ShardId

Merge = Callable[..., Store]


@pytest.fixture
def make(tiny: ModuleType, tmp_path: Path) -> Callable[..., Store]:
    """A whole store of tiny samples: its name, then arguments of `tiny.make_plan`."""

    def made(name: str, *arguments: Any, calibrations: Any = None, **changes: Any) -> Store:
        plan = tiny.make_plan(*arguments, **changes)
        store = tiny.build(plan, tmp_path / name)
        if plan.spec.is_quantised:
            with Leases(store.path, plan.layout, heartbeat_s=1, hung_s=60) as leases:
                lease = leases.claim(store.is_open, max_failures=1)
                given = calibrations or tiny.calibration_of(plan)
                store = publish_calibration(store, given, {"layers": []}, lease)
        tiny.capture(plan, store)
        store.seal()
        return open_store(store.path)

    return made


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def merged(tmp_path: Path, said: list[str]) -> Merge:
    """Merges stores into tmp_path / merged."""

    def run(*stores: Store, deep: bool = True) -> Store:
        return merge(
            tmp_path / "merged",
            [str(store.path) for store in stores],
            deep=deep,
            say=said.append,
            progress=lambda _done, _total: None,
        )

    return run


def _check_holds_all(store: Store, parts: tuple[Store, ...]) -> None:
    """Every sample of the parts, by its key: rows, tokens, and what the plan says of it."""
    assert len(store.table) == sum(len(part.table) for part in parts)
    for part in parts:
        for i in range(len(part.table)):
            j = store.table.find(part.table.key(i))
            assert np.array_equal(store.hidden(j), part.hidden(i))
            assert np.array_equal(store.last(j), part.last(i))
            for found, wanted in zip(store.tokens(j), part.tokens(i), strict=True):
                assert np.array_equal(found, wanted)
            for name in ("split", "source_row", "num_anchors", "token_hash", "sample_id"):
                assert getattr(store.table, name)[j] == getattr(part.table, name)[i]
            domain = part.table.domains[part.table.domain[i]]
            assert store.table.domains[store.table.domain[j]] == domain


def _check_plain_zarr(store: Store) -> None:
    group = zarr.open_group(str(store.path), mode="r")
    for i in (0, len(store.table) - 1):
        first, num = int(store.table.start[i]), int(store.table.num_tokens[i])
        rows = group[f"b{store.table.bucket[i]}/hidden"][first : first + num]
        assert np.array_equal(rows, store.sample(i).hidden_TKH)


def test_shards_of_one_capacity_become_hard_links(
    make: Callable[..., Store], merged: Merge, said: list[str], tiny: ModuleType
) -> None:
    parts = make("a", 24), make("b", 22, offset=100), make("c", 8, offset=200)
    before = [tiny.digest(part.path) for part in parts]
    store = merged(*parts)
    assert store.is_sealed
    assert store.spec == parts[0].spec
    assert verify(store.path, deep=True).problems == []
    _check_holds_all(store, parts)
    _check_plain_zarr(store)
    # buckets of one bound are one bucket, and the shards of the first store come first
    assert store.layout.bucket_bounds == tiny.BOUNDS
    file = paths.hidden_file(ShardId(1, 0))
    assert (store.path / file).stat().st_ino == (parts[0].path / file).stat().st_ino
    num_shards = sum(store.layout.num_shards)
    assert said[-1].endswith(
        f"54 samples of 3 stores; {num_shards} shards are hard links, 0 are copies"
    )
    assert [tiny.digest(part.path) for part in parts] == before
    assert describe(store.path)["problems"] == []
    assert dict(store.attributes.dropped) == {"empty": 6}
    # it can itself be merged
    assert len(store.attributes.run["merged"]) == 3


def test_shards_of_another_capacity_are_copied_with_a_new_index(
    make: Callable[..., Store], merged: Merge, said: list[str]
) -> None:
    parts = make("a", 24, rows=512), make("b", 22, offset=100, rows=768)
    store = merged(*parts)
    assert store.layout.rows_per_shard == 768
    assert verify(store.path, deep=True).problems == []
    _check_holds_all(store, parts)
    _check_plain_zarr(store)
    copies, links = (sum(part.layout.num_shards) for part in parts)
    assert said[-1].endswith(f"{links} shards are hard links, {copies} are copies")


def test_across_file_systems_everything_is_a_copy(
    make: Callable[..., Store], merged: Merge, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = make("a", 6), make("b", 7, offset=100)

    def no_link(source: Path, target: Path) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", no_link)
    store = merged(*parts)
    assert verify(store.path, deep=True).problems == []
    _check_holds_all(store, parts)
    assert "; 0 shards are hard links" in said[-1]


@pytest.mark.parametrize("last_mode", ["int8", "bf16", "none"])
def test_quantised_stores_of_one_calibration_are_merged(
    make: Callable[..., Store], merged: Merge, tiny: ModuleType, last_mode: str
) -> None:
    changes = {"hidden_mode": "int4", "last_mode": last_mode, "hidden_size": 64}
    first = make("a", 8, **changes)
    entries = first.calibration.entries(3, first.spec.has_last)
    second = make("b", 9, offset=100, calibrations=entries, **changes)
    assert first.spec == second.spec
    store = merged(first, second)
    assert store.spec == first.spec
    assert verify(store.path, deep=True).problems == []
    _check_plain_zarr(store)
    if last_mode != "none":
        _check_holds_all(store, (first, second))
    other = make("c", 9, offset=200, **changes)
    with pytest.raises(
        UsageError, match=r"a and .*c cannot .*calibration_hash: .*--calibration-from \S*a\)"
    ):
        merge("no", [str(first.path), str(other.path)], deep=False, say=print, progress=print)


def _refused(
    merged: Merge, tmp_path: Path, stores: tuple[Store, ...], text: str, **how: Any
) -> None:
    with pytest.raises(ValueError, match=text):
        merged(*stores, **how)
    left = {path.name for path in tmp_path.iterdir() if path.name.startswith("merged")}
    assert left <= {"merged.logs"}


def test_stores_that_do_not_fit_together_are_refused_by_name(
    make: Callable[..., Store], merged: Merge, tmp_path: Path, tiny: ModuleType
) -> None:
    first = make("a", 6)
    other = make("b", 6, offset=100, target_hash="beef", max_len=201)
    text = r"a and .*b cannot be merged, .*target_hash: 'feed' and 'beef'; max_len: 200 and 201"
    _refused(merged, tmp_path, (first, other), text)
    again = make("c", 4, offset=3)
    text = r"3 samples stand in both .*a and .*c \(.*'sample-4-é'.*\): capture the new data without"
    _refused(merged, tmp_path, (first, again), text)
    growing = tiny.build(tiny.make_plan(5, offset=300), tmp_path / "d")
    _refused(merged, tmp_path, (first, growing), r"d is not sealed: finish its capture")


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"offset": 100, "hidden_mode": "int8"},
            "merged, they differ in hidden_mode.*: capture one of",
        ),
        ({"offset": 3}, "3 samples stand in both"),
    ],
)
def test_what_the_headers_tell_is_refused_before_a_row_is_read(
    make: Callable[..., Store],
    merged: Merge,
    tmp_path: Path,
    flip: Callable[[Path, int], None],
    changes: dict[str, Any],
    text: str,
) -> None:
    parts = make("a", 6, hidden_size=64), make("b", 6, hidden_size=64, **changes)
    # whoever read the rows first would name this
    flip(parts[0].path / paths.hidden_file(ShardId(1, 0)), 5)
    _refused(merged, tmp_path, parts, text)


def test_another_held_out_share_is_refused(
    make: Callable[..., Store], merged: Merge, tmp_path: Path, tiny: ModuleType
) -> None:
    first, plan = make("a", 6), tiny.make_plan(6, offset=100)
    plan.attributes = replace(plan.attributes, run={"data": {"heldout": 0.5}})
    store = tiny.build(plan, tmp_path / "b")
    tiny.capture(plan, store)
    store.seal()
    _refused(merged, tmp_path, (first, store), r"data\.heldout: \[\] and \[0\.5\]")


@pytest.mark.parametrize("deep", [False, True])
def test_a_damaged_store_is_refused_and_nothing_is_left(
    make: Callable[..., Store],
    merged: Merge,
    tmp_path: Path,
    flip: Callable[[Path, int], None],
    deep: bool,
) -> None:
    """Without --fast all of it is read; with it what is copied is."""
    parts = make("a", 6, rows=512), make("b", 6, offset=100, rows=768)
    flip(parts[0].path / paths.hidden_file(ShardId(1, 0)), 5)
    _refused(merged, tmp_path, parts, r"b1/hidden/c/0/0/0.*chunk 0 does not match", deep=deep)
    flip(parts[0].path / paths.hidden_file(ShardId(1, 0)), 5)
    flip(parts[1].path / paths.commit_file(ShardId(1, 0)), 9)
    _refused(merged, tmp_path, parts, r"b is damaged: commit record .*b1/commit/c/0/0", deep=deep)


def test_a_damage_behind_a_hard_link_is_not_hidden(
    make: Callable[..., Store], merged: Merge, flip: Callable[[Path, int], None]
) -> None:
    parts = make("a", 6), make("b", 6, offset=100)
    flip(parts[0].path / paths.hidden_file(ShardId(1, 0)), 5)
    store = merged(*parts, deep=False)
    assert "chunk 0 does not match" in verify(store.path, deep=True).problems[0]


def test_the_root_of_a_merged_store_is_one_of_ours(
    make: Callable[..., Store], merged: Merge
) -> None:
    store = merged(make("a", 6), make("b", 6, offset=100))
    document = json.loads((store.path / "zarr.json").read_bytes())
    assert set(document["attributes"]) == {"dflash"}
    # sources of both, each once
    assert store.table.sources == ("data.jsonl",)
