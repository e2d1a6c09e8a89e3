"""Kills three capture workers and the trainer that follows them at random moments, many times.

    python tests/bench/chaos.py --kills 200 --json tests/bench/chaos.json

Store after store is captured while it is trained on. In the end each must have the bytes of one
that nobody disturbed; no reader may ever have seen a row that differs from it; the next start must
leave no file of a dead process behind; and each sample must have been trained on once. Exit code 1
and a line for what did not hold.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from dflash_pipeline.store import durable, paths
from dflash_pipeline.store.check import verify
from dflash_pipeline.store.reader import Store, open_store
from dflash_pipeline.store.table import TRAIN

sys.path.append(str(Path(__file__).parents[1]))
import rolling
from tiny_targets import save_target

NUM_WORKERS = 3
NUM_SAMPLES = 240
# a round whose store is not whole by then hangs
ROUND_LIMIT_S = 300.0


class Round:
    """One store, from its plan to its check."""

    def __init__(self, folder: Path, calm: Store, chance: random.Random) -> None:
        self._calm, self._chance = calm, chance
        self._path = folder / "hs"
        shutil.copytree(folder / "planned", self._path, symlinks=True)
        stores = (str(self._path),)
        run = rolling.run_of(folder, "hs", "", stores=stores, save_every=4, validate_every=20)
        # the trainer compares the checksum of each chunk it reads
        self._run = rolling.with_checks(run)
        self._follower = open_store(self._path)
        self._processes = [("capture", rank) for rank in range(NUM_WORKERS)] + [("train", 0)]
        self.kills: Counter[str] = Counter()
        self.num_left = self.num_rows_seen = 0
        self.faults: list[str] = []

    def play(self, num_kills: int) -> None:
        """Until the store is whole and trained on; up to `num_kills` kills on the way."""
        host = rolling.Host(self._run, NUM_WORKERS)
        end = time.monotonic() + ROUND_LIMIT_S
        try:
            for process in self._processes:
                host.start(*process)
            while not all(host.is_over(*process) for process in self._processes):
                # a trainer alone would soon have had all the kills
                is_captured = all(host.is_over(*one) for one in self._processes[:NUM_WORKERS])
                is_calm = is_captured or self.kills.total() >= num_kills
                time.sleep(0.1 if is_calm else self._chance.uniform(0.02, 0.6))
                alive = [one for one in self._processes if host.is_alive(*one)]
                if alive and not is_calm:
                    victim = self._chance.choice(alive)
                    host.kill(*victim)
                    self.kills[victim[0]] += 1
                    self.num_left += len(self._temporaries())
                self._look()
                for process in self._processes:
                    if not host.is_alive(*process) and not host.is_over(*process):
                        host.start(*process)
                if time.monotonic() > end:
                    self.faults.append(f"not over within {ROUND_LIMIT_S:.0f} s")
                    return
            # the next start of the same command: nothing to do but to clean up
            self._clean_up(host)
        finally:
            host.close()
        self._check(host)

    def _look(self) -> None:
        """A reader beside it: what is committed has the rows of the calm store."""
        for shard_id in self._follower.refresh():
            samples = self._follower.table.of_shard(shard_id)
            for i in range(samples.start, samples.stop):
                for mine, calm in (
                    (self._follower.hidden(i), self._calm.hidden(i)),
                    (self._follower.last(i), self._calm.last(i)),
                ):
                    self.num_rows_seen += len(mine)
                    if not np.array_equal(mine, calm):
                        self.faults.append(f"sample {i} of shard {shard_id} was read torn")

    def _clean_up(self, host: Any) -> None:
        """Start capture once more, and wait for its end."""
        host.start("capture", 0)
        while host.is_alive("capture", 0):
            time.sleep(0.05)

    def _temporaries(self) -> list[Path]:
        return [file for file in self._path.rglob("*") if durable.is_temporary(file.name)]

    def _check(self, host: Any) -> None:
        self._look()
        left = [*self._temporaries(), *(paths.log_directory(self._path) / "holders").iterdir()]
        self.faults += [f"{file} was left behind" for file in left]
        mine, calm = _digests(self._path), _digests(self._calm.path)
        names = sorted(name for name in mine | calm if mine.get(name) != calm.get(name))
        self.faults += [f"{name} differs from the undisturbed store" for name in names]
        report = verify(self._path, deep=True)
        self.faults += [*report.problems, *report.notes]
        table = self._calm.table
        wanted = np.flatnonzero((table.split == TRAIN) & (table.num_anchors > 0)).tolist()
        if sorted(rolling.trained_samples(host.record)) != wanted:
            self.faults.append("the samples that were trained on are not each one once")


def _digests(path: Path) -> dict[str, str]:
    return {
        str(file.relative_to(path)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in path.rglob("*")
        if file.is_file()
    }


def calm_store(folder: Path) -> Store:
    """A store of the same plan, captured by one worker that nobody disturbs."""
    rolling.plan(rolling.run_of(folder, "planned", ""), NUM_SAMPLES)
    shutil.copytree(folder / "planned", folder / "calm", symlinks=True)
    host = rolling.Host(rolling.run_of(folder, "calm", ""), 1)
    try:
        host.start("capture", 0)
        while host.is_alive("capture", 0):
            time.sleep(0.05)
    finally:
        host.close()
    store = open_store(folder / "calm")
    assert store.is_sealed, host.output("capture", 0).read_text()
    return store


def main() -> int:
    """Rounds until there were enough kills."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="file for the result")
    options = parser.parse_args()
    chance, begin = random.Random(options.seed), time.monotonic()
    kills: Counter[str] = Counter()
    faults: list[str] = []
    num_rounds = num_left = num_rows_seen = num_shards = 0
    parent = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    while kills.total() < options.kills and not faults:
        with tempfile.TemporaryDirectory(dir=parent) as directory:
            folder = Path(directory)
            save_target(folder / "target", "qwen3")
            calm = calm_store(folder)
            one = Round(folder, calm, chance)
            one.play(options.kills - kills.total())
            num_rounds, num_shards = num_rounds + 1, len(calm.layout.shard_ids())
            kills += one.kills
            num_left, num_rows_seen = num_left + one.num_left, num_rows_seen + one.num_rows_seen
            faults += one.faults
            print(f"round {num_rounds}: {kills.total()} kills, {len(faults)} faults", flush=True)
    result = {
        "command": f"python tests/bench/chaos.py --kills {options.kills} --seed {options.seed}",
        "kills": dict(sorted(kills.items())),
        "stores": num_rounds,
        "shards_a_store": num_shards,
        "rows_compared_while_captured": num_rows_seen,
        "unfinished_files_seen_after_kills": num_left,
        "faults": faults,
        "wall_s": round(time.monotonic() - begin, 1),
    }
    text = json.dumps(result, indent=1)
    print(text)
    if options.json:
        options.json.write_text(text + "\n")
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
