"""A process that torchrun started is one rank already: nothing is launched."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from dflash_pipeline.configs import child, gpus, refusal
from dflash_pipeline.configs.errors import UsageError
from dflash_pipeline.configs.gpus import Devices
from dflash_pipeline.configs.launch import place_of
from dflash_pipeline.configs.schema import Run
from dflash_pipeline.configs.status import log_path, read_status, status_path


def is_rank() -> bool:
    """Whether torchrun, or what sets its variables, started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def run_rank(
    entry: str,
    run: Run,
    gpus_text: str,
    share: bool,
    stage: str,
    log_dir: str,
    extra: Mapping[str, object],
) -> int:
    """Call `entry` in this process, which from here on sees its own GPU alone.

    Returns the exit code. The traceback goes to the rank's log, one line to the terminal.
    UsageError where its GPU is not there or, unless `share`, in use.
    """
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    own = _own(gpus.parse(gpus_text), local_rank)
    gpus.check(own, share)
    with gpus.reserved(own, stage, share):
        if own.kind == "cuda":
            os.environ["CUDA_VISIBLE_DEVICES"] = gpus.device_name(own.ids[0])
        return _call(entry, run, own.kind, stage, log_dir, extra)


def _own(devices: Devices, local_rank: int) -> Devices:
    """The device of a rank; plain CPU workers have no numbers."""
    if devices.kind == "cpu" and not gpus.gpus_are_cpu():
        return devices
    if local_rank >= len(devices.ids):
        raise UsageError(
            f"torchrun started local rank {local_rank}, but there are only {devices}: lower "
            "--nproc-per-node"
        )
    return Devices(devices.kind, (devices.ids[local_rank],))


def _call(
    entry: str, run: Run, kind: str, stage: str, log_dir: str, extra: Mapping[str, object]
) -> int:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    # the other nodes have cores of their own
    num_here = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    place = place_of(kind, world, rank, stage, log_dir, rank, "env://", num_here)
    before = refusal.before(log_dir, stage)
    Path(log_dir).mkdir(parents=True, exist_ok=True)
    log = log_path(log_dir, stage, rank)
    sys.stderr.flush()
    terminal = os.dup(2)
    with log.open("ab") as file:
        os.dup2(file.fileno(), 2)
    try:
        code = child.call(entry, run, place, dict(extra))
    finally:
        sys.stderr.flush()
        os.dup2(terminal, 2)
        os.close(terminal)
    if code in (1, 2):
        ended = read_status(status_path(log_dir, stage, rank))
        error = ended.error if ended else f"exit code {code}"
        # a refusal says all there is to know; its log goes
        where = f"rank {rank}" if code == 2 else f"rank {rank}, log: {log}"
        sys.stderr.write(f"error: {error} ({where})\n")
    if code == 2:
        before.restore([rank])
    return code
