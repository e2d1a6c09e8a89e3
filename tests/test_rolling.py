"""A capture under a quota and trainers that follow it, each killed again and again."""

from __future__ import annotations

import json
import os
import random
import re
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rolling
from dflash_pipeline.configs.shares import parse_stores
from dflash_pipeline.configs.status import find_statuses
from dflash_pipeline.store.check import verify
from dflash_pipeline.store.describe import describe
from dflash_pipeline.store.quota import fixed_bytes, largest_shard_bytes
from dflash_pipeline.store.reader import Store, open_store
from dflash_pipeline.store.report import render
from dflash_pipeline.store.spec import ShardId
from dflash_pipeline.store.table import TRAIN
from dflash_pipeline.train.order import catalog
from tiny_targets import save_target

NUM_SAMPLES = 120
NUM_KILLS = 3
LIMIT_S = 200.0


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


@pytest.mark.parametrize(("hidden_mode", "last_mode"), [("int8", "int4"), ("int4", "int8")])
def test_two_runs_over_three_ranks_train_the_rows_that_two_capture_workers_wrote(
    hidden_mode: str, last_mode: str, folder: Path
) -> None:
    """Of quantised rows; the second run begins once the first waits for it, and a worker dies."""
    sets = (
        f"store.hidden_mode={hidden_mode}",
        f"store.last_mode={last_mode}",
        "store.shard_bytes=12000",
        "capture.num_consumers=2",
        "capture.force=true",
        "loss.kl=0.5",
    )
    calm_run = rolling.run_of(folder, "calm", "1GB", sets)
    calm = rolling.plan(calm_run, NUM_SAMPLES)
    quota = fixed_bytes(calm) + int(5.2 * largest_shard_bytes(calm)) + 10_000
    run = rolling.run_of(
        folder, "hs", str(quota), sets, stores=(str(folder / "hs"),), validate_every=5, save_every=3
    )
    store = rolling.plan(run, NUM_SAMPLES)
    num_shards = len(store.layout.shard_ids())
    assert num_shards >= 10
    other = replace(run, train=replace(run.train, out=str(folder / "other-run"), seed=1))
    first, end = rolling.Host(run, 2, num_train=2), time.monotonic() + LIMIT_S
    second = rolling.Host(other, 2, beside=first)
    reference = rolling.Host(calm_run, 1, beside=first)
    hosts = [(first, "capture", 0), (first, "capture", 1), (first, "train", 0)]
    hosts += [(first, "train", 1), (second, "train", 0)]
    for host in (first, second):
        host.batches.mkdir()
    awaited = "no shard is released before 2 training runs follow (--consumers 2): 1 more to start"
    has_killed = False
    with rolling.watched(store.path) as sizes:
        try:
            for host, stage, rank in hosts[:-1]:
                host.start(stage, rank)
            while not any(awaited in one.text for one in find_statuses(store.path)):
                assert time.monotonic() < end, _tails(first)
                time.sleep(0.1)
            store.refresh()
            assert store.num_released == 0
            second.start("train", 0)
            while not all(host.is_over(stage, rank) for host, stage, rank in hosts):
                assert time.monotonic() < end, _tails(first) + _tails(second)
                time.sleep(0.1)
                store.refresh()
                if store.num_released and not has_killed and first.is_alive("capture", 1):
                    first.kill("capture", 1)
                    has_killed = True
                    first.start("capture", 1)
                for host, stage, rank in hosts:
                    text = host.output(stage, rank).read_text()
                    assert "Traceback" not in text, text[-2000:]
            reference.start("capture", 0)
            while not reference.is_over("capture", 0):
                assert time.monotonic() < end, _tails(reference)
                time.sleep(0.1)
        finally:
            first.close()
    assert has_killed, "it was over before it was disturbed"
    assert max(sizes) <= quota
    report = verify(store.path, deep=True)
    assert (report.problems, report.notes) == ([], [])
    assert num_shards / 2 < report.num_released < num_shards
    calm = open_store(calm.path)
    assert calm.is_sealed
    table = store.table
    wanted = np.flatnonzero((table.split == TRAIN) & (table.num_anchors > 0)).tolist()
    steps = {}
    for host, num_ranks in ((first, 2), (second, 1)):
        ranks = [rolling.trained_steps(host.record_of(rank)) for rank in range(num_ranks)]
        steps[str(host.out)] = ranks
        trained = [sample for drawn in ranks for samples in drawn.values() for sample in samples]
        assert sorted(trained) == wanted
        _compare_batches(host, calm, len(wanted))
    released = [json.loads(line) for line in first.releases.read_text().splitlines()]
    assert len(released) == report.num_released
    for bucket, shard, checkpoints in released:
        samples = set(range(len(table))[table.of_shard(ShardId(bucket, shard))]) & set(wanted)
        assert checkpoints
        for out, last in checkpoints.items():
            drawn = {
                sample
                for by_step in steps[out]
                for step, drawn in by_step.items()
                if step <= last
                for sample in drawn
            }
            # each run had a checkpoint behind all of it
            assert samples <= drawn


def _compare_batches(host: rolling.Host, calm: Store, num_wanted: int) -> None:
    """What a run was given equals what a store without a quota decodes, bit for bit."""
    train = host.run.train
    samples = catalog([calm.table], parse_stores(train.stores), train)
    num_seen = 0
    for file in host.batches.iterdir():
        batch = np.load(file)
        parts = [calm.sample(int(i)) for i in samples.sample_C[batch["places"]]]
        hidden_NKH = np.concatenate([part.hidden_TKH for part in parts])
        assert np.array_equal(batch["feature_NKH"][: len(hidden_NKH)], hidden_NKH)
        last = np.concatenate([part.last_MH for part in parts if part.last_MH is not None])
        assert len(batch["state_UH"]) > 0
        assert {row.tobytes() for row in batch["state_UH"]} <= {row.tobytes() for row in last}
        num_seen += len(parts)
    assert num_seen == num_wanted


def _tails(host: Any) -> str:
    outputs = [host.output(stage, 0) for stage in ("capture", "train")]
    return "\n".join(path.read_text()[-2000:] for path in outputs if path.exists())
