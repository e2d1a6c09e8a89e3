"""Single damaged bytes all over a store: `verify --deep` must find each and name its file.

    python tests/bench/flips.py [--flips 900] [--seed 0]

Copies the golden stores (bf16, int8, int4), changes one byte of one file at a time by a random bit
pattern, and puts it back. The bytes are drawn so that every part of a store has its share: rows,
shard indices, commit records, the seal, the plan, the tokens, the calibration, the target's files
and the Zarr documents. Prints a line a part, writes flips.json into $OUT where that is set, and
ends with 1 when a byte was not found or not named.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from dflash_pipeline.store.check import verify
from dflash_pipeline.store.reader import open_store

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
MODES = ("bf16", "int8", "int4")


@dataclass
class Count:
    """Bytes changed in one part of a store."""

    flips: int = 0
    detected: int = 0
    named: int = 0
    """Detected, and the file stands in the message."""


def part_of(name: str, place: int, index_begin: int) -> str:
    """The part of a store that byte `place` of the file `name` belongs to."""
    first, *_ = name.split("/")
    if name.endswith("zarr.json"):
        return "root document" if name == "zarr.json" else "documents"
    if "/hidden/" in name or "/last/" in name:
        return "index" if place >= index_begin else "rows"
    for piece in ("commit", "token_crc"):
        if f"/{piece}/" in name:
            return {"commit": "commit records", "token_crc": "checksums of tokens"}[piece]
    known = {"samples": "plan", "target": "target", "calibration": "calibration"}
    return known.get(first, "seal" if first == "commit_sealed" else "tokens")


def places(store: Path) -> dict[str, list[tuple[Path, int, int]]]:
    """By part: each file, and the range of its bytes that belongs to the part."""
    opened, found = open_store(store), defaultdict(list)
    index_bytes = 16 * opened.layout.num_chunks + 4
    for file in sorted(store.rglob("*")):
        name, size = str(file.relative_to(store)), file.stat().st_size
        # raw/ holds documents of its own, and links to the rows
        if (
            not file.is_file()
            or size == 0
            or (name.startswith("raw/") and file.name != "zarr.json")
        ):
            continue
        is_shard = part_of(name, 0, 1) == "rows"
        if is_shard and size > index_bytes:
            found["rows"].append((file, 0, size - index_bytes))
            found["index"].append((file, size - index_bytes, size))
        else:
            found[part_of(name, 0, 0 if is_shard else 1)].append((file, 0, size))
    return dict(found)


def flip_all(store: Path, num_flips: int, random: np.random.Generator) -> dict[str, Count]:
    """Change bytes one by one, the same number in each part."""
    counts: dict[str, Count] = {}
    parts = places(store)
    for part, ranges in sorted(parts.items()):
        count = counts[part] = Count()
        for _ in range(-(-num_flips // len(parts))):
            file, begin, end = ranges[int(random.integers(len(ranges)))]
            place, pattern = int(random.integers(begin, end)), int(random.integers(1, 256))
            _change(file, place, pattern)
            problems = verify(store, deep=True).problems
            _change(file, place, pattern)
            count.flips += 1
            count.detected += bool(problems)
            is_named = any(str(file) in problem for problem in problems)
            count.named += is_named
            if not is_named:
                print(f"NOT NAMED: {file} byte {place} ^ {pattern}: {problems[:2]}")
    assert verify(store, deep=True).problems == []
    return counts


def _change(file: Path, place: int, pattern: int) -> None:
    with file.open("r+b") as stream:
        stream.seek(place)
        (byte,) = stream.read(1)
        stream.seek(place)
        stream.write(bytes([byte ^ pattern]))


def added_up(counts: Mapping[str, Mapping[str, Count]]) -> dict[str, Count]:
    """Over all modes."""
    total: dict[str, Count] = defaultdict(Count)
    for of_mode in counts.values():
        for part, count in of_mode.items():
            total[part].flips += count.flips
            total[part].detected += count.detected
            total[part].named += count.named
    return dict(total)


def main() -> int:
    """0 if every byte was found and named."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--flips", type=int, default=900, help="In all, at least.")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    random, begin = np.random.default_rng(arguments.seed), time.monotonic()
    counts: dict[str, dict[str, Count]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for mode in MODES:
            store = Path(folder) / mode
            shutil.copytree(GOLDEN / f"store-v1-{mode}", store, symlinks=True)
            counts[mode] = flip_all(store, -(-arguments.flips // len(MODES)), random)
    total = added_up(counts)
    for part, count in sorted(total.items()):
        print(f"{part:20} {count.flips:4} flips, {count.detected} detected, {count.named} named")
    sums = Count(*(sum(getattr(one, f) for one in total.values()) for f in asdict(Count())))
    wall_s = time.monotonic() - begin
    print(f"{'all':20} {sums.flips:4} flips, {sums.detected} detected, {sums.named} named")
    record = {
        "command": f"python tests/bench/flips.py --flips {arguments.flips}",
        "seed": arguments.seed,
        "python": platform.python_version(),
        "all": asdict(sums),
        "parts": {part: asdict(count) for part, count in sorted(total.items())},
        "wall_s": round(wall_s, 1),
    }
    if out := os.environ.get("OUT"):
        (Path(out) / "flips.json").write_text(json.dumps(record, indent=1) + "\n")
    return 0 if sums.named == sums.flips else 1


if __name__ == "__main__":
    sys.exit(main())
