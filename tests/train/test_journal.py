"""What a log line says of a run of several ranks."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from dflash_pipeline.configs.place import Place
from dflash_pipeline.configs.schema import Run
from dflash_pipeline.store.runlog import RunLog
from dflash_pipeline.train import journal
from dflash_pipeline.train.clock import Clock
from dflash_pipeline.train.feed import FeedCounts
from dflash_pipeline.train.follow import Draw
from dflash_pipeline.train.journal import Journal
from dflash_pipeline.train.metrics import Metrics
from dflash_pipeline.train.optim import Health
from dflash_pipeline.train.order import Position

COUNTS = FeedCounts(wait_s=3.0, num_tokens=400, num_blocks=50, num_samples=20)


def test_counts_are_of_all_ranks_and_the_wait_is_a_ranks_mean(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four steps in ten seconds; the other of two ranks has done the same, and waited 5 s."""
    now = [100.0]
    clock = SimpleNamespace(perf_counter=lambda: now[0], time=lambda: 0.0, monotonic=lambda: 0.0)
    monkeypatch.setattr(journal, "time", clock)
    cpu, out = torch.device("cpu"), tmp_path / "out"

    def add_up(sums: torch.Tensor) -> None:
        sums.mul_(2)
        # what the other waited longer
        sums[-1] += 2.0

    group: Any = SimpleNamespace(rank=0, world=2, add_up=add_up)
    health = Health(gradient_norm=1.0, num_bad=0, longest_streak=0, first_bad=("",) * 4)
    optimizer: Any = SimpleNamespace(vector=lambda: torch.zeros(4), health=lambda _vector: health)
    feed: Any = SimpleNamespace(take_counts=lambda: COUNTS)
    samples: Any = None
    told = Journal(out, RunLog(place), group, Run(), [], samples, Clock(cpu))
    for step in range(1, 5):
        told.note(step, Draw(0, (np.zeros(1, np.int64),), Position(0, 0, step), None, 4 - step))
    now[0] += 10.0
    told.line(4, 1e-3, Metrics(4, cpu), optimizer, feed)
    told.close()
    (record,) = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    assert record["wait_share"] == pytest.approx((3 + 5) / 2 / 10)
    # of this rank alone, a step
    assert record["wait_ms"] == pytest.approx(3000 / 4)
    assert record["tokens_per_s"] == pytest.approx(2 * 400 / 10)
    assert record["draft_rows_per_s"] == pytest.approx(2 * 50 * 4 / 10)
    assert record["samples_per_s"] == pytest.approx(2 * 20 / 10)
    assert "speed of the last 4 steps: 4.0 samples/s" in told.speed.line()
    assert "40.0% of the time waiting for data" in told.speed.line()
