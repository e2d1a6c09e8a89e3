"""Rows to shard files in threads of its own: bounded queue, checksums, fence, commit.

One thread writes, one computes checksums of what is being written, and one syncs and commits the
shard before, so that the disk has work while the next shard comes. Their first error is raised at
the owner's next call and each one after; what was queued behind it is dropped and its buffers are
given back. Only a commit makes a shard exist, so nothing that ran after an error can be seen.
Letters: N rows of a batch, M of its `last`, K layers, R bytes of a stored row.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from dflash_pipeline.configs.disk import is_full
from dflash_pipeline.configs.sizes import size_text
from dflash_pipeline.store import durable, paths, stripes
from dflash_pipeline.store.checksum import crc32c
from dflash_pipeline.store.commit import Commit, state_codes
from dflash_pipeline.store.commitlog import write_commit
from dflash_pipeline.store.lease import Lease, Leases, remove_leftovers
from dflash_pipeline.store.metadata import TOKEN_ARRAYS
from dflash_pipeline.store.reader import Store
from dflash_pipeline.store.shard import ShardFile

Bytes = NDArray[np.uint8]


class StoreWriter:
    """Writes the shards of one worker, one after another. At most `depth` batches wait."""

    def __init__(self, store: Store, leases: Leases, *, depth: int) -> None:
        self._store, self._leases, self._depth = store, leases, depth
        self._thread, self._closer, self._checksums = (
            ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"store-{name}")
            for name in ("writer", "closer", "checksums")
        )
        self._pending: deque[Future[None]] = deque()
        # the shard before; the writer's thread sets it
        self._closing: Future[None] | None = None
        self._error: BaseException | None = None
        self._shard: _OpenShard | None = None
        self.wait_s = 0.0
        """Seconds the owner spent waiting for room in the queue."""

    def begin(self, lease: Lease) -> None:
        """Start a shard."""
        if self._shard is not None:
            raise ValueError(f"shard {self._shard.lease.shard_id} is not finished yet")
        self._raise()
        shard = self._shard = _OpenShard(self._store, lease, self._checksums)
        self._queue(shard, shard.open)

    def put(self, hidden_NKR: Bytes, last_MR: Bytes | None, release: Callable[[], None]) -> None:
        """Add the rows of a batch, in plan order; waits while `depth` batches are queued.

        The arrays are C-contiguous uint8 and stay untouched until `release` is called, from the
        writer's thread, as soon as the file holds them or they are dropped.
        """
        shard = self._current()
        try:
            self._raise()
        except BaseException:
            release()
            raise
        self._queue(shard, lambda: shard.append(hidden_NKR, last_MR), release)

    def finish(
        self,
        amax: NDArray[np.float32],
        clipped: NDArray[Any],
        bad: Mapping[int, str],
        *,
        halved: bool,
        compiled: bool = False,
    ) -> None:
        """Wait until the shard's files are whole, synced and renamed; it is not committed yet.

        amax float32 [num_amax]: largest |x| of each layer, then of `last`, over good samples;
        clipped uint32 [num_amax]; bad: reason (SAMPLE_STATES) of each bad sample, whose rows are
        erased; halved: a batch was halved after running out of memory; compiled: compiled layers
        computed rows.
        """
        shard = self._current()
        self._queue(shard, lambda: shard.finish(amax, clipped, bad, halved, compiled))
        self._queue(shard, shard.publish)
        self.wait()

    def read_back(self, i: int) -> tuple[Bytes, Bytes]:
        """Rows of a sample of the finished shard out of its own files: uint8 [T, K, R], [M, R]."""
        self._raise()
        return self._current().read_back(i)

    def commit(self) -> None:
        """Make the finished shard exist and give its lease back; waits."""
        shard = self._current()
        self._queue(shard, shard.commit)
        self._shard = None
        self.wait()

    def submit(
        self,
        amax: NDArray[np.float32],
        clipped: NDArray[Any],
        bad: Mapping[int, str],
        *,
        halved: bool,
        compiled: bool = False,
    ) -> None:
        """Finish and commit in the background and return at once; see `finish` for the arguments.

        At most two shards are under way: the one being written, and the one being synced.
        """
        shard = self._current()

        def close() -> None:
            shard.publish()
            shard.commit()

        def finish() -> None:
            shard.finish(amax, clipped, bad, halved, compiled)
            if self._closing is not None:
                self._closing.result()
            self._closing = self._closer.submit(self._run, shard, close, lambda: None)

        self._queue(shard, finish)
        self._shard = None

    def abort(self) -> None:
        """Drop the shard that was begun, if any, and give its lease back."""
        shard, self._shard = self._shard, None
        if shard is not None:
            self._thread.submit(shard.drop).result()

    def wait(self) -> None:
        """Wait until all that was queued is done; raise the first error."""
        while self._pending:
            self._pending.popleft().result()
        if self._closing is not None:
            self._closing.result()
        self._raise()

    def close(self) -> None:
        """Finish what was submitted, drop what was begun, end threads; raise the first error."""
        self.abort()
        try:
            self.wait()
        finally:
            self._end()

    def _end(self) -> None:
        # in the order in which each gives work to the next
        for thread in (self._thread, self._closer, self._checksums):
            thread.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
            return
        # the caller's own error goes first; ours is most likely what it is about
        self.abort()
        self._end()

    def _current(self) -> _OpenShard:
        if self._shard is None:
            self._raise()
            raise ValueError("no shard was begun")
        return self._shard

    def _raise(self) -> None:
        self._leases.beat()
        if self._error is not None:
            raise self._error

    def _queue(
        self,
        shard: _OpenShard,
        work: Callable[[], None],
        release: Callable[[], None] = lambda: None,
    ) -> None:
        begin = time.monotonic()
        while self._pending and (self._pending[0].done() or len(self._pending) >= self._depth):
            self._pending.popleft().result()
        self.wait_s += time.monotonic() - begin
        self._pending.append(self._thread.submit(self._run, shard, work, release))

    def _run(
        self, shard: _OpenShard, work: Callable[[], None], release: Callable[[], None]
    ) -> None:
        """In a thread: do the work unless something failed before, keep the first error."""
        try:
            if self._error is None:
                work()
        except BaseException as error:
            self._error = self._error or _explained(error, shard)
        finally:
            if self._error is not None:
                shard.drop()
            release()


class _OpenShard:
    """The files of a shard; all but `read_back` runs in the writer's threads, one at a time."""

    def __init__(self, store: Store, lease: Lease, checksums: Executor) -> None:
        self.store, self.lease, self._checksums = store, lease, checksums
        self._dropping = threading.Lock()
        self._files: list[ShardFile] = []
        self._record: Commit | None = None
        self._samples = store.table.of_shard(lease.shard_id)

    def open(self) -> None:
        path, shard_id = self.store.path, self.lease.shard_id
        with self.lease.fence():
            if not self.lease.is_held:
                # given back while this was queued: what lies there may be the next holder's
                return
            remove_leftovers(path, shard_id)
        arrays = [(paths.hidden_file(shard_id), self.store.hidden_shape)]
        if self.store.last_shape is not None:
            arrays.append((paths.last_file(shard_id), self.store.last_shape))
        for name, shape in arrays:
            self._files.append(ShardFile(path / name, shape, self._checksums))

    def append(self, hidden_NKR: Bytes, last_MR: Bytes | None) -> None:
        arrays = [hidden_NKR, last_MR][: len(self._files)]
        for file, array in zip(self._files, arrays, strict=True):
            if array is None or array.dtype != np.uint8 or not array.flags.c_contiguous:
                raise ValueError(f"shard {self.lease.shard_id}: rows must be contiguous uint8")
            file.append(array)

    def finish(
        self,
        amax: NDArray[np.float32],
        clipped: NDArray[Any],
        bad: Mapping[int, str],
        halved: bool,
        compiled: bool,
    ) -> None:
        store, shard_id, table = self.store, self.lease.shard_id, self.store.table
        expected = table.rows_of(shard_id)
        found = tuple(file.num_rows for file in self._files)
        if found != expected[: len(found)]:
            raise ValueError(f"shard {shard_id} was given {found} rows, the plan says {expected}")
        num_amax = store.spec.num_amax
        if len(amax) != num_amax or len(clipped) != num_amax or not np.isfinite(amax).all():
            raise ValueError(
                f"shard {shard_id}: amax and clipped must be {num_amax} finite numbers"
            )
        samples = self._samples
        states = state_codes(dict(bad), samples.start, samples.stop - samples.start)
        first = shard_id.shard * store.layout.rows_per_shard
        starts = (table.start, table.last_start)
        counts = (table.num_tokens, table.num_teacher)
        crcs = [
            file.finish([(int(start[i]) - first, int(count[i])) for i in bad])
            for file, start, count in zip(self._files, starts, counts, strict=False)
        ]
        sizes = [file.size_bytes for file in self._files]
        self._record = Commit(
            rows=expected[0],
            last_rows=expected[1],
            hidden_bytes=sizes[0],
            last_bytes=sizes[1] if len(sizes) > 1 else 0,
            token_crcs=self._token_crcs(),
            amax=np.asarray(amax, np.float32),
            clipped=np.asarray(clipped, np.uint32),
            hidden_crcs=crcs[0],
            last_crcs=crcs[1] if len(crcs) > 1 else np.empty(0, np.uint32),
            states=states,
            is_halved=halved,
            is_compiled=compiled,
        )

    def publish(self) -> None:
        for file in self._files:
            file.sync()
        with self.lease.fence():
            for file in self._files:
                file.publish()

    def _token_crcs(self) -> tuple[int, int]:
        """Checksums of the token chunks, which must still be those of the plan."""
        files = [
            self.store.path / paths.token_file(self.lease.shard_id, name) for name in TOKEN_ARRAYS
        ]
        found = [crc32c(file.read_bytes()) for file in files]
        planned = self.store.token_crcs(self.lease.shard_id)
        for file, crc, plan in zip(files, found, planned, strict=True):
            if crc != plan:
                raise ValueError(f"{file} changed since the plan was made: the store is damaged")
        return found[0], found[1]

    def read_back(self, i: int) -> tuple[Bytes, Bytes]:
        if self._record is None or not self._samples.start <= i < self._samples.stop:
            raise ValueError(f"sample {i} is not in a finished shard")
        store, table = self.store, self.store.table
        first = self.lease.shard_id.shard * store.layout.rows_per_shard
        num_tokens, num_teacher = int(table.num_tokens[i]), int(table.num_teacher[i])
        hidden = self._files[0].read(int(table.start[i]) - first, num_tokens)
        hidden_TKR = hidden.reshape(num_tokens, *store.hidden_shape.row)
        if store.last_shape is None:
            return hidden_TKR, np.empty((0, 0), np.uint8)
        last = self._files[1].read(int(table.last_start[i]) - first, num_teacher)
        return hidden_TKR, last.reshape(num_teacher, *store.last_shape.row)

    def commit(self) -> None:
        if self._record is None:
            raise ValueError(f"shard {self.lease.shard_id} is not finished yet")
        store = self.store
        write_commit(store.path, store.spec, store.layout, self._record, self.lease)
        self.drop()

    def drop(self) -> None:
        """Close the files, remove what was not renamed, give the lease back; again is harmless."""
        # the thread that hands a shard over and the one that takes it may both meet an error
        with self._dropping:
            while self._files:
                self._files.pop().close()
            self.lease.release()


def _explained(error: BaseException, shard: _OpenShard) -> BaseException:
    """An error of the disk as one that says what to do."""
    if not isinstance(error, OSError):
        return error
    shard_id, path = shard.lease.shard_id, shard.store.path
    if is_full(error):
        # of a striped store on another mount
        folder = (path / stripes.shard_folder(shard_id, "hidden")).resolve()
        text = (
            f"no space left for shard {shard_id} of {path} in {folder} ({error.strerror}; "
            f"{size_text(durable.free_bytes(folder))} free): free some and run the same command "
            "again, committed shards are kept, what was written of this one is removed"
        )
    else:
        text = f"shard {shard_id} of {path} cannot be written: {error}"
    explained = ValueError(text)
    explained.__cause__ = error
    return explained
