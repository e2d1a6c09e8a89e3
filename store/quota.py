"""The quota of a rolling store: shards are begun only while all of them fit below it.

What counts is what lies on the disk, files of dead workers included, plus what the shards that are
being written will take in the end. Workers look and claim under one lock, so that together they
stay below the quota too.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Set
from pathlib import Path

from dflash_pipeline.configs.errors import UsageError
from dflash_pipeline.configs.following import ONLY_BY_RESUMING, training_on_open
from dflash_pipeline.configs.sizes import size_text
from dflash_pipeline.store import commit, durable, paths
from dflash_pipeline.store.build import shard_bytes
from dflash_pipeline.store.consumers import Consumer, consumers, presence_text
from dflash_pipeline.store.documents import kinds
from dflash_pipeline.store.lease import Lease, Leases
from dflash_pipeline.store.reader import Store
from dflash_pipeline.store.release import Releases
from dflash_pipeline.store.rolling import awaited_text
from dflash_pipeline.store.spec import Layout, ShardId, StoreSpec

_LOCK_WAIT_S = 60.0


def check_quota(quota_bytes: int, fixed: int, largest: int, num_workers: int, store: str) -> None:
    """UsageError unless a shard for each worker fits beside what is always there (bytes)."""
    needed = fixed + num_workers * largest
    if quota_bytes < needed:
        raise UsageError(
            f"--quota {size_text(quota_bytes)} is too small for {store}: {size_text(fixed)} hold "
            f"the plan and the target, and each of {num_workers} workers writes a shard of up to "
            f"{size_text(largest)}; give at least {needed} bytes ({size_text(needed)}), fewer "
            "--gpus, or plan smaller shards (store.shard_bytes) in another --store"
        )


def fixed_bytes(store: Store) -> int:
    """Bytes of all but the shards' data and the consumers, all commit records to come included."""
    path, shard_ids = store.path, store.layout.shard_ids()
    # rows of consumers come and go: they are counted when room is asked for
    skipped = {path / paths.CONSUMERS, *_data_directories(store)}
    present = _tree_bytes(path, frozenset(skipped))
    # counted twice below, whole: one by one, and merged by the seal
    records = sum(_size(path / paths.commit_file(shard_id)) for shard_id in shard_ids)
    records += _size(path / paths.SEALED_FILE)
    coming = 2 * record_bytes(store.spec, store.layout)
    return present - records + coming


def record_bytes(spec: StoreSpec, layout: Layout) -> int:
    """Bytes of all commit records."""
    return sum(
        4 * num_shards * commit.width(spec, layout, bucket)
        for bucket, num_shards in enumerate(layout.num_shards)
    )


def largest_shard_bytes(store: Store) -> int:
    """Bytes of the largest shard, its record included."""
    args = (store.spec, store.layout, store.table)
    return max(shard_bytes(*args, shard_id) for shard_id in store.layout.shard_ids())


class Room:
    """Claims shards for one worker, below the quota; 0: as many as there are."""

    def __init__(self, store: Store, leases: Leases, quota_bytes: int) -> None:
        self._store, self._leases, self._quota_bytes = store, leases, quota_bytes
        self._fixed_bytes = fixed_bytes(store) if quota_bytes else 0
        self._releases = Releases(store)
        self.is_full = False
        """The last claim found a shard, and no room for it."""

    def claim(self, max_failures: int) -> Lease | None:
        """As `Leases.claim`; None as well while there is no room for the next shard."""
        if not self._quota_bytes:
            return self._leases.claim(self._store.is_open, max_failures=max_failures)
        file = paths.log_directory(self._store.path) / "quota.lock"
        with durable.locked(file, 0, wait_s=_LOCK_WAIT_S) as is_held:
            if not is_held:
                raise ValueError(f"{file} is locked for {_LOCK_WAIT_S:.0f} s: end what hangs")
            lease = self._leases.claim(self._store.is_open, max_failures=max_failures)
            self.is_full = lease is not None and self.used_bytes() > self._quota_bytes
            if lease is not None and self.is_full:
                lease.release()
                return None
            return lease

    def release(self) -> None:
        """Release what may go, in place of a trainer that was killed while it did."""
        self._releases.run()

    def used_bytes(self) -> int:
        """Bytes on the disk, with each shard that is being written at its final size."""
        store, being_written = self._store, self._leases.in_progress()
        written = sum(size for shard_id, size in _data(store) if shard_id not in being_written)
        args = (store.spec, store.layout, store.table)
        coming = sum(shard_bytes(*args, shard_id) for shard_id in being_written)
        rows = _tree_bytes(store.path / paths.CONSUMERS, frozenset())
        return self._fixed_bytes + rows + written + coming

    def waiting_text(self) -> str:
        """Why there is no room, who it waits for, and what can be done about it."""
        store = self._store
        shard_ids = store.layout.shard_ids()
        num_captured = sum(store.is_committed(shard_id) for shard_id in shard_ids)
        return (
            f"{size_text(self.used_bytes())} of the quota of {size_text(self._quota_bytes)} are in "
            f"use; {num_captured} of {len(shard_ids)} shards captured, {store.num_released} "
            f"released; {self._awaited()}"
        )

    def _awaited(self) -> str:
        store, path = self._store, self._store.path
        found, quoted = consumers(path, store.layout), shlex.quote(str(path))
        training = training_on_open(str(path), store.attributes.run)
        if awaited := awaited_text(path, store.layout):
            names = f"; {', '.join(one.name for one in found)} do" if found else ""
            return (
                f"{awaited}{names}. Start {training}, or run capture again with a smaller "
                "--consumers"
            )
        behind = [(one, num) for one in found if (num := _num_unused(store, one))]
        if not found and store.num_released:
            return f"no training run uses them, {ONLY_BY_RESUMING}"
        if not found:
            return (
                f"no training run uses them: start {training}, or run capture again with a larger "
                "--quota"
            )
        if not behind:
            return "the rest is being written by other workers"
        named = ", ".join(
            f"{one.name} ({num} shards to go, {presence_text(path, one)})" for one, num in behind
        )
        return (
            f"waiting for {named}; to drop a run: dflash status {quoted} --drop "
            f"{shlex.quote(behind[0][0].name)}"
        )


def _num_unused(store: Store, consumer: Consumer) -> int:
    """Captured shards that a run has still to use."""
    pairs = zip(store.layout.shard_ids(), consumer.used.tolist(), strict=True)
    return sum(store.is_committed(shard_id) and not used for shard_id, used in pairs)


def _data_directories(store: Store) -> dict[Path, int]:
    """The directories of shards of rows, and the bucket of each."""
    return {
        store.path / f"b{bucket}" / kind / "c": bucket
        for bucket in range(len(store.layout.num_shards))
        for kind, _, _ in kinds(store.spec)
    }


def _data(store: Store) -> Iterator[tuple[ShardId, int]]:
    """Shards and the bytes of their rows, on all mounts and temporary files included."""
    for top, bucket in _data_directories(store).items():
        for name in os.listdir(top) if top.is_dir() else []:
            if name.isdecimal():
                yield ShardId(bucket, int(name)), _tree_bytes(top / name, frozenset())


def _tree_bytes(directory: Path, skipped: Set[Path]) -> int:
    """Bytes of the files below a directory but for some; those that vanish meanwhile count 0."""
    total = 0
    for parent, folders, names in os.walk(directory):
        folders[:] = [name for name in folders if Path(parent) / name not in skipped]
        total += sum(_size(Path(parent) / name) for name in names)
    return total


def _size(file: Path) -> int:
    try:
        return file.lstat().st_size
    except FileNotFoundError:
        return 0
