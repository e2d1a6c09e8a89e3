"""One process of a training run, as a story: open, build, go on where it was left, learn, tell.

All ranks do the same in the same order; rank 0 alone writes. The loop waits for the device at log
lines only.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path

import torch

from dflash_pipeline.configs.memory import explained
from dflash_pipeline.configs.place import Place, is_poisoned, let_memory_grow
from dflash_pipeline.configs.schema import Run
from dflash_pipeline.store.runlog import RunLog
from dflash_pipeline.train import record
from dflash_pipeline.train.consumption import Consumption
from dflash_pipeline.train.feed import Feed, feed_access
from dflash_pipeline.train.follow import Order
from dflash_pipeline.train.group import Group
from dflash_pipeline.train.preflight import LESS_MEMORY
from dflash_pipeline.train.segments import ORDER_FILE
from dflash_pipeline.train.setup import Training, build, compute_on, open_stores
from dflash_pipeline.train.stop import StopVote, StopWish
from dflash_pipeline.train.validation import is_on_plateau, validate
from dflash_pipeline.train.watchdog import Watchdog
from dflash_pipeline.train.window import take_step


def main(run: Run, place: Place, extra: dict[str, object]) -> None:
    """`dflash train`, one rank; extra: resume."""
    torch.set_num_threads(place.threads)
    let_memory_grow(torch.__version__)
    out = Path(run.train.out)
    log = RunLog(place)
    with (
        contextlib.ExitStack() as held,
        StopWish() as wish,
        contextlib.closing(Group(place, run.train.timeout_s)) as group,
    ):
        resume = bool(extra["resume"])
        stores, samples, shape = open_stores(run, place, log, wish, resume)
        if group.rank == 0:
            record.begin(out, run, [store.root for store in stores], resume)
            held.enter_context(record.held(out))
        group.agree("begun", "")
        try:
            training = build(run, place, group, log, stores, samples, shape, resume)
        except BaseException:
            if group.rank == 0 and not resume:
                record.withdraw(out)
            raise
        position, num_planned = training.progress.position, training.progress.num_steps
        path, say = out / ORDER_FILE, log.say_once
        order = Order(samples, stores, run.train, group, path, position, say, num_planned)
        if order.is_following and not all(store.is_sealed for store in stores):
            log.say_once("the store is still being captured: following it")
        training.consumption = Consumption(stores, order, out, position, group.rank)
        device, dtype = compute_on(run, place)
        access = feed_access(stores, run.feed, log.say_once)
        clock = training.clock
        with (
            contextlib.closing(training.consumption),
            contextlib.closing(training),
            Watchdog(place, run.train.timeout_s, log, group, clock) as watchdog,
            explained(
                torch,
                device,
                training.holdings,
                lambda: clock.stage_now,
                "activations and logits",
                LESS_MEMORY,
                training.beside,
            ),
            Feed(
                stores, samples, order, run, shape, device, dtype, is_poisoned(), access, clock
            ) as feed,
        ):
            training.feed_bytes = feed.device_bytes
            vote = StopVote(group, device)
            is_stopped = _learn(training, feed, order, vote, wish, watchdog)
            if not is_stopped and training.progress.validated_step != training.progress.step:
                validate(training, watchdog.beat)
            training.save(is_best=False)
        if not is_stopped:
            training.consumption.leave()
        group.leave(wish.is_asked)
        if group.rank == 0 and (speed := training.journal.speed.line()):
            log.say(speed)
        if is_stopped:
            log.say(f"stopped after step {training.progress.step}, checkpoint written")
            raise KeyboardInterrupt
        if group.rank == 0:
            log.say(f"trained {training.progress.step} steps into {out}{_why_early(training)}")


def _why_early(training: Training) -> str:
    progress = training.progress
    if not is_on_plateau(progress, training.run.train.patience):
        return ""
    return (
        f": ended early, tau has not risen by {training.run.train.min_gain:g} in "
        f"{progress.num_stale} validations; best {progress.best_tau:.3f} at step "
        f"{progress.best_step}"
    )


def _learn(
    training: Training,
    feed: Feed,
    order: Order,
    vote: StopVote,
    wish: StopWish,
    watchdog: Watchdog,
) -> bool:
    """Steps until the run is over; whether it was stopped before."""
    config, journal = training.run.train, training.journal
    optimizer, metrics = training.optimizer, training.metrics
    draw, lr = None, 0.0

    def on_wait() -> None:
        watchdog.beat(training.progress.step)
        _wait(training)

    while not _is_over(training):
        watchdog.beat(training.progress.step)
        training.consumption.beat()
        coming = feed.step(wish.is_asked, on_wait)
        if coming is None:
            break
        draw, step = coming, training.progress.step + 1
        training.profiler.before(step)
        lr, votes = take_step(training, feed, draw, step, wish.is_asked)
        training.progress = replace(
            training.progress,
            step=step,
            position=draw.after,
            schedule_step=training.progress.schedule_step + 1,
        )
        journal.note(step, draw)
        training.profiler.after(step)
        if step % config.log_every == 0:
            journal.line(step, lr, metrics, optimizer, feed)
        if config.validate_every and step % config.validate_every == 0:
            validate(training, watchdog.beat)
        is_awaited = training.consumption.is_awaited(training.progress.position)
        if step % config.save_every == 0 or is_awaited:
            training.save(is_best=False)
        if training.saver is not None:
            training.saver.check()
        if vote.is_carried(votes):
            return True
    if journal.has_steps:
        journal.line(training.progress.step, lr, metrics, optimizer, feed)
    return order.is_stopped


def _wait(training: Training) -> None:
    """Between two looks for shards. A full store grows only if this run lets go of what it used."""
    training.journal.waiting()
    training.consumption.beat()
    if training.consumption.is_owed(training.progress.position):
        training.save(is_best=False)
    if training.saver is not None:
        training.saver.check()


def _is_over(training: Training) -> bool:
    config, progress = training.run.train, training.progress
    is_at_the_limit = 0 < config.max_steps <= progress.step
    return is_at_the_limit or is_on_plateau(progress, config.patience)
