"""Costs of units of work out of the times of batches."""

from __future__ import annotations

import random

import pytest

from dflash_pipeline.configs.fit import dot, fitted, steady


def _batches(count: int) -> list[list[float]]:
    chance = random.Random(0)
    shapes = [(chance.randint(1, 96), 64 * chance.randint(1, 48)) for _ in range(count)]
    return [[1.0, float(b * t), float(b * t * t)] for b, t in shapes]


def test_costs_that_made_the_times_are_found_again() -> None:
    costs = [2e-3, 3e-5, 1e-9]
    rows = _batches(24)
    found = fitted(rows, [dot(row, costs) for row in rows])
    assert found == pytest.approx(costs, rel=0.05)


def test_noise_moves_the_total_of_other_lengths_little() -> None:
    chance = random.Random(1)
    costs = [0.0, 3e-5, 0.0]
    rows = _batches(30)
    times = [dot(row, costs) * chance.uniform(0.9, 1.1) for row in rows]
    found = fitted(rows, times)
    assert min(found) >= 0
    assert sum(dot(row, found) for row in rows) == pytest.approx(sum(times))
    long = [4.0, 4 * 3072.0, 4 * 3072.0 * 3072]
    assert dot(long, found) == pytest.approx(dot(long, costs), rel=0.1)


def test_one_shape_alone_is_one_cost() -> None:
    found = fitted([[1.0, 64.0], [1.0, 64.0]], [2.0, 4.0])
    assert dot([1.0, 64.0], found) == pytest.approx(3.0)


def test_nothing_measured_is_an_error() -> None:
    with pytest.raises(ValueError, match="nothing was measured"):
        fitted([], [])


def test_a_few_that_were_disturbed_move_nothing() -> None:
    lengths = [100.0 * number for number in range(1, 13)]
    seconds = [0.08 + 2e-5 * length for length in lengths]
    assert steady(lengths, seconds) == pytest.approx([0.08, 2e-5])
    # the longest and one more, by much
    seconds[-1] += 1.0
    seconds[3] += 0.5
    constant, slope = steady(lengths, seconds)
    assert constant + 1500 * slope == pytest.approx(0.08 + 2e-5 * 1500, rel=0.02)


def test_without_a_slope_all_is_the_constant() -> None:
    assert steady([5.0, 5.0], [1.0, 3.0]) == [2.0, 0.0]
    # shorter for longer ones: noise
    assert steady([1.0, 2.0, 3.0], [3.0, 2.0, 1.0]) == [2.0, 0.0]
    with pytest.raises(ValueError, match="nothing was measured"):
        steady([], [])
