"""Ways to bring a range of a file into a buffer, which all give the same bytes; which one pays.

The trap: posix_fadvise(DONTNEED) leaves pages alone that a live map holds. The mapped way maps the
range it reads and no more, and unmaps it before it drops it.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
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
# pages stay cached while all rows take no more than this share of the memory
_CACHED_SHARE = 0.5
# the measurement: of each way, in so much of each sample, and not for less than so much in all
_TRIAL_S = 0.25
_TRIAL_BYTES = 16 << 20
_LEAST_BYTES = 256 << 20
# throughputs this near to the best are the same: processor time decides
_SAME = 0.9


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
        descriptor = _open(place, os.O_RDONLY)
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
        descriptor = _open(place, os.O_RDONLY)
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
            descriptor = _open(place, os.O_RDONLY | os.O_DIRECT)
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


def _open(place: Range, flags: int) -> int:
    try:
        descriptor = os.open(place.file, flags)
    except FileNotFoundError:
        raise ValueError(f"{place.file} is missing although it is committed") from None
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


def memory_bytes() -> int:
    """Memory of the machine, or of the control group where that is less."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii").strip()
    except OSError:
        return memory
    return min(memory, int(limit)) if limit.isdecimal() else memory


def open_access(
    io: str, num_threads: int, places: Sequence[Range], total_bytes: int, say: Say
) -> Access:
    """The way that `io` names (`auto`: measured), and one line about it.

    `places`: where some samples stand that can be read now, no two alike; `total_bytes`: of all
    rows that will be read. Beyond half of the memory they would push everything else out of the
    page cache and not be there when their turn comes again: then nothing read is kept in it.
    """
    memory = memory_bytes()
    drops_cache = total_bytes > _CACHED_SHARE * memory
    sizes = f"{total_bytes / 1e9:.1f} GB of rows, {memory / 1e9:.1f} GB of memory"
    kept = f"page cache {'dropped after reading' if drops_cache else 'kept'} ({sizes})"
    ways: dict[str, Access] = {
        "read": Plain(drops_cache),
        "mmap": Mapped(drops_cache),
        "direct": Direct(drops_cache, say),
    }
    if io != "auto":
        say(f"feed.io = {io}; {kept}")
        return ways[io]
    if not drops_cache:
        # from the second pass on the rows are in memory, where direct reads would not look
        del ways["direct"]
    if sum(place.num_bytes for place in places) < _LEAST_BYTES:
        say(f"feed.io = auto: read, too few rows are there to measure; {kept}")
        return ways["read"]
    trials = _measure(ways, num_threads, places, is_cold=drops_cache)
    chosen = best(trials)
    figures = ", ".join(
        f"{name} {trial.rate / 1e9:.2f} GB/s and {trial.cpu_s_per_gb:.2f} CPU-s/GB"
        for name, trial in trials.items()
    )
    how = f"{num_threads} threads, {'uncached' if drops_cache else 'cached'} rows"
    say(f"feed.io = auto: {chosen} ({figures}; {how}); {kept}")
    return ways[chosen]


@dataclass(frozen=True, slots=True)
class Trial:
    """What a way did in its time."""

    rate: float
    """Bytes a second, all threads."""
    cpu_s_per_gb: float


def best(trials: dict[str, Trial]) -> str:
    """The way with the least processor time among those within 10 % of the fastest."""
    fastest = max(trial.rate for trial in trials.values())
    near = {name: trial for name, trial in trials.items() if trial.rate >= _SAME * fastest}
    return min(near, key=lambda name: near[name].cpu_s_per_gb)


def _measure(
    ways: dict[str, Access], num_threads: int, places: Sequence[Range], is_cold: bool
) -> dict[str, Trial]:
    """A trial of each way that can be had here: cold each on samples of its own; else each on the
    same ones out of the page cache, where all passes but the first will find them."""
    # ranks measure at the same time, and what one has read is cached for another
    order = np.random.default_rng(os.getpid()).permutation(len(places)).tolist()
    buffers = [np.full(_TRIAL_BYTES, 1, np.uint8) for _ in range(num_threads)]
    starts = [_start_of(places[i]) for i in order]
    if not is_cold:
        cached = deque(starts)
        _try(ways["read"], cached, buffers[0], time.perf_counter() + _TRIAL_S)
        starts = starts[: len(starts) - len(cached)]
    trials = {}
    with ThreadPoolExecutor(num_threads, thread_name_prefix="feed-trial") as threads:
        for number, (name, way) in enumerate(ways.items()):
            own = deque(starts[number :: len(ways)] if is_cold else starts)
            if is_cold:
                for place in own:
                    _make_cold(place)
            begin = time.perf_counter()
            futures = [
                threads.submit(_try, way, own, buffer, begin + _TRIAL_S) for buffer in buffers
            ]
            done = [future.result() for future in futures]
            wall_s = time.perf_counter() - begin
            size = sum(num_bytes for num_bytes, _ in done)
            if size and not (isinstance(way, Direct) and way.is_refused):
                trials[name] = Trial(size / wall_s, sum(cpu_s for _, cpu_s in done) / size * 1e9)
    return trials


def _start_of(place: Range) -> Range:
    return replace(place, num_bytes=min(place.num_bytes, _TRIAL_BYTES))


def _make_cold(place: Range) -> None:
    descriptor = _open(place, os.O_RDONLY)
    drop_cached(descriptor, place)
    os.close(descriptor)


def _try(way: Access, places: deque[Range], buffer: Bytes, end: float) -> tuple[int, float]:
    """Read until the time is over: bytes, and seconds of processor time."""
    num_bytes, begin = 0, time.thread_time()
    while time.perf_counter() < end:
        try:
            place = places.popleft()
        except IndexError:
            break
        way.read(place, buffer[: place.num_bytes])
        num_bytes += place.num_bytes
    return num_bytes, time.thread_time() - begin
