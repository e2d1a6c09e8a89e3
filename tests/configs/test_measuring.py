"""A measurement of `dflash plan` that is kept is used again for the same settings alone."""

from __future__ import annotations

import io
import json
import os
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from dflash_pipeline.configs import measuring
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
from dflash_pipeline.configs.gpus import Devices
from dflash_pipeline.configs.load import load, to_dict
from dflash_pipeline.configs.schema import Run
from dflash_pipeline.configs.stage import ONE_CPU

CAPTURE = CaptureCosts(
    device=CPU,
    is_compiled=False,
    import_s=1.0,
    plan_s=1.0,
    token_s=1e-6,
    load_s=1.0,
    fixed_s=1.0,
    calibrated_s=[0.0, 0.0],
    gated_s=[0.0, 0.0],
    busy=1.0,
    batch_s=[0.0, 1e-4, 0.0],
    answer_step_s=0.0,
)
DISK = DiskCosts(
    worker_bytes_per_s=1e9, write_bytes_per_s=[1e9], read_bytes_per_s=[1e9], cached_bytes=0
)
TRAIN = TrainCosts(
    start_s=1.0, batch_s=[0.1], validated_s=[0.0], checkpoint_s=0.0, checkpoint_bytes=0
)


def _used(path: Path, sets: list[str], devices: Devices) -> None:
    known = {"run": to_dict(load("toy", ["store.path=a"], {}))}
    known |= {"capture": asdict(CAPTURE), "train": asdict(TRAIN), "disk": asdict(DISK)}
    file = path / "measurement.json"
    file.write_text(json.dumps(known))
    run = load("toy", ["store.path=a", *sets], {})
    measuring.predictor(run, devices, path, str(path / "logs"), str(file), io.StringIO())


@pytest.mark.parametrize(
    "setting",
    [
        "target.id=other",
        "drafter.num_layers=3",
        "store.shard_bytes=5",
        "store.path=a,b",
        "capture.gate_samples=1",
        "capture.device_buffers=3",
        "capture.host_buffers=9",
        "train.batch_tokens=99",
        "train.noise_std=0.1",
        "generate.batch_size=3",
    ],
)
def test_what_changes_a_cost_is_named(setting: str, tmp_path: Path) -> None:
    key = "a store over 1 and 2 mounts" if "path" in setting else setting.partition("=")[0]
    with pytest.raises(UsageError, match=f"was made with other settings: {key}"):
        _used(tmp_path, [setting], Devices("cpu", (0,)))


def test_what_was_measured_on_a_cpu_foretells_nothing_of_gpus(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="measured on CPU, asked of GPU 0"):
        _used(tmp_path, [], Devices("cuda", (0,)))


@pytest.mark.parametrize(
    "setting", ["data.limit=3", "train.epochs=2", "capture.price=3", "store.path=elsewhere"]
)
def test_other_data_or_more_epochs_are_only_counted(
    setting: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches: list[tuple[Any, Any]] = []

    def launched(*arguments: object, **_keywords: object) -> int:
        launches.append((arguments[2], arguments[5]))
        return 7

    monkeypatch.setattr(measuring, "launch", launched)
    with pytest.raises(measuring.MeasuringFailed, match="exit code 7"):
        _used(tmp_path, [setting], Devices("cpu", (0,)))
    extra = {"folder": str(tmp_path), "is_measured": True, "kind": "cpu", "with_answers": True}
    assert launches == [(ONE_CPU, extra)]


def test_a_kept_measurement_of_gpus_asks_for_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine that plans need not be the one that was measured."""
    monkeypatch.setattr("dflash_pipeline.configs.gpus._all_gpus", list)
    launches: list[tuple[Any, Any]] = []

    def launched(*arguments: object, **_keywords: object) -> int:
        launches.append((arguments[2], arguments[5]))
        return 7

    monkeypatch.setattr(measuring, "launch", launched)
    run = load("toy", ["store.path=a"], {})
    costs = {"capture": {**asdict(CAPTURE), "device": "a GPU"}}
    costs |= {"train": asdict(TRAIN), "disk": asdict(DISK)}
    file = tmp_path / "measurement.json"
    file.write_text(json.dumps({"run": to_dict(run), **costs}))
    devices = Devices("cuda", (0, 1, 2, 3))
    with pytest.raises(measuring.MeasuringFailed, match="exit code 7"):
        measuring.measured(run, devices, tmp_path / "a", str(file), False, io.StringIO())
    (device, extra), *_ = launches
    assert (device, extra["kind"], extra["is_measured"]) == (ONE_CPU, "cuda", True)
    # without it, the first of them is measured
    with pytest.raises(UsageError, match="--gpus 0: there is no such GPU"):
        measuring.measured(run, devices, tmp_path / "a", "", False, io.StringIO())


def test_a_measurement_is_kept_in_a_folder_that_is_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A minute of measuring must not end at a folder that nobody has made."""
    work = CaptureWork(
        num_samples=1,
        num_heldout=0,
        num_tokens=9,
        num_supervised=4,
        num_padded=16,
        store_bytes=90,
        rows_bytes=80,
        mounts=[Mount(path="a", needed_bytes=90, free_bytes=900, device_id=1)],
        read_s=0.1,
        batches=[1.0, 16.0, 256.0],
        warm_batches=[0.0, 0.0, 0.0],
        calibrated=[0.0, 0.0],
        gated=[0.0, 0.0],
        answer_steps=0.0,
        is_compiled=False,
    )
    written = {
        "costs": CAPTURE,
        "train_costs": TRAIN,
        "work": work,
        "train_work": TrainWork(batches=[1.0], validated=[0.0]),
        "disk": DISK,
    }

    def launched(*_arguments: object, **_keywords: object) -> int:
        for name, values in written.items():
            (tmp_path / f"{name}.json").write_text(json.dumps(asdict(values)))
        return 0

    monkeypatch.setattr(measuring, "launch", launched)
    run, devices = load("toy", ["store.path=a"], {}), Devices("cpu", (0,))
    kept = str(tmp_path / "new" / "folder" / "m.json")
    for _ in range(2):
        found = measuring.predictor(run, devices, tmp_path, "logs", kept, io.StringIO())
        assert found.work == work
    assert json.loads(Path(kept).read_text())["train"] == asdict(TRAIN)
    # as many data as have the layers compiled
    written["work"] = replace(work, is_compiled=True)
    with pytest.raises(UsageError, match=r"made with plain layers, a capture of these 9 tokens"):
        measuring.predictor(run, devices, tmp_path, "logs", kept, io.StringIO())


@pytest.mark.parametrize(("kind", "is_beside"), [("cuda", True), ("cpu", False)])
def test_on_gpus_both_begin_at_once_and_on_a_cpu_one_after_the_other(
    kind: str, is_beside: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both, ended = threading.Barrier(2), list[str]()

    def launched(entry: str, *_arguments: object, **_keywords: object) -> int:
        stage = entry.split(".")[1]
        if is_beside:
            both.wait(timeout=30)
        elif stage == "train":
            assert ended == ["capture"]
        ended.append(stage)
        return 0

    monkeypatch.setattr(measuring, "launch", launched)
    run, devices = load("toy", ["store.path=a"], {}), Devices(kind, (0,))
    with pytest.raises(FileNotFoundError, match=r"costs\.json"):
        measuring.predictor(run, devices, tmp_path, "logs", "", io.StringIO())
    assert sorted(ended) == ["capture", "train"]


_PARTS = {
    "waits": "import time\ndef main(*_): time.sleep(600)",
    "refuses": "from dflash_pipeline.configs.errors import UsageError\n"
    "def main(*_): raise UsageError('found 3, expected 4')",
}


def test_the_failure_of_one_process_ends_the_other_and_is_what_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name, text in _PARTS.items():
        (tmp_path / f"part_that_{name}.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    entries = {"capture": "part_that_waits:main", "train": "part_that_refuses:main"}
    whole = measuring.launch

    def launched(entry: str, run: Run, _devices: Devices, *arguments: Any, **keywords: Any) -> int:
        # on CPUs: a GPU's process would look for its GPU
        stage = entry.split(".")[1]
        return whole(entries[stage], run, ONE_CPU, *arguments, **keywords)

    monkeypatch.setattr(measuring, "launch", launched)
    run, devices = load("toy", ["store.path=a"], {}), Devices("cuda", (0,))
    lines, begin = io.StringIO(), time.monotonic()
    with pytest.raises(measuring.MeasuringFailed) as failed:
        measuring.predictor(run, devices, tmp_path, str(tmp_path / "logs"), "", lines)
    assert failed.value.code == 2
    assert time.monotonic() - begin < 60
    assert "SIGTERM" not in lines.getvalue()
    assert capfd.readouterr().err.splitlines() == ["error: found 3, expected 4"]
