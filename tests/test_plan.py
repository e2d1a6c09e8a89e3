"""`dflash plan`: what it counts is exact, and what it measured on some data holds for others.

Times are those of this process's own processor seconds, so that others who use the machine's cores
meanwhile are not measured; commands' own seconds, on machines that do nothing else, are compared by
`tests/bench/plan.py`.
"""

from __future__ import annotations

import io
import json
import os
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dflash_pipeline.capture import counting, planning
from dflash_pipeline.capture import measure as capture_measure
from dflash_pipeline.capture import worker as capture_worker
from dflash_pipeline.capture.model import resolve
from dflash_pipeline.capture.samples import Dropped, read
from dflash_pipeline.capture.shapes import planned_shapes
from dflash_pipeline.capture.stop import Stop
from dflash_pipeline.capture.times import SampleTime, Times
from dflash_pipeline.capture.toytext import conversations
from dflash_pipeline.capture.voice import Silence
from dflash_pipeline.configs import measuring
from dflash_pipeline.configs.costs import (
    CaptureCosts,
    CaptureWork,
    DiskCosts,
    TrainCosts,
    TrainWork,
)
from dflash_pipeline.configs.errors import UsageError
from dflash_pipeline.configs.gpus import Devices
from dflash_pipeline.configs.load import load, to_dict
from dflash_pipeline.configs.measuring import work_of
from dflash_pipeline.configs.place import Place
from dflash_pipeline.configs.prediction import HOUR_S, Predictor
from dflash_pipeline.configs.schema import Run
from dflash_pipeline.configs.status import find_statuses
from dflash_pipeline.store.build import shard_bytes
from dflash_pipeline.store.reader import open_store
from dflash_pipeline.train import journal, worker
from dflash_pipeline.train import measure as train_measure
from places import cpu_place

BOUND = 1.35
"""Predicted over true, and the reverse: what seconds of measuring on a shared machine keep."""
ROUNDS = 5


def _place(folder: Path, stage: str) -> Place:
    return cpu_place(folder, stage)


@pytest.fixture(scope="module")
def _processor_time() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("perf_counter", "monotonic"):
            patch.setattr(time, name, time.process_time)
        # of the log lines, which tell the time of day
        clock = SimpleNamespace(**dict.fromkeys(("time", "perf_counter"), time.process_time))
        patch.setattr(journal, "time", clock)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Short and long conversations."""
    folder = tmp_path_factory.mktemp("plan")
    sources = [conversations(domain, "train", 0) for domain in ("math", "chat", "code")]
    texts = [next(sources[number % 3]) for number in range(400)]
    texts.sort(key=lambda turns: sum(len(turn["content"]) for turn in turns))
    for name, part in (("short", texts[:200]), ("long", texts[-100:])):
        rows = [
            {"id": f"{name}{i}", "domain": "abc"[i % 3], "messages": turns}
            for i, turns in enumerate(part)
        ]
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


def _run(folder: Path, name: str) -> Run:
    run = load("toy", ["train.epochs=1", "data.heldout=0.1"], {})
    return replace(
        run,
        data=replace(run.data, files=(str(folder / f"{name}.jsonl"),)),
        store=replace(run.store, path=str(folder / f"{name}-store")),
        train=replace(run.train, out=str(folder / f"{name}-run")),
    )


def _measure(run: Run, here: Path, is_measured: bool) -> None:
    here.mkdir()
    for stage in (capture_measure, train_measure):
        extra: dict[str, object] = {"folder": str(here), "is_measured": is_measured, "kind": "cpu"}
        extra["with_answers"] = True
        stage.main(run, _place(here.parent / "logs", "plan"), extra)


def _json(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


@dataclass(frozen=True)
class Round:
    """A prediction, and what then happened."""

    folder: Path
    predictor: Predictor
    """Of the long conversations, counted, from the costs of the short ones."""
    run: Run
    """The long ones captured and trained on for real."""

    @property
    def capture_ratio(self) -> float:
        """Predicted over true seconds of a worker, from its first batch on."""
        (status,) = find_statuses(Path(self.run.store.path))
        costs, work = self.predictor.capture_costs, self.predictor.work
        # what comes before the first batch this process had done before
        start_s = costs.import_s + costs.plan_s + costs.token_s * work.num_tokens + costs.load_s
        expected = self.predictor.capture(1).hours * HOUR_S - start_s - work.read_s
        return expected / status.counts["seconds"]

    @property
    def step_ratio(self) -> float:
        """Predicted over true seconds of a training step."""
        lines = (Path(self.run.train.out) / "metrics.jsonl").read_text().splitlines()
        losses = [line for line in map(json.loads, lines) if "loss" in line]
        first, last = losses[0], losses[-1]
        took_s = (last["time"] - first["time"]) / (last["step"] - first["step"])
        return 1 / self.predictor.train(1).rate / took_s


def _round(folder: Path, number: int) -> Round:
    own = folder / f"round-{number}"
    own.mkdir()
    short, long = _run(folder, "short"), _run(folder, "long")
    long = replace(
        long,
        store=replace(long.store, path=str(own / "store")),
        train=replace(long.train, out=str(own / "run"), stores=(str(own / "store"),)),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(capture_measure, "CAPTURE_S", 2.0)
        patch.setattr(train_measure, "TRAIN_S", 3.0)
        _measure(short, own / "measured", is_measured=False)
    _measure(long, own / "counted", is_measured=True)
    place = _place(Path(f"{long.store.path}.logs"), "capture")
    extra: dict[str, object] = {"kind": "cpu", "num_workers": 1, "only_count": False}
    planning.plan_and_capture(long, place, extra)
    worker.main(long, _place(Path(long.train.out) / "logs", "train"), {"resume": False})
    predictor = Predictor(
        long,
        work_of(_json(own / "counted" / "work.json")),
        CaptureCosts(**_json(own / "measured" / "costs.json")),
        TrainWork(**_json(own / "counted" / "train_work.json")),
        TrainCosts(**_json(own / "measured" / "train_costs.json")),
        DiskCosts(**_json(own / "measured" / "disk.json")),
    )
    return Round(own, predictor, long)


@pytest.fixture(scope="module")
def rounds(folder: Path, _processor_time: None) -> list[Round]:
    """One; more where it is not within the bound. Their median counts: what is predicted wrongly
    stays out of it, however often it is tried."""
    found = [_round(folder, 0)]
    ratios = found[0].capture_ratio, found[0].step_ratio
    if not all(1 / BOUND < ratio < BOUND for ratio in ratios):
        found += [_round(folder, number) for number in range(1, ROUNDS)]
    return found


def test_what_is_counted_is_what_the_run_then_has(rounds: list[Round]) -> None:
    run, predictor = rounds[0].run, rounds[0].predictor
    work = predictor.work
    store = open_store(run.store.path)
    table, layout = store.table, store.layout
    assert (work.num_samples, work.num_tokens) == (len(table), table.num_tokens.sum())
    shapes = [shape for found in planned_shapes(table, layout) for shape in found]
    assert work.batches == [
        len(shapes),
        sum(b * t for b, t in shapes),
        sum(b * t * t for b, t in shapes),
    ]
    (status,) = find_statuses(Path(run.store.path))
    assert work.num_padded == work.batches[1] == status.counts["num_places"]
    assert work.rows_bytes == status.counts["size_bytes"]
    shards = [shard_bytes(store.spec, layout, table, i) for i in layout.shard_ids()]
    assert work.store_bytes > sum(shards) > work.rows_bytes
    assert [mount.needed_bytes for mount in work.mounts] == [work.store_bytes]
    *_, last = (Path(run.train.out) / "metrics.jsonl").read_text().splitlines()
    assert predictor.num_steps(1) == json.loads(last)["step"]


def test_costs_measured_on_short_samples_foretell_a_capture_of_long_ones(
    rounds: list[Round],
) -> None:
    ratios = [one.capture_ratio for one in rounds]
    print(f"capture: predicted / true {ratios}")
    assert 1 / BOUND < statistics.median(ratios) < BOUND


def test_and_their_training(rounds: list[Round]) -> None:
    ratios = [one.step_ratio for one in rounds]
    print(f"step: predicted / true {ratios}")
    assert 1 / BOUND < statistics.median(ratios) < BOUND


def _counted_work(run: Run, here: Path) -> tuple[CaptureWork, TrainWork]:
    _measure(run, here, is_measured=True)
    return work_of(_json(here / "work.json")), TrainWork(**_json(here / "train_work.json"))


def test_samples_that_training_drops_are_not_counted_for_it(folder: Path, tmp_path: Path) -> None:
    run = _run(folder, "short")
    whole, trained = _counted_work(run, tmp_path / "whole")
    fewer = replace(run.train, drop_domains=("b",), drop_samples=("short0", "short3"))
    same, left = _counted_work(replace(run, train=fewer), tmp_path / "fewer")
    # captured all the same
    assert same.num_samples == whole.num_samples == 200
    with_domain = replace(run, data=replace(run.data, files=(str(tmp_path / "left.jsonl"),)))
    rows = (folder / "short.jsonl").read_text().splitlines()
    kept = [row for row in rows if json.loads(row)["domain"] != "b"]
    kept = [row for row in kept if json.loads(row)["id"] not in fewer.drop_samples]
    (tmp_path / "left.jsonl").write_text("\n".join(kept))
    _, expected = _counted_work(with_domain, tmp_path / "left")
    assert left.batches[1:] == expected.batches[1:]
    assert left.batches[1] < 0.7 * trained.batches[1]
    assert left.validated == expected.validated
    unknown = replace(run.train, drop_domains=("B",))
    with pytest.raises(UsageError, match="no store has a domain 'B'"):
        _counted_work(replace(run, train=unknown), tmp_path / "unknown")


def test_each_mount_takes_its_turns_of_the_shards(folder: Path, tmp_path: Path) -> None:
    run = _run(folder, "short")
    paths = [str(tmp_path / name) for name in ("a", "b", "c")]
    small = replace(run.store, path=",".join(paths), shard_bytes=1)
    work, _ = _counted_work(replace(run, store=small), tmp_path / "counted")
    assert [mount.path for mount in work.mounts] == paths
    assert sum(mount.needed_bytes for mount in work.mounts) == work.store_bytes
    further = [mount.needed_bytes for mount in work.mounts[1:]]
    assert min(further) > 0.2 * work.rows_bytes
    assert len({mount.device_id for mount in work.mounts}) == 1


def test_the_answers_steps_are_those_of_the_longest_of_each_batch() -> None:
    lengths = np.random.default_rng(0).integers(10, 500, 6400)
    expected = lengths.reshape(-1, 32).max(axis=1).sum()
    assert counting.answer_steps(lengths, 32) == pytest.approx(expected, rel=0.01)
    assert counting.answer_steps(lengths[:1], 32) == lengths[0]


@pytest.mark.parametrize("mode", ["bf16", "int4"])
def test_samples_that_a_capture_computes_alone_are_counted_before_it(
    mode: Any, folder: Path, tmp_path: Path
) -> None:
    run = _run(folder, "short")
    run = replace(
        run,
        data=replace(run.data, limit=90),
        store=replace(run.store, path=str(tmp_path / "hs"), hidden_mode=mode, last_mode=mode),
        capture=replace(run.capture, force=True),
    )
    files, place, times = resolve(run.target), _place(tmp_path / "logs", "capture"), Times()
    work, _ = counting.count(run, files, "cpu", 1, counting.Sampled(0))
    planning.main(run, place, {"kind": "cpu", "num_workers": 1, "only_count": False})
    store = open_store(run.store.path)
    target = capture_worker.load_target(run, place, store, files)
    with Stop() as stop:
        capture_worker.capture(store, target, run.capture, Silence(), stop, times)
    for counted, found in ((work.calibrated, times.calibrated), (work.gated, times.gated)):
        assert counted == [len(found), sum(one.num_tokens for one in found)]
    # those that the calibration is made from, and those that it is judged by
    assert [len(times.calibrated), len(times.gated)] == [90 if mode == "int4" else 0, 4]


def test_what_loads_with_the_first_sample_alone_is_no_cost_of_the_others() -> None:
    told = [SampleTime(100, 9.0), *(SampleTime(n, 0.5 + 0.01 * n) for n in (100, 200, 400))]
    assert capture_measure._alone_s(told) == pytest.approx([0.5, 0.01])
    assert capture_measure._alone_work_s(told, [0.5, 0.01]) == pytest.approx(10.0)
    assert capture_measure._alone_s([]) == [0.0, 0.0]


def test_a_captured_batch_costs_by_its_places_and_by_what_each_may_see() -> None:
    assert counting.amounts(3, 64) == [1.0, 192.0, 3 * 64 * 64]


def test_the_sample_of_the_data_does_not_depend_on_their_order(
    folder: Path,
) -> None:
    found = list(read((str(folder / "short.jsonl"),), 0, Dropped()))
    kept = []
    for order in (found, found[::-1]):
        sampled = counting.Sampled(7)
        assert list(sampled.through(order)) == order
        kept.append([conversation.key for conversation in sampled.conversations])
    assert len(kept[0]) == 7
    assert kept[0] == kept[1]


def test_the_command_predicts_from_a_kept_measurement_and_prints_lines_that_parse(
    rounds: list[Round], folder: Path
) -> None:
    predictor, measured = rounds[0].predictor, rounds[0].folder / "measured"
    known = {
        "run": to_dict(_run(folder, "short")),
        "capture": _json(measured / "costs.json"),
        "train": _json(measured / "train_costs.json"),
        "disk": _json(measured / "disk.json"),
    }
    (folder / "measurement.json").write_text(json.dumps(known))
    line = (
        "plan --config toy --set train.epochs=1 --set data.heldout=0.1 --data long.jsonl "
        "--store new --price 36 --measurement measurement.json --json "
        "--capture-gpus 0-1 --train-gpus 2"
    )
    answer = subprocess.run(
        [sys.executable, "-m", "dflash_pipeline.cli", *line.split()],
        cwd=folder,
        env={**os.environ, "DFLASH_GPUS_AS_CPU": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(answer.stdout)
    assert {way["name"] for way in found["ways"]} == {"one after the other", "side by side"}
    best, other = found["ways"]
    assert best["hours"] <= 1.02 * other["hours"]
    for way in found["ways"]:
        assert way["cost"] == pytest.approx(36 * 3 * way["hours"])
        assert [stage["name"] for stage in way["stages"]] == ["capture", "train"]
    assert found["work"]["num_tokens"] == predictor.work.num_tokens
    capture, train = (shlex.split(command) for command in found["commands"])
    assert capture[:2] == ["dflash", "capture"]
    assert train[:2] == ["dflash", "train"]
    assert train[train.index("--store") + 1] == "new"
    # nothing of it is left beside the store
    assert not list(folder.glob("dflash-plan-*"))
    assert not (folder / "new").exists()


def test_of_a_store_that_is_whole_only_the_training_is_planned(
    rounds: list[Round], folder: Path
) -> None:
    measured, store = rounds[0].folder / "measured", rounds[0].run.store.path
    known = {
        "run": to_dict(rounds[0].run),
        "capture": _json(measured / "costs.json"),
        "train": _json(measured / "train_costs.json"),
        "disk": _json(measured / "disk.json"),
    }
    (folder / "of-long.json").write_text(json.dumps(known))
    line = [*["plan", "--config", "toy", "--set", "train.epochs=1", "--set", "data.heldout=0.1"]]
    line += ["--data", "long.jsonl", "--measurement", "of-long.json", "--store", store]

    def said(*more: str) -> str:
        command = [sys.executable, "-m", "dflash_pipeline.cli", *line, *more]
        answer = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
        return answer.stdout

    text = said("--gpus", "cpu:2")
    assert f"{store} is captured whole, only the training is left:\n  dflash train " in text
    assert text.splitlines()[-1].startswith(f"next: dflash train --store {store} ")
    assert "--out" not in text
    # without --data those of its capture
    own = [one for one in line if one not in ("--data", "long.jsonl")]
    text = subprocess.run(
        [sys.executable, "-m", "dflash_pipeline.cli", *own, "--gpus", "cpu:2"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert f"{len(open_store(store))} samples" in text
    # a run is where the configuration puts the next one
    (folder / "mine").mkdir()
    (folder / "mine" / "run.json").touch()
    (train,) = json.loads(said("--set", "train.out=mine", "--json"))["commands"]
    assert "--out mine-2" in train
    assert "dflash capture" not in text
    assert "min of CPU workers" in text
    assert "GPUs" not in text
    found = json.loads(said("--gpus", "cpu:2", "--json"))
    assert [stage["name"] for way in found["ways"] for stage in way["stages"]] == ["train"]
    (train,) = found["commands"]
    assert shlex.split(train)[-2:] == ["--gpus", "cpu:2"]


def test_both_stages_are_measured_beside_each_other_as_on_a_gpu(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measuring, "_are_beside", lambda _devices: True)
    run, kept, lines = _run(folder, "short"), str(tmp_path / "kept.json"), io.StringIO()
    store = Path(run.store.path)
    found = measuring.measured(run, Devices("cpu", (0,)), store, kept, True, lines)
    way = found.one_after_the_other((0,), price=0.0)
    assert min(stage.hours for stage in way.stages) > 0
    # the training's process has not waited for the end of the other to say its first word
    said = lines.getvalue()
    assert said.index("measuring the disk") < said.index("measuring the capture")
    assert found.generate(1) is not None
    assert json.loads(Path(kept).read_text()).keys() == {"run", "capture", "train", "disk"}
    assert not list(folder.glob("dflash-plan-*"))
