"""The learning rate: its curves, and which place in them a step has."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np
import pytest

from dflash_pipeline.configs.schema import OptimConfig, TrainConfig
from dflash_pipeline.train.order import Catalog
from dflash_pipeline.train.schedule import Shares, learning_rate, place_in_schedule


def test_schedules_rise_hold_and_fall() -> None:
    config = OptimConfig(lr=1.0, warmup=0.1, decay=0.2, min_lr_share=0.1)
    rates = {
        name: [learning_rate(step, 100, replace(config, schedule=name)) for step in range(101)]
        for name in ("cosine", "linear", "wsd")
    }
    for rate in rates.values():
        assert rate[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
        assert rate[10] == pytest.approx(1.0)
        assert rate[100] == pytest.approx(0.1)
        assert rate[10:] == sorted(rate[10:], reverse=True)
    assert rates["cosine"][55] == pytest.approx(0.55)
    assert rates["linear"][55] == pytest.approx(0.55)
    assert rates["wsd"][80] == pytest.approx(1.0)
    assert rates["wsd"][90] == pytest.approx(0.55)
    # each epoch packs anew, so there may be a step more than the plan gave: the floor, never below
    assert learning_rate(140, 100, config) == pytest.approx(0.1)


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd"])
@pytest.mark.parametrize("warmup", [0.0, 0.04, 0.5])
def test_between_two_whole_steps_the_rate_lies_between_theirs(
    schedule: Literal["cosine", "linear", "wsd"], warmup: float
) -> None:
    config = OptimConfig(lr=1.0, warmup=warmup, schedule=schedule)
    whole = [learning_rate(step, 30, config) for step in range(31)]
    for before, after, step in zip(whole, whole[1:], range(30), strict=False):
        for part in (0.01, 0.5, 0.99):
            rate = learning_rate(step + part, 30, config)
            assert min(before, after) <= rate <= max(before, after), (step, part)


def test_whole_stores_count_steps_and_what_is_followed_counts_data() -> None:
    def place(share: float | None, max_steps: int = 0) -> float:
        return place_in_schedule(50, share, 40, 80, max_steps)

    # another number of ranks went before: 40 of the schedule, after 50 steps
    assert place(None) == place(None, max_steps=80) == 40
    assert place(0.25) == 20
    # the data end before the limit, or after it
    assert place(0.25, max_steps=1000) == 20
    assert place(0.25, max_steps=100) == 40


def test_samples_are_shared_out_by_the_part_of_a_batch_that_they_fill() -> None:
    samples = Catalog(
        store_C=np.array([0, 0, 0, 1, 1]),
        sample_C=np.array([0, 1, 2, 0, 1]),
        sample_id_C=np.arange(5, dtype=np.uint64),
        num_tokens_C=np.array([100, 10, 50, 40, 40]),
        num_anchors_C=np.array([1, 2, 2, 1, 6]),
        shard_C=np.array([7, 7, 9, 7, 8]),
        shares=(1.0, 0.5),
    )
    shares = Shares(samples, TrainConfig(batch_tokens=100, batch_anchors=10))
    # filled: 1.0, 0.2, 0.5 of the first store; half of 0.4 and 0.6 of the second
    assert shares.of([(0, 7)]) == pytest.approx(1.2 / 2.2)
    assert shares.of([(0, 9), (1, 7)]) == pytest.approx(0.7 / 2.2)
    assert shares.of([(0, 7), (0, 9), (1, 7), (1, 8)]) == 1.0
    # a shard without a training sample
    assert shares.of([(1, 9)]) == 0.0
