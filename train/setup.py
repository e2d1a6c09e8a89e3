"""What one rank needs before its first step: stores, head, drafter, optimizer, a place to begin."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch

from dflash_pipeline.configs.errors import UsageError
from dflash_pipeline.configs.place import Place, dtype_name
from dflash_pipeline.configs.schema import Run
from dflash_pipeline.configs.shares import parse_stores
from dflash_pipeline.store import open_store
from dflash_pipeline.store.completion import is_calibrated
from dflash_pipeline.store.reader import Store
from dflash_pipeline.store.runlog import RunLog
from dflash_pipeline.train import checkpoint, preflight
from dflash_pipeline.train.checkpoint import Progress
from dflash_pipeline.train.clock import Clock
from dflash_pipeline.train.consumption import Consumption
from dflash_pipeline.train.drafter import Drafter
from dflash_pipeline.train.forward import Forward, forward_of
from dflash_pipeline.train.group import Group
from dflash_pipeline.train.head import TargetHead
from dflash_pipeline.train.journal import Journal
from dflash_pipeline.train.metrics import Metrics
from dflash_pipeline.train.noise import Noise
from dflash_pipeline.train.optim import Optimizer
from dflash_pipeline.train.order import Catalog, catalog, planned_steps
from dflash_pipeline.train.profile import Profiler
from dflash_pipeline.train.remembered import trained_on
from dflash_pipeline.train.saver import Saver
from dflash_pipeline.train.selection import doubled_lines, dropped_lines, kept_samples
from dflash_pipeline.train.shape import DrafterShape, drafter_shape
from dflash_pipeline.train.stop import StopWish
from dflash_pipeline.train.takeover import take_over

IDLE_S = 0.5


@dataclass(slots=True)
class Training:
    """What one rank holds while it trains."""

    run: Run
    out: Path
    group: Group
    stores: list[Store]
    samples: Catalog
    drafter: Drafter
    forward: Forward
    head: TargetHead
    optimizer: Optimizer
    metrics: Metrics
    journal: Journal
    saver: Saver | None
    """Rank 0's alone."""
    clock: Clock
    noise: Noise
    profiler: Profiler
    progress: Progress
    consumption: Consumption = field(init=False)
    """Set once the order is known."""
    feed_bytes: int = 0
    """What the feed's buffers hold on the device."""

    def save(self, is_best: bool) -> None:
        """Have the checkpoint of this step written, once, and OUT/best point to it."""
        if self.saver is not None:
            told = self.consumption.telling(self.progress.position)
            with self.clock.stage("checkpoint"):
                self.saver.save(self.optimizer.state(), self.progress, is_best, told)

    def close(self) -> None:
        """Wait for the checkpoints; raises what writing them met."""
        # the last one's error is the one that is told
        with contextlib.ExitStack() as closing:
            if self.saver is not None:
                closing.callback(self.saver.close)
            closing.callback(setattr, self.clock, "stage_now", "checkpoint")
            closing.callback(self.profiler.close, self.progress.step)
            closing.callback(self.journal.close)

    def holdings(self) -> dict[str, int]:
        """Bytes on the device that stay from step to step, by what holds them."""
        return (
            self.optimizer.sizes()
            | {"embedding and head": self.head.num_bytes}
            | {"the feed's buffers": self.feed_bytes}
        )

    def beside(self) -> dict[str, int]:
        """Bytes on the device that are not torch's, by what holds them."""
        return {"sums over GPUs": self.optimizer.connection_bytes}


def open_stores(
    run: Run, place: Place, log: RunLog, wish: StopWish, is_resumed: bool
) -> tuple[list[Store], Catalog, DrafterShape]:
    """Stores, their trainable samples, and the drafter's shape: all that can be refused early."""
    shares = parse_stores(run.train.stores or (run.store.path,))
    stores = [_await_calibration(share.path, run, log, wish) for share in shares]
    preflight.check_stores(run, stores, is_resumed)
    first = stores[0]
    try:
        shape = drafter_shape(
            run.drafter, first.target_config(), first.spec, first.attributes.mask_token_id
        )
    except ValueError as error:
        raise UsageError(str(error)) from error
    preflight.check_device(run, shape, place)
    tables = [store.table for store in stores]
    samples = catalog(tables, shares, run.train)
    if place.rank == 0:
        names = [share.path for share in shares]
        dropped = dropped_lines(names, tables, kept_samples(tables, run.train))
        for line in (*dropped, *doubled_lines(names, tables)):
            log.say(line)
    preflight.rehearse(run, shape, place)
    return stores, samples, shape


def _await_calibration(path: str, run: Run, log: RunLog, wish: StopWish) -> Store:
    """The store, once a capture that has just begun has settled how its rows are stored."""
    store = open_store(path)
    if store.spec.is_calibrated or not run.train.follow:
        return store
    log.say_once(f"waiting until the capture into {path} has calibrated {store.spec.hidden_mode}")
    while not is_calibrated(path):
        log.state("waiting")
        if wish.is_asked():
            raise KeyboardInterrupt
        time.sleep(IDLE_S)
    return open_store(path)


def compute_on(run: Run, place: Place) -> tuple[torch.device, torch.dtype]:
    """Where this rank computes, and in which type."""
    device = torch.device(place.device)
    is_bf16 = dtype_name(run.train.dtype, place.kind) == "bf16"
    return device, torch.bfloat16 if is_bf16 else torch.float32


def build(
    run: Run,
    place: Place,
    group: Group,
    log: RunLog,
    stores: list[Store],
    samples: Catalog,
    shape: DrafterShape,
    resume: bool,
) -> Training:
    """Head, drafter, optimizer; random, from a checkpoint, or where the run was left."""
    device, dtype = compute_on(run, place)
    out = Path(run.train.out)
    torch.manual_seed(run.train.seed)
    # where it will be: torch's own start weights, which nothing keeps, cost seconds on a CPU
    with device:
        drafter = Drafter(shape)
    if run.train.init_from:
        take_over(drafter, run.train.init_from)
    else:
        drafter.initialise(run.train.seed)
    # the rotary frequencies are made on the CPU
    drafter.to(device=device)
    # the masters are taken before the parameters are rounded to the compute type
    optimizer = Optimizer(drafter.named_parameters(), run.optim, group, run.train.log_every, dtype)
    optimizer.connect()
    saver = None
    if group.rank == 0:
        # of several stores all are of one identity
        saver = Saver(out, shape, run.train.keep, optimizer.state(), trained_on(stores[0]))
    num_steps = planned_steps(samples, run.train, group.world)
    progress = checkpoint.at_the_beginning(num_steps)
    found = checkpoint.newest(out) if resume else None
    if found is not None:
        progress, state = checkpoint.load(found, device)
        progress = checkpoint.replanned(progress, num_steps)
        optimizer.load(state)
        log.say_once(f"going on from {found}")
    if saver is not None and resume:
        checkpoint.trim_metrics(out / "metrics.jsonl", progress.step)
        if found is not None:
            saver.found(progress)
    clock = Clock(device)
    return Training(
        run=run,
        out=out,
        group=group,
        stores=stores,
        samples=samples,
        drafter=drafter,
        forward=forward_of(drafter, run.train, device),
        head=TargetHead.from_store(stores[0], shape, device, dtype),
        optimizer=optimizer,
        metrics=Metrics(shape.block_size, device),
        journal=Journal(out, log, group, run, stores, samples, clock),
        saver=saver,
        clock=clock,
        noise=Noise(run.train, group.rank, device),
        profiler=Profiler(run.train.profile, out, group.rank, device, log.say),
        progress=progress,
    )
