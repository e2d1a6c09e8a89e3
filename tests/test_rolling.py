"""A capture under a quota and a trainer that follows it, each killed again and again."""

from __future__ import annotations

import os
import random
import re
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import rolling
from dflash_pipeline.store.check import verify
from dflash_pipeline.store.describe import describe
from dflash_pipeline.store.quota import fixed_bytes, largest_shard_bytes
from dflash_pipeline.store.reader import open_store
from dflash_pipeline.store.report import render
from dflash_pipeline.store.table import TRAIN
from tiny_targets import save_target

NUM_SAMPLES = 120
NUM_KILLS = 3
LIMIT_S = 100.0


@pytest.fixture
def folder() -> Iterator[Path]:
    """In memory where that is possible; holds `target`."""
    parent = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=parent) as directory:
        save_target(Path(directory) / "target", "qwen3")
        yield Path(directory)


def test_both_ends_killed_again_and_again_train_each_sample_once_below_the_quota(
    folder: Path,
) -> None:
    sized = rolling.plan(rolling.run_of(folder, "sized", "1GB"), NUM_SAMPLES)
    quota = fixed_bytes(sized) + int(3.2 * largest_shard_bytes(sized)) + 10_000
    run = rolling.run_of(
        folder, "hs", str(quota), stores=(str(folder / "hs"),), validate_every=5, save_every=4
    )
    store = rolling.plan(run, NUM_SAMPLES)
    num_shards = len(store.layout.shard_ids())
    assert num_shards >= 10
    host, chance, kills = rolling.Host(run, 1), random.Random(1), []
    end = time.monotonic() + LIMIT_S
    with rolling.watched(store.path) as sizes:
        try:
            host.start("capture", 0)
            host.start("train", 0)
            while not (host.is_over("capture", 0) and host.is_over("train", 0)):
                time.sleep(chance.uniform(0.3, 1.2) if len(kills) < 2 * NUM_KILLS else 0.1)
                assert time.monotonic() < end, _tails(host)
                store.refresh()
                victim = ("capture", "train")[len(kills) % 2]
                # not before there is something to lose
                has_begun = store.is_committed(store.layout.shard_ids()[0])
                if len(kills) < 2 * NUM_KILLS and has_begun and host.is_alive(victim, 0):
                    host.kill(victim, 0)
                    kills.append(victim)
                for stage in ("capture", "train"):
                    if not host.is_alive(stage, 0) and not host.is_over(stage, 0):
                        assert "Traceback" not in host.output(stage, 0).read_text(), _tails(host)
                        host.start(stage, 0)
        finally:
            host.close()
    assert len(kills) == 2 * NUM_KILLS, "it was over before it was disturbed"
    assert max(sizes) <= quota
    table = store.table
    wanted = np.flatnonzero((table.split == TRAIN) & (table.num_anchors > 0)).tolist()
    assert sorted(rolling.trained_samples(host.record)) == wanted
    report = verify(store.path, deep=True)
    assert (report.problems, report.notes) == ([], [])
    assert report.num_committed == num_shards
    assert num_shards / 2 < report.num_released < num_shards
    found = open_store(store.path)
    assert found.is_sealed
    text = render(describe(store.path))
    assert f"released: {report.num_released} shards" in text
    said = host.output("capture", 0).read_text()
    assert re.search(rf"of the quota of .* waiting for {host.out} .*--drop {host.out}", said)


def _tails(host: object) -> str:
    outputs = [host.output(stage, 0) for stage in ("capture", "train")]  # type: ignore[attr-defined]
    return "\n".join(path.read_text()[-2000:] for path in outputs if path.exists())
