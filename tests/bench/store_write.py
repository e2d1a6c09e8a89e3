"""The store's writer against raw pwrite of the same bytes: fsync on both sides, rounds in turn.

    python tests/bench/store_write.py DIR [--samples 400] [--rounds 3] [--hidden 4096]

Writes stores of random bf16 rows into DIR, removes them, and prints wall time and processor time of
each way; writes store_write.json into $OUT where that is set. The writer checks, indexes, syncs,
renames and commits; raw pwrite writes the batches' bytes into one file a shard and syncs it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
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

ROWS_PER_SHARD = 8192


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
            writer.finish(amax, clipped, {}, halved=False)
            writer.commit()


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


def timed(work: Callable[[], None]) -> tuple[float, float]:
    """Wall and processor seconds."""
    wall, processor = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - processor


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--samples", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--hidden", type=int, default=4096)
    options = parser.parse_args()
    plan = tiny_store.make_plan(options.samples, rows=ROWS_PER_SHARD, hidden_size=options.hidden)
    batches = Batches(plan)
    size = sum(
        array.nbytes
        for shard_id in plan.layout.shard_ids()
        for arrays in batches.of(shard_id)
        for array in arrays
    )
    spent: dict[str, list[tuple[float, float]]] = {"store": [], "pwrite": []}
    for _ in range(options.rounds):
        with tempfile.TemporaryDirectory(dir=options.directory) as folder:
            raw = Path(folder)
            spent["pwrite"].append(timed(lambda raw=raw: by_pwrite(plan, raw, batches)))
        with tempfile.TemporaryDirectory(dir=options.directory) as folder:
            store = tiny_store.build(plan, Path(folder) / "hs")
            spent["store"].append(timed(lambda store=store: by_store(plan, store, batches)))
    walls = {way: statistics.median(wall for wall, _ in times) for way, times in spent.items()}
    result = {
        "machine": platform.processor() or platform.machine(),
        "file_system": shutil.disk_usage(options.directory).total,
        "gb": size / 1e9,
        "gb_per_s": {way: size / wall / 1e9 for way, wall in walls.items()},
        "processor_s": {
            way: statistics.median(processor for _, processor in times)
            for way, times in spent.items()
        },
        "of_pwrite": walls["pwrite"] / walls["store"],
    }
    print(json.dumps(result))
    if "OUT" in os.environ:
        (Path(os.environ["OUT"]) / "store_write.json").write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
