"""The processes of `dflash plan`: one for each stage, since neither may know the other.

They meet in a folder beside the store: the capture's process leaves a small store there, the
training's trains on it; each leaves what it counted and measured as JSON. On a GPU both begin at
once, and the training's, whose libraries and compiler take longest, waits where it needs the
device for itself; on a CPU, whose cores both would measure, they run one after the other.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from dflash_pipeline.configs import gpus, inputs
from dflash_pipeline.configs.costs import (
    CPU,
    CaptureCosts,
    CaptureWork,
    DiskCosts,
    Mount,
    TrainCosts,
    TrainWork,
)
from dflash_pipeline.configs.disk import nearest, write_whole
from dflash_pipeline.configs.errors import UsageError
from dflash_pipeline.configs.gpus import Devices
from dflash_pipeline.configs.jsonfile import read_object
from dflash_pipeline.configs.launch import Beside, launch, noted_signals
from dflash_pipeline.configs.load import differences, from_dict, to_dict
from dflash_pipeline.configs.mounts import split
from dflash_pipeline.configs.options import refuse_unheeded
from dflash_pipeline.configs.prediction import Predictor
from dflash_pipeline.configs.schema import CE_ALONE, Run
from dflash_pipeline.configs.scratch import scratch
from dflash_pipeline.configs.screen import Lines
from dflash_pipeline.configs.stage import ONE_CPU, scratch_logs

# what a measurement holds for; how much data there are, and where, is counted anew
_SECTIONS = ("target", "drafter", "loss", "optim", "feed")
_FIELDS = {
    "store": ("hidden_mode", "last_mode", "last_rows", "shard_bytes"),
    "capture": (
        "token_budget",
        "pad_multiple",
        "num_buckets",
        "gate_samples",
        "device_buffers",
        "host_buffers",
        "compile",
    ),
    "train": (
        "anchors_per_sample",
        "batch_anchors",
        "batch_tokens",
        "accumulate",
        "log_every",
        "dtype",
        "compile",
        "noise_std",
    ),
    "generate": ("batch_size", "endpoints"),
}


class MeasuringFailed(Exception):
    """A process ended with this exit code; it has said why."""

    def __init__(self, code: int) -> None:
        super().__init__(f"exit code {code}")
        self.code = code


def measured(
    run: Run,
    devices: Devices,
    store: Path,
    measurement: str,
    share: bool,
    lines: Lines,
    with_answers: bool = True,
) -> Predictor:
    """`predictor` on the first of the devices, in a folder beside the store, where its disk is.

    Where the file `measurement` is there no device is asked for: nothing is measured on it.
    with_answers: measure generating them as well.
    """
    first = Devices(devices.kind, devices.ids[: run.target.num_gpus])
    if is_kept(measurement):
        share, held = True, ONE_CPU
    else:
        held = first
        gpus.check(first, share)
    parent = nearest(store.absolute().parent)
    with (
        scratch_logs("plan") as logs,
        scratch("plan", parent) as folder,
        gpus.reserved(held, "plan", share),
    ):
        return predictor(run, first, folder, logs, measurement, lines, with_answers)


def is_kept(measurement: str) -> bool:
    """Whether an earlier plan has left this file."""
    return bool(measurement) and Path(measurement).exists()


def check_measurement(context: click.Context, measurement: str) -> None:
    """UsageError where the file can neither be used nor be written, or where it is there and the
    line says how to share the device that nothing is measured on."""
    if is_kept(measurement):
        why = f"--measurement {measurement} is there, nothing is measured: leave it out"
        refuse_unheeded(context, ("--share-gpu",), why)
    elif measurement:
        inputs.check_out_file(measurement, "--measurement")


def check_loss(run: Run) -> None:
    """UsageError for a store without what the loss needs, before minutes of measuring its target:
    training would be refused then."""
    if run.store.last_mode == "none" and run.loss.needs_last:
        raise UsageError(
            f"loss.kl is {run.loss.kl:g} and loss.tv {run.loss.tv:g}, but store.last_mode = none "
            "stores no `last` states: plan with --last-mode bf16, or with cross-entropy alone: "
            f"{CE_ALONE}"
        )


def planned_devices(
    text: str, capture_text: str, train_text: str
) -> tuple[Devices, tuple[tuple[int, ...], tuple[int, ...]] | None]:
    """All devices of a plan, and their split where the line names one."""
    if not capture_text and not train_text:
        return gpus.parse(text), None
    if text or not (capture_text and train_text):
        raise UsageError("--capture-gpus and --train-gpus go together, and without --gpus")
    first, second = gpus.parse(capture_text), gpus.parse(train_text)
    if first.kind == "cpu" == second.kind and not gpus.gpus_are_cpu():
        # CPU workers have no numbers of their own
        later = tuple(len(first.ids) + number for number in second.ids)
        second = Devices("cpu", later)
    if first.kind != second.kind or set(first.ids) & set(second.ids):
        raise UsageError(
            f"--capture-gpus {capture_text} and --train-gpus {train_text}: name different GPUs"
        )
    everything = Devices(first.kind, tuple(sorted((*first.ids, *second.ids))))
    return everything, (first.ids, second.ids)


def predictor(
    run: Run,
    devices: Devices,
    folder: Path,
    logs: str,
    measurement: str,
    lines: Lines,
    with_answers: bool = True,
) -> Predictor:
    """Count the data of `run` and, unless the file `measurement` is there, measure; it is written.

    folder: a scratch folder beside the store; devices: those of one target, the first trains.
    UsageError for a measurement of other settings, or of plain layers where so much data have them
    compiled; MeasuringFailed.
    """
    known = _read_measurement(measurement, run, devices)
    if known is None:
        capturing = Devices(devices.kind, devices.ids[: run.target.num_gpus])
        training = Devices(devices.kind, devices.ids[:1])
    else:
        # counting needs no GPU, which may be another machine's
        capturing = training = ONE_CPU
    extra: dict[str, object] = {
        "folder": str(folder),
        "is_measured": known is not None,
        "kind": devices.kind,
    }
    extra["with_answers"] = with_answers
    _run_both(run, {"capture": capturing, "train": training}, logs, extra, lines)
    if known is None:
        known = {
            "run": to_dict(run),
            "capture": read_object(folder / "costs.json"),
            "train": read_object(folder / "train_costs.json"),
            "disk": read_object(folder / "disk.json"),
        }
        if measurement:
            Path(measurement).parent.mkdir(parents=True, exist_ok=True)
            write_whole(Path(measurement), (json.dumps(known, indent=1) + "\n").encode())
    work, costs = work_of(read_object(folder / "work.json")), CaptureCosts(**known["capture"])
    if work.is_compiled != costs.is_compiled:
        layers = {True: "compiled layers", False: "plain layers"}
        raise UsageError(
            f"--measurement {measurement} was made with {layers[costs.is_compiled]}, a capture of "
            f"these {work.num_tokens:,} tokens has {layers[work.is_compiled]} (capture.compile = "
            f"{run.capture.compile}). Name a file that is not there, and it is measured anew"
        )
    return Predictor(
        run,
        work,
        costs,
        TrainWork(**read_object(folder / "train_work.json")),
        TrainCosts(**known["train"]),
        DiskCosts(**known["disk"]),
    )


def _run_both(
    run: Run,
    devices: Mapping[str, Devices],
    logs: str,
    extra: Mapping[str, object],
    lines: Lines,
) -> None:
    """The process of each stage; the first one's failure ends the other. MeasuringFailed."""
    with noted_signals() as signals:
        failed: list[int] = []
        # they take turns at what needs the cores
        beside = Beside(signals, 1, failed)

        def work(stage: str) -> None:
            if signals or failed:
                return
            entry, own = f"dflash_pipeline.{stage}.measure:main", devices[stage]
            words, count = (entry, run, own, "plan", logs, extra, lines), len(own.ids)
            try:
                code = launch(*words, beside=beside, per_process=count)
            except BaseException:
                failed.append(1)
                raise
            # of one that was ended by the other's failure that one's stands first
            failed.extend([code] if code else [])

        with ThreadPoolExecutor(len(devices) if _are_beside(devices.values()) else 1) as pool:
            for done in [pool.submit(work, stage) for stage in devices]:
                done.result()
    if signals or failed:
        raise MeasuringFailed(128 + signals[0] if signals else failed[0])


def _are_beside(devices: Iterable[Devices]) -> bool:
    return all(one.kind == "cuda" for one in devices)


def work_of(values: Mapping[str, Any]) -> CaptureWork:
    """Counted work out of its JSON."""
    return CaptureWork(**{**values, "mounts": [Mount(**one) for one in values["mounts"]]})


def _read_measurement(path: str, run: Run, devices: Devices) -> dict[str, Any] | None:
    """An earlier measurement of the same settings on such devices; None: there is no such file."""
    if not is_kept(path):
        return None
    try:
        found = read_object(Path(path))
        before = from_dict(found["run"])
        device = CaptureCosts(**found["capture"]).device
        TrainCosts(**found["train"])
        DiskCosts(**found["disk"])
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise UsageError(
            f"--measurement {path} is no measurement of dflash plan ({error}): name another file"
        ) from error
    different = differences(before, run, _SECTIONS)
    different += [
        f"{section}.{name}"
        for section, names in _FIELDS.items()
        for name in names
        if asdict(before)[section][name] != asdict(run)[section][name]
    ]
    num_before, num_now = len(split(before.store.path)), len(split(run.store.path))
    if num_before != num_now:
        different.append(f"a store over {num_before} and {num_now} mounts")
    if (device == CPU) != (devices.kind == "cpu"):
        different.append(f"measured on {device}, asked of {devices} (--gpus)")
    if different:
        raise UsageError(
            f"--measurement {path} was made with other settings: {'; '.join(different)}. Name a "
            "file that is not there, and it is measured anew"
        )
    return found
