"""`dflash plan`: what it counts is exact, and what it measured on some data holds for others."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_pipeline.capture import measure as capture_measure
from dflash_pipeline.capture import planning
from dflash_pipeline.capture.samples import Dropped, read
from dflash_pipeline.capture.toytext import conversations
from dflash_pipeline.capture.warmup import num_positions
from dflash_pipeline.configs.load import load, to_dict
from dflash_pipeline.configs.place import Place
from dflash_pipeline.configs.prediction import (
    HOUR_S,
    CaptureCosts,
    CaptureWork,
    Predictor,
    TrainCosts,
    TrainWork,
)
from dflash_pipeline.configs.schema import Run
from dflash_pipeline.configs.status import find_statuses
from dflash_pipeline.store.build import shard_bytes
from dflash_pipeline.store.reader import open_store
from dflash_pipeline.train import measure as train_measure
from dflash_pipeline.train import worker
from places import cpu_place

# between measuring and running, others may take the machine's cores or leave them: under a load of
# six on two cores steps were foretold at 0.7 to 2.0 of what they took. A formula that counts a
# batch, a step or a device wrongly is further off
SHARED = 4.0


def _place(folder: Path, stage: str) -> Place:
    return cpu_place(folder, stage)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Short and long conversations, and what was measured on the short ones."""
    folder = tmp_path_factory.mktemp("plan")
    sources = [conversations(domain, "train", 0) for domain in ("math", "chat", "code")]
    texts = [next(sources[number % 3]) for number in range(360)]
    texts.sort(key=lambda turns: sum(len(turn["content"]) for turn in turns))
    for name, part in (("short", texts[:160]), ("long", texts[-100:])):
        rows = [{"id": f"{name}{i}", "messages": turns} for i, turns in enumerate(part)]
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(capture_measure, "CAPTURE_S", 2.0)
        patch.setattr(train_measure, "TRAIN_S", 3.0)
        _measure(folder, "short", is_measured=False)
    return folder


def _run(folder: Path, name: str) -> Run:
    run = load("toy", ["train.epochs=1", "data.heldout=0.1"], {})
    return replace(
        run,
        data=replace(run.data, files=(str(folder / f"{name}.jsonl"),)),
        store=replace(run.store, path=str(folder / f"{name}-store")),
        train=replace(run.train, out=str(folder / f"{name}-run")),
    )


def _measure(folder: Path, name: str, is_measured: bool) -> None:
    here = folder / f"{name}-measured"
    here.mkdir()
    for stage in (capture_measure, train_measure):
        extra: dict[str, object] = {"folder": str(here), "is_measured": is_measured}
        stage.main(_run(folder, name), _place(folder / "logs", "plan"), extra)


def _json(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


@pytest.fixture(scope="module")
def predictor(folder: Path) -> Predictor:
    """Of the long conversations, counted, from the costs of the short ones."""
    _measure(folder, "long", is_measured=True)
    counted, measured = folder / "long-measured", folder / "short-measured"
    return Predictor(
        _run(folder, "long"),
        CaptureWork(**_json(counted / "work.json")),
        CaptureCosts(**_json(measured / "costs.json")),
        TrainWork(**_json(counted / "train_work.json")),
        TrainCosts(**_json(measured / "train_costs.json")),
    )


@pytest.fixture(scope="module")
def long_run(folder: Path) -> Run:
    """The same conversations captured and trained on for real."""
    run = _run(folder, "long")
    place = _place(Path(f"{run.store.path}.logs"), "capture")
    extra: dict[str, object] = {"kind": "cpu", "num_workers": 1, "only_count": False}
    planning.plan_and_capture(run, place, extra)
    run = replace(run, train=replace(run.train, stores=(run.store.path,)))
    worker.main(run, _place(Path(run.train.out) / "logs", "train"), {"resume": False})
    return run


def test_what_is_counted_is_what_the_run_then_has(
    predictor: Predictor, folder: Path, long_run: Run
) -> None:
    work = CaptureWork(**_json(folder / "long-measured" / "work.json"))
    store = open_store(long_run.store.path)
    table, layout = store.table, store.layout
    assert (work.num_samples, work.num_tokens) == (len(table), table.num_tokens.sum())
    shapes = [
        (batch.stop - batch.start, num_positions(int(table.num_tokens[batch].max()), layout))
        for shard_id in layout.shard_ids()
        for batch in table.batches_of(shard_id)
    ]
    assert work.batches == [
        len(shapes),
        sum(b * t for b, t in shapes),
        sum(b * t * t for b, t in shapes),
    ]
    (status,) = find_statuses(Path(long_run.store.path))
    assert work.num_padded == work.batches[1] == status.counts["num_places"]
    assert work.rows_bytes == status.counts["size_bytes"]
    shards = [shard_bytes(store.spec, layout, table, i) for i in layout.shard_ids()]
    assert work.store_bytes > sum(shards) > work.rows_bytes
    *_, last = (Path(long_run.train.out) / "metrics.jsonl").read_text().splitlines()
    assert predictor.num_steps(1) == json.loads(last)["step"]


def test_costs_measured_on_short_samples_foretell_a_capture_of_long_ones(
    predictor: Predictor, long_run: Run
) -> None:
    (status,) = find_statuses(Path(long_run.store.path))
    costs, work = predictor.capture_costs, predictor.work
    # without what comes before the first batch: this process had loaded everything
    expected = predictor.capture(1).hours * HOUR_S - costs.start_s - work.read_s
    ratio = expected / status.counts["seconds"]
    print(f"capture: predicted {expected:.2f} s, took {status.counts['seconds']:.2f}: {ratio:.2f}")
    assert 1 / SHARED < ratio < SHARED


def test_and_their_training(predictor: Predictor, long_run: Run) -> None:
    lines = (Path(long_run.train.out) / "metrics.jsonl").read_text().splitlines()
    losses = [line for line in map(json.loads, lines) if "loss" in line]
    first, last = losses[0], losses[-1]
    took_s = (last["time"] - first["time"]) / (last["step"] - first["step"])
    epoch_s, _ = predictor.epoch_s(1)
    ratio = epoch_s / predictor.num_steps(1) / took_s
    print(
        f"step: predicted {epoch_s / predictor.num_steps(1):.4f} s, took {took_s:.4f}: {ratio:.2f}"
    )
    assert 1 / SHARED < ratio < SHARED


def test_the_answers_steps_are_those_of_the_longest_of_each_batch() -> None:
    lengths = np.random.default_rng(0).integers(10, 500, 6400)
    expected = lengths.reshape(-1, 32).max(axis=1).sum()
    assert capture_measure.answer_steps(lengths, 32) == pytest.approx(expected, rel=0.01)
    assert capture_measure.answer_steps(lengths[:1], 32) == lengths[0]


def test_the_sample_of_the_data_does_not_depend_on_their_order(
    folder: Path,
) -> None:
    found = list(read((str(folder / "short.jsonl"),), 0, Dropped()))
    kept = []
    for order in (found, found[::-1]):
        sampled = capture_measure.Sampled(7)
        assert list(sampled.through(order)) == order
        kept.append([conversation.key for conversation in sampled.conversations])
    assert len(kept[0]) == 7
    assert kept[0] == kept[1]


def test_the_command_predicts_from_a_kept_measurement_and_prints_lines_that_parse(
    predictor: Predictor, folder: Path
) -> None:
    measured = folder / "short-measured"
    known = {
        "run": to_dict(_run(folder, "short")),
        "capture": _json(measured / "costs.json"),
        "train": _json(measured / "train_costs.json"),
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
