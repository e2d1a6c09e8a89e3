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
from dflash_pipeline.train import validation
from dflash_pipeline.train.checkpoint import Progress, at_the_beginning
from dflash_pipeline.train.group import Group
from dflash_pipeline.train.replay import held_out
from dflash_pipeline.train.tally import Tally
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


def test_samples_that_may_be_deleted_meanwhile_are_not_replayed_before_the_seal(
    tiny: Any,
    train_plan: Any,
    growing_store: Store,
    train_run: Callable[..., Run],
    place: Place,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = growing_store
    tiny.capture(train_plan, store)
    assert store.is_complete
    candidates = held_out(store)
    used = store.table.shard_id(candidates[0])
    replayed: list[int] = []

    def replay(_store: Store, samples: list[int], *_rest: Any) -> Tally:
        replayed.extend(samples)
        return Tally(num_drafts=3)

    monkeypatch.setattr(validation, "replay", replay)
    training: Any = SimpleNamespace(
        progress=BEGIN,
        group=Group(place, 5.0),
        stores=[store],
        run=train_run(validate_samples=100),
        metrics=SimpleNamespace(sums=torch.zeros(1)),
        drafter=SimpleNamespace(shape=None),
        head=None,
        consumption=SimpleNamespace(has_used=lambda _number, shard_id: shard_id == used),
    )
    # the last commit is there, but a release that began before it may still be under way
    validation._replayed(training, lambda _step: None)
    assert replayed == [i for i in candidates if store.table.shard_id(i) != used]
    assert len(replayed) < len(candidates)
    store.seal()
    replayed.clear()
    validation._replayed(training, lambda _step: None)
    assert replayed == candidates
