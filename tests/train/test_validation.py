"""The best checkpoint and the plateau, from taus alone; and which samples are replayed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dflash_pipeline.configs.place import Place
from dflash_pipeline.configs.schema import Run, TrainConfig
from dflash_pipeline.store.reader import Store
from dflash_pipeline.store.spec import ShardId
from dflash_pipeline.train import validation
from dflash_pipeline.train.checkpoint import Progress, at_the_beginning
from dflash_pipeline.train.group import Group
from dflash_pipeline.train.replay import Replayed, held_out
from dflash_pipeline.train.tally import Answer, Cycle
from dflash_pipeline.train.validation import is_on_plateau, judged

BEGIN = at_the_beginning(9)


def _after(taus: list[float], min_gain: float) -> Progress:
    progress = BEGIN
    for step, tau in enumerate(taus, start=1):
        progress = judged(replace(progress, step=step), tau, min_gain)
    return progress


def test_any_rise_is_the_best_and_small_ones_add_up_to_a_gain() -> None:
    progress = _after([2.0, 2.04, 2.08], 0.1)
    assert (progress.best_tau, progress.best_step, progress.num_stale) == (2.08, 3, 2)
    progress = _after([2.0, 2.04, 2.08, 2.11], 0.1)
    assert (progress.plateau_tau, progress.num_stale) == (2.11, 0)
    progress = _after([2.0, 1.5, 2.0], 0.0)
    assert (progress.best_step, progress.num_stale) == (1, 2)


def test_a_plateau_is_patience_long_and_never_without_patience() -> None:
    progress = _after([2.0, 1.9, 1.9], 0.0)
    assert [is_on_plateau(progress, patience) for patience in (0, 1, 2, 3)] == [
        False,
        True,
        True,
        False,
    ]
    with pytest.raises(ValueError, match=r"train\.patience.*train\.validate_every"):
        TrainConfig(patience=2, validate_every=0)


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The samples that a validation replays, in turn; each has one cycle."""
    samples: list[int] = []

    def replayed(_store: Store, own: list[int], *_rest: Any) -> Replayed:
        samples.extend(own)
        return iter([(index, [Answer(tokens=[1, 2], cycles=[Cycle(1, 0)])]) for index in own])

    monkeypatch.setattr(validation, "replayed", replayed)
    return samples


def _training(run: Run, store: Store, group: Any, used: ShardId | None) -> Any:
    """used: the shard that this run has told to be used."""
    return SimpleNamespace(
        progress=BEGIN,
        group=group,
        stores=[store],
        run=run,
        metrics=SimpleNamespace(sums=torch.zeros(1)),
        drafter=SimpleNamespace(shape=None),
        head=None,
        consumption=SimpleNamespace(has_used=lambda _number, shard_id: shard_id == used),
    )


def test_samples_that_may_be_deleted_meanwhile_are_not_replayed_before_the_seal(
    tiny: Any,
    train_plan: Any,
    growing_store: Store,
    train_run: Callable[..., Run],
    place: Place,
    replayed: list[int],
) -> None:
    store = growing_store
    tiny.capture(train_plan, store)
    assert store.is_complete
    candidates = held_out(store)
    used = store.table.shard_id(candidates[0])
    training = _training(train_run(validate_samples=100), store, Group(place, 5.0), used)
    # the last commit is there, but a release that began before it may still be under way
    validation._replayed(training, lambda _step: None)
    assert replayed == [i for i in candidates if store.table.shard_id(i) != used]
    assert len(replayed) < len(candidates)
    store.seal()
    replayed.clear()
    validation._replayed(training, lambda _step: None)
    assert replayed == candidates


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_replay_each_sample_once_among_them(
    world: int, whole_store: Store, train_run: Callable[..., Run], replayed: list[int]
) -> None:
    run, sums, num_before = train_run(validate_samples=5), list[Any](), 0
    chosen = held_out(whole_store)[:5]
    for rank in range(world):
        group = SimpleNamespace(
            rank=rank, world=world, agree=lambda _key, text: text, add_up=sums.append
        )
        validation._replayed(_training(run, whole_store, group, None), lambda _step: None)
        assert len(chosen) // world <= len(replayed) - num_before <= -(-len(chosen) // world)
        num_before = len(replayed)
    assert sorted(replayed) == sorted(chosen)
    # what is added up over ranks: kept tokens, cycles
    assert sum(float(one[1]) for one in sums) == len(chosen)
