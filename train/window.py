"""One optimizer step: the batches of a window, their sum over ranks, the update."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from dflash_pipeline.train.feed import Feed
from dflash_pipeline.train.follow import Draw
from dflash_pipeline.train.schedule import learning_rate, place_in_schedule
from dflash_pipeline.train.setup import Training
from dflash_pipeline.train.step import learn


def take_step(
    training: Training, feed: Feed, draw: Draw, step: int, wants_stop: Callable[[], bool]
) -> tuple[float, Tensor]:
    """Step number `step` (from 1) from the batches of `draw`; a rank may have none.

    Returns the learning rate, and how many ranks want to stop, still on the device. `wants_stop`
    is asked once the batches are done: a signal that came meanwhile counts.
    """
    optimizer, clock = training.optimizer, training.clock
    for number, batch in enumerate(feed.batches(draw)):
        training.noise.add(batch.feature_NKH, step, number)
        if number == len(draw.batches) - 1:
            optimizer.expect_last()
        learn(
            batch,
            training.forward,
            training.head,
            training.run.loss,
            optimizer,
            training.metrics,
            clock,
        )
    progress = training.progress
    num_steps, max_steps = progress.num_steps, training.run.train.max_steps
    place = place_in_schedule(
        progress.step, draw.share, progress.schedule_step, num_steps, max_steps
    )
    lr = learning_rate(place, num_steps, training.run.optim)
    with clock.stage("reduce"):
        votes = optimizer.sum_up(wants_stop())
    with clock.stage("optimizer"):
        optimizer.step(lr)
    return lr, votes
