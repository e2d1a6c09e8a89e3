"""The stage of `dflash train`, and whether it can begin or go on: its stores and its directory."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import click

from dflash_pipeline.configs import inputs, torchrun
from dflash_pipeline.configs.arrival import await_store
from dflash_pipeline.configs.errors import UsageError
from dflash_pipeline.configs.gpus import Devices
from dflash_pipeline.configs.load import RUN_FILE
from dflash_pipeline.configs.mounts import root_of
from dflash_pipeline.configs.options import give, resolve
from dflash_pipeline.configs.schema import Run
from dflash_pipeline.configs.shares import parse_stores
from dflash_pipeline.configs.stage import run_stage

ENTRY = "dflash_pipeline.train.worker:main"


def prepared(context: click.Context, resume: bool) -> tuple[Run, list[str]]:
    """The run of this line and the directories of its stores, once these are there.

    UsageError without a store, and where the run directory must be named and is not.
    """
    run = with_samples_listed(context)
    stores = run.train.stores or (run.store.path,)
    inputs.need(stores[0], "--store DIR", "store.path")
    paths = [root_of(one.path) for one in parse_stores(stores)]
    for path in paths:
        await_store(path, "train", run.train.follow, click.echo)
    if not run.train.out:
        if resume or torchrun.is_rank():
            why = "--resume" if resume else "under torchrun"
            raise UsageError(f"{why}: name the run directory with --out DIR")
        give(context, "train.out", f"runs/{paths[0].name}-{time.strftime('%Y%m%d-%H%M%S')}")
        run = resolve(context)
    return run, list(map(str, paths))


def with_samples_listed(context: click.Context) -> Run:
    """The run of this line, with the samples of `--drop-sample @FILE` by name.

    The run's record names each of them, so that a run that goes on drops the same.
    """
    run = resolve(context)
    if run.train.drop_samples:
        give(context, "train.drop_samples", inputs.listed(run.train.drop_samples, "--drop-sample"))
        run = resolve(context)
    return run


def check_directory(out: str, resume: bool, is_sweep: bool) -> None:
    """UsageError unless OUT is free, or with `resume` holds the run or the sweep to go on with."""
    inputs.check_run_directory(out)
    if resume and not Path(out).is_dir():
        raise UsageError(f"--resume: there is no run directory {out}")
    is_run = (Path(out) / RUN_FILE).is_file()
    if resume and not is_sweep and not is_run:
        raise UsageError(
            f"{out} holds no {RUN_FILE}: there is no run to resume; leave --resume out, or "
            "name the --sweep that it is of"
        )
    if resume and is_sweep and is_run:
        raise UsageError(f"{out} is a run, no sweep: leave --sweep out, or name another --out")
    if not resume and not inputs.is_free_for_run(out):
        raise UsageError(f"{out} is not empty: go on with it by --resume, or name another --out")


def train(run: Run, stores: Sequence[str], devices: Devices, share: bool, resume: bool) -> int:
    """One process a device; the exit code. stores: their directories."""
    named, out = ", ".join(run.train.stores or stores), run.train.out
    click.echo(f"train: {named} -> {out} on {devices}")
    return run_stage(ENTRY, run, devices, "train", f"{out}/logs", {"resume": resume}, share)


def run_rank(run: Run, gpus: str, share: bool, resume: bool) -> int:
    """The rank that torchrun started this process as; the exit code."""
    extra, logs = {"resume": resume}, f"{run.train.out}/logs"
    return torchrun.run_rank(ENTRY, run, gpus, share, "train", logs, extra)
