"""Every setting of training is marked with what a change of it would change."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from dflash_pipeline.configs.effects import (
    changes_of_continuation,
    changes_of_result,
    effects,
    sections,
)
from dflash_pipeline.configs.schema import FREE, LEARNT, RESULT, LossConfig, Run, TrainConfig

TRAINING = ("drafter", "loss", "optim", "feed", "train")
KINDS = {mark["effect"] for mark in (LEARNT, RESULT, FREE)}


def test_every_setting_of_training_has_one_mark_by_itself_or_by_its_section() -> None:
    for section in fields(Run):
        marked = [
            (section.metadata.get("effect"), one.metadata.get("effect"))
            for one in fields(getattr(Run(), section.name))
        ]
        if section.name not in TRAINING:
            assert set(marked) == {(None, None)}, section.name
            continue
        for one, marks in zip(fields(getattr(Run(), section.name)), marked, strict=True):
            found = [mark for mark in marks if mark is not None]
            assert len(found) == 1, f"{section.name}.{one.name}: mark what a change of it changes"
            assert found[0] in KINDS
    assert sections() == TRAINING


def test_what_is_learnt_may_never_change_and_what_is_judged_may_in_a_run_that_goes_on() -> None:
    recorded = Run()
    learnt = replace(recorded, loss=LossConfig(gamma=4.0), train=TrainConfig(epochs=2))
    told = ["loss.gamma: 7.0, now 4.0", "train.epochs: 6, now 2"]
    assert changes_of_continuation(recorded, learnt) == changes_of_result(recorded, learnt) == told
    judged = replace(recorded, train=TrainConfig(patience=3, stores=("a",)))
    assert changes_of_continuation(recorded, judged) == []
    told = ["train.stores: [], now ['a']", "train.patience: 0, now 3"]
    assert changes_of_result(recorded, judged) == told


def test_each_setting_counts_as_its_mark_says() -> None:
    num_tried = 0
    for key, effect in effects().items():
        section, _, name = key.partition(".")
        value: Any = getattr(getattr(Run(), section), name)
        other = _another(value)
        if other is None:
            continue
        try:
            now = replace(Run(), **{section: replace(getattr(Run(), section), **{name: other})})
        except (ValueError, TypeError):
            # no value that this one may have
            continue
        num_tried += 1
        assert bool(changes_of_continuation(Run(), now)) == (effect == "learnt"), key
        assert bool(changes_of_result(Run(), now)) == (effect != "free"), key
    assert num_tried > 30


def _another(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    return ("x",) if isinstance(value, tuple) else None
