"""One device's part of a capture, as a story: load, warm up, take shards until none is left."""

from __future__ import annotations

import contextlib
import time
import traceback
from collections.abc import Sequence

import numpy as np
import torch

from dflash_pipeline.capture.calibrating import calibrated
from dflash_pipeline.capture.compiled import Served, code_of, compile_layers, is_wanted
from dflash_pipeline.capture.forward import MORE_GPUS
from dflash_pipeline.capture.model import TargetFiles, resolve
from dflash_pipeline.capture.offload import Offload
from dflash_pipeline.capture.shapes import Shape, extremes, largest_batch, planned_shapes
from dflash_pipeline.capture.shards import Worker
from dflash_pipeline.capture.stop import Stop
from dflash_pipeline.capture.target import Target, compute_dtype, slow_fallback
from dflash_pipeline.capture.times import Times
from dflash_pipeline.capture.turns import turn
from dflash_pipeline.capture.voice import Voice
from dflash_pipeline.capture.warmup import warm_up
from dflash_pipeline.configs.errors import UsageError, first_line
from dflash_pipeline.configs.memory import explained
from dflash_pipeline.configs.place import Place, is_poisoned, let_memory_grow
from dflash_pipeline.configs.schema import CaptureConfig, Run
from dflash_pipeline.configs.sizes import parse_size
from dflash_pipeline.store.build import plan_lock
from dflash_pipeline.store.calibration import NUM_SAMPLES
from dflash_pipeline.store.lease import Leases
from dflash_pipeline.store.quota import Room
from dflash_pipeline.store.reader import Store, open_store
from dflash_pipeline.store.report import compiled_text
from dflash_pipeline.store.runlog import RunLog
from dflash_pipeline.store.writer import StoreWriter

IDLE_S = 0.5
SEAL_WAIT_S = 600.0


def main(run: Run, place: Place, extra: dict[str, object]) -> None:
    """One of the processes that capture the planned store at `run.store.path`; see `work`."""
    prepare_torch(place)
    work(run, place, resolve(run.target))


def work(run: Run, place: Place, files: TargetFiles) -> None:
    """Capture the planned store at `run.store.path` until nothing is left; several may at once.

    Raises ValueError when the target is not the store's, the gate refuses, too many samples are
    bad, or shards had to be set aside; KeyboardInterrupt after SIGINT, SIGTERM or SIGHUP.
    """
    log = RunLog(place)
    store = open_store(run.store.path)
    if not store.is_complete:
        check_weights(run, store, files)
        try:
            with explained_start(place):
                target = load_target(run, place, store, files)
        except UsageError as error:
            # no refusal that leaves nothing behind: the plan is there
            raise ValueError(
                f"{error}. {store.path} was planned for these weights: remove it"
            ) from error
        if slow := slow_fallback(files, place.kind):
            log.say(slow)
        num_tokens = int(store.table.num_tokens.sum())
        planned = planned_shapes(store.table, store.layout)
        served = compiled(target, planned, run.capture, num_tokens, log)
        warm_up(target, extremes(planned))
        where = target.spread or f"on {place.device}"
        log.say(f"{run.target.id} is ready {where} ({target.dtype})")
        try:
            with Stop() as stop:
                store = capture(store, target, run.capture, log, stop)
        except KeyboardInterrupt:
            log.say("stopped; committed shards are kept, run the same command to go on")
            raise
        if served and target.is_compiled:
            log.say(f"compiled layers served {100 * served.share:.1f} % of the batches' layers")
    seal(store, run.capture)
    num_bad = int(np.count_nonzero(store.state_N))
    records = [store.commit_of(shard_id) for shard_id in store.layout.shard_ids()]
    num_compiled = sum(record is not None and record.is_compiled for record in records)
    if 0 < num_compiled < len(records):
        # a worker gave its compiled layers up, or a later start had other settings
        log.say(compiled_text(num_compiled, len(records)))
    log.say(
        f"{store.path} is complete: {len(store.table):,} samples, "
        f"{int(store.table.num_tokens.sum()):,} tokens" + (f", {num_bad} bad" if num_bad else "")
    )


def prepare_torch(place: Place) -> None:
    """Settings that must stand before CUDA starts."""
    torch.set_num_threads(place.threads)
    let_memory_grow(torch.__version__)


def explained_start(place: Place) -> contextlib.AbstractContextManager[None]:
    """Say what holds the device's memory where the target itself does not fit."""
    device = torch.device(place.device)
    return explained(torch, device, dict, lambda: "loading the target", "weights", MORE_GPUS)


def check_weights(run: Run, store: Store, files: TargetFiles) -> None:
    """UsageError unless the store was planned for the target's weights."""
    if files.weight_hash() != store.spec.target_hash:
        raise UsageError(
            f"{store.path} was planned for other weights than those of target {run.target.id}: "
            "name the target of before, or another store"
        )


def load_target(run: Run, place: Place, store: Store, files: TargetFiles) -> Target:
    """The target that the store was planned for, on this worker's device. UsageError for one that
    cannot be used."""
    dtype = compute_dtype(store.spec.target_dtype, place.kind)
    layer_ids = store.spec.layer_ids
    return Target.load(files, layer_ids, place.device, dtype, run.target.num_gpus)


def compiled(
    target: Target,
    planned: Sequence[Sequence[Shape]],
    config: CaptureConfig,
    num_tokens: int,
    log: Voice,
) -> Served | None:
    """Compile the target for the planned shapes, where that is wanted; what counts its use.

    num_tokens: of the whole capture, whose work decides under `auto`. UsageError as of
    `compile_layers` where `capture.compile` is on.
    """
    if not is_wanted(config.compile, target.device.type, bool(target.spread), num_tokens):
        return None
    log.say("compiling the target's layers")

    def wait() -> None:
        # no lease is held yet: nobody takes this worker for hung
        log.state("waiting")
        time.sleep(IDLE_S)

    try:
        with turn(code_of(target), log.say, wait):
            return compile_layers(target, [shape for found in planned for shape in found])
    except Exception as error:
        if config.compile == "on":
            raise
        # whatever stopped it, the plain layers do without
        target.is_compiled = False
        traceback.print_exception(error)
        why = first_line(error.__cause__ or error)
        log.say(
            f"the layers of {type(target.model).__name__} cannot be compiled ({why}): they run "
            "plain"
        )
        return None


def seal(store: Store, config: CaptureConfig) -> None:
    """Mark a complete store as finished; any of its workers may. What dead ones left goes."""
    with _leases(store, config) as leases:
        leases.sweep()
    with plan_lock(store.path, wait_s=SEAL_WAIT_S):
        if not store.is_sealed:
            store.seal()


def capture(
    store: Store,
    target: Target,
    config: CaptureConfig,
    log: Voice,
    stop: Stop,
    times: Times | None = None,
    num_calibrated: int = NUM_SAMPLES,
) -> Store:
    """Take free shards and write them until the store is complete; the store as it is then.

    times: what batches and samples took is added to it; num_calibrated: samples to calibrate from,
    and to judge by.
    """
    times = times or Times()
    with _leases(store, config) as leases:
        leases.sweep()
        # a run that is started again tries what was set aside again
        leases.forgive()

        def beat() -> None:
            leases.beat()
            stop.check()

        def wait() -> None:
            log.state("waiting")
            beat()
            time.sleep(IDLE_S)

        store = calibrated(
            store, target, config, leases, log.say, beat, wait, times.calibrated, num_calibrated
        )
        with (
            Offload(
                largest_batch(store),
                target.device,
                num_device_buffers=config.device_buffers,
                num_host_buffers=config.host_buffers,
                poison=is_poisoned(),
            ) as offload,
            StoreWriter(store, leases, depth=config.host_buffers) as writer,
        ):
            worker = Worker(store, target, config, log, stop, leases, offload, writer, times)
            room = Room(store, leases, parse_size(config.quota))
            while not store.is_complete:
                lease = room.claim(config.max_shard_failures)
                if lease is not None:
                    worker.take(lease)
                    continue
                worker.settle()
                writer.wait()
                worker.refresh()
                worker.check_set_aside()
                if room.is_full:
                    room.release()
                    log.waiting(room.waiting_text())
                if not store.is_complete:
                    wait()
                    worker.idle_s += IDLE_S
        log.note(worker.counts().text())
    return store


def _leases(store: Store, config: CaptureConfig) -> Leases:
    return Leases(store.path, store.layout, heartbeat_s=config.heartbeat_s, hung_s=config.hung_s)
