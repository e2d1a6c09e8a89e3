"""The learning rate of a step: a pure function of the plan and of where the run is in it.

A run over whole stores counts its steps. One that follows stores packs its first epoch in parts, as
shards come, so it takes more steps than one packing of all would: for it the share of the planned
data before a step counts, so that the schedule ends where the data end. That share follows from
the plan and from the shards drawn, so it is the same on every rank and after a resume.

Shape letter: C samples of the catalog.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from dflash_pipeline.configs.schema import OptimConfig, TrainConfig
from dflash_pipeline.train.order import Catalog


def learning_rate(step: float, num_steps: int, config: OptimConfig) -> float:
    """At `step`, from 0, of `num_steps`; between two whole steps it lies between their rates."""
    warmup_steps = math.ceil(config.warmup * num_steps)
    if step < warmup_steps:
        return config.lr * min((step + 1) / warmup_steps, 1.0)
    floor = config.min_lr_share
    if config.schedule == "wsd":
        decay_steps = max(math.ceil(config.decay * num_steps), 1)
        share = min(max(num_steps - step, 0) / decay_steps, 1.0)
    else:
        done = min((step - warmup_steps) / max(num_steps - warmup_steps, 1), 1.0)
        linear = config.schedule == "linear"
        share = 1 - done if linear else 0.5 * (1 + math.cos(math.pi * done))
    return config.lr * (floor + (1 - floor) * share)


def place_in_schedule(
    steps_done: int, share: float | None, schedule_step: int, num_steps: int, max_steps: int
) -> float:
    """The `step` that `learning_rate` wants, of `num_steps`.

    `share`: of the planned data before this step; None: whole stores, `schedule_step` counts.
    Where train.max_steps ends the run before its data do, the schedule ends there.
    """
    if share is None:
        return schedule_step
    return num_steps * max(share, steps_done / max_steps if max_steps else 0.0)


class Shares:
    """How much of the planned data the shards of stores hold.

    A sample counts as the part of a batch that it fills, so that each step is about as large a
    share as the next one. It counts whether capture could use it or not: that is not planned.
    """

    def __init__(self, samples: Catalog, config: TrainConfig) -> None:
        filled_C = np.maximum(
            samples.num_tokens_C / config.batch_tokens, samples.num_anchors_C / config.batch_anchors
        )
        self._filled: dict[tuple[int, int], float] = {}
        for store, share in enumerate(samples.shares):
            own = samples.store_C == store
            shards, place = np.unique(samples.shard_C[own], return_inverse=True)
            filled = share * np.bincount(place, filled_C[own], len(shards))
            names = ((store, shard) for shard in shards.tolist())
            self._filled |= zip(names, filled.tolist(), strict=True)
        self._total = math.fsum(self._filled.values())

    def of(self, shards: Iterable[tuple[int, int]]) -> float:
        """Of all planned data, what these shards (store, shard number) hold."""
        return math.fsum(self._filled.get(shard, 0.0) for shard in shards) / self._total
