"""Hours of both ways of sharing out the devices, from costs that are known."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest

from dflash_pipeline.configs.costs import (
    CPU,
    CaptureCosts,
    CaptureWork,
    DiskCosts,
    Mount,
    TrainCosts,
    TrainWork,
)
from dflash_pipeline.configs.errors import UsageError
from dflash_pipeline.configs.foretold import command_lines, lines, room_lines
from dflash_pipeline.configs.prediction import HOUR_S, Predictor
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
    mounts=[Mount(path="/a", needed_bytes=TOKENS * 13_920, free_bytes=10**14, device_id=1)],
    read_s=0.0,
    batches=[22_800.0, 1.02 * TOKENS, 0.0],
    warm_batches=[0.0, 0.0, 0.0],
    calibrated=[0.0, 0.0],
    gated=[0.0, 0.0],
    answer_steps=1e6,
    is_compiled=True,
)
CAPTURE = CaptureCosts(
    device="H200",
    is_compiled=True,
    import_s=0.0,
    plan_s=0.0,
    token_s=0.0,
    load_s=0.0,
    fixed_s=0.0,
    calibrated_s=[0.0, 0.0],
    gated_s=[0.0, 0.0],
    busy=1.0,
    batch_s=[0.0, 1 / 34_600 / 1.02, 0.0],
    answer_step_s=0.03,
)
DISK = DiskCosts(
    worker_bytes_per_s=4e9, write_bytes_per_s=[8e9], read_bytes_per_s=[12e9], cached_bytes=0
)
TRAIN_WORK = TrainWork(batches=[1_095_000.0, TOKENS, 512 * 1_095_000.0, 0.0], validated=[0.0, 0.0])
TRAIN = TrainCosts(
    start_s=0.0,
    batch_s=[0.1216, 0.0, 0.0, 0.0],
    validated_s=[0.0, 0.0],
    checkpoint_s=0.0,
    checkpoint_bytes=0,
)


def _predictor(run: Run | None = None, disk: DiskCosts = DISK, **costs: Any) -> Predictor:
    run = run or Run(train=TrainConfig(epochs=6))
    return Predictor(run, WORK, replace(CAPTURE, **costs), TRAIN_WORK, TRAIN, disk)


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
    stage = _predictor(disk=replace(DISK, write_bytes_per_s=[1e9])).capture(8)
    assert stage.bound == "disk"
    assert stage.hours == pytest.approx(WORK.rows_bytes / 1e9 / HOUR_S)
    assert stage.rate == pytest.approx(1e9 / 13_920)
    assert _predictor().capture(1).bound == "device"
    # one writer alone is slower than the disk
    alone = _predictor(disk=replace(DISK, worker_bytes_per_s=1e8)).capture(1)
    assert alone.hours == pytest.approx(WORK.rows_bytes / 1e8 / HOUR_S)


def test_of_several_mounts_the_one_that_is_done_last_counts() -> None:
    half = Mount(path="/a", needed_bytes=WORK.store_bytes // 2, free_bytes=10**14, device_id=1)
    work = replace(WORK, mounts=[half, replace(half, path="/b", device_id=2)])
    disk = replace(DISK, write_bytes_per_s=[1e9, 0.5e9], read_bytes_per_s=[2e9, 1e9])
    run = Run(train=TrainConfig(epochs=1))
    slow = replace(TRAIN, batch_s=[0.0, 0.0, 0.0, 0.0])
    predictor = Predictor(run, work, CAPTURE, TRAIN_WORK, slow, disk)
    assert predictor.capture(8).hours == pytest.approx(WORK.rows_bytes / 1e9 / HOUR_S)
    assert predictor.epoch_s(1) == (pytest.approx(WORK.rows_bytes / 2e9), True)
    # what stays in the page cache is not read from the disk
    cached = replace(disk, cached_bytes=WORK.rows_bytes)
    assert Predictor(run, work, CAPTURE, TRAIN_WORK, slow, cached).epoch_s(1) == (0.0, False)


def test_a_file_system_without_room_is_named_with_all_that_is_to_lie_there() -> None:
    mount = Mount(path="/a", needed_bytes=6 * 10**12, free_bytes=10**13, device_id=1)
    both = [mount, replace(mount, path="/b")]
    assert room_lines([mount], 0) == []
    (line,) = room_lines(both, 0)
    assert line.startswith("no room: /a, /b would take 12 TB and has 10 TB free;")
    assert room_lines(both, 8 * 10**12) == []
    assert room_lines([mount, replace(mount, path="/b", device_id=2)], 0) == []
    (line,) = room_lines([mount, replace(mount, path="/b", free_bytes=1, device_id=2)], 10**12)
    assert line.startswith("no room: /b would take 500 GB and has 1 B free;")


def test_what_is_done_once_is_counted_for_the_plan_and_each_worker() -> None:
    once = {"import_s": 7.0, "plan_s": 3.0, "load_s": 11.0, "fixed_s": 2.0, "token_s": 1e-6}
    alone, two = (_predictor(**once).capture(n).hours for n in (1, 2))
    bare, bare_two = (_predictor().capture(n).hours for n in (1, 2))
    kept_s = 1e-6 * TOKENS
    assert (alone - bare) * HOUR_S == pytest.approx(7 + 3 + 11 + 2 + kept_s)
    # several workers begin after another process has planned
    assert (two - bare_two) * HOUR_S == pytest.approx(7 + 7 + 3 + 11 + 2 + kept_s)


def test_what_the_start_computes_alone_grows_with_its_samples_lengths() -> None:
    costs = replace(CAPTURE, calibrated_s=[0.02, 3e-5], gated_s=[0.0, 1e-3])
    work = replace(WORK, calibrated=[128.0, 192_000.0], gated=[4.0, 6_000.0])
    seconds = [
        Predictor(Run(), one, costs, TRAIN_WORK, TRAIN, DISK).capture(1).hours * HOUR_S
        for one in (work, WORK)
    ]
    expected = 128 * 0.02 + 192_000 * 3e-5 + 6_000 * 1e-3
    assert seconds[0] - seconds[1] == pytest.approx(expected, rel=1e-4)


def test_validations_and_checkpoints_are_pauses_and_the_last_one_is_waited_for() -> None:
    run = Run(train=TrainConfig(epochs=1, max_steps=1000, validate_every=400, save_every=500))
    work = replace(TRAIN_WORK, validated=[64.0, 6400.0])
    costs = replace(TRAIN, validated_s=[0.5, 0.01], checkpoint_s=0.25, checkpoint_bytes=80 * 10**9)
    predictor = Predictor(run, WORK, CAPTURE, work, costs, DISK)
    bare = Predictor(run, WORK, CAPTURE, TRAIN_WORK, TRAIN, DISK)
    paused_s = (predictor.train(1).hours - bare.train(1).hours) * HOUR_S
    # three validations, as many checkpoints of 20 s each, which are written while steps go on
    assert paused_s == pytest.approx(3 * (64 * 0.5 + 6400 * 0.01) + 3 * 0.25 + 20.0)
    slower = replace(costs, checkpoint_bytes=400 * 10**9)
    waited_s = Predictor(run, WORK, CAPTURE, work, slower, DISK).train(1).hours * HOUR_S
    apart_s = 0.1216 * 1000 / 3
    assert waited_s - predictor.train(1).hours * HOUR_S == pytest.approx(80 + 2 * (100 - apart_s))


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


def test_a_store_that_is_whole_leaves_the_training_alone() -> None:
    predictor = _predictor()
    found = predictor.training_alone((5, 6, 7), 3.0)
    (way,) = found.ways
    train = predictor.train(3)
    assert (way.capture_ids, way.train_ids, way.stages) == ((), (5, 6, 7), (train,))
    assert (way.hours, way.cost) == (train.hours, pytest.approx(9 * train.hours))
    assert found.num_steps == predictor.num_steps(3)
    text = lines(found, 6, 3.0)
    # its store has its room already, and nothing is written
    assert not any("no room" in line or "written at the same time" in line for line in text)
    assert command_lines(way, ["dflash train --store hs"], "hs") == [
        "hs is captured whole, only the training is left:",
        "  dflash train --store hs",
    ]


def test_cpu_workers_share_the_cores_that_one_was_measured_with() -> None:
    """Four workers on two cores were foretold four times the speed of one, without a word."""
    predictor = _predictor(device=CPU)
    four = predictor.predicted([predictor.one_after_the_other((0, 1, 2, 3), 0.0)])
    told = f"they share the {len(os.sched_getaffinity(0))} cores of this machine"
    assert any(told in text for text in four.not_measured)
    for alone in (predictor.both_ways((0,), None, 0.0), _predictor().both_ways((0, 1), None, 0.0)):
        assert not any("cores" in text for text in alone.not_measured)


def test_devices_are_called_what_they_are() -> None:
    predictor = _predictor()
    found = predictor.both_ways(tuple(range(8)), None, 0.0)
    on_gpus = "\n".join(lines(found, 6, 0.0))
    on_cpu = "\n".join(lines(replace(found, capture=replace(found.capture, device="CPU")), 6, 0.0))
    assert "h of GPUs" in on_gpus
    assert on_cpu == on_gpus.replace("of GPUs", "of CPU workers").replace("on H200", "on CPU")
