"""Hours of both ways of sharing out the devices, from costs that are known."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dflash_pipeline.configs.errors import UsageError
from dflash_pipeline.configs.prediction import (
    HOUR_S,
    CaptureCosts,
    CaptureWork,
    Predictor,
    TrainCosts,
    TrainWork,
    lines,
)
from dflash_pipeline.configs.schema import GenerateConfig, Run, TargetConfig, TrainConfig

# the 8B row of performance.md: 1.095M samples of 1,000 tokens, six epochs
TOKENS = 1_095_000_000
WORK = CaptureWork(
    num_samples=1_095_000,
    num_heldout=0,
    num_tokens=TOKENS,
    num_supervised=TOKENS // 2,
    num_padded=int(1.02 * TOKENS),
    store_bytes=TOKENS * 13_920,
    rows_bytes=TOKENS * 13_920,
    read_s=0.0,
    batches=[22_800.0, 1.02 * TOKENS, 0.0],
    answer_steps=1e6,
)
CAPTURE = CaptureCosts(
    device="H200",
    start_s=0.0,
    fixed_s=0.0,
    busy=1.0,
    batch_s=[0.0, 1 / 34_600 / 1.02, 0.0],
    tokens_per_s=34_600,
    write_bytes_per_s=8e9,
    read_bytes_per_s=12e9,
    answer_step_s=0.03,
)
TRAIN_WORK = TrainWork(batches=[1_095_000.0, TOKENS, 512 * 1_095_000.0, 0.0], num_validated=0)
TRAIN = TrainCosts(
    start_s=0.0, batch_s=[0.1216, 0.0, 0.0, 0.0], optimizer_s=0.0, validated_s=0.0, steps_per_s=8.2
)


def _predictor(run: Run | None = None, **costs: float) -> Predictor:
    run = run or Run(train=TrainConfig(epochs=6))
    return Predictor(run, WORK, replace(CAPTURE, **costs), TRAIN_WORK, TRAIN)


def test_all_eight_one_after_the_other_beat_five_and_three_by_the_pages_factor() -> None:
    predictor = _predictor()
    ids = tuple(range(8))
    all_eight = predictor.one_after_the_other(ids, price=3.0)
    side = predictor.side_by_side(ids[:5], ids[5:], price=3.0)
    assert all_eight.hours == pytest.approx(28.8, rel=0.02)
    assert side.hours == pytest.approx(74.0, rel=0.02)
    assert side.hours / all_eight.hours == pytest.approx(2.6, rel=0.02)
    assert all_eight.cost == pytest.approx(3 * 8 * all_eight.hours)
    found = predictor.predicted([side, all_eight])
    assert [way.name for way in found.ways] == ["one after the other", "side by side"]
    assert any("gradients" in text for text in found.not_measured)


def test_a_split_is_chosen_so_that_neither_side_waits_long() -> None:
    split = _predictor().best_split(tuple(range(8)), price=0.0)
    assert split is not None
    assert (split.capture_ids, split.train_ids) == ((0,), tuple(range(1, 8)))


def test_targets_of_several_gpus_are_so_many_fewer_workers() -> None:
    predictor = _predictor(Run(target=TargetConfig(num_gpus=2), train=TrainConfig(epochs=6)))
    assert predictor.capture(8).hours == pytest.approx(2 * _predictor().capture(8).hours)
    split = predictor.best_split(tuple(range(8)), price=0.0)
    assert split is not None
    assert len(split.capture_ids) % 2 == 0
    assert predictor.best_split((0, 1), price=0.0) is None
    with pytest.raises(UsageError, match="7 GPUs that capture are no multiple"):
        predictor.capture(7)


def test_a_disk_that_is_slower_than_the_devices_binds_and_is_named() -> None:
    stage = _predictor(write_bytes_per_s=1e9).capture(8)
    assert stage.bound == "disk"
    assert stage.hours == pytest.approx(WORK.rows_bytes / 1e9 / HOUR_S)
    assert _predictor().capture(1).bound == "device"


def test_a_first_epoch_that_follows_takes_as_long_as_the_capture() -> None:
    predictor = _predictor(Run(train=TrainConfig(epochs=1)), busy=0.01)
    side = predictor.side_by_side((0,), (1,), price=0.0)
    assert side.hours == pytest.approx(predictor.capture(1).hours)
    assert side.device_hours == pytest.approx(2 * side.hours)


def test_max_steps_ends_training_within_an_epoch() -> None:
    whole = _predictor(Run(train=TrainConfig(epochs=1)))
    short = _predictor(Run(train=TrainConfig(epochs=1, max_steps=10_950)))
    assert short.num_steps(1) == 10_950
    assert short.train(1).hours == pytest.approx(0.01 * whole.train(1).hours)


def test_generating_through_servers_is_told_as_not_measured() -> None:
    run = Run(generate=GenerateConfig(endpoints=("http://host/v1",)), train=TrainConfig(epochs=6))
    predictor = _predictor(run, answer_step_s=0.0)
    found = predictor.predicted([predictor.one_after_the_other((0,), 0.0)])
    assert found.generate is None
    assert any(text.startswith("generate") for text in found.not_measured)
    here = _predictor().predicted([_predictor().one_after_the_other((0, 1), 0.0)])
    assert here.generate is not None
    assert here.generate.hours == pytest.approx(1e6 * 0.03 / 2 / HOUR_S)


def test_the_lines_hold_stages_ways_and_cost() -> None:
    predictor = _predictor()
    ways = [predictor.one_after_the_other(tuple(range(8)), 3.0)]
    text = "\n".join(lines(predictor.predicted(ways), 6, 3.0))
    assert "1,095,000 samples (0 held out), 1,095,000,000 tokens" in text
    assert "a store of 15.2 TB" in text
    way = ways[0]
    assert (
        f"one after the other: {way.hours:.1f} h, {8 * way.hours:.1f} h of GPUs, "
        f"cost {24 * way.hours:.2f}"
    ) in text
    assert "39,420,000 steps" not in text
    assert "821,250 steps" in text
