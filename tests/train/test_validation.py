"""The best checkpoint and the plateau, from taus alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dflash_pipeline.configs.schema import TrainConfig
from dflash_pipeline.train.checkpoint import Progress
from dflash_pipeline.train.order import Position
from dflash_pipeline.train.validation import is_on_plateau, judged

BEGIN = Progress(0, Position(0, 0, 0), 0.0, 0, 0.0, 0)


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
