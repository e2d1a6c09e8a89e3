"""The stages of `dflash capture`: one process plans, then one a device captures, or one does both.

The plan needs no GPU. How an earlier capture ended is told by `dflash status` until this one has
really begun.
"""

from __future__ import annotations

from pathlib import Path

import click

from dflash_pipeline.configs import counts, inputs, numbers, refusal
from dflash_pipeline.configs.gpus import Devices
from dflash_pipeline.configs.inputs import need
from dflash_pipeline.configs.launch import grouped
from dflash_pipeline.configs.mounts import split
from dflash_pipeline.configs.schema import Run
from dflash_pipeline.configs.stage import ONE_CPU, run_stage, scratch_logs
from dflash_pipeline.configs.status import Status

_PLAN = "dflash_pipeline.capture.planning:main"


def check(run: Run) -> tuple[str, ...]:
    """The directories of the store, its own first. UsageError unless all that a capture names is
    there, and the store can be where it shall be."""
    need(run.target.id, "--target MODEL", "target.id")
    need(run.data.files, "--data FILE", "data.files")
    store, *further = map(str, map(Path, split(need(run.store.path, "--store DIR", "store.path"))))
    inputs.check_target(run.target.id)
    inputs.check_data(run.data.files)
    inputs.check_store_place(store)
    for mount in further:
        inputs.check_further_mount(mount)
    if run.capture.calibration_from:
        inputs.check_store(run.capture.calibration_from)
    return (store, *further)


def count(run: Run, devices: Devices) -> int:
    """`--plan`: say what it would be, and leave nothing behind; the exit code."""
    with scratch_logs("plan") as logs:
        return run_stage(_PLAN, run, ONE_CPU, "plan", logs, _told(run, devices, True))


def capture(run: Run, store: str, devices: Devices, share: bool) -> int:
    """Plan and capture, and say what all workers together have done; the exit code."""
    per_target, logs = run.target.num_gpus, f"{store}.logs"
    told, planned = _told(run, devices, False), refusal.before(logs, "plan")
    plans, workers = list[Status](), list[Status]()
    is_alone = told["num_workers"] == 1
    if is_alone:
        # the one process plans as well: how an earlier plan ended says nothing any longer
        numbers.forget_ended(logs, "plan")
    elif code := run_stage(_PLAN, run, ONE_CPU, "plan", logs, told, ended=plans):
        return code
    click.echo(f"capture: {store} on {devices}")
    module, function = ("planning", "plan_and_capture") if is_alone else ("worker", "main")
    entry = f"dflash_pipeline.capture.{module}:{function}"
    code = run_stage(entry, run, devices, "capture", logs, told, share, per_target, workers)
    if code == 2:
        planned.restore(one.number for one in plans)
    for text in counts.closing_lines(workers, run.capture.price) if code == 0 else []:
        click.echo(text)
    return code


def _told(run: Run, devices: Devices, only_count: bool) -> dict[str, object]:
    num_workers = len(grouped(devices, run.target.num_gpus))
    return {"kind": devices.kind, "num_workers": num_workers, "only_count": only_count}
