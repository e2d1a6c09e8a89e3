"""A rolling store: room below the quota, who is waited for, and what goes when."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from dflash_pipeline.configs.errors import UsageError
from dflash_pipeline.store import consumers, drop, durable, paths, release, rolling
from dflash_pipeline.store.build import shard_bytes
from dflash_pipeline.store.check import verify
from dflash_pipeline.store.commit import RELEASED
from dflash_pipeline.store.consumers import Consumer, Presence
from dflash_pipeline.store.describe import describe
from dflash_pipeline.store.lease import Leases
from dflash_pipeline.store.quota import Room, check_quota, fixed_bytes, largest_shard_bytes
from dflash_pipeline.store.reader import Store, open_store
from dflash_pipeline.store.release import Releases
from dflash_pipeline.store.report import render
from dflash_pipeline.store.spec import ShardId
from dflash_pipeline.store.table import claim_order
from dflash_pipeline.store.writer import StoreWriter


@pytest.fixture
def rolling_store(empty_store: Store) -> Store:
    """Planned, rolling, nothing captured."""
    rolling.make_rolling(empty_store.path, empty_store.layout, 1)
    return empty_store


def _row(store: Store, number: int, used: list[ShardId]) -> Consumer:
    flags = np.array([shard_id in used for shard_id in store.layout.shard_ids()])
    row = Consumer(number, f"id-{number}", f"/runs/{number}", flags)
    consumers.write_row(store.path, row)
    return row


def _file_bytes(path: Path) -> int:
    return sum(file.lstat().st_size for file in path.rglob("*") if file.is_file())


def test_a_shard_goes_when_every_run_has_used_it_and_is_told_apart_from_a_missing_one(
    tiny: ModuleType, plan: Any, rolling_store: Store
) -> None:
    store = rolling_store
    first, second, *others = claim_order(store.layout.num_shards)
    tiny.capture(plan, store, most=2)
    follower = open_store(store.path)
    sample = store.table.of_shard(first).start
    view = follower.sample(sample)
    _row(store, 0, [first, second])
    _row(store, 1, [first])
    assert Releases(store).run() == [first]
    assert Releases(store).run() == []
    follower.refresh()
    for reader in (store, follower, open_store(store.path)):
        assert reader.is_released(first)
        assert not reader.is_open(first)
        assert not reader.is_released(second)
        assert reader.captured_N[sample]
        assert not reader.readable_N[sample]
        for look in (reader.sample, reader.num_rows, reader.hidden, reader.check_sample):
            with pytest.raises(ValueError, match=f"shard {first}, which was released"):
                look(sample)
        with pytest.raises(ValueError, match="is not captured yet"):
            reader.sample(store.table.of_shard(others[0]).start)
    record = store.commit_of(first)
    assert record is not None
    assert record.state == RELEASED
    assert record.rows == len(view.ids_T) + sum(
        len(store.tokens(i)[0]) for i in range(sample + 1, store.table.of_shard(first).stop)
    )
    for name in paths.data_files(first):
        assert not (store.path / name).exists()
        assert not (store.path / name).parent.exists()
    report = verify(store.path, deep=True)
    assert (report.problems, report.notes) == ([], [])
    assert (report.num_committed, report.num_released) == (2, 1)
    text = render(describe(store.path))
    assert "released: 1 shards" in text
    assert "training run /runs/1: has used 1 of" in text


def test_without_a_run_or_once_all_is_captured_nothing_goes(
    tiny: ModuleType, plan: Any, rolling_store: Store
) -> None:
    store = rolling_store
    tiny.capture(plan, store, most=1)
    assert Releases(store).run() == []
    tiny.capture(plan, store, most=sum(store.layout.num_shards) - 1)
    _row(store, 0, store.layout.shard_ids())
    assert Releases(store).run() == []
    assert store.readable_N.all()


@pytest.mark.parametrize("place", ["recorded", "half deleted"])
def test_a_release_that_was_cut_off_is_finished_by_the_next(
    place: str,
    tiny: ModuleType,
    plan: Any,
    rolling_store: Store,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = rolling_store
    first = claim_order(store.layout.num_shards)[0]
    tiny.capture(plan, store, most=2)
    _row(store, 0, [first])
    delete = release._delete

    def dies(file: Path) -> bool:
        if place == "recorded" or file.name != "0" or "last" in str(file):
            raise MemoryError
        return delete(file)

    with monkeypatch.context() as patch:
        patch.setattr(release, "_delete", dies)
        with pytest.raises(MemoryError):
            Releases(store).run()
    report = verify(store.path, deep=True)
    assert report.problems == []
    assert report.notes == [f"shard {first} is released: the next release deletes its data"]
    assert Releases(open_store(store.path)).run() == [first]
    report = verify(store.path, deep=True)
    assert (report.problems, report.notes) == ([], [])


def test_a_sealed_store_has_the_same_merged_records_whatever_was_released_before(
    tiny: ModuleType, plan: Any, rolling_store: Store, store_digest: dict[str, str]
) -> None:
    store = rolling_store
    num_shards = sum(store.layout.num_shards)
    tiny.capture(plan, store, most=num_shards - 1)
    _row(store, 0, claim_order(store.layout.num_shards)[:2])
    assert len(Releases(store).run()) == 2
    tiny.capture(plan, store, most=1)
    store.seal()
    assert tiny.digest(store.path)[paths.SEALED_FILE] == store_digest[paths.SEALED_FILE]
    report = verify(store.path, deep=True)
    assert (report.problems, report.num_released) == ([], 2)
    again = open_store(store.path)
    assert again.num_released == 2
    assert int((again.captured_N & ~again.readable_N).sum()) > 0


@pytest.fixture
def store_digest(tiny: ModuleType, plan: Any, tmp_path: Path) -> dict[str, str]:
    """Files of the undisturbed store."""
    calm = tiny.build(plan, tmp_path / "calm")
    tiny.capture(plan, calm)
    calm.seal()
    return dict(tiny.digest(calm.path))


def test_verify_finds_what_does_not_belong_to_a_release(
    tiny: ModuleType, plan: Any, rolling_store: Store, flip: Any
) -> None:
    store = rolling_store
    first, second = claim_order(store.layout.num_shards)[:2]
    tiny.capture(plan, store, most=2)
    _row(store, 0, [first])
    Releases(store).run()
    (store.path / paths.hidden_file(second)).unlink()
    assert any("cannot be opened" in text for text in verify(store.path, deep=False).problems)
    row = store.path / paths.consumer_file(0)
    flip(row, 1030)
    assert any("is damaged" in text for text in verify(store.path, deep=False).problems)
    with pytest.raises(ValueError, match="nothing is released until it is removed"):
        Releases(store).run()
    assert any("is damaged" in text for text in describe(store.path)["problems"])
    stray = store.path / paths.CONSUMERS / "c" / "99" / "0"
    stray.parent.mkdir()
    stray.touch()
    assert any("does not belong" in text for text in verify(store.path, deep=False).problems)
    document = store.path / paths.CONSUMERS / "zarr.json"
    document.write_bytes(document.read_bytes().replace(b'"shape":[64', b'"shape":[63'))
    assert any("differs from the plan" in t for t in verify(store.path, deep=False).problems)


def test_workers_together_stay_below_the_quota_and_go_on_when_there_is_room(
    tiny: ModuleType, plan: Any, rolling_store: Store
) -> None:
    store, order = rolling_store, claim_order(rolling_store.layout.num_shards)
    sizes = [shard_bytes(store.spec, store.layout, store.table, i) for i in order]
    quota = fixed_bytes(store) + sum(sizes[:3]) + 2000
    beats = {"heartbeat_s": 1, "hung_s": 60}
    with (
        Leases(store.path, plan.layout, **beats) as mine,
        Leases(store.path, plan.layout, **beats) as theirs,
        StoreWriter(store, mine, depth=2) as writer,
    ):
        rooms = [Room(store, leases, quota) for leases in (mine, theirs)]
        held = [room.claim(3) for room in (*rooms, rooms[0])]
        assert [lease and lease.shard_id for lease in held] == list(order[:3])
        assert [room.claim(3) for room in rooms] == [None, None]
        assert all(room.is_full for room in rooms)
        assert "no training run uses them: start dflash train" in rooms[0].waiting_text()
        assert mine.in_progress() == set(order[:3])
        clipped = np.zeros(plan.spec.num_amax, np.uint32)
        assert held[0] is not None
        writer.finish(tiny.put_shard(plan, writer, held[0]), clipped, {}, halved=False)
        writer.commit()
        store.refresh()
        assert _file_bytes(store.path) <= rooms[0].used_bytes() <= quota
        row = _row(store, 0, [])
        assert rooms[1].claim(3) is None
        text = rooms[1].waiting_text()
        assert "waiting for /runs/0 (1 shards to go, not running)" in text
        assert f"dflash status {store.path} --drop /runs/0" in text
        _row(store, row.number, [order[0]])
        rooms[1].release()
        freed = rooms[1].claim(3)
        assert freed is not None
        assert freed.shard_id == order[3]
        assert not rooms[1].is_full


def test_files_of_a_dead_worker_count_until_they_are_swept(plan: Any, rolling_store: Store) -> None:
    store, first = rolling_store, claim_order(rolling_store.layout.num_shards)[0]
    with Leases(store.path, plan.layout, heartbeat_s=1, hung_s=60) as leases:
        room = Room(store, leases, 1 << 40)
        before = room.used_bytes()
        left = durable.temporary_name(store.path / paths.hidden_file(first))
        left.parent.mkdir(parents=True)
        left.write_bytes(bytes(5000))
        assert room.used_bytes() == before + 5000
        leases.sweep()
        assert room.used_bytes() == before


def test_a_quota_below_a_shard_a_worker_is_refused_with_its_numbers(store: Store) -> None:
    fixed, largest = fixed_bytes(store), largest_shard_bytes(store)
    check_quota(fixed + 3 * largest, fixed, largest, 3, "hs")
    with pytest.raises(UsageError, match=rf"each of 3 workers .* at least {fixed + 3 * largest}"):
        check_quota(fixed + 3 * largest - 1, fixed, largest, 3, "hs")


def test_what_is_fixed_is_what_lies_there_before_the_first_shard_and_after_the_last(
    tiny: ModuleType, plan: Any, rolling_store: Store
) -> None:
    store = rolling_store
    before = fixed_bytes(store)
    assert before > _file_bytes(store.path) - (store.path / "consumers/zarr.json").stat().st_size
    tiny.capture(plan, store)
    store.seal()
    assert fixed_bytes(store) == before


def test_a_run_is_dropped_by_its_directory_and_another_is_named(rolling_store: Store) -> None:
    store = rolling_store
    _row(store, 3, [])
    with pytest.raises(
        UsageError, match=r"no training run /runs/7 follows .* one of these: /runs/3"
    ):
        drop.drop(store.path, store.layout, "/runs/7")
    assert rolling.consumer_lines(store.path) == [
        f"training run /runs/3: has used 0 of {sum(store.layout.num_shards)} shards, not running"
    ]
    drop.main(None, None, {"path": store.path, "drop": "/runs/3"})
    assert rolling.consumer_lines(store.path) == []
    assert consumers.consumers(store.path, store.layout) == []
    assert consumers.free_number(store.path) == 0


def test_a_full_array_of_consumers_says_so(
    rolling_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consumers, "MOST_CONSUMERS", 2)
    for number in range(2):
        assert consumers.free_number(rolling_store.path) == number
        _row(rolling_store, number, [])
    with pytest.raises(UsageError, match="has 2 consumers already"):
        consumers.free_number(rolling_store.path)


def test_a_process_is_present_until_it_ends(rolling_store: Store) -> None:
    store, row = rolling_store, _row(rolling_store, 0, [])
    assert consumers.presence_text(store.path, row) == "not running"
    presence = Presence(store.path, row.id)
    presence.beat()
    assert consumers.presence_text(store.path, row) == "last sign of life 0:00:00 ago"
    with pytest.raises(UsageError, match="is alive"):
        Presence(store.path, row.id)
    presence.close()
    presence.close()
    assert consumers.presence_text(store.path, row) == "not running"


def test_who_looks_whether_a_run_lives_never_keeps_it_from_starting(
    rolling_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, row = rolling_store, _row(rolling_store, 0, [])
    Presence(store.path, row.id).close()
    real, started = durable.is_locked, list[Presence]()

    def starts_meanwhile(descriptor: int, byte: int) -> bool:
        found = real(descriptor, byte)
        started.append(Presence(store.path, row.id))
        return found

    with monkeypatch.context() as patch:
        patch.setattr(durable, "is_locked", starts_meanwhile)
        assert consumers.presence_text(store.path, row) == "not running"
    assert consumers.presence_text(store.path, row).startswith("last sign of life")
    started[0].close()


def test_plain_zarr_reads_the_consumers_and_what_was_released(
    tiny: ModuleType, plan: Any, rolling_store: Store
) -> None:
    zarr = pytest.importorskip("zarr")
    store = rolling_store
    first = claim_order(store.layout.num_shards)[0]
    tiny.capture(plan, store, most=1)
    _row(store, 2, [first])
    Releases(store).run()
    group = zarr.open_group(store.path, mode="r")
    begin, end = group["consumers"].attrs["fields"]["used"]
    assert group["consumers"][2, begin:end].sum() == 1
    assert group[f"b{first.bucket}/commit"][first.shard, 0] == RELEASED
    assert "consumers" in dict(group.members())


def test_the_notebook_tells_released_shards_and_reads_a_sample_that_is_there(
    tiny: ModuleType,
    plan: Any,
    rolling_store: Store,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It counted released shards as committed, and read their rows as zeros."""
    pytest.importorskip("zarr")
    store = rolling_store
    first, other = claim_order(store.layout.num_shards)[:2]
    tiny.capture(plan, store, most=2)
    _row(store, 2, [first])
    assert Releases(store).run() == [first]
    notebook = Path(__file__).parents[1] / "notebooks" / "read_a_store.ipynb"
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    script = "\n".join("".join(one["source"]) for one in cells if one["cell_type"] == "code")
    monkeypatch.setenv("STORE", str(store.path))
    found: dict[str, Any] = {}
    exec(compile(script, str(notebook), "exec"), found)
    said = capsys.readouterr().out
    assert first.bucket == other.bucket
    assert f"b{first.bucket}: 1 shards committed, 1 released" in said
    store.refresh()
    assert (found["is_there"] == store.readable_N).all()
    assert found["i"] > 0
    assert np.array_equal(found["hidden"], store.sample(found["i"]).hidden_TKH)
