"""Bootstrap over prompts: covers what it should, keeps pairs, depends on its seed alone."""

from __future__ import annotations

import numpy as np
import pytest

from dflash_pipeline.train import intervals
from dflash_pipeline.train.intervals import Counts, Interval
from dflash_pipeline.train.tally import Cycle, Tally


def drawn(seed: int, num: int = 60) -> Counts:
    """Prompts of 10 to 30 cycles whose tau differs from one to the next."""
    random = np.random.default_rng(seed)
    cycles_N = random.integers(10, 30, num).astype(float)
    return Counts(np.round(cycles_N * random.uniform(1.5, 2.5, num)), cycles_N)


def test_counts_leave_out_prompts_without_a_cycle() -> None:
    tallies = [Tally(num_drafts=3) for _ in range(3)]
    tallies[0].add([Cycle(2, 1), Cycle(4, 3)])
    tallies[2].add([Cycle(1, 0)])
    counted = intervals.counts(tallies)
    assert counted.kept_N.tolist() == [6, 1]
    assert counted.cycles_N.tolist() == [2, 1]


def test_an_interval_covers_the_truth_about_95_times_in_100() -> None:
    pooled = [intervals.pooled_tau(drawn(seed), 0) for seed in range(100)]
    each = [intervals.tau_per_prompt(drawn(seed), 0) for seed in range(100)]
    for found in (pooled, each):
        assert 89 <= sum(one.low <= 2.0 <= one.high for one in found) <= 99


def test_an_interval_is_as_wide_as_the_spread_of_many_prompts_says() -> None:
    counted = drawn(5, 900)
    taus_N = counted.kept_N / counted.cycles_N
    found = intervals.tau_per_prompt(counted, 0)
    half_width = 1.96 * taus_N.std() / len(taus_N) ** 0.5
    assert (found.high - found.low) / 2 == pytest.approx(half_width, rel=0.06)


def test_an_interval_narrows_with_the_root_of_the_prompts() -> None:
    few, many = (intervals.pooled_tau(drawn(1, num), 0) for num in (50, 800))
    assert 2.5 < (few.high - few.low) / (many.high - many.low) < 6


def test_prompts_are_paired_in_a_difference() -> None:
    one = drawn(2)
    other = Counts(one.kept_N + one.cycles_N * 0.1, one.cycles_N)
    # prompts differ by far more than the two do on any of them
    alone = intervals.pooled_tau(one, 0)
    paired = intervals.pooled_difference(other, one, 0)
    assert paired == pytest.approx((0.1, 0.1), abs=1e-9)
    assert alone.high - alone.low > 0.1
    assert intervals.pooled_difference(one, one, 0) == Interval(0.0, 0.0)


def test_an_interval_depends_on_the_seed_and_not_on_the_chunks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = intervals.pooled_tau(drawn(3), 0)
    assert intervals.pooled_tau(drawn(3), 1) != whole
    monkeypatch.setattr(intervals, "_MOST_PLACES", 777)
    assert intervals.pooled_tau(drawn(3), 0) == whole


def test_without_prompts_there_is_nothing_to_say() -> None:
    nothing = intervals.counts([Tally(num_drafts=3)])
    assert intervals.pooled_tau(nothing, 0) == Interval(0.0, 0.0)
    assert intervals.tau_per_prompt(nothing, 0) == Interval(0.0, 0.0)
