"""Leases: exclusive, gone with their holder, taken from the hung, and fenced."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dflash_pipeline.store import durable, paths
from dflash_pipeline.store.lease import LeaseLost, Leases
from dflash_pipeline.store.spec import ShardId
from dflash_pipeline.store.table import claim_order


def leases_of(path: Path, plan: Any, hung_s: float = 60.0) -> Leases:
    return Leases(path, plan.layout, heartbeat_s=0.0, hung_s=hung_s)


def test_a_held_shard_cannot_be_acquired_twice(plan: Any, tmp_path: Path) -> None:
    shard = ShardId(1, 0)
    with leases_of(tmp_path / "hs", plan) as mine, leases_of(tmp_path / "hs", plan) as theirs:
        lease = mine.acquire(shard)
        assert lease is not None
        assert mine.acquire(shard) is None
        assert theirs.acquire(shard) is None
        lease.release()
        lease.release()
        assert theirs.acquire(shard) is not None


def test_a_sweep_beside_a_start_takes_no_worker_for_a_dead_one(
    plan: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, real = tmp_path / "hs", durable.lock
    with leases_of(path, plan) as before:

        def sweeps_before_the_lock(descriptor: int, byte: int, *, wait: bool = False) -> bool:
            patch.setattr(durable, "lock", real)
            before.sweep()
            return real(descriptor, byte, wait=wait)

        with monkeypatch.context() as patch:
            patch.setattr(durable, "lock", sweeps_before_the_lock)
            started = leases_of(path, plan)
        assert started._beat_file.exists()
        before.sweep()
        assert started._beat_file.exists()
        started.close()
        assert not started._beat_file.exists()


def test_claims_follow_the_claim_order_past_what_is_held_or_done(plan: Any, tmp_path: Path) -> None:
    order = claim_order(plan.layout.num_shards)
    with leases_of(tmp_path / "hs", plan) as mine, leases_of(tmp_path / "hs", plan) as theirs:
        held = theirs.acquire(order[0])
        claimed = [mine.claim(lambda i: i != order[1], max_failures=3) for _ in order[2:]]
        assert tuple(lease.shard_id for lease in claimed if lease) == order[2:]
        assert mine.claim(lambda i: i != order[1], max_failures=3) is None
        assert held is not None


def test_a_shard_that_failed_too_often_is_left_out_until_forgiven(
    plan: Any, tmp_path: Path
) -> None:
    first = claim_order(plan.layout.num_shards)[0]
    with leases_of(tmp_path / "hs", plan) as leases:
        for _ in range(2):
            lease = leases.claim(lambda _: True, max_failures=2)
            assert lease is not None
            assert lease.shard_id == first
            lease.fail()
        other = leases.claim(lambda _: True, max_failures=2)
        assert other is not None
        assert other.shard_id != first
        assert leases.failures() == {first: 2}
        leases.forgive()
        assert leases.failures() == {}


def test_the_leases_of_a_killed_process_are_free_at_once(
    plan: Any, empty_store: Any, fork_worker: Callable[[Path, int], Callable[[float], int]]
) -> None:
    worker = fork_worker(empty_store.path, 24)(60.0)
    with leases_of(empty_store.path, plan) as leases:
        first = claim_order(plan.layout.num_shards)[0]
        directory = (empty_store.path / paths.last_file(first)).parent
        while not durable.temporaries(directory):
            time.sleep(0.01)
        assert leases.acquire(first) is None
        os.kill(worker, signal.SIGKILL)
        while (lease := leases.acquire(first)) is None:
            time.sleep(0.002)
        lease.release()
        assert leases.sweep() == 3, "two temporary files and a sign of life"
        assert durable.temporaries(directory) == []
        assert lease.generation == 0


def test_a_hung_holder_loses_its_shard_and_cannot_write_any_more(plan: Any, tmp_path: Path) -> None:
    order = claim_order(plan.layout.num_shards)
    with (
        leases_of(tmp_path / "hs", plan) as hung,
        leases_of(tmp_path / "hs", plan, hung_s=0.2) as other,
    ):
        lease = hung.claim(lambda i: i == order[0], max_failures=3)
        assert lease is not None
        assert other.claim(lambda i: i == order[0], max_failures=3) is None
        with lease.fence():
            pass
        time.sleep(0.25)
        taken = other.claim(lambda i: i == order[0], max_failures=3)
        assert taken is not None
        assert (taken.shard_id, taken.generation) == (order[0], 1)
        with pytest.raises(LeaseLost, match=r"taken over.*same command"), lease.fence():
            pass
        with taken.fence():
            pass
        lease.release()
        assert hung.acquire(order[0]) is None, "the new holder's lock is another byte"
        taken.release()
        assert hung.acquire(order[0]) is not None


def test_a_holder_that_gives_signs_of_life_keeps_its_shard(plan: Any, tmp_path: Path) -> None:
    first = claim_order(plan.layout.num_shards)[0]
    with (
        leases_of(tmp_path / "hs", plan) as slow,
        leases_of(tmp_path / "hs", plan, hung_s=0.1) as other,
    ):
        assert slow.acquire(first) is not None
        for _ in range(6):
            slow.beat()
            assert other.claim(lambda i: i == first, max_failures=3) is None
            time.sleep(0.05)


def test_nobody_takes_over_while_the_holder_is_inside_its_fence(plan: Any, tmp_path: Path) -> None:
    first = claim_order(plan.layout.num_shards)[0]
    with (
        leases_of(tmp_path / "hs", plan) as holder,
        leases_of(tmp_path / "hs", plan, hung_s=0.0) as other,
    ):
        lease = holder.acquire(first)
        assert lease is not None
        with lease.fence():
            for _ in range(3):
                time.sleep(0.01)
                assert other.claim(lambda i: i == first, max_failures=3) is None
        assert other.claim(lambda i: i == first, max_failures=3) is not None


def test_a_file_system_without_locks_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    durable.check_file_system(tmp_path / "logs")
    assert list((tmp_path / "logs").iterdir()) == []
    monkeypatch.setattr(durable, "lock", lambda *_, **__: True)
    with pytest.raises(ValueError, match=r"cannot lock bytes.*local disk"):
        durable.check_file_system(tmp_path / "logs")
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="cannot make"):
        durable.check_file_system(tmp_path / "file" / "logs")
