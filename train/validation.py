"""Held-out acceptance of a run, the best checkpoint by it, and whether it still rises.

Samples, anchors and drafts are the same at every validation: two of the same weights give the same
tau to the last bit, so a difference is one of the weights.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import torch

from dflash_pipeline.train.checkpoint import Progress
from dflash_pipeline.train.replay import held_out, replayed
from dflash_pipeline.train.selection import kept_samples
from dflash_pipeline.train.setup import Training


def validate(training: Training, beat: Callable[[int], None]) -> None:
    """Replay held-out samples, shared out over the ranks; a new best is saved and pointed to.

    A sample whose rows are damaged is named and left out, each time alike. `beat` is told the step
    now and then, as a sign of life.
    """
    with training.clock.stage("validate"):
        tau, num_cycles = _replayed(training, beat)
    step = training.progress.step
    training.progress = replace(training.progress, validated_step=step)
    if not num_cycles:
        return
    is_best = tau > training.progress.best_tau
    training.journal.validated(step, tau, num_cycles, is_best)
    training.progress = judged(training.progress, tau, training.run.train.min_gain)
    if is_best:
        training.save(is_best=True)


def _replayed(training: Training, beat: Callable[[int], None]) -> tuple[float, int]:
    """tau of all ranks, pooled, and its cycles; none where nothing is held out."""
    step, group, stores = training.progress.step, training.group, training.stores
    kept = kept_samples([store.table for store in stores], training.run.train)
    # whoever seals waits for a release under way, and none begins after the last commit: what is
    # there once that was seen stays
    is_sealed = [store.is_sealed for store in stores]
    for store in stores:
        store.refresh()
    ours = [
        (number, sample)
        for number, store in enumerate(stores)
        for sample in held_out(store)
        if kept[number][sample] and (is_sealed[number] or not _is_used(training, number, sample))
    ]
    # while following, ranks may have seen different shards: rank 0's list counts
    listed = json.loads(group.agree(f"held out/{step}", json.dumps(ours)))
    chosen = listed[: training.run.train.validate_samples]
    if not chosen:
        return 0.0, 0
    num_kept = num_cycles = 0
    for number, store in enumerate(stores):
        if group.rank:
            # to read what rank 0 has seen
            store.refresh()
        own = [sample for owner, sample in chosen[group.rank :: group.world] if owner == number]
        for _, answers in replayed(
            store,
            own,
            training.drafter,
            training.head,
            None,
            lambda error: training.journal.left_out(step, str(error)),
        ):
            cycles = [cycle for answer in answers for cycle in answer.cycles]
            num_kept += sum(cycle.kept for cycle in cycles)
            num_cycles += len(cycles)
            beat(step)
    device = training.metrics.sums.device
    totals = torch.tensor([num_kept, num_cycles], dtype=torch.float64, device=device)
    group.add_up(totals)
    num_kept, num_cycles = map(int, totals.tolist())
    return num_kept / max(num_cycles, 1), num_cycles


def _is_used(training: Training, number: int, sample: int) -> bool:
    """Whether this run has told that it used the sample's shard, which may go any moment then."""
    shard_id = training.stores[number].table.shard_id(sample)
    return training.consumption.has_used(number, shard_id)


def judged(progress: Progress, tau: float, min_gain: float) -> Progress:
    """The progress after a validation gave `tau`."""
    if tau > progress.best_tau:
        progress = replace(progress, best_tau=tau, best_step=progress.step)
    # gains too small to count add up until they do
    if tau > progress.plateau_tau + min_gain:
        return replace(progress, plateau_tau=tau, num_stale=0)
    return replace(progress, num_stale=progress.num_stale + 1)


def is_on_plateau(progress: Progress, patience: int) -> bool:
    """Whether the run ends early; patience 0: never."""
    return 0 < patience <= progress.num_stale
