"""One stage of a command: on which devices it runs, where its logs stand, launched and waited for.

A command that only reads leaves no logs beside what it reads, which may stand where nobody can
write: its logs go into a temporary directory, which stays where the line of an error names it.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from dflash_pipeline.configs import gpus, status
from dflash_pipeline.configs.errors import UsageError
from dflash_pipeline.configs.gpus import Devices
from dflash_pipeline.configs.launch import launch
from dflash_pipeline.configs.schema import Run
from dflash_pipeline.configs.scratch import scratch
from dflash_pipeline.configs.status import Status

ONE_CPU = Devices("cpu", (0,))


def devices_of(text: str, share: bool) -> Devices:
    """Those of --gpus. UsageError where one is not there, or another process uses it."""
    devices = gpus.parse(text)
    gpus.check(devices, share)
    return devices


def one_device(text: str, share: bool, per_target: int = 1) -> Devices:
    """The one of --gpus, or the first there is; of a target that is spread, so many.

    UsageError for another number of them.
    """
    devices = gpus.parse(text)
    if not text:
        devices = Devices(devices.kind, devices.ids[:per_target])
    if len(devices.ids) != per_target:
        told = f"--gpus {text}" if text else str(devices)
        wanted = "one device" if per_target == 1 else f"the {per_target} of one target"
        raise UsageError(f"{told}: this command runs on {wanted} (--gpus-per-target {per_target})")
    gpus.check(devices, share)
    return devices


def run_stage(
    entry: str,
    run: Run,
    devices: Devices,
    stage: str,
    logs: str,
    extra: Mapping[str, object],
    share: bool = True,
    per_process: int = 1,
    ended: list[Status] | None = None,
) -> int:
    """`launch` on devices that nobody else may take meanwhile; its exit code."""
    if devices is ONE_CPU:
        return launch(entry, run, devices, stage, logs, extra, ended=ended)
    # of several workers each may end once all shards are there, whoever wrote them
    lag_s = run.capture.hung_s if stage == "capture" else math.inf
    with gpus.reserved(devices, stage, share):
        return launch(
            entry,
            run,
            devices,
            stage,
            logs,
            extra,
            per_process=per_process,
            ended=ended,
            lag_s=lag_s,
        )


def look(
    entry: str,
    stage: str,
    extra: Mapping[str, object],
    run: Run | None = None,
    devices: Devices = ONE_CPU,
    share: bool = True,
) -> int:
    """A stage that only reads a store, in one process; the exit code. extra: `json` among
    others."""
    with scratch_logs(stage) as logs, gpus.reserved(devices, stage, share):
        # with --json stdout is the process's alone; anything said goes to stderr
        lines = sys.stderr if extra["json"] else sys.stdout
        count = len(devices.ids)
        return launch(entry, run or Run(), devices, stage, logs, extra, lines, per_process=count)


@contextlib.contextmanager
def scratch_logs(stage: str) -> Iterator[str]:
    """A log directory that stays only where an error left its traceback, until the next one."""
    with scratch(f"{stage}-logs", is_kept=_has_failed) as folder:
        yield str(folder)


def _has_failed(logs: Path) -> bool:
    # one that was killed has not said how it ended
    ended = ("done", "stopped")
    return any(one.state not in ended for one in status.find_statuses(logs))


def logs_near(checkpoint: Path) -> contextlib.AbstractContextManager[str]:
    """Those of the run that a checkpoint is of; nothing is left beside any other."""
    for folder in (checkpoint, checkpoint.parent):
        if (folder / "logs").is_dir():
            return contextlib.nullcontext(str(folder / "logs"))
    return scratch_logs("eval")
