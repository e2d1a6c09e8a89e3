"""How fast the disks of a store's folders write durably and read what is not in memory."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dflash_pipeline.configs.disk import writing
from dflash_pipeline.store import durable

_BLOCK_BYTES = 1 << 26
# synced so often: about a shard's size, and soon enough for the time that there is
_SYNC_BLOCKS = 4
_MOST_BYTES = 1 << 31
_THREADS = 2
_ALONE_S, _TOGETHER_S, _READ_S = 1.0, 1.5, 1.0


@dataclass(frozen=True, slots=True)
class DiskSpeed:
    """Bytes a second."""

    worker: float
    """Written by one thread into the first folder; the syncs included, as a shard's."""
    write: tuple[float, ...]
    """Of each folder, while threads write into all of them at the same time."""
    read: tuple[float, ...]
    """Of each folder, the same; out of the page cache's reach, as far as the file system lets it
    be dropped."""


def disk_speed(folders: Sequence[Path]) -> DiskSpeed:
    """Write files into the folders for some seconds, read them back, remove them.

    After a first block of 64 MiB each never more than a tenth of what is free.
    """
    # random: a disk may compress
    block = np.random.default_rng(0).integers(0, 256, _BLOCK_BYTES, np.uint8)
    with ThreadPoolExecutor(_THREADS * len(folders)) as pool:
        with _Trial(folders[0], 1) as alone:
            alone_rate = alone.write(block, _ALONE_S)
        with contextlib.ExitStack() as stack:
            trials = [
                stack.enter_context(_Trial(folder, _THREADS * len(folders)))
                for folder in folders
                for _ in range(_THREADS)
            ]
            written = list(pool.map(lambda one: one.write(block, _TOGETHER_S), trials))
            read = list(pool.map(lambda one: one.read(_READ_S), trials))
    return DiskSpeed(alone_rate, _by_folder(written), _by_folder(read))


def _by_folder(rates: Sequence[float]) -> tuple[float, ...]:
    return tuple(sum(rates[at : at + _THREADS]) for at in range(0, len(rates), _THREADS))


class _Trial:
    """One file, written and read by one thread."""

    def __init__(self, folder: Path, num_trials: int) -> None:
        self._most = min(_MOST_BYTES, durable.free_bytes(folder) // 10) // num_trials
        self._path = durable.temporary_name(folder / "speed")
        self._descriptor = os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        self._size = 0

    def __enter__(self) -> _Trial:
        return self

    def __exit__(self, *_: object) -> None:
        """Remove the file."""
        os.close(self._descriptor)
        self._path.unlink()

    def write(self, block: NDArray[np.uint8], seconds: float) -> float:
        """Bytes a second."""
        begin, num_blocks = time.perf_counter(), 0
        while num_blocks == 0 or (
            self._size + _BLOCK_BYTES <= self._most and time.perf_counter() - begin < seconds
        ):
            with writing(self._path):
                durable.write_all(self._descriptor, block, self._size)
            self._size += _BLOCK_BYTES
            num_blocks += 1
            if num_blocks % _SYNC_BLOCKS == 0:
                os.fdatasync(self._descriptor)
        os.fdatasync(self._descriptor)
        return self._size / (time.perf_counter() - begin)

    def read(self, seconds: float) -> float:
        """Bytes a second."""
        # touched, so that no page is made while it is timed
        buffer = np.ones(_BLOCK_BYTES, np.uint8)
        os.posix_fadvise(self._descriptor, 0, self._size, os.POSIX_FADV_DONTNEED)
        begin, size = time.perf_counter(), 0
        while size < self._size and (size == 0 or time.perf_counter() - begin < seconds):
            size += durable.read_all(self._descriptor, buffer, size)
        return size / (time.perf_counter() - begin)
