"""The ways of `feed.io` against raw preadv, cold and warm, with 1, 2 and 4 threads.

    python tests/bench/feed_io.py DIR [--size-mb 400] [--sample-mb 8] [--threads 1 2 4] [--rounds 3]

Writes shards like a store's into DIR, removes them at the end, and prints a line for each figure;
writes feed_io.json into $OUT where that is set. Raw preadv has its files open, reads into the same
kind of buffer, and checks nothing. A round runs every way once, raw first and last, so that ratios
are of the same minute; a figure is the median over rounds. Cold: every file is dropped from the
page cache before each run, and mincore must find none of its pages there (on tmpfs, where pages
are the file, cold is left out). "dropped" is what a store of more than half the memory is read
with: the range leaves the page cache once it has been read. `--pinned` reads into pinned memory,
which needs a GPU.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import platform
import resource
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dflash_pipeline.store.access import Access, Direct, Mapped, Plain, Range
from dflash_pipeline.store.choice import memory_bytes

ROW_BYTES = 5 * 2136
"""About a row of five int4 layers of width 4096: no whole blocks."""
NUM_FILES = 4


def write_shards(directory: Path, size: int, sample: int) -> list[Range]:
    """Shards of random rows, synced; where their samples stand, shuffled."""
    rows = max(1, sample // ROW_BYTES)
    num_samples = max(1, size // NUM_FILES // (rows * ROW_BYTES))
    random, places = np.random.default_rng(0), []
    for number in range(NUM_FILES):
        file = directory / f"shard-{number}"
        # the index of a shard ends it at no whole block
        file_bytes = num_samples * rows * ROW_BYTES + 16 * 64 + 4
        with file.open("wb") as stream:
            for _ in range(num_samples):
                stream.write(random.bytes(rows * ROW_BYTES))
            stream.write(bytes(16 * 64 + 4))
            stream.flush()
            os.fsync(stream.fileno())
        size = rows * ROW_BYTES
        places += [Range(file, i * size, size, file_bytes) for i in range(num_samples)]
    return [places[i] for i in random.permutation(len(places))]


def resident_pages(file: Path) -> int:
    """Pages of a file that are in memory, by mincore."""
    size = file.stat().st_size
    num_pages = -(-size // mmap.PAGESIZE)
    states = (ctypes.c_ubyte * num_pages)()
    # mincore of another's private map needs write access to the file: these are our own
    with file.open("r+b") as stream, mmap.mmap(stream.fileno(), size) as mapped:
        pages = np.frombuffer(mapped, np.uint8)
        mincore = ctypes.CDLL(None, use_errno=True).mincore
        mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
        if mincore(pages.ctypes.data, size, states):
            raise OSError(ctypes.get_errno(), "mincore")
        del pages
    return int((np.frombuffer(states, np.uint8) & 1).sum())


def drop(files: list[Path]) -> None:
    """Empty the page cache of the files; an error if pages are left."""
    for pause_s in (0.2, 0.0):
        for file in files:
            descriptor = os.open(file, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)
        # what the kernel is still reading ahead is neither dropped nor seen by mincore
        time.sleep(pause_s)
    for file in files:
        left = resident_pages(file)
        assert left == 0, f"{left} pages of {file} are still in memory: no cold run is possible"


def warm(files: list[Path]) -> None:
    """Bring the files into the page cache."""
    for file in files:
        with file.open("rb") as stream:
            while stream.read(1 << 24):
                pass


@dataclass
class Raw:
    """preadv of files that are open already."""

    descriptors: dict[Path, int]
    name: str = "raw preadv"

    def read(self, place: Range, out: Any) -> None:
        got = os.preadv(self.descriptors[place.file], [out], place.offset)
        assert got == place.num_bytes


def cpu_s() -> float:
    """Processor time of this process, kernel included."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def run(way: Access | Raw, places: list[Range], buffers: list[Any]) -> tuple[float, float]:
    """Read all samples once with a thread a buffer: wall and processor seconds."""
    waiting = iter(list(places))

    def work(buffer: Any) -> None:
        # next() of a list's iterator is one step of the interpreter
        for place in waiting:
            way.read(place, buffer[: place.num_bytes])

    with ThreadPoolExecutor(len(buffers)) as threads:
        begin, begin_cpu = time.perf_counter(), cpu_s()
        for future in [threads.submit(work, buffer) for buffer in buffers]:
            future.result()
        return time.perf_counter() - begin, cpu_s() - begin_cpu


def buffer_maker(pinned: bool) -> Callable[[int], Any]:
    """Buffers of a feed: pinned where there is a GPU; else pages that have been touched."""
    if not pinned:
        return lambda size: np.full(size, 1, np.uint8)
    import torch

    return lambda size: torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy()


def machine(directory: Path) -> dict[str, Any]:
    """What the figures are of."""
    cpu = next(
        line.split(":")[1].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    )
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    real = str(directory.resolve())
    kind = max(
        (m for m in mounts if (real + "/").startswith(m[1].rstrip("/") + "/")),
        key=lambda m: len(m[1]),
    )
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "memory_gb": round(memory_bytes() / 1e9, 1),
        "kernel": platform.release(),
        "file_system": kind[2],
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--size-mb", type=int, default=400)
    parser.add_argument("--sample-mb", type=int, default=8)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--pinned", action="store_true")
    parser.add_argument("--note", default="", help="what else is to be known of the machine")
    options = parser.parse_args()
    options.directory.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(dir=options.directory))
    try:
        result = measure(folder, options)
    finally:
        shutil.rmtree(folder)
    if "OUT" in os.environ:
        out = Path(os.environ["OUT"]) / "feed_io.json"
        out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """All figures, printed on the way."""
    places = write_shards(folder, options.size_mb * 10**6, options.sample_mb * 10**6)
    files = sorted({place.file for place in places})
    total = sum(place.num_bytes for place in places)
    make = buffer_maker(options.pinned)
    buffers = [make(places[0].num_bytes) for _ in range(max(options.threads))]
    raw = Raw({file: os.open(file, os.O_RDONLY) for file in files})
    about = machine(folder)
    print(f"{about}; {total / 1e6:.0f} MB in {len(places)} samples; pinned {options.pinned}")
    said: list[str] = []
    check(places, [Plain(False), Mapped(False), Direct(False, said.append)], raw, buffers[0])
    figures = []
    for state in ("warm",) if about["file_system"] == "tmpfs" else ("cold", "warm"):
        ways: dict[str, Access] = {
            "read": Plain(False),
            "mmap": Mapped(False),
            "direct": Direct(False, said.append),
        }
        if state == "cold":
            ways |= {"read, dropped": Plain(True), "mmap, dropped": Mapped(True)}
        for num_threads in options.threads:
            figures += compare(state, raw, ways, places, files, buffers[:num_threads], options)
    for descriptor in raw.descriptors.values():
        os.close(descriptor)
    if said:
        print(f"direct: {said[0].replace(str(folder), 'DIR')}")
    return {
        "machine": about | {"note": options.note},
        "bytes": total,
        "samples": len(places),
        "pinned": options.pinned,
        "rounds": options.rounds,
        "direct_refused": bool(said),
        "figures": figures,
    }


def check(places: list[Range], ways: list[Access], raw: Raw, buffer: Any) -> None:
    """Every way reads every sample to the same bytes."""
    for place in places:
        raw.read(place, buffer[: place.num_bytes])
        expected = buffer[: place.num_bytes].tobytes()
        for way in ways:
            buffer[:] = 0
            way.read(place, buffer[: place.num_bytes])
            assert buffer[: place.num_bytes].tobytes() == expected, f"{way.name} {place}"


def compare(
    state: str,
    raw: Raw,
    ways: dict[str, Access],
    places: list[Range],
    files: list[Path],
    buffers: list[Any],
    options: argparse.Namespace,
) -> list[dict[str, Any]]:
    """Rounds of raw preadv, each way, raw preadv again."""
    total = sum(place.num_bytes for place in places)
    seen: dict[str, list[tuple[float, float]]] = {}
    left: dict[str, int] = {}
    for _ in range(options.rounds):
        for name, way in ((raw.name, raw), *ways.items(), (raw.name, raw)):
            (drop if state == "cold" else warm)(files)
            seen.setdefault(name, []).append(run(way, places, buffers))
            left[name] = sum(resident_pages(file) for file in files) * mmap.PAGESIZE
    medians = {
        name: [statistics.median(column) for column in zip(*runs, strict=True)]
        for name, runs in seen.items()
    }
    raw_wall, raw_cpu = medians[raw.name]
    figures = []
    for name, (wall, cpu) in medians.items():
        figure = {
            "state": state,
            "threads": len(buffers),
            "way": name,
            "wall_s": round(wall, 4),
            "cpu_s": round(cpu, 4),
            "gb_per_s": round(total / wall / 1e9, 3),
            "gb_per_cpu_s": round(total / cpu / 1e9, 3),
            "ratio_to_raw": round(raw_wall / wall, 3),
            "cpu_ratio_to_raw": round(raw_cpu / cpu, 3),
            "cached_after": round(left[name] / total, 3),
        }
        print(
            f"{state} {len(buffers)} threads {name:13}: {figure['gb_per_s']:6.2f} GB/s "
            f"{figure['gb_per_cpu_s']:6.2f} GB/cpu-s; x raw: {figure['ratio_to_raw']:.2f} wall, "
            f"{figure['cpu_ratio_to_raw']:.2f} cpu; {figure['cached_after']:.1%} cached after",
            flush=True,
        )
        figures.append(figure)
    return figures


if __name__ == "__main__":
    main()
