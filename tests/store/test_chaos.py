"""Capture processes killed at random moments leave, in the end, the store of an undisturbed one."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from dflash_pipeline.store import durable, paths
from dflash_pipeline.store.check import verify
from dflash_pipeline.store.reader import Store, open_store

SAMPLES, KILLS = 120, 20


def is_alive(worker: int) -> bool:
    with contextlib.suppress(ProcessLookupError):
        os.kill(worker, 0)
        return True
    return False


def kill(worker: int) -> None:
    os.kill(worker, signal.SIGKILL)
    while is_alive(worker):
        time.sleep(0.002)


def follow(plan: Any, follower: Store) -> None:
    """A trainer beside it: what it sees as committed is right, row by row."""
    for shard_id in follower.refresh():
        for i in range(len(plan.table))[plan.table.of_shard(shard_id)]:
            assert np.array_equal(follower.sample(i).hidden_TKH, plan.rows_of(i)[0])


def test_twenty_kills_leave_the_same_bytes(
    tiny: ModuleType, fork_worker: Callable[[Path, int], Callable[[float], int]], tmp_path: Path
) -> None:
    plan = tiny.make_plan(SAMPLES)
    calm = tiny.build(plan, tmp_path / "calm")
    tiny.capture(plan, calm)
    calm.seal()
    path = tiny.build(plan, tmp_path / "hs").path
    follower, chance = open_store(path), random.Random(0)
    start = fork_worker(path, SAMPLES)
    workers = [start(0.15) for _ in range(3)]
    for _ in range(KILLS):
        time.sleep(chance.uniform(0.02, 0.2))
        kill(workers.pop(0))
        workers.append(start(0.15))
        follow(plan, follower)
    for worker in workers:
        kill(worker)
    follow(plan, follower)
    assert not follower.is_complete, "too little work to be disturbed"
    orphans = [file for file in path.rglob("*") if durable.is_temporary(file.name)]
    assert orphans, "no worker was killed while it wrote"
    workers = [start(0.0) for _ in range(2)]
    while any(is_alive(worker) for worker in workers):
        time.sleep(0.02)
    follow(plan, follower)
    assert follower.is_complete
    assert tiny.digest(path) == tiny.digest(calm.path)
    report = verify(path, deep=True)
    assert (report.problems, report.notes) == ([], [])
    assert list((paths.log_directory(path) / "holders").iterdir()) == []
