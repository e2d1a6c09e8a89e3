"""One shard file of a valid Zarr v3 array, written by us: rows from offset 0, index at the end.

The array's grid splits axis 0 alone and inner chunks hold raw rows, so the head of the file IS the
array in C order: one memory map, one read a sample. Checksums stand in the commit record, because
an inner crc32c codec would break the flat layout.
"""

from __future__ import annotations

import math
import os
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dflash_pipeline.store import durable
from dflash_pipeline.store.access import check_file_bytes, open_committed
from dflash_pipeline.store.checksum import crc32c
from dflash_pipeline.store.rows import row_bytes
from dflash_pipeline.store.spec import Layout, StoreSpec

Bytes = NDArray[np.uint8]

_MISSING = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class ShardShape:
    """What the size and the index of a shard file follow from."""

    row: tuple[int, ...]
    """(K, R) of `hidden`, (R,) of `last`."""
    chunk_rows: int
    """Rows of an inner chunk."""
    num_chunks: int
    """Inner chunks of a full shard."""

    @property
    def row_bytes(self) -> int:
        """Bytes of a row, all layers."""
        return math.prod(self.row)

    @property
    def chunk_bytes(self) -> int:
        """Bytes of an inner chunk."""
        return self.chunk_rows * self.row_bytes

    def num_present(self, num_rows: int) -> int:
        """Inner chunks that so many rows fill, the last one perhaps in part."""
        return -(-num_rows // self.chunk_rows)

    def file_bytes(self, num_rows: int) -> int:
        """Size of a finished file."""
        return self.num_present(num_rows) * self.chunk_bytes + 16 * self.num_chunks + 4

    def index(self, num_rows: int) -> bytes:
        """Offset and length of each inner chunk, then their crc32c; trailing chunks are missing."""
        present = self.num_present(num_rows)
        index = np.full((self.num_chunks, 2), _MISSING, "<u8")
        index[:present, 0] = np.arange(present, dtype=np.uint64) * np.uint64(self.chunk_bytes)
        index[:present, 1] = self.chunk_bytes
        content = index.tobytes()
        return content + crc32c(content).to_bytes(4, "little")


def hidden_shape(spec: StoreSpec, layout: Layout) -> ShardShape:
    """Of the shard files of `hidden`."""
    row = (spec.num_layers, row_bytes(spec.hidden_mode, spec.hidden_size))
    return ShardShape(row, layout.chunk_rows, layout.num_chunks)


def last_shape(spec: StoreSpec, layout: Layout) -> ShardShape:
    """Of the shard files of `last`."""
    row = (row_bytes(spec.last_mode, spec.hidden_size),)
    return ShardShape(row, layout.chunk_rows, layout.num_chunks)


class ShardFile:
    """A shard being written under a temporary name; it becomes visible by `publish` alone."""

    def __init__(self, file: Path, shape: ShardShape, checksums: Executor) -> None:
        """`checksums`: computes them beside the writing, in order: it has one thread."""
        self._file, self._shape, self._checksums = file, shape, checksums
        self._num_rows = 0
        self._crcs: list[int] = []
        self._partial_crc = 0
        durable.make_directories(file.parent)
        self._temporary = durable.temporary_name(file)
        flags = os.O_CREAT | os.O_EXCL | os.O_RDWR
        self._descriptor = os.open(self._temporary, flags, 0o644)

    @property
    def num_rows(self) -> int:
        """Rows appended so far."""
        return self._num_rows

    @property
    def size_bytes(self) -> int:
        """Size of the file when it is finished."""
        return self._shape.file_bytes(self._num_rows)

    def append(self, rows: Bytes) -> None:
        """Add contiguous rows uint8 [n, ...]."""
        flat = rows.reshape(-1)
        if flat.size % self._shape.row_bytes:
            raise ValueError(f"{flat.size} bytes are no whole rows of {self._shape.row_bytes}")
        self._add(flat)
        self._num_rows += flat.size // self._shape.row_bytes

    def _add(self, flat: Bytes) -> None:
        """Write bytes at the end, and meanwhile carry the checksum of the chunk they fall in."""
        used = self._num_rows * self._shape.row_bytes
        summed = self._checksums.submit(self._sum_up, flat, used)
        try:
            durable.write_all(self._descriptor, flat, used)
        finally:
            # after this the bytes may change
            summed.result()

    def _sum_up(self, flat: Bytes, used: int) -> None:
        chunk_bytes, place = self._shape.chunk_bytes, 0
        while place < flat.size:
            step = min(chunk_bytes - (used + place) % chunk_bytes, flat.size - place)
            self._partial_crc = crc32c(flat[place : place + step], self._partial_crc)
            place += step
            if (used + place) % chunk_bytes == 0:
                self._crcs.append(self._partial_crc)
                self._partial_crc = 0

    def finish(self, erased: list[tuple[int, int]]) -> NDArray[np.uint32]:
        """Erase ranges of rows (first, number), pad, add the index; crc32c of each chunk."""
        shape = self._shape
        padding = -self._num_rows % shape.chunk_rows * shape.row_bytes
        self._add(np.zeros(padding, np.uint8))
        if len(self._crcs) > shape.num_chunks:
            raise ValueError(f"{self._num_rows} rows are more than {self._file} holds")
        touched: set[int] = set()
        for first, number in erased:
            zeros = np.zeros(number * shape.row_bytes, np.uint8)
            durable.write_all(self._descriptor, zeros, first * shape.row_bytes)
            touched |= set(range(first // shape.chunk_rows, shape.num_present(first + number)))
        for chunk in touched:
            rows = self.read(chunk * shape.chunk_rows, shape.chunk_rows)
            self._crcs[chunk] = crc32c(rows)
        index = shape.index(self._num_rows)
        durable.write_all(self._descriptor, index, len(self._crcs) * shape.chunk_bytes)
        return np.array(self._crcs, np.uint32)

    def sync(self) -> None:
        """Make the finished file durable; what takes long, as all of it goes to the disk."""
        os.fdatasync(self._descriptor)

    def publish(self) -> None:
        """Give the synced file its name."""
        durable.rename(self._temporary, self._file)

    def read(self, first: int, number: int) -> Bytes:
        """Rows as they stand in the file, uint8 [number * R]."""
        row_bytes = self._shape.row_bytes
        rows = np.empty(number * row_bytes, np.uint8)
        if durable.read_all(self._descriptor, rows, first * row_bytes) != rows.size:
            raise ValueError(f"{self._file}: rows {first}..{first + number} are not written yet")
        return rows

    def close(self) -> None:
        """Close, and remove what was not published."""
        os.close(self._descriptor)
        self._temporary.unlink(missing_ok=True)


def check_shard(descriptor: int, name: str, num_rows: int, shape: ShardShape) -> None:
    """Raise ValueError unless an open shard file has the size and the index of so many rows."""
    check_size(descriptor, name, num_rows, shape)
    index = shape.index(num_rows)
    place = shape.file_bytes(num_rows) - len(index)
    if os.pread(descriptor, len(index), place) != index:
        raise ValueError(f"{name}: the index at the end of the file is damaged")


def check_size(descriptor: int, name: str, num_rows: int, shape: ShardShape) -> None:
    """Raise ValueError unless an open shard file has the size of so many rows."""
    check_file_bytes(descriptor, name, shape.file_bytes(num_rows))


def map_shard(file: Path, num_rows: int, shape: ShardShape) -> Bytes:
    """Read-only memory map of a shard's rows, uint8 [num_rows, ...], size and index checked."""
    with os.fdopen(open_committed(file, os.O_RDONLY), "rb") as stream:
        check_shard(stream.fileno(), str(file), num_rows, shape)
        if num_rows == 0:
            return np.empty((0, *shape.row), np.uint8)
        return np.memmap(stream, np.uint8, "r", 0, (num_rows, *shape.row))
