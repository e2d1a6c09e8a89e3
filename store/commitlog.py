"""All commit records of a store: read as they appear, written under a fence, merged at the end.

Letters: S shards of a bucket, W words of a record, C samples of a bucket, or of a shard.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dflash_pipeline.store import durable, paths
from dflash_pipeline.store.commit import (
    COMMITTED,
    RELEASED,
    Commit,
    Words,
    are_whole,
    fields_of,
    pack,
    problem,
    unpack,
    width,
    with_state,
)
from dflash_pipeline.store.lease import Lease
from dflash_pipeline.store.rolling import is_rolling
from dflash_pipeline.store.spec import Layout, ShardId, StoreSpec
from dflash_pipeline.store.table import SampleTable, claim_order


class CommitLog:
    """The records found so far; a damaged one raises, or is listed in `problems` if given."""

    def __init__(
        self,
        store: Path,
        spec: StoreSpec,
        layout: Layout,
        table: SampleTable,
        problems: list[str] | None,
    ) -> None:
        self._store, self._spec, self._layout, self._table = store, spec, layout, table
        self._problems = problems
        self._order = claim_order(layout.num_shards)
        self._records: dict[ShardId, Words] = {}
        # file number of each record that may still change to RELEASED, by a file in its place
        self._inodes: dict[ShardId, int] = {}
        self._damaged: set[ShardId] = set()
        self.readable_N: NDArray[np.bool_] = np.zeros(len(table), bool)
        self.captured_N: NDArray[np.bool_] = np.zeros(len(table), bool)
        self.state_N: NDArray[np.uint8] = np.zeros(len(table), np.uint8)
        # who lists problems wants each record judged on its own; `check` compares the merged ones,
        # which do not tell what was released
        if problems is not None or is_rolling(store) or not self._read_sealed():
            self.refresh()

    @property
    def num_committed(self) -> int:
        """Shards committed at the last refresh."""
        return len(self._records)

    def is_committed(self, shard_id: ShardId) -> bool:
        """Whether the shard was committed at the last refresh."""
        return shard_id in self._records

    def is_released(self, shard_id: ShardId) -> bool:
        """Whether the shard's data was used and deleted, as of the last refresh."""
        return shard_id in self._records and int(self._records[shard_id][0]) == RELEASED

    def get(self, shard_id: ShardId) -> Commit | None:
        """The record of a shard, None before it is committed."""
        words = self._records.get(shard_id)
        return None if words is None else unpack(words, self._spec, self._layout, shard_id.bucket)

    def refresh(self) -> list[ShardId]:
        """Read the records that appeared since, a scandir a bucket; the new ones in claim order."""
        found = set()
        for bucket, num_shards in enumerate(self._layout.num_shards):
            directory = self._store / f"b{bucket}" / "commit" / "c"
            for name in os.listdir(directory) if directory.is_dir() else []:
                if not (name.isdecimal() and len(name) <= 8 and int(name) < num_shards):
                    continue
                shard_id = ShardId(bucket, int(name))
                if shard_id not in self._records and shard_id not in self._damaged:
                    found.add(shard_id)
        if is_rolling(self._store):
            self._look_for_releases()
        if not found:
            return []
        return [shard_id for shard_id in self._order if shard_id in found and self._read(shard_id)]

    def _look_for_releases(self) -> None:
        """Read records again whose file was replaced."""
        for shard_id, inode in list(self._inodes.items()):
            file = self._store / paths.commit_file(shard_id)
            with contextlib.suppress(FileNotFoundError):
                if file.stat().st_ino != inode:
                    self._read(shard_id)

    def _read(self, shard_id: ShardId) -> bool:
        file = self._store / paths.commit_file(shard_id)
        try:
            with file.open("rb") as stream:
                content, inode = stream.read(), os.fstat(stream.fileno()).st_ino
        except FileNotFoundError:
            return False
        except OSError:
            if self._problems is None:
                raise
            # judged like an empty one
            content, inode = b"", 0
        whole = content[: len(content) // 4 * 4]
        words = np.frombuffer(whole, "<u4") if len(whole) == len(content) else np.empty(0, "<u4")
        is_whole = self._add(shard_id, words, str(file))
        if is_whole and not self.is_released(shard_id):
            self._inodes[shard_id] = inode
        else:
            self._inodes.pop(shard_id, None)
        return is_whole

    def _add(self, shard_id: ShardId, words: Words, name: str) -> bool:
        expected = width(self._spec, self._layout, shard_id.bucket)
        why = problem(words, expected, self._table.rows_of(shard_id))
        if why:
            message = f"commit record {name} {why}"
            if self._problems is None:
                raise ValueError(f"{message}: see `dflash verify`")
            self._damaged.add(shard_id)
            self._problems.append(message)
            return False
        samples = self._table.of_shard(shard_id)
        fields = fields_of(self._spec, self._layout, shard_id.bucket)
        states = np.ascontiguousarray(words[fields["states"]]).view(np.uint8)
        self._records[shard_id] = words
        self._tell(samples, states[: samples.stop - samples.start], words[0] == COMMITTED)
        return True

    def _tell(self, samples: slice, states: NDArray[np.uint8], is_there: Any) -> None:
        """What is known of some samples by now; `is_there`: their shards are not released."""
        self.state_N[samples] = states
        self.captured_N[samples] = states == 0
        self.readable_N[samples] = (states == 0) & is_there

    def _read_sealed(self) -> bool:
        """Read the merged records if the store is sealed; ValueError names the first damaged one.

        A bucket at a time: record by record, a store of a million samples took twice as long to
        open.
        """
        try:
            buckets = read_sealed(self._store, self._spec, self._layout)
        except FileNotFoundError:
            return False
        begin = 0
        for bucket, words_SW in enumerate(buckets):
            shards = slice(begin, begin + len(words_SW))
            begin = shards.stop
            if len(words_SW):
                self._add_bucket(bucket, words_SW, shards)
        return True

    def _add_bucket(self, bucket: int, words_SW: Words, shards: slice) -> None:
        """The merged records of a bucket, whose shards are `shards` of all."""
        table, num_shards = self._table, len(words_SW)
        shard_ids = [ShardId(bucket, shard) for shard in range(num_shards)]
        rows_S, last_rows_S = (num[shards] for num in table.shard_rows)
        if not are_whole(words_SW, rows_S, last_rows_S):
            file = self._store / paths.SEALED_FILE
            for shard_id, words in zip(shard_ids, words_SW, strict=True):
                self._add(shard_id, words, f"of {shard_id} in {file}")
        fields = fields_of(self._spec, self._layout, bucket)
        states_SC = np.ascontiguousarray(words_SW[:, fields["states"]]).view(np.uint8)
        bounds = table.shard_bounds[shards.start : shards.stop + 1]
        shard_C = np.repeat(np.arange(num_shards), np.diff(bounds))
        place_C = np.arange(bounds[0], bounds[-1]) - bounds[shard_C]
        samples = slice(int(bounds[0]), int(bounds[-1]))
        self._tell(samples, states_SC[shard_C, place_C], words_SW[shard_C, 0] == COMMITTED)
        self._records.update(zip(shard_ids, words_SW, strict=True))

    def seal(self) -> None:
        """Write the merged records of a complete store; again is harmless."""
        self.refresh()
        open_ids = [str(i) for i in self._layout.shard_ids() if i not in self._records]
        if open_ids:
            raise ValueError(
                f"{self._store} cannot be sealed: {len(open_ids)} shards are not committed, "
                f"the first {open_ids[0]}"
            )
        # what was released by now is no part of it: any capture of this plan gives these words
        merged = np.concatenate(
            [with_state(self._records[i], COMMITTED) for i in self._layout.shard_ids()]
        )
        file = self._store / paths.SEALED_FILE
        durable.make_directories(file.parent)
        for leftover in durable.temporaries(file.parent):
            leftover.unlink(missing_ok=True)
        durable.write_durably(file, merged.tobytes())


def write_commit(
    store: Path, spec: StoreSpec, layout: Layout, record: Commit, lease: Lease
) -> None:
    """Make a shard exist: its record, written aside and renamed under the lease's fence."""
    words = pack(record, spec, layout, lease.shard_id.bucket)
    file = store / paths.commit_file(lease.shard_id)
    durable.make_directories(file.parent)
    temporary = durable.write_aside(file, words.tobytes())
    try:
        with lease.fence():
            durable.rename(temporary, file)
    finally:
        temporary.unlink(missing_ok=True)


def write_released(
    store: Path, spec: StoreSpec, layout: Layout, shard_id: ShardId, rows: tuple[int, int]
) -> None:
    """Record that the data of a committed shard of `rows` (hidden, last) is deleted from here on.

    Under `release_lock` only.
    """
    file = store / paths.commit_file(shard_id)
    content = file.read_bytes()
    words = np.frombuffer(content[: len(content) // 4 * 4], "<u4")
    if why := problem(words, width(spec, layout, shard_id.bucket), rows):
        raise ValueError(f"commit record {file} {why}: the store is damaged, see dflash verify")
    # of a process that was killed here
    for leftover in durable.temporaries(file.parent):
        leftover.unlink(missing_ok=True)
    durable.write_durably(file, with_state(words, RELEASED).tobytes())


def read_sealed(store: Path, spec: StoreSpec, layout: Layout) -> list[Words]:
    """The merged records of a sealed store, unchecked: uint32 [shards, W] of each bucket.

    FileNotFoundError if it is not sealed.
    """
    file = store / paths.SEALED_FILE
    widths = [width(spec, layout, bucket) for bucket in range(len(layout.num_shards))]
    sizes = [num * words for num, words in zip(layout.num_shards, widths, strict=True)]
    found = file.stat().st_size
    if found != 4 * sum(sizes):
        raise ValueError(
            f"{file} has {found} bytes, expected {4 * sum(sizes)}: the store is damaged"
        )
    parts = np.split(np.fromfile(file, "<u4"), np.cumsum(sizes[:-1]))
    return [part.reshape(-1, words) for part, words in zip(parts, widths, strict=True)]
