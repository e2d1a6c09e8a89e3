"""One process of a training run, as a story: open, build, go on where it was left, learn, tell.

All ranks do the same in the same order; rank 0 alone writes. The loop waits for the device at log
lines only.
"""

from __future__ import annotations

import contextlib
import json
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from dflash_pipeline.configs.errors import UsageError
from dflash_pipeline.configs.place import Place, dtype_name, is_poisoned, let_memory_grow
from dflash_pipeline.configs.schema import Run
from dflash_pipeline.configs.shares import parse_stores
from dflash_pipeline.store import open_store
from dflash_pipeline.store.completion import is_calibrated
from dflash_pipeline.store.reader import Store
from dflash_pipeline.store.runlog import RunLog
from dflash_pipeline.train import checkpoint, preflight
from dflash_pipeline.train.checkpoint import Progress
from dflash_pipeline.train.drafter import Drafter
from dflash_pipeline.train.export import read_checkpoint
from dflash_pipeline.train.feed import Feed, feed_access
from dflash_pipeline.train.follow import Order
from dflash_pipeline.train.group import Group
from dflash_pipeline.train.head import TargetHead
from dflash_pipeline.train.journal import Journal
from dflash_pipeline.train.metrics import Metrics
from dflash_pipeline.train.optim import Optimizer, learning_rate
from dflash_pipeline.train.order import Catalog, Position, catalog, planned_steps
from dflash_pipeline.train.replay import held_out, replay
from dflash_pipeline.train.shape import DrafterShape, drafter_shape
from dflash_pipeline.train.step import learn
from dflash_pipeline.train.stop import StopVote, StopWish

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
    head: TargetHead
    optimizer: Optimizer
    metrics: Metrics
    journal: Journal
    num_steps: int
    """By the plan; what the learning rate is a function of."""
    progress: Progress
    saved_step: int = -1
    validated_step: int = -1


def main(run: Run, place: Place, extra: dict[str, object]) -> None:
    """`dflash train`, one rank; extra: resume."""
    torch.set_num_threads(place.threads)
    let_memory_grow(torch.__version__)
    out = Path(run.train.out)
    log = RunLog(place)
    with StopWish() as wish, contextlib.closing(Group(place, run.train.timeout_s)) as group:
        stores, samples, shape = _open(run, place, log, wish)
        resume = bool(extra["resume"])
        if group.rank == 0:
            checkpoint.begin(out, run, stores, resume)
        group.agree("begun", "")
        training = _build(run, place, group, log, stores, samples, shape, resume)
        position = training.progress.position
        order = Order(samples, stores, run.train, group, out / "order", position)
        if order.is_following:
            log.say("the store is still being captured: following it")
        device, dtype = _compute(run, place)
        access = feed_access(stores, run.feed, log.say)
        with (
            contextlib.closing(training.journal),
            Feed(stores, samples, order, run, shape, device, dtype, is_poisoned(), access) as feed,
        ):
            is_stopped = _learn(training, feed, order, StopVote(group, device), wish)
            if not is_stopped and training.validated_step != training.progress.step:
                _validate(training)
            _save(training)
        if is_stopped:
            log.say(f"stopped after step {training.progress.step}, checkpoint written")
            raise KeyboardInterrupt
        if group.rank == 0:
            log.say(f"trained {training.progress.step} steps into {out}")


def _open(
    run: Run, place: Place, log: RunLog, wish: StopWish
) -> tuple[list[Store], Catalog, DrafterShape]:
    """Stores, their trainable samples, and the drafter's shape: all that can be refused early."""
    shares = parse_stores(run.train.stores or (run.store.path,))
    stores = [_await_calibration(share.path, run, log, wish) for share in shares]
    preflight.check_stores(run, stores)
    first = stores[0]
    shape = drafter_shape(
        run.drafter, first.target_config(), first.spec, first.attributes.mask_token_id
    )
    preflight.check_device(shape, place)
    samples = catalog([store.table for store in stores], shares, run.train)
    preflight.rehearse(run, shape, place)
    return stores, samples, shape


def _await_calibration(path: str, run: Run, log: RunLog, wish: StopWish) -> Store:
    """The store, once a capture that has just begun has settled how its rows are stored."""
    store = open_store(path)
    if store.spec.is_calibrated or not run.train.follow:
        return store
    log.say(f"waiting until the capture into {path} has calibrated {store.spec.hidden_mode}")
    while not is_calibrated(path):
        log.state("waiting")
        if wish.is_asked():
            raise KeyboardInterrupt
        time.sleep(IDLE_S)
    return open_store(path)


def _compute(run: Run, place: Place) -> tuple[torch.device, torch.dtype]:
    device = torch.device(place.device)
    is_bf16 = dtype_name(run.train.dtype, place.kind) == "bf16"
    return device, torch.bfloat16 if is_bf16 else torch.float32


def _build(
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
    device, dtype = _compute(run, place)
    out = Path(run.train.out)
    torch.manual_seed(run.train.seed)
    drafter = Drafter(shape)
    if run.train.init_from:
        _take_over(drafter, run.train.init_from)
    else:
        drafter.initialise(run.train.seed)
    # the masters are taken before the parameters are rounded to the compute type
    drafter.to(device=device)
    optimizer = Optimizer(drafter.named_parameters(), run.optim, group, run.train.log_every, dtype)
    progress = Progress(step=0, position=Position(0, 0, 0), best_tau=0.0, best_step=0)
    found = checkpoint.newest(out) if resume else None
    if found is not None:
        progress, state = checkpoint.load(found, device)
        optimizer.load(state)
        log.say(f"going on from {found}")
    if resume and group.rank == 0:
        checkpoint.trim_metrics(out / "metrics.jsonl", progress.step)
    num_steps = planned_steps(samples, run.train, group.world)
    return Training(
        run=run,
        out=out,
        group=group,
        stores=stores,
        samples=samples,
        drafter=drafter,
        head=TargetHead.from_store(stores[0], shape, device, dtype),
        optimizer=optimizer,
        metrics=Metrics(shape.block_size, device),
        journal=Journal(out, log, group, run, stores, samples, num_steps),
        num_steps=num_steps,
        progress=progress,
    )


def _take_over(drafter: Drafter, path: str) -> None:
    """Weights of another checkpoint. UsageError unless it is a drafter of the same shape."""
    found = read_checkpoint(path)
    names = ["layer_ids", "mask_token_id", "head_dim", "rope_theta", "rms_norm_eps"]
    names += ["layer_types", "sliding_window"]
    # the speculators layout of others does not say how many layers its target has
    if found.layout == "zlab":
        names.append("num_target_layers")
    wrong = [
        f"{name} {getattr(found.shape, name)}, wanted {getattr(drafter.shape, name)}"
        for name in names
        if getattr(found.shape, name) != getattr(drafter.shape, name)
    ]
    wanted = {name: tuple(tensor.shape) for name, tensor in drafter.named_parameters()}
    sizes = {name: tuple(tensor.shape) for name, tensor in found.tensors.items()}
    wrong += [
        f"{name} {sizes.get(name, 'missing')}, wanted {wanted.get(name, 'absent')}"
        for name in sorted(wanted.keys() | sizes.keys())
        if wanted.get(name) != sizes.get(name)
    ]
    if wrong:
        raise UsageError(
            f"{path} is another drafter than the one configured ({'; '.join(wrong[:6])}): set "
            "drafter.* to its shape, or begin without --init-from"
        )
    drafter.load_state_dict(found.tensors)


def _learn(training: Training, feed: Feed, order: Order, vote: StopVote, wish: StopWish) -> bool:
    """Steps until the run is over; whether it was stopped before."""
    config, journal = training.run.train, training.journal
    optimizer, metrics = training.optimizer, training.metrics
    draw, lr = None, 0.0
    while not config.max_steps or training.progress.step < config.max_steps:
        training.group.beat(training.progress.step)
        coming = feed.step(wish.is_asked, journal.waiting)
        if coming is None:
            break
        draw = coming
        for batch in feed.batches(draw):
            learn(batch, training.drafter, training.head, training.run.loss, optimizer, metrics)
        lr = learning_rate(training.progress.step, training.num_steps, training.run.optim)
        votes = optimizer.step(lr, wish.is_asked())
        step = training.progress.step + 1
        training.progress = replace(training.progress, step=step, position=draw.after)
        journal.note(step, draw)
        if step % config.log_every == 0:
            journal.line(step, lr, metrics, optimizer, feed)
        if config.validate_every and step % config.validate_every == 0:
            _validate(training)
        if step % config.save_every == 0:
            _save(training)
        if vote.is_carried(votes):
            return True
    if journal.has_steps:
        journal.line(training.progress.step, lr, metrics, optimizer, feed)
    return order.is_stopped


def _validate(training: Training) -> None:
    """Replay held-out samples, shared out over the ranks; a new best is saved and pointed to."""
    step, group, stores = training.progress.step, training.group, training.stores
    training.validated_step = step
    ours = [(number, sample) for number, store in enumerate(stores) for sample in held_out(store)]
    # while following, ranks may have seen different shards: rank 0's list counts
    listed = json.loads(group.agree(f"held out/{step}", json.dumps(ours)))
    chosen = listed[: training.run.train.validate_samples]
    if not chosen:
        return
    kept = torch.zeros(2, dtype=torch.float64, device=training.metrics.sums.device)
    for number, store in enumerate(stores):
        store.refresh()
        own = [sample for owner, sample in chosen[group.rank :: group.world] if owner == number]
        drafter = training.drafter
        tally = replay(store, own, drafter, training.head, drafter.shape, None)
        kept[0] += tally.num_kept
        kept[1] += tally.num_cycles
    group.add_up(kept)
    num_kept, num_cycles = kept.tolist()
    tau = num_kept / max(num_cycles, 1)
    is_best = tau > training.progress.best_tau
    training.journal.validated(step, tau, int(num_cycles), is_best)
    if is_best:
        training.progress = replace(training.progress, best_tau=tau, best_step=step)
        _save(training)
        if group.rank == 0:
            checkpoint.point(training.out, "best", checkpoint.step_directory(training.out, step))


def _save(training: Training) -> None:
    """Rank 0 writes the checkpoint of this step, once."""
    progress = training.progress
    if training.group.rank != 0 or training.saved_step == progress.step:
        return
    optimizer, shape = training.optimizer, training.drafter.shape
    checkpoint.save(training.out, shape, optimizer.masters(), optimizer.state(), progress)
    checkpoint.prune(training.out, training.run.train.keep)
    training.saved_step = progress.step
