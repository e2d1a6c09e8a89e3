"""The writer: back-pressure, first error, bad samples, a full disk, two writers on one store."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from dflash_pipeline.store import durable, paths
from dflash_pipeline.store.lease import LeaseLost, Leases
from dflash_pipeline.store.reader import open_store
from dflash_pipeline.store.rows import decode, encode
from dflash_pipeline.store.shard import ShardFile
from dflash_pipeline.store.spec import SAMPLE_STATES, ShardId
from dflash_pipeline.store.writer import StoreWriter
from limits import small_files

SHARD = ShardId(1, 0)


@pytest.fixture
def leases(plan: Any, empty_store: Any) -> Any:
    with Leases(empty_store.path, plan.layout, heartbeat_s=60, hung_s=0.1) as leases:
        yield leases


def clipped(plan: Any) -> np.ndarray:
    return np.zeros(plan.spec.num_amax, np.uint32)


def test_a_finished_shard_reads_back_and_exists_only_once_committed(
    tiny: ModuleType, plan: Any, empty_store: Any, leases: Leases
) -> None:
    with StoreWriter(empty_store, leases, depth=2) as writer:
        lease = leases.acquire(SHARD)
        amax = tiny.put_shard(plan, writer, lease)
        writer.finish(amax, clipped(plan), {}, halved=True, compiled=True)
        for i in range(len(plan.table))[plan.table.of_shard(SHARD)]:
            hidden_TKR, last_MR = writer.read_back(i)
            assert (decode(hidden_TKR, "bf16") == plan.rows_of(i)[0]).all()
            assert (decode(last_MR, "bf16") == plan.rows_of(i)[1]).all()
        assert empty_store.refresh() == []
        assert empty_store.is_open(SHARD)
        writer.commit()
        assert not lease.is_held
        assert not empty_store.is_open(SHARD)
        assert empty_store.refresh() == [SHARD]
    record = empty_store.commit_of(SHARD)
    assert record.is_halved
    assert record.is_compiled
    assert (record.amax == amax).all()
    assert not record.states.any()


def test_submitted_shards_are_committed_in_the_background(
    tiny: ModuleType, plan: Any, empty_store: Any, leases: Leases
) -> None:
    with StoreWriter(empty_store, leases, depth=2) as writer:
        for shard_id in plan.layout.shard_ids():
            amax = tiny.put_shard(plan, writer, leases.acquire(shard_id))
            writer.submit(amax, clipped(plan), {}, halved=False)
        writer.wait()
        empty_store.refresh()
        assert empty_store.is_complete


def test_a_shard_that_was_given_back_before_it_was_opened_leaves_its_next_holder_alone(
    tiny: ModuleType, plan: Any, empty_store: Any, leases: Leases
) -> None:
    """As one whose batch fails while the disk is still busy with the shard before."""
    failed = leases.acquire(SHARD)
    failed.fail()
    with (
        Leases(empty_store.path, plan.layout, heartbeat_s=60, hung_s=60) as others,
        StoreWriter(empty_store, others, depth=2) as other,
        StoreWriter(empty_store, leases, depth=2) as writer,
    ):
        amax = tiny.put_shard(plan, other, others.acquire(SHARD))
        # the other one's files are there
        other._thread.submit(lambda: None).result()
        tiny.put_shard(plan, writer, failed)
        writer.abort()
        other.finish(amax, clipped(plan), {}, halved=False)
        other.commit()
    assert empty_store.refresh() == [SHARD]


def test_a_bad_sample_has_no_rows_and_its_reason(
    tiny: ModuleType, plan: Any, empty_store: Any, leases: Leases
) -> None:
    first = plan.table.of_shard(SHARD).start
    bad = {first: "not_finite", first + 2: "who knows"}
    with StoreWriter(empty_store, leases, depth=2) as writer:
        amax = tiny.put_shard(plan, writer, leases.acquire(SHARD))
        writer.finish(amax, clipped(plan), bad, halved=False)
        assert not writer.read_back(first)[0].any()
        writer.commit()
    store = open_store(empty_store.path)
    assert [store.num_rows(first + k) for k in range(3)] == [0, plan.table.num_tokens[first + 1], 0]
    assert store.readable_N[first : first + 3].tolist() == [False, True, False]
    assert [SAMPLE_STATES[c] for c in store.state_N[first : first + 3]] == [
        "not_finite",
        "ok",
        "other",
    ]
    with pytest.raises(ValueError, match="no good rows"):
        store.hidden(first)
    assert (store.sample(first + 1).hidden_TKH == plan.rows_of(first + 1)[0]).all()


def test_wrong_rows_are_refused_before_anything_is_renamed(
    tiny: ModuleType, plan: Any, empty_store: Any, leases: Leases
) -> None:
    rows = np.zeros((3, 3, 16), np.uint8)
    for array, last, text in (
        (rows, rows[:, 0].copy(), "the plan says"),
        (rows[:, :, ::2], rows[:, 0].copy(), "contiguous"),
        (rows, None, "contiguous"),
        (rows.reshape(-1)[:-1].copy(), rows[:, 0].copy(), "no whole rows"),
    ):
        writer = StoreWriter(empty_store, leases, depth=2)
        lease = leases.acquire(SHARD)
        writer.begin(lease)
        writer.put(array, last, lambda: None)
        with pytest.raises(ValueError, match=text):
            writer.finish(np.zeros(4, np.float32), clipped(plan), {}, halved=False)
        assert not lease.is_held
        with pytest.raises(ValueError, match=text):
            writer.close()
    directory = (empty_store.path / paths.hidden_file(SHARD)).parent
    assert list(directory.iterdir()) == []


def test_put_waits_while_the_queue_is_full_and_every_buffer_comes_back(
    tiny: ModuleType,
    plan: Any,
    empty_store: Any,
    leases: Leases,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate, released = threading.Event(), []
    real = ShardFile.append

    def slow(self: ShardFile, rows: np.ndarray) -> None:
        gate.wait(10)
        real(self, rows)

    monkeypatch.setattr(ShardFile, "append", slow)
    writer = StoreWriter(empty_store, leases, depth=3)
    writer.begin(leases.acquire(SHARD))
    hidden_NKR, last_MR = np.zeros((1, 3, 16), np.uint8), np.zeros((1, 16), np.uint8)

    def feed() -> None:
        for k in range(8):
            writer.put(hidden_NKR, last_MR, lambda k=k: released.append(k))

    feeder = threading.Thread(target=feed)
    feeder.start()
    time.sleep(0.1)
    assert feeder.is_alive()
    assert released == []
    gate.set()
    feeder.join(10)
    writer.abort()
    writer.close()
    assert released == list(range(8))


@pytest.mark.parametrize("fails", [False, True])
def test_the_next_shard_is_written_while_the_one_before_is_synced(
    fails: bool,
    tiny: ModuleType,
    plan: Any,
    empty_store: Any,
    leases: Leases,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    is_syncing, may_go_on, released = threading.Event(), threading.Event(), list[int]()
    real = ShardFile.sync

    def slow(self: ShardFile) -> None:
        is_syncing.set()
        may_go_on.wait(10)
        if fails:
            raise OSError(5, "Input/output error")
        real(self)

    monkeypatch.setattr(ShardFile, "sync", slow)
    first, second = leases.acquire(SHARD), leases.acquire(ShardId(1, 1))
    writer = StoreWriter(empty_store, leases, depth=4)
    writer.submit(tiny.put_shard(plan, writer, first), clipped(plan), {}, halved=False)
    writer.begin(second)
    hidden_NKR, last_MR = np.zeros((1, 3, 16), np.uint8), np.zeros((1, 16), np.uint8)
    for k in range(3):
        writer.put(hidden_NKR, last_MR, lambda k=k: released.append(k))
    assert is_syncing.wait(10)
    end = time.monotonic() + 10
    while released != [0, 1, 2] and time.monotonic() < end:
        time.sleep(0.01)
    # written while the first waits for its disk, and nothing is committed by then
    assert released == [0, 1, 2]
    assert first.is_held
    assert empty_store.refresh() == []
    may_go_on.set()
    if fails:
        with pytest.raises(ValueError, match=r"shard b1/0 of .* cannot be written.*Input/output"):
            writer.wait()
        writer.abort()
        assert (first.is_held, second.is_held) == (False, False)
        with pytest.raises(ValueError, match="shard b1/0"):
            writer.close()
        assert empty_store.refresh() == []
        for shard_id in (SHARD, ShardId(1, 1)):
            folder = (empty_store.path / paths.hidden_file(shard_id)).parent
            assert list(folder.iterdir()) == []
        return
    writer.abort()
    writer.close()
    assert empty_store.refresh() == [SHARD]


def test_after_an_error_buffers_come_back_and_each_call_raises_it(
    plan: Any, empty_store: Any, leases: Leases, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: ShardFile, rows: np.ndarray) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(ShardFile, "append", broken)
    released: list[int] = []
    writer = StoreWriter(empty_store, leases, depth=8)
    lease = leases.acquire(SHARD)
    writer.begin(lease)
    hidden_NKR, last_MR = np.zeros((1, 3, 16), np.uint8), np.zeros((1, 16), np.uint8)
    for k in range(5):
        with contextlib.suppress(ValueError):
            writer.put(hidden_NKR, last_MR, lambda k=k: released.append(k))
    with pytest.raises(ValueError, match=r"shard b1/0 of .* cannot be written.*Input/output"):
        writer.wait()
    with pytest.raises(ValueError, match="cannot be written"):
        writer.wait()
    assert sorted(released) == [0, 1, 2, 3, 4]
    assert not lease.is_held
    writer.abort()
    with pytest.raises(ValueError, match="cannot be written"):
        writer.begin(leases.acquire(SHARD))
    with pytest.raises(ValueError, match="cannot be written"):
        writer.close()
    assert leases.acquire(SHARD) is None, "the refused begin left the lease with its owner"


def test_a_full_disk_is_one_clear_line_and_gives_the_shard_back(
    tiny: ModuleType, plan: Any, empty_store: Any, leases: Leases
) -> None:
    writer = StoreWriter(empty_store, leases, depth=2)
    lease = leases.acquire(SHARD)
    told = r"no space left for shard b1/0 of .* in .*b1/hidden/c/0 .* committed shards"
    with small_files(9000):
        with contextlib.suppress(ValueError):
            tiny.put_shard(plan, writer, lease)
        with pytest.raises(ValueError, match=told):
            writer.wait()
    assert not lease.is_held
    writer.abort()
    with pytest.raises(ValueError, match="no space"):
        writer.close()
    directory = (empty_store.path / paths.hidden_file(SHARD)).parent
    assert durable.temporaries(directory) == []
    assert tiny.capture(plan, empty_store) == sum(plan.layout.num_shards)


def test_a_worker_that_hung_cannot_replace_what_its_successor_wrote(
    tiny: ModuleType, plan: Any, empty_store: Any, leases: Leases
) -> None:
    ours = StoreWriter(empty_store, leases, depth=2)
    lease = leases.acquire(SHARD)
    amax = tiny.put_shard(plan, ours, lease)
    ours.finish(amax, clipped(plan), {}, halved=True)
    with Leases(empty_store.path, plan.layout, heartbeat_s=60, hung_s=0.0) as others:
        while (taken := others.claim(lambda i: i == SHARD, max_failures=1)) is None:
            time.sleep(0.01)
        with StoreWriter(empty_store, others, depth=2) as theirs:
            tiny.put_shard(plan, theirs, taken)
            theirs.finish(amax, clipped(plan), {}, halved=False)
            theirs.commit()
    before = tiny.digest(empty_store.path)
    with pytest.raises(LeaseLost):
        ours.commit()
    with pytest.raises(LeaseLost):
        ours.close()
    assert tiny.digest(empty_store.path) == before


def test_two_writers_share_a_store(tiny: ModuleType, plan: Any, empty_store: Any) -> None:
    counts: list[int] = []

    def work() -> None:
        counts.append(tiny.capture(plan, open_store(empty_store.path), pause_s=0.01))

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(counts) == sum(plan.layout.num_shards)
    assert min(counts) > 0
    empty_store.refresh()
    assert empty_store.is_complete


def test_a_process_that_never_closes_its_writer_still_ends(
    tiny: ModuleType, empty_store: Any
) -> None:
    code = f"""
import sys
sys.path.insert(0, {str(Path(tiny.__file__).parent)!r})
import tiny_store as tiny
from dflash_pipeline.store.lease import Leases
from dflash_pipeline.store.reader import open_store
from dflash_pipeline.store.writer import StoreWriter
plan, store = tiny.make_plan(24), open_store({str(empty_store.path)!r})
leases = Leases(store.path, plan.layout, heartbeat_s=1, hung_s=9)
writer = StoreWriter(store, leases, depth=2)
tiny.put_shard(plan, writer, leases.claim(store.is_open, max_failures=1))
raise SystemExit(7)
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=30).returncode == 7


def test_a_store_without_last_takes_none(tiny: ModuleType, tmp_path: Path) -> None:
    plan = tiny.make_plan(9, last_mode="none")
    store = tiny.build(plan, tmp_path / "hs")
    tiny.capture(plan, store)
    assert store.sample(0).last_MH is None
    assert len(store.commit_of(ShardId(1, 0)).amax) == 3
    with pytest.raises(ValueError, match="no last state"):
        store.last(0)
    assert encode(plan.rows_of(0)[0], "bf16").shape == store.hidden(0).shape
