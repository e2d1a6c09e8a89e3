"""How fast the disk of a store's folder writes durably and reads what is not in memory."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dflash_pipeline.store import durable

_BLOCK_BYTES = 1 << 26
_MOST_BYTES = 1 << 32
_WRITE_S = 4.0


@dataclass(frozen=True, slots=True)
class DiskSpeed:
    """Bytes a second, one thread."""

    write: float
    """The sync at the end included, as a shard's."""
    read: float
    """Out of the page cache's reach, as far as the file system lets it be dropped."""


def disk_speed(folder: Path) -> DiskSpeed:
    """Write a file of up to 4 GiB into `folder` for some seconds, read it back, remove it.

    After a first block of 64 MiB never more than a tenth of what is free.
    """
    most = min(_MOST_BYTES, durable.free_bytes(folder) // 10)
    # random: a disk may compress
    block = np.random.default_rng(0).integers(0, 256, _BLOCK_BYTES, np.uint8)
    path = durable.temporary_name(folder / "speed")
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    try:
        written, begin = 0, time.perf_counter()
        while written == 0 or (
            written + _BLOCK_BYTES <= most and time.perf_counter() - begin < _WRITE_S
        ):
            durable.write_all(descriptor, block, written)
            written += _BLOCK_BYTES
        os.fdatasync(descriptor)
        write_s = time.perf_counter() - begin
        os.posix_fadvise(descriptor, 0, written, os.POSIX_FADV_DONTNEED)
        begin = time.perf_counter()
        for offset in range(0, written, _BLOCK_BYTES):
            durable.read_all(descriptor, block, offset)
        return DiskSpeed(written / write_s, written / (time.perf_counter() - begin))
    finally:
        os.close(descriptor)
        path.unlink()
