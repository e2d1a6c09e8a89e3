"""One store over several mounts: nobody who reads or writes it sees a difference but the disk."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import zarr

from dflash_pipeline.configs.errors import UsageError
from dflash_pipeline.configs.inputs import check_store
from dflash_pipeline.configs.mounts import root_of, split
from dflash_pipeline.store import paths, stripes
from dflash_pipeline.store.build import StoreBuilder, shard_bytes
from dflash_pipeline.store.check import fail, verify
from dflash_pipeline.store.commit import width
from dflash_pipeline.store.completion import is_calibrated
from dflash_pipeline.store.consumers import Consumer, write_row
from dflash_pipeline.store.describe import describe
from dflash_pipeline.store.lease import Leases
from dflash_pipeline.store.merge import merge
from dflash_pipeline.store.quota import Room, fixed_bytes
from dflash_pipeline.store.reader import Store, open_store
from dflash_pipeline.store.release import Releases
from dflash_pipeline.store.repair import repair
from dflash_pipeline.store.report import render
from dflash_pipeline.store.rolling import make_rolling
from dflash_pipeline.store.spec import ShardId
from dflash_pipeline.store.table import claim_order


@pytest.fixture
def text(tmp_path: Path) -> str:
    return ",".join(str(tmp_path / name / "hs") for name in ("m0", "m1", "m2"))


@pytest.fixture
def planned(text: str, plan: Any, tiny: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Store:
    """Over three mounts, nothing captured."""
    root, *mounts = map(Path, split(text))
    root.parent.mkdir()
    lay = partial(stripes.lay, mounts=mounts, spec=plan.spec, layout=plan.layout)
    publish = StoreBuilder.publish
    monkeypatch.setattr(StoreBuilder, "publish", lambda builder: publish(builder, lay))
    store = tiny.build(plan, root)
    assert isinstance(store, Store)
    return store


@pytest.fixture
def striped(planned: Store, text: str, plan: Any, tiny: ModuleType) -> Store:
    """The same, whole and sealed."""
    tiny.capture(plan, planned)
    planned.seal()
    return open_store(text)


def test_a_further_mount_is_told_apart_from_what_is_no_store_at_all(
    striped: Store, text: str
) -> None:
    check_store(text)
    for mount in split(text)[1:]:
        with pytest.raises(
            UsageError,
            match=r"hs is no store, it holds rows \(b\d/hidden/c\) of one that lies on several "
            r"mounts, .*: name that store's own directory, the first of those that dflash capture",
        ):
            check_store(mount)


def test_shards_take_turns_and_everything_else_is_in_the_first(
    striped: Store, plan: Any, tmp_path: Path
) -> None:
    for turn, shard_id in enumerate(claim_order(plan.layout.num_shards)):
        mount = tmp_path / f"m{turn % 3}" / "hs"
        for file in (paths.hidden_file(shard_id), paths.last_file(shard_id)):
            assert (striped.path / file).resolve() == mount / file
    for name in ("m1", "m2"):
        files = [file for file in (tmp_path / name).rglob("*") if file.is_file()]
        assert files
        assert {file.relative_to(tmp_path / name / "hs").parts[1] for file in files} == {
            "hidden",
            "last",
        }


def test_it_reads_as_any_other_store(striped: Store, plan: Any, text: str) -> None:
    report = verify(text, deep=True)
    assert (report.problems, report.notes) == ([], [])
    assert report.num_committed == 8
    group = zarr.open_group(str(striped.path), mode="r")
    for i in range(len(plan.table)):
        hidden_TKH, _ = plan.rows_of(i)
        first = int(plan.table.start[i])
        rows = group[f"b{plan.table.bucket[i]}/hidden"][first : first + len(hidden_TKH)]
        assert np.array_equal(rows, hidden_TKH)
        assert np.array_equal(striped.sample(i).hidden_TKH, hidden_TKH)
    found = describe(text)
    assert found["mounts"] == list(split(text)[1:])
    assert f"shards lie in it and on {found['mounts'][0]}" in render(found)
    # the store knows its mounts, so its own directory is name enough
    assert open_store(striped.path).is_complete
    assert is_calibrated(text)


def test_a_missing_mount_is_named(striped: Store, text: str, tmp_path: Path) -> None:
    shutil.move(tmp_path / "m2", tmp_path / "unplugged")
    for name in (text, str(striped.path)):
        with pytest.raises(ValueError, match=r"is striped over .*m2/hs, which is not there: mount"):
            open_store(name)
        assert "m2/hs, which is not there" in " ".join(verify(name, deep=False).problems)
        assert "m2/hs, which is not there" in describe(name)["problems"][0]
    shutil.move(tmp_path / "unplugged", tmp_path / "m2")
    assert verify(text, deep=True).problems == []


@pytest.mark.parametrize("leaves_its_directory", [False, True])
def test_what_stands_on_a_missing_mount_is_not_taken_for_damaged(
    leaves_its_directory: bool, striped: Store, text: str, tmp_path: Path, tiny: ModuleType
) -> None:
    """A repair while a disk is unplugged would throw away all that is on it."""
    whole = tiny.digest(striped.path)
    shutil.move(tmp_path / "m2", tmp_path / "unplugged")
    if leaves_its_directory:
        (tmp_path / "m2").mkdir()
    report = verify(text, deep=False)
    with pytest.raises(UsageError, match=r"m2/hs, which is not there.*Nothing was uncommitted"):
        repair(text, report)
    # and --repair is not proposed
    with pytest.raises(ValueError, match=r"m2/hs, which is not there: mount it[^;]*$"):
        fail(report)
    if leaves_its_directory:
        (tmp_path / "m2").rmdir()
    shutil.move(tmp_path / "unplugged", tmp_path / "m2")
    assert tiny.digest(striped.path) == whole
    assert open_store(text).is_sealed


def test_other_mounts_than_the_stores_are_refused(striped: Store, text: str) -> None:
    root, one, two = split(text)
    for wrong in (f"{root},{one}", f"{root},{two},{one}"):
        with pytest.raises(ValueError, match=rf"write it as {text}"):
            open_store(wrong)


@pytest.mark.parametrize("kind", ["hidden", "last"])
def test_a_folder_that_leads_elsewhere_is_a_fault(
    striped: Store, text: str, plan: Any, tmp_path: Path, kind: str
) -> None:
    second = claim_order(plan.layout.num_shards)[1]
    link = striped.path / stripes.shard_folder(second, kind)
    other = tmp_path / "other" / stripes.shard_folder(second, kind)
    shutil.copytree(link, other)
    link.unlink()
    link.symlink_to(other)
    problems = " ".join(verify(striped.path, deep=False).problems)
    # the mounts are what the links of `hidden` say, so there the others may be called wrong
    assert f"{link} leads to {other}, expected" in problems or f"expected {other.parents[3]}" in (
        problems
    )


def test_files_on_further_mounts_are_looked_at(striped: Store, text: str, tmp_path: Path) -> None:
    (tmp_path / "m1" / "hs" / "notes.txt").touch()
    (tmp_path / "m2" / "hs" / ".0.ab.tmp").touch()
    report = verify(text, deep=False)
    assert report.problems == [f"{tmp_path}/m1/hs/notes.txt does not belong into a store"]
    assert report.notes == [f"{tmp_path}/m2/hs/.0.ab.tmp was left by an interrupted capture"]
    assert describe(text)["leftovers"] == [f"{tmp_path}/m2/hs/.0.ab.tmp"]


def test_a_damaged_shard_on_a_further_mount_is_redone_there(
    striped: Store, text: str, plan: Any, tiny: ModuleType, flip: Callable[[Path, int], None]
) -> None:
    second: ShardId = claim_order(plan.layout.num_shards)[1]
    file = striped.path / paths.hidden_file(second)
    content, place = file.read_bytes(), file.resolve()
    flip(file, 7)
    repair(text, verify(text, deep=True))
    store = open_store(text)
    assert tiny.capture(plan, store) == 1
    store.seal()
    assert place.read_bytes() == content
    assert verify(text, deep=True).problems == []


def test_a_quota_counts_all_mounts_and_a_release_frees_them(
    planned: Store, plan: Any, tiny: ModuleType
) -> None:
    store, before = planned, fixed_bytes(planned)
    make_rolling(store.path, store.layout, 1)
    order = claim_order(plan.layout.num_shards)
    with Leases(store.path, plan.layout, heartbeat_s=1, hung_s=60) as leases:
        room = Room(store, leases, before + shard_bytes(*_described(store), order[0]) + 1000)
        lease = room.claim(3)
        assert lease is not None
        assert room.claim(3) is None
        lease.release()
    tiny.capture(plan, store)
    assert fixed_bytes(store) == before
    used = np.ones(len(order), bool)
    write_row(store.path, Consumer(0, "id", "/run", used))
    # one shard is missing again: whoever captures waits for room
    (store.path / paths.commit_file(order[-1])).unlink()
    again = open_store(store.path)
    assert set(Releases(again).run()) == set(order[:-1])
    assert verify(store.path, deep=True).problems == []
    with Leases(store.path, plan.layout, heartbeat_s=1, hung_s=60) as leases:
        rows = (store.path / "consumers").rglob("*")
        left = sum(file.stat().st_size for file in rows if file.is_file())
        data = shard_bytes(*_described(store), order[-1]) - 4 * width(
            store.spec, store.layout, order[-1].bucket
        )
        assert Room(again, leases, 1 << 40).used_bytes() == before + left + data


def _described(store: Store) -> tuple[Any, Any, Any]:
    return store.spec, store.layout, store.table


def test_it_is_merged_with_another(
    text: str, striped: Store, tiny: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # the other one is in one directory
    monkeypatch.undo()
    plan = tiny.make_plan(4, offset=100)
    other = tiny.build(plan, tmp_path / "b")
    tiny.capture(plan, other)
    other.seal()
    path = tmp_path / "ab"
    merge(path, [text, str(other.path)], deep=True, say=print, progress=lambda _d, _t: None)
    assert verify(path, deep=True).problems == []
    assert len(open_store(path).table) == len(striped.table) + 4


def test_a_mount_with_files_is_no_place_for_a_new_store(tmp_path: Path) -> None:
    (tmp_path / "m1" / "b0").mkdir(parents=True)
    stripes.check_free([tmp_path / "m1", tmp_path / "not-yet"])
    (tmp_path / "m1" / "b0" / "old").touch()
    with pytest.raises(UsageError, match=r"m1 holds files \(.*b0/old\)"):
        stripes.check_free([tmp_path / "m1"])


def test_names_of_several_directories(tmp_path: Path) -> None:
    assert split("/a/hs") == ("/a/hs",)
    assert split("/a/hs, /b/hs") == ("/a/hs", "/b/hs")
    assert root_of("/a/hs,/b/hs") == Path("/a/hs")
    # a directory that really has a comma in its name
    (tmp_path / "x,y").mkdir()
    assert root_of(str(tmp_path / "x,y")) == tmp_path / "x,y"
    for wrong in ("/a,", ",/a", "/a,/a", "/a,/b,/a/"):
        with pytest.raises(UsageError, match="expected different directories"):
            split(wrong)
