"""The store's writer against raw pwrite of the same bytes: fsync on both sides, rounds in turn.

    python tests/bench/store_write.py DIR... [--samples 400] [--rounds 3] [--note TEXT]

Writes stores of random bf16 rows into each DIR, removes them, and prints wall time and processor
time of each way; writes store_write.json into $OUT where that is set. The writer checks, indexes,
syncs, renames and commits, as in a capture after its gate; raw pwrite writes the batches' bytes
into one file a shard and syncs it. A round runs raw, ours, raw: its ratio is of the same minute.
Checksums have a thread of their own: where no core is free for it they count in full.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from dflash_pipeline.store.lease import Leases
from dflash_pipeline.store.reader import Store
from dflash_pipeline.store.writer import StoreWriter

sys.path.append(str(Path(__file__).parents[1]))
import tiny_store

ROWS_PER_SHARD = 32768
"""0.8 GB of `hidden`: about a shard of the default size."""
WAYS = ("pwrite", "store")


class Batches:
    """The rows of every batch, cut out of one random buffer."""

    def __init__(self, plan: Any) -> None:
        self._plan = plan
        width = 2 * plan.spec.hidden_size
        random = np.random.default_rng(0)
        self._hidden = random.integers(0, 256, (1024, plan.spec.num_layers, width), np.uint8)
        self._last = random.integers(0, 256, (1024, width), np.uint8)

    def of(self, shard_id: Any) -> list[tuple[Any, Any]]:
        table, found = self._plan.table, []
        for samples in table.batches_of(shard_id):
            num_rows, num_last = table.num_tokens[samples].sum(), table.num_teacher[samples].sum()
            found.append((self._hidden[:num_rows], self._last[:num_last]))
        return found


def by_store(plan: Any, store: Store, batches: Batches) -> None:
    amax = np.ones(plan.spec.num_amax, np.float32)
    clipped = np.zeros(plan.spec.num_amax, np.uint32)
    with (
        Leases(store.path, plan.layout, heartbeat_s=1, hung_s=60) as leases,
        StoreWriter(store, leases, depth=2) as writer,
    ):
        while lease := leases.claim(store.is_open, max_failures=3):
            writer.begin(lease)
            for hidden_NKR, last_MR in batches.of(lease.shard_id):
                writer.put(hidden_NKR, last_MR, lambda: None)
            writer.submit(amax, clipped, {}, halved=False)


def by_pwrite(plan: Any, folder: Path, batches: Batches) -> None:
    for number, shard_id in enumerate(plan.layout.shard_ids()):
        file = os.open(folder / f"{number}", os.O_CREAT | os.O_WRONLY)
        place = 0
        for arrays in batches.of(shard_id):
            for array in arrays:
                os.pwrite(file, array.data, place)
                place += array.nbytes
        os.fdatasync(file)
        os.close(file)


def one_round(plan: Any, batches: Batches, directory: Path) -> dict[str, tuple[float, float]]:
    """Wall and processor seconds of each way; raw before and after ours, and their mean."""
    raw = []
    for is_after in (False, True):
        with tempfile.TemporaryDirectory(dir=directory) as folder:
            raw.append(timed(lambda folder=Path(folder): by_pwrite(plan, folder, batches)))
        if is_after:
            break
        with tempfile.TemporaryDirectory(dir=directory) as folder:
            store = tiny_store.build(plan, Path(folder) / "hs")
            ours = timed(lambda store=store: by_store(plan, store, batches))
    wall_s, cpu_s = (statistics.mean(part) for part in zip(*raw, strict=True))
    return {"pwrite": (wall_s, cpu_s), "store": ours}


def file_system(directory: Path) -> str:
    """The kind that a directory is on."""
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    real = f"{directory.resolve()}/"
    holding = [one for one in mounts if real.startswith(one[1].rstrip("/") + "/")]
    return max(holding, key=lambda one: len(one[1]))[2]


def timed(work: Callable[[], None]) -> tuple[float, float]:
    """Wall and processor seconds."""
    wall, processor = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - processor


def measured(plan: Any, batches: Batches, directory: Path, num_rounds: int) -> dict[str, Any]:
    """The figures of one file system: medians over rounds, and the least of each way."""
    size = sum(
        array.nbytes
        for shard_id in plan.layout.shard_ids()
        for arrays in batches.of(shard_id)
        for array in arrays
    )
    rounds = [one_round(plan, batches, directory) for _ in range(num_rounds)]
    walls, cpus = ({way: [one[way][part] for one in rounds] for way in WAYS} for part in range(2))
    ratios = [one["pwrite"][0] / one["store"][0] for one in rounds]
    return {
        "file_system": file_system(directory),
        "rounds": num_rounds,
        "gb": round(size / 1e9, 3),
        "shards": sum(plan.layout.num_shards),
        "gb_per_s": {way: round(size / statistics.median(walls[way]) / 1e9, 3) for way in WAYS},
        "processor_s": {way: round(statistics.median(cpus[way]), 3) for way in WAYS},
        "of_pwrite": {
            "median": round(statistics.median(ratios), 3),
            "least_of_each": round(min(walls["pwrite"]) / min(walls["store"]), 3),
            "rounds": [round(ratio, 3) for ratio in ratios],
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("directories", type=Path, nargs="+")
    parser.add_argument("--samples", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--note", default="", help="what else is to be known of the machine")
    options = parser.parse_args()
    plan = tiny_store.make_plan(options.samples, rows=ROWS_PER_SHARD, hidden_size=options.hidden)
    batches = Batches(plan)
    result = {
        "machine": {"cores": os.cpu_count(), "note": options.note},
        "figures": [
            measured(plan, batches, directory, options.rounds) for directory in options.directories
        ],
    }
    print(json.dumps(result, indent=1))
    if "OUT" in os.environ:
        out = Path(os.environ["OUT"]) / "store_write.json"
        out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
