"""Whole training runs on the CPU: resume, ranks, following, stopping."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from builds import launches
from dflash_pipeline.configs.errors import UsageError
from dflash_pipeline.configs.gpus import Devices
from dflash_pipeline.configs.launch import launch
from dflash_pipeline.configs.load import load
from dflash_pipeline.configs.place import POISON_VARIABLE, Place
from dflash_pipeline.configs.schema import CE_ALONE, DrafterConfig, LossConfig, OptimConfig, Run
from dflash_pipeline.configs.shares import parse_stores
from dflash_pipeline.store.reader import Store
from dflash_pipeline.store.runlog import RunLog
from dflash_pipeline.train import follow, loss, optim, window, worker
from dflash_pipeline.train.drafter import Drafter
from dflash_pipeline.train.follow import Draw
from dflash_pipeline.train.journal import Journal
from dflash_pipeline.train.loading import read_checkpoint
from dflash_pipeline.train.optim import Optimizer
from dflash_pipeline.train.order import catalog, planned_steps
from dflash_pipeline.train.replay import held_out
from dflash_pipeline.train.shape import DrafterShape
from exports import speculators, tensors

# torch 2.11 warns about its own use of deprecated calls when it compiles
WARNS = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]
DEVICE_STAGES = ("dequantise", "forward", "backward", "optimizer")
NEW: dict[str, object] = {"resume": False}
AGAIN: dict[str, object] = {"resume": True}


class Killed(BaseException):
    """In place of a signal that ends the whole process."""


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(POISON_VARIABLE, "1")


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> dict[int, Draw]:
    """Each step's draw, as runs of this process make them."""
    draws: dict[int, Draw] = {}
    before = Journal.note

    def note(self: Journal, step: int, draw: Draw) -> None:
        draws[step] = draw
        before(self, step, draw)

    monkeypatch.setattr(Journal, "note", note)
    return draws


def _elsewhere(run: Run, place: Place, tmp_path: Path, name: str) -> tuple[Run, Place]:
    out = tmp_path / name
    train = replace(run.train, out=str(out))
    return replace(run, train=train), replace(place, log_dir=str(out / "logs"))


def _files(path: Path) -> dict[str, bytes]:
    return {
        str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()
    }


def test_a_run_learns_and_leaves_a_whole_run_directory(
    whole_store: Store, train_run: Callable[..., Run], place: Place, tmp_path: Path
) -> None:
    run = replace(train_run(epochs=6, validate_every=20), loss=LossConfig(ce=0.5, kl=0.5))
    worker.main(run, place, NEW)
    out = tmp_path / "out"
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    losses = [record["loss"] for record in records if "loss" in record]
    assert losses[-1] < losses[0]
    taus = [record["tau"] for record in records if "tau" in record]
    assert min(taus) >= 1.0
    assert (out / "last").is_symlink()
    assert (out / "best" / "model.safetensors").is_file()
    assert json.loads((out / "run.json").read_text())["run"]["train"]["epochs"] == 6
    assert any((out / "tensorboard").iterdir())
    assert not list(out.glob(".*"))
    with pytest.raises(UsageError, match="not empty"):
        worker.main(run, place, NEW)
    # another run may begin from it, if the drafter is the same
    second = replace(run, train=replace(run.train, init_from=str(out), max_steps=1))
    worker.main(*_elsewhere(second, place, tmp_path, "second"), NEW)
    other = replace(second, drafter=replace(run.drafter, num_layers=3))
    with pytest.raises(UsageError, match=r"layers\.2\..*missing"):
        worker.main(*_elsewhere(other, place, tmp_path, "third"), NEW)
    # a refused run is none: the corrected line may name the same directory
    assert [one.name for one in (tmp_path / "third").iterdir()] == ["logs"]


def test_a_step_is_trained_from_a_checkpoint_of_speculators(
    whole_store: Store,
    train_run: Callable[..., Run],
    shape: DrafterShape,
    place: Place,
    tmp_path: Path,
) -> None:
    theirs = {name: tensor.bfloat16().float() for name, tensor in tensors(shape).items()}
    speculators(tmp_path / "theirs", shape, theirs)
    run = train_run(max_steps=1, init_from=str(tmp_path / "theirs"))
    run = replace(run, optim=replace(run.optim, lr=1e-3, clip=0.0, warmup=0.0))
    worker.main(run, place, NEW)
    last = tmp_path / "out" / "last"
    state = load_file(last / "state" / "state.safetensors")
    moved = {name: state[f"master.{name}"] - tensor for name, tensor in theirs.items()}
    # AdamW's first step moves what has a gradient by the learning rate
    assert all(0 < float(change.abs().max()) <= 1.001e-3 for change in moved.values())
    records = map(json.loads, (tmp_path / "out" / "metrics.jsonl").read_text().splitlines())
    (loss,) = [record["loss"] for record in records if "loss" in record]
    assert 0 < loss < 10
    # what it was trained into is of our own layout
    assert read_checkpoint(last).layout == "zlab"


def test_a_store_without_last_is_learnt_from_with_what_the_refusal_proposes(
    store_without_last: Store, train_run: Callable[..., Run], place: Place, tmp_path: Path
) -> None:
    run = train_run(epochs=6)
    with pytest.raises(UsageError, match="holds no `last` states") as refused:
        worker.main(run, place, NEW)
    assert str(refused.value).endswith(CE_ALONE)
    sets = CE_ALONE.replace("--set ", "").split()
    run = replace(run, loss=replace(load("", sets, {}).loss, position_chunk=13))
    worker.main(run, place, NEW)
    records = map(json.loads, (tmp_path / "out" / "metrics.jsonl").read_text().splitlines())
    losses = [record["loss"] for record in records if "loss" in record]
    assert losses[-1] < losses[0]


def test_the_first_step_builds_the_kernels_for_every_launch_of_a_run(
    whole_store: Store,
    train_run: Callable[..., Run],
    place: Place,
    noted: dict[int, Draw],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever its batches hold. On a CPU by Triton's keys alone, beside the plain ways."""
    pytest.importorskip("triton", reason="triton has no build for this platform")
    from dflash_pipeline.train import optim_kernel

    score, add_two = loss._Loss._score_plainly, optim._add_two
    update = Optimizer._update_plainly
    by_step: dict[int, set[str]] = {}

    def scored(self: Any, *inputs: Any) -> torch.Tensor:
        self._score_by_kernel(*inputs)
        return score(self, *inputs)

    def added(*tensors: torch.Tensor) -> None:
        optim_kernel.add_two(*tensors)
        add_two(*tensors)

    def updated(self: Optimizer, *inputs: Any) -> None:
        self._update_by_kernel(*inputs)
        update(self, *inputs)
        # the rehearsal's comes before the first step, whose own then take its place
        by_step[len(noted)] = set(keys)
        keys.clear()

    run = train_run(epochs=3, accumulate=2, batch_anchors=12, dtype="bf16")
    run = replace(run, loss=replace(run.loss, kl=0.5, ce=0.5))
    monkeypatch.setattr(loss._Loss, "_score_plainly", scored)
    monkeypatch.setattr(optim, "_add_two", added)
    monkeypatch.setattr(Optimizer, "_update_plainly", updated)
    with launches() as keys:
        worker.main(run, place, NEW)
    first, *later = [by_step[step] for step in sorted(by_step)]
    assert {key.split()[0] for key in first} == {"score_kernel", "add_kernel", "adamw_kernel"}
    assert len(later) > 5
    assert set().union(*later) <= first


@pytest.mark.parametrize("noise_std", [0.0, 0.1])
def test_a_killed_run_goes_on_bit_by_bit(
    noise_std: float,
    whole_store: Store,
    train_run: Callable[..., Run],
    place: Place,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = train_run(max_steps=12, epochs=9, save_every=7, log_every=3, noise_std=noise_std)
    worker.main(*_elsewhere(run, place, tmp_path, "whole"), NEW)
    before = Journal.note

    def dies(self: Journal, step: int, draw: Draw) -> None:
        if step == 10:
            raise Killed
        before(self, step, draw)

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "note", dies)
        with pytest.raises(Killed):
            worker.main(run, place, NEW)
    out = tmp_path / "out"
    assert [path.name for path in out.glob("step-*")] == ["step-00000007"]
    worker.main(run, place, AGAIN)
    wanted, found = _files(tmp_path / "whole" / "last"), _files(out / "last")
    assert sorted(found) == sorted(wanted)
    assert found == wanted
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records if "loss" in record] == [3, 6, 9, 12]


@pytest.mark.parametrize(
    ("kind", "max_steps"), [("in parts", 0), ("in parts", 7), ("bad samples", 0), ("whole", 0)]
)
def test_the_steps_of_a_run_are_told_as_they_are_known_and_all_of_them_at_its_end(
    kind: str,
    max_steps: int,
    tiny: Any,
    train_plan: Any,
    growing_store: Store,
    train_run: Callable[..., Run],
    place: Place,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A plan counts on samples that capture refuses, and on the first epoch's packing where others
    or parts have more: 80 of 80 steps were shown before the 84th, and 1,158 of 1,160 at the end."""
    monkeypatch.setattr(follow, "_LOOK_EVERY_S", 0.0)
    told: list[tuple[float, float]] = []
    before = RunLog.progress

    def progress(self: RunLog, done: float, total: float, unit: str, **numbers: float) -> None:
        if unit == "steps":
            told.append((done, total))
        before(self, done, total, unit, **numbers)

    def capture(_self: Journal) -> None:
        growing_store.refresh()
        if growing_store.is_complete:
            growing_store.seal()
        else:
            tiny.capture(train_plan, growing_store, most=1)

    monkeypatch.setattr(RunLog, "progress", progress)
    monkeypatch.setattr(Journal, "waiting", capture)
    if kind != "in parts":
        bad = dict.fromkeys(range(8), "not_finite") if kind == "bad samples" else {}
        tiny.capture(train_plan, growing_store, bad=bad)
        growing_store.seal()
    run = train_run(epochs=2, log_every=3, max_steps=max_steps)
    worker.main(run, place, NEW)
    samples = catalog([growing_store.table], parse_stores(run.train.stores), run.train)
    num_planned = planned_steps(samples, run.train, 1)
    *earlier, (done, total) = told
    assert done == total
    assert all(done < total for done, total in earlier)
    if kind == "in parts" and not max_steps:
        assert total > num_planned
    elif kind == "bad samples":
        assert total < num_planned
    elif max_steps:
        assert {total for _, total in told} == {max_steps}
    else:
        # the first epoch is packed as planned
        assert told[0] == (3, num_planned)


def test_masters_are_taken_before_weights_are_rounded(
    whole_store: Store, train_run: Callable[..., Run], place: Place, tmp_path: Path
) -> None:
    run = train_run(max_steps=1, dtype="bf16")
    # too small a step for any number of fp32
    run = replace(run, optim=replace(run.optim, lr=1e-30))
    worker.main(run, place, NEW)
    drafter = Drafter(read_checkpoint(tmp_path / "out").shape)
    drafter.initialise(run.train.seed)
    state = load_file(tmp_path / "out" / "last" / "state" / "state.safetensors")
    for name, parameter in drafter.named_parameters():
        assert torch.equal(state[f"master.{name}"], parameter)
    assert not torch.equal(drafter.fc[0].weight, drafter.fc[0].weight.bfloat16().float())


def test_a_run_that_goes_on_with_other_ranks_keeps_to_its_learning_rate(
    whole_store: Store,
    train_run: Callable[..., Run],
    place: Place,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Half of the steps on one rank, the other half of the data on two."""
    run = train_run(epochs=4, log_every=1, save_every=1, dtype="fp32")
    run = replace(run, optim=replace(run.optim, schedule="linear", warmup=0.0, lr=1.0))
    before = Journal.note

    def asks(self: Journal, step: int, draw: Draw) -> None:
        before(self, step, draw)
        if draw.after.epoch == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "note", asks)
        with pytest.raises(KeyboardInterrupt):
            worker.main(run, place, NEW)
    out = tmp_path / "out"
    num_before = int((out / "last").readlink().name.removeprefix("step-"))
    devices = Devices(kind="cpu", ids=(0, 1))
    entry = "dflash_pipeline.train.worker:main"
    assert launch(entry, run, devices, "train", place.log_dir, AGAIN) == 0
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    rates = {record["step"]: record["lr"] for record in records if "loss" in record}
    assert list(rates) == list(range(1, len(rates) + 1))
    shares = np.diff(list(rates.values()))
    # each step on two ranks uses up as much of the schedule as two steps of one
    np.testing.assert_allclose(shares[: num_before - 1], shares[0])
    assert rates[num_before + 1] == pytest.approx(rates[num_before] + shares[0], abs=0.05)
    np.testing.assert_allclose(shares[num_before:], 2 * shares[0], rtol=0.1)
    # an odd number of batches takes two ranks half a step more each epoch
    assert 0 < rates[len(rates)] < -4 * shares[num_before]


@pytest.mark.parametrize("kind", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_ends_a_run_with_a_checkpoint_that_goes_on_bit_by_bit(
    kind: signal.Signals,
    whole_store: Store,
    train_run: Callable[..., Run],
    place: Place,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = train_run(max_steps=8)
    worker.main(*_elsewhere(run, place, tmp_path, "whole"), NEW)
    before = Journal.note

    def signals(self: Journal, step: int, draw: Draw) -> None:
        before(self, step, draw)
        if step == 4:
            os.kill(os.getpid(), kind)

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "note", signals)
        with pytest.raises(KeyboardInterrupt):
            worker.main(run, place, NEW)
    out = tmp_path / "out"
    assert (out / "last").readlink() == Path("step-00000005")
    worker.main(run, place, AGAIN)
    assert _files(out / "last") == _files(tmp_path / "whole" / "last")


def test_a_plateau_ends_a_run_and_a_validation_repeats_to_the_last_bit(
    whole_store: Store, train_run: Callable[..., Run], place: Place, tmp_path: Path
) -> None:
    # no step changes a weight
    run = train_run(epochs=99, validate_every=2, patience=3, dtype="fp32")
    run = replace(run, optim=replace(run.optim, lr=1e-30))
    worker.main(run, place, NEW)
    out = tmp_path / "out"
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    taus = {record["step"]: record["tau"] for record in records if "tau" in record}
    assert list(taus) == [2, 4, 6, 8]
    assert len(set(taus.values())) == 1
    assert (out / "best").readlink() == Path("step-00000002")
    log = (out / "logs" / "train-0.log").read_text()
    assert "trained 8 steps" in log
    assert "ended early, tau has not risen by 0.01 in 3 validations; best" in log
    worker.main(run, place, AGAIN)
    assert (out / "last").readlink() == Path("step-00000008")


def test_the_last_validation_of_a_run_is_in_its_last_checkpoint(
    whole_store: Store, train_run: Callable[..., Run], place: Place, tmp_path: Path
) -> None:
    """Step 4 is saved as every second one, and validated because the run ends there."""
    run = train_run(max_steps=4, epochs=9, save_every=2, validate_every=3, dtype="fp32")
    worker.main(run, place, NEW)
    out = tmp_path / "out"

    def taus() -> list[tuple[int, float]]:
        records = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
        return [(record["step"], record["tau"]) for record in records if "tau" in record]

    first = taus()
    assert [step for step, _ in first] == [3, 4]
    told = json.loads((out / "last" / "state" / "state.json").read_text())
    assert told["validated_step"] == 4
    assert told["best_tau"] == max(tau for _, tau in first)
    # nothing is left to do, and nothing is measured twice
    worker.main(run, place, AGAIN)
    assert taus() == first
    assert json.loads((out / "last" / "state" / "state.json").read_text()) == told


@pytest.mark.parametrize("array", ["hidden", "last"])
def test_a_held_out_sample_with_damaged_rows_is_named_once_and_left_out(
    array: str, whole_store: Store, train_run: Callable[..., Run], place: Place, tmp_path: Path
) -> None:
    store, run = whole_store, train_run(epochs=99, max_steps=4, validate_every=2, dtype="fp32")
    whole, elsewhere = _elsewhere(run, place, tmp_path, "whole")
    worker.main(whole, elsewhere, NEW)
    first = held_out(store)[0]
    damaged = store.place_of(first, array)
    with damaged.file.open("r+b") as file:
        file.seek(damaged.offset)
        file.write(b"\xc0\x7f")
    worker.main(run, place, NEW)
    log = (tmp_path / "out" / "logs" / "train-0.log").read_text()
    named = f"left out of the validation: sample {first} ({store.table.key(first)}, shard"
    # `last` plays no part in a replay: tau is right whatever it holds
    assert log.count(named) == (array == "hidden")
    taus = [
        [line["tau"] for line in map(json.loads, path.read_text().splitlines()) if "tau" in line]
        for path in (tmp_path / name / "metrics.jsonl" for name in ("out", "whole"))
    ]
    assert len(taus[0]) == 2
    assert all(1 <= tau <= 4 for tau in taus[0])
    assert (taus[0] == taus[1]) == (array == "last")


@pytest.mark.parametrize("kind", ["cpu", pytest.param("cuda", marks=WARNS)])
def test_two_ranks_do_what_one_does_with_twice_the_window(
    kind: Literal["cpu", "cuda"],
    whole_store: Store,
    train_run: Callable[..., Run],
    place: Place,
    tmp_path: Path,
) -> None:
    if kind == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    # FlexAttention takes no head narrower than 16
    drafter = DrafterConfig(num_layers=2, block_size=4, head_dim=16)
    one = replace(train_run(epochs=2, accumulate=2, dtype="fp32"), drafter=drafter)
    worker.main(one, replace(place, kind=kind, device="cuda:0" if kind == "cuda" else "cpu"), NEW)
    two, elsewhere = _elsewhere(one, place, tmp_path, "two")
    # an odd number of batches: the last step of an epoch leaves one rank without data
    two = replace(two, train=replace(two.train, accumulate=1))
    devices = Devices(kind=kind, ids=(0, 1))
    entry = "dflash_pipeline.train.worker:main"
    code = launch(entry, two, devices, "train", elsewhere.log_dir, NEW)
    assert code == 0
    states = [
        load_file(tmp_path / name / "last" / "state" / "state.safetensors")
        for name in ("out", "two")
    ]
    assert float(states[0]["step"]) == float(states[1]["step"]) > 4
    for name, tensor in states[0].items():
        if name.startswith("master"):
            torch.testing.assert_close(tensor, states[1][name], rtol=1e-3, atol=1e-5)


def test_a_run_follows_a_store_that_is_being_captured(
    tiny: Any,
    train_plan: Any,
    growing_store: Store,
    train_run: Callable[..., Run],
    place: Place,
    tmp_path: Path,
    noted: dict[int, Draw],
) -> None:
    run = train_run(epochs=2)
    with pytest.raises(UsageError, match="still being captured and --no-follow"):
        worker.main(replace(run, train=replace(run.train, follow=False)), place, NEW)

    log = tmp_path / "out" / "logs" / "train-0.log"
    log.touch()

    def capture() -> None:
        tiny.capture(train_plan, growing_store, most=2)
        deadline = time.monotonic() + 60
        while "waiting for shards" not in log.read_text() and time.monotonic() < deadline:
            time.sleep(0.05)
        tiny.capture(train_plan, growing_store)
        growing_store.seal()

    thread = threading.Thread(target=capture)
    thread.start()
    worker.main(run, place, NEW)
    thread.join()
    drawn = [batch for draw in noted.values() if draw.epoch == 0 for batch in draw.batches]
    places = np.concatenate(drawn)
    assert sorted(places.tolist()) == list(range(len(places)))
    assert (tmp_path / "out" / "order").is_file()
    assert "waiting for shards" in log.read_text()
    # its order stays what it was, but nothing is captured any longer
    worker.main(run, place, AGAIN)
    assert log.read_text().count("the store is still being captured: following it") == 1


@pytest.mark.parametrize("max_steps", [0, 9, 12])
def test_the_learning_rate_of_a_run_that_follows_ends_with_its_data_or_its_limit(
    max_steps: int,
    tiny: Any,
    train_plan: Any,
    growing_store: Store,
    train_run: Callable[..., Run],
    place: Place,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Shard by shard, so that there are more steps than planned: none of them learns nothing."""
    monkeypatch.setattr(follow, "_LOOK_EVERY_S", 0.0)

    def capture(_self: Journal) -> None:
        """Whatever is waited for."""
        growing_store.refresh()
        if not growing_store.is_complete:
            tiny.capture(train_plan, growing_store, most=1)
        else:
            growing_store.seal()

    monkeypatch.setattr(Journal, "waiting", capture)
    run = train_run(epochs=1, log_every=1, max_steps=max_steps)
    run = replace(run, optim=OptimConfig(schedule="linear", warmup=0.0, lr=1e-3))
    worker.main(run, place, NEW)
    lines = (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
    records = [record for record in map(json.loads, lines) if "lr" in record]
    rates = np.array([record["lr"] for record in records]) / 1e-3
    samples = catalog([growing_store.table], parse_stores(run.train.stores), run.train)
    num_planned = planned_steps(samples, run.train, 1)
    assert rates[0] == 1.0
    assert np.all(np.diff(rates) < 0)
    if max_steps:
        assert len(rates) == max_steps
        assert rates[-1] == pytest.approx(1 / max_steps)
    else:
        assert len(rates) > num_planned
        # no further from the end than one step of the plan is
        assert 0 < rates[-1] <= 1 / num_planned


def test_steps_that_are_not_finite_are_named_and_end_the_run_in_time(
    whole_store: Store,
    train_run: Callable[..., Run],
    place: Place,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = train_run(max_bad_steps=4, log_every=2)
    before = window.learn

    def spoiled(batch: Any, *others: Any) -> None:
        before(replace(batch, feature_NKH=batch.feature_NKH * float("nan")), *others)

    monkeypatch.setattr(window, "learn", spoiled)
    last = "the last on this rank: step 4: NaN or Inf first in the stored features, .* sample-"
    with pytest.raises(ValueError, match=f"not finite in 4 steps in a row.*{last}"):
        worker.main(run, place, NEW)
    log = (tmp_path / "out" / "logs" / "train-0.log").read_text()
    first = "step 1: NaN or Inf first in the stored features, step skipped; samples sample-"
    assert first in log
    # JSON has no NaN, and most readers stop at one
    for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line, parse_constant=pytest.fail)
        assert record["loss"] is None


def test_memory_that_runs_out_is_accounted_for(
    whole_store: Store,
    train_run: Callable[..., Run],
    place: Place,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def backward(*_arguments: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB. GPU 0 is full.")

    monkeypatch.setattr(torch.Tensor, "backward", backward)
    monkeypatch.setattr("dflash_pipeline.train.preflight.rehearse", lambda *_arguments: None)
    holders = r"weights .*fp32 masters .*moments .*gradient .*embedding and head .*feed's buffers "
    with pytest.raises(
        ValueError, match=r"ran out in backward \(Tried to allocate 2 GiB\).*" + holders
    ):
        worker.main(train_run(), place, NEW)


@pytest.mark.parametrize("setting", ["batch_tokens", "batch_anchors"])
def test_the_hosts_memory_that_runs_out_is_accounted_for(
    setting: str, whole_store: Store, train_run: Callable[..., Run], place: Place
) -> None:
    told = (
        r"the host's memory ran out in .* \(Tried to .*\): .* fp32 masters .*; lower train\.batch_a"
    )
    with pytest.raises(ValueError, match=told):
        worker.main(train_run(**{setting: 10**14}), place, NEW)
    blocks = train_run()
    blocks = replace(blocks, drafter=replace(blocks.drafter, block_size=10**12))
    with pytest.raises(
        ValueError, match=r"memory ran out in a rehearsal .* or drafter\.block_size"
    ):
        worker.main(blocks, place, NEW)


def test_log_lines_tell_each_stage_and_a_window_is_traced(
    whole_store: Store, train_run: Callable[..., Run], place: Place, tmp_path: Path
) -> None:
    worker.main(train_run(max_steps=4, profile="2-3", save_every=2, validate_every=2), place, NEW)
    out = tmp_path / "out"
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    lines = [record for record in records if "loss" in record]
    assert all(line[f"{stage}_ms"] > 0 for line in lines for stage in DEVICE_STAGES)
    # what comes after a line is told by the next one
    assert [line["validate_ms"] > 0 for line in lines] == [False, True]
    assert [line["checkpoint_ms"] > 0 for line in lines] == [False, True]
    assert all(line["host_memory_gib"] > 0 for line in lines)
    (trace,) = (out / "profile").iterdir()
    assert trace.name == "rank0-steps-2-3.json"
    names = [event.get("name") for event in json.loads(trace.read_text())["traceEvents"]]
    assert names.count("optimizer") == 2
    log = (out / "logs" / "train-0.log").read_text()
    assert "steps 2 to 3 are traced in" in log
    assert re.search(r"speed of the last 2 steps: .* a million samples take .* h on 1 process", log)


def test_settings_that_cannot_work_are_refused_before_anything_is_written(
    whole_store: Store, train_run: Callable[..., Run], place: Place, tmp_path: Path
) -> None:
    run = train_run(batch_tokens=100)
    with pytest.raises(UsageError, match=r"train\.batch_tokens"):
        worker.main(run, place, NEW)
    assert not (tmp_path / "out" / "run.json").exists()


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")
def test_a_run_on_cuda_learns_and_goes_on(
    whole_store: Store, train_run: Callable[..., Run], place: Place, tmp_path: Path
) -> None:
    run = replace(train_run(epochs=6, validate_every=20), loss=LossConfig(ce=0.5, kl=0.5))
    drafter = replace(run.drafter, head_dim=16, block_size=16, layer_ids=(1, 5))
    run = replace(run, drafter=drafter)
    place = replace(place, kind="cuda", device="cuda:0")
    worker.main(run, place, NEW)
    out = tmp_path / "out"
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    losses = [record["loss"] for record in records if "loss" in record]
    assert losses[-1] < losses[0]
    assert min(record["tau"] for record in records if "tau" in record) >= 1.0
    worker.main(run, place, AGAIN)
