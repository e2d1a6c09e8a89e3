"""Which way of reading pays on this disk, measured for a moment on rows that are there."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from dflash_pipeline.configs.memory import gib
from dflash_pipeline.configs.sizes import size_text
from dflash_pipeline.store.access import (
    Access,
    Bytes,
    Direct,
    Mapped,
    Plain,
    Range,
    Say,
    drop_cached,
)

# pages stay cached while all rows take no more than this share of the memory
_CACHED_SHARE = 0.5
# the measurement: of each way, in so much of each sample, and not for less than so much in all
_TRIAL_S = 0.25
_TRIAL_BYTES = 16 << 20
_LEAST_BYTES = 256 << 20
# throughputs this near to the best are the same: processor time decides
_SAME = 0.9


def memory_bytes() -> int:
    """Memory of the machine, or of the control group where that is less."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii").strip()
    except OSError:
        return memory
    return min(memory, int(limit)) if limit.isdecimal() else memory


def cached_bytes() -> int:
    """Rows up to this many bytes in all stay in the page cache once they were there."""
    return int(_CACHED_SHARE * memory_bytes())


def open_access(
    io: str, num_threads: int, places: Sequence[Range], total_bytes: int, say: Say
) -> Access:
    """The way that `io` names (`auto`: measured), and one line about it.

    `places`: where some samples stand that can be read now, no two alike; `total_bytes`: of all
    rows that will be read. Beyond half of the memory they would push everything else out of the
    page cache and not be there when their turn comes again: then nothing read is kept in it.
    """
    memory = memory_bytes()
    drops_cache = total_bytes > cached_bytes()
    sizes = f"{size_text(total_bytes)} of rows, {gib(memory):.1f} GiB of memory"
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
    if not trials:
        say(f"feed.io = auto: read, the rows to measure with were released; {kept}")
        return ways["read"]
    chosen = best(trials)
    figures = ", ".join(
        f"{name} {size_text(trial.rate)}/s and {trial.cpu_s_per_gb:.2f} CPU-s/GB"
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
    try:
        descriptor = os.open(place.file, os.O_RDONLY)
    except FileNotFoundError:
        # released since: `_try` passes it over
        return
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
        try:
            way.read(place, buffer[: place.num_bytes])
        except ValueError:
            # of a rolling store, where a shard may be released any moment
            if place.file.exists():
                raise
            continue
        num_bytes += place.num_bytes
    return num_bytes, time.thread_time() - begin
