"""Counters of several workers are added up as sums and divided once."""

from __future__ import annotations

import io
from dataclasses import asdict

import pytest

from dflash_pipeline.configs.counts import Counts, closing_lines, of, total
from dflash_pipeline.configs.screen import Screen
from dflash_pipeline.configs.status import Status, process_age_s

GIB = 1 << 30
FAST = Counts(
    held_s=120.0,
    seconds=100.0,
    device_s=90.0,
    buffer_wait_s=2.0,
    idle_s=8.0,
    num_tokens=300_000,
    num_places=320_000,
    size_bytes=3e9,
    device_bytes=8 * GIB,
    host_bytes=2 * GIB,
)
# joined late, and half as fast
SLOW = Counts(held_s=70.0, seconds=50.0, device_s=15.0, num_tokens=60_000, num_places=80_000)


def test_the_total_weighs_each_worker_by_its_time_and_tokens() -> None:
    together = total([FAST, SLOW])
    assert together.tokens_per_s == pytest.approx(360_000 / 75)
    numbers = together.numbers()
    assert numbers["padding"] == pytest.approx(0.1)
    assert numbers["busy"] == pytest.approx(0.7)
    assert numbers["mb_s"] == pytest.approx(40.0)
    assert numbers["disk_wait"] == pytest.approx(0.013, abs=1e-3)
    assert numbers["idle"] == pytest.approx(0.053, abs=1e-3)
    assert (numbers["gib"], numbers["host_gib"]) == (8.0, 2.0)


def test_the_end_names_each_worker_the_total_and_the_cost_of_the_held_devices() -> None:
    statuses = [
        Status(stage="capture", number=1, counts=asdict(SLOW)),
        Status(stage="capture", number=0, counts=asdict(FAST)),
        Status(stage="capture", number=2),
    ]
    lines = closing_lines(statuses, price=36.0)
    assert [line.split(":")[0] for line in lines] == [
        "worker 0",
        "worker 1",
        "together",
        "1.90 for 0.053 device hours at 36 each",
    ]
    assert lines[0] == (
        "worker 0: 300,000 tokens in 100.0 s, 3,000 tok/s, 6.2 % padding, device busy 90.0 %, "
        "waiting for the disk 2.0 %, for a shard 8.0 %, 30.0 MB/s, device 8.00 GiB, host 2.00 GiB"
    )
    # 190 s at 0.01 a second, for 0.36 million tokens
    assert lines[3].endswith("5.278 per million tokens")
    assert closing_lines(statuses[1:2], price=0.0) == [FAST.text()]
    assert closing_lines(statuses[2:], price=36.0) == []


def test_counts_survive_the_status_file_and_a_later_versions_fields() -> None:
    assert of({**asdict(FAST), "of_a_later_version": 1.0}) == FAST


def test_the_progress_line_shows_all_workers_together() -> None:
    lines = io.StringIO()
    screen = Screen(lines, "capture", world=2)
    for rank, counts in enumerate((FAST, SLOW)):
        message = {"done": 10 * rank, "total": 10, "unit": "tokens", "rate": 0.0, "numbers": {}}
        screen.progress(rank, {**message, "counts": asdict(counts)})
    first, last = lines.getvalue().splitlines()
    assert "tok_s 3,000, padding 0.0625, busy 0.9" in first
    assert "tok_s 4,800, padding 0.1, busy 0.7" in last


def test_a_process_knows_its_age() -> None:
    assert 0 < process_age_s() < 3600
