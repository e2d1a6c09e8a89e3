"""Ways to bring a range of a file into a buffer, which all give the same bytes.

The trap: posix_fadvise(DONTNEED) leaves pages alone that a live map holds. The mapped way maps the
range it reads and no more, and unmaps it before it drops it.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from dflash_pipeline.store import durable

Bytes = NDArray[np.uint8]
Say = Callable[[str], None]

ALIGNMENT = 4096
"""Of offset, length and address in a direct read: the block of every common disk."""

# ENOTSUP where a file system has no such reads; EFAULT where it cannot reach the buffer's pages
_REFUSALS = (errno.EINVAL, errno.EOPNOTSUPP, errno.EFAULT)
_MADV_POPULATE_READ = 22


@dataclass(frozen=True, slots=True)
class Range:
    """Where the rows of a sample stand."""

    file: Path
    offset: int
    num_bytes: int
    file_bytes: int
    """Size of the whole file, to tell a truncated one."""


class Access(Protocol):
    """A way to read. Used from several threads at once."""

    @property
    def name(self) -> str:
        """Its word in `feed.io`."""

    def read(self, place: Range, out: Bytes) -> None:
        """Fill `out`, uint8 [num_bytes], in one read; ValueError names the file if it cannot."""


class Plain:
    """preadv through the page cache."""

    name = "read"

    def __init__(self, drops_cache: bool) -> None:
        """`drops_cache`: what was read is not kept in the page cache."""
        self._drops_cache = drops_cache

    def read(self, place: Range, out: Bytes) -> None:
        descriptor = open_whole(place, os.O_RDONLY)
        try:
            if self._drops_cache:
                _read_ahead(descriptor, place)
            _check_read(place, durable.read_all(descriptor, out, place.offset))
            if self._drops_cache:
                drop_cached(descriptor, place)
        finally:
            os.close(descriptor)


class Mapped:
    """A copy out of a memory map of the range."""

    name = "mmap"

    def __init__(self, drops_cache: bool) -> None:
        """`drops_cache`: what was read is not kept in the page cache."""
        self._drops_cache = drops_cache
        self._madvise = ctypes.CDLL(None, use_errno=True).madvise
        self._madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

    def read(self, place: Range, out: Bytes) -> None:
        descriptor = open_whole(place, os.O_RDONLY)
        try:
            if self._drops_cache:
                _read_ahead(descriptor, place)
            self._copy(descriptor, place, out)
            if self._drops_cache:
                drop_cached(descriptor, place)
        finally:
            os.close(descriptor)

    def _copy(self, descriptor: int, place: Range, out: Bytes) -> None:
        _check_read(place, os.fstat(descriptor).st_size - place.offset)
        slack = place.offset % mmap.ALLOCATIONGRANULARITY
        with mmap.mmap(
            descriptor,
            slack + place.num_bytes,
            prot=mmap.PROT_READ,
            offset=place.offset - slack,
        ) as mapped:
            rows = np.frombuffer(mapped, np.uint8)
            failure = self._populate(rows)
            if failure == 0:
                np.copyto(out, rows[slack:])
            # a map with a view left cannot be closed
            del rows
        if failure:
            raise OSError(failure, os.strerror(failure))

    def _populate(self, rows: Bytes) -> int:
        """Bring the pages in. Where one cannot be read this says so, while a copy would end the
        process by SIGBUS; 0, or what was wrong."""
        # not mmap.madvise, which would hold every Python thread until the pages are there
        if self._madvise(rows.ctypes.data, rows.size, _MADV_POPULATE_READ) == 0:
            return 0
        failure = ctypes.get_errno()
        # a kernel before 5.14 does not know it: the copy faults page after page instead
        return 0 if failure == errno.EINVAL else failure


class Direct:
    """O_DIRECT: from the disk into the buffer, past the page cache.

    One preadv of whole blocks. Those inside the range go straight into the buffer and are moved by
    less than a block where file and buffer are aligned differently; the first and the last go
    through blocks aside, so that no more than two blocks are read in vain.
    """

    name = "direct"

    def __init__(self, drops_cache: bool, say: Say) -> None:
        """`say` is told once a disk that refuses such reads; it is read by `Plain` then."""
        self._plain = Plain(drops_cache)
        self._drops_cache, self._say = drops_cache, say
        self._lock = threading.Lock()
        self._refused: set[int] = set()

    @property
    def is_refused(self) -> bool:
        """Whether some disk refused."""
        return bool(self._refused)

    def read(self, place: Range, out: Bytes) -> None:
        if self._refused and os.stat(place.file).st_dev in self._refused:
            self._plain.read(place, out)
            return
        try:
            descriptor = open_whole(place, os.O_RDONLY | os.O_DIRECT)
            try:
                _read_blocks(descriptor, place, out)
                if self._drops_cache:
                    # of what other readers, such as checksums, left there
                    drop_cached(descriptor, place)
            finally:
                os.close(descriptor)
        except OSError as error:
            if error.errno not in _REFUSALS:
                raise
            self._refuse(place.file, error)
            self._plain.read(place, out)

    def _refuse(self, file: Path, error: OSError) -> None:
        device = os.stat(file).st_dev
        with self._lock:
            is_new = device not in self._refused
            self._refused.add(device)
        if is_new:
            self._say(
                f"the file system of {file.parent} refuses O_DIRECT ({error.strerror}): "
                "reading it through the page cache, as feed.io = read does"
            )


def _read_blocks(descriptor: int, place: Range, out: Bytes) -> None:
    offset, end = place.offset, place.offset + place.num_bytes
    first, first_whole = offset // ALIGNMENT * ALIGNMENT, -(-offset // ALIGNMENT) * ALIGNMENT
    num_whole = max(0, end // ALIGNMENT * ALIGNMENT - first_whole)
    # where whole blocks may start in the buffer, and where their bytes belong
    start, head = -out.ctypes.data % ALIGNMENT, first_whole - offset
    if num_whole and start + num_whole > out.size:
        num_whole -= ALIGNMENT
    if num_whole == 0:
        aside = _aligned(-(-(end - first) // ALIGNMENT) * ALIGNMENT)
        got = _read_vector(descriptor, [aside], first)
        _check_read(place, got - (offset - first))
        out[:] = aside[offset - first : end - first]
        return
    if start == head % ALIGNMENT:
        start = head
    tail = end - first_whole - num_whole
    before, after = _aligned(first_whole - first), _aligned(-(-tail // ALIGNMENT) * ALIGNMENT)
    whole = out[start : start + num_whole]
    parts = [part for part in (before, whole, after) if part.size]
    got = _read_vector(descriptor, parts, first)
    _check_read(place, got - (offset - first))
    if start != head:
        # numpy would copy overlapping bytes twice, or one by one
        ctypes.memmove(out.ctypes.data + head, whole.ctypes.data, num_whole)
    out[:head] = before[before.size - head :]
    out[head + num_whole :] = after[:tail]


def _aligned(size: int) -> Bytes:
    buffer = np.empty(size + ALIGNMENT, np.uint8)
    start = -buffer.ctypes.data % ALIGNMENT
    return buffer[start : start + size]


def _read_vector(descriptor: int, parts: list[Any], offset: int) -> int:
    """preadv until all is read or the file ends; the bytes read."""
    total = 0
    while parts:
        got = os.preadv(descriptor, parts, offset + total)
        total += got
        # the end of a file is the only one that is no whole block
        if got == 0 or got % ALIGNMENT:
            break
        while parts and got >= parts[0].size:
            got -= parts.pop(0).size
        if parts and got:
            parts[0] = parts[0][got:]
    return total


def open_committed(file: Path, flags: int) -> int:
    """Open a file of a shard's rows; ValueError where it is not there."""
    try:
        return os.open(file, flags)
    except FileNotFoundError:
        raise ValueError(
            f"{file} is missing although it is committed: dflash verify --repair uncommits it, and "
            "the same dflash capture does it again"
        ) from None


def open_whole(place: Range, flags: int) -> int:
    """Open a file that must be there in its whole size; ValueError names it if not."""
    descriptor = open_committed(place.file, flags)
    try:
        check_file_bytes(descriptor, str(place.file), place.file_bytes)
    except ValueError:
        os.close(descriptor)
        raise
    return descriptor


def check_file_bytes(descriptor: int, name: str, expected: int) -> None:
    """Raise ValueError unless an open file has the expected size."""
    size = os.fstat(descriptor).st_size
    if size != expected:
        raise ValueError(f"{name} has {size} bytes, expected {expected}: truncated or damaged")


def _check_read(place: Range, got: int) -> None:
    if got < place.num_bytes:
        raise ValueError(
            f"{place.file}: {max(got, 0)} bytes could be read at {place.offset}, expected "
            f"{place.num_bytes}: truncated or damaged"
        )


def _read_ahead(descriptor: int, place: Range) -> None:
    """Ask for this range alone: the kernel's own guess reads megabytes around it, which nobody
    would take out of the page cache again."""
    os.posix_fadvise(descriptor, place.offset, place.num_bytes, os.POSIX_FADV_WILLNEED)


def drop_cached(descriptor: int, place: Range) -> None:
    """Take the pages of a range out of the page cache, except those in use elsewhere."""
    os.posix_fadvise(descriptor, place.offset, place.num_bytes, os.POSIX_FADV_DONTNEED)
