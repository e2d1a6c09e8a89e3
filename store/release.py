"""Releases shards of a rolling store: recorded first, then deleted.

A shard is released when every registered run has used it, as many runs as were asked for have come
together (`rolling.py`), and shards are still to be captured; once all are committed nobody waits
for space, and what is left stays to look at. A process that is killed between record and deletion
leaves data that its record disowns: the next release by anyone removes it.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import numpy as np

from dflash_pipeline.store import durable, paths
from dflash_pipeline.store.commitlog import write_released
from dflash_pipeline.store.consumers import consumers, release_lock
from dflash_pipeline.store.reader import Store
from dflash_pipeline.store.rolling import gather
from dflash_pipeline.store.spec import ShardId


class Releases:
    """What one process releases of one store."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._deleted: set[ShardId] = set()

    def run(self) -> list[ShardId]:
        """Release what may go and delete what was released; the shards whose data went."""
        with release_lock(self._store.path):
            store = self._store
            store.refresh()
            for shard_id in self._releasable():
                rows = store.table.rows_of(shard_id)
                write_released(store.path, store.spec, store.layout, shard_id, rows)
            store.refresh()
            return self._delete()

    def _releasable(self) -> list[ShardId]:
        store = self._store
        found = consumers(store.path, store.layout)
        if not found or store.is_complete or not gather(store.path, store.layout):
            return []
        is_used = np.logical_and.reduce([one.used for one in found])
        return [
            shard_id
            for shard_id, used in zip(store.layout.shard_ids(), is_used, strict=True)
            if used and store.is_committed(shard_id) and not store.is_released(shard_id)
        ]

    def _delete(self) -> list[ShardId]:
        gone = []
        for shard_id in self._store.layout.shard_ids():
            if shard_id not in self._deleted and self._store.is_released(shard_id):
                names = paths.data_files(shard_id)
                num_files = sum(_delete(self._store.path / name) for name in names)
                gone += [shard_id] if num_files else []
                self._deleted.add(shard_id)
        return gone


def _delete(file: Path) -> bool:
    """Remove a shard file and the directories that are empty without it; whether it was there."""
    is_there = file.exists()
    file.unlink(missing_ok=True)
    directory = file.parent
    # `c` itself stays: the links of `raw/` lead to it
    while directory.name != "c":
        with contextlib.suppress(OSError):
            directory.rmdir()
        directory = directory.parent
    if is_there:
        durable.sync(directory)
    return is_there
