"""Which settings of training may change, and when, by the mark that each has in the schema."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import Field, fields
from typing import Any

from dflash_pipeline.configs.load import to_dict
from dflash_pipeline.configs.schema import LEARNT, RESULT, Run

_EFFECT = "effect"


def effects() -> dict[str, str]:
    """`section.name` -> the effect of a change, of every setting of training."""
    found = {}
    for section in fields(Run):
        of_section = section.metadata.get(_EFFECT)
        for one in _fields_of(section):
            effect = of_section or one.metadata.get(_EFFECT)
            if effect is not None:
                found[f"{section.name}.{one.name}"] = str(effect)
    return found


def sections() -> tuple[str, ...]:
    """Those that training alone reads."""
    return tuple(dict.fromkeys(key.partition(".")[0] for key in effects()))


def changes_of_continuation(recorded: Run, now: Run) -> list[str]:
    """What a run that goes on must not have changed: `drafter.block_size: 16, now 8`."""
    return _changes(recorded, now, LEARNT)


def changes_of_result(recorded: Run, now: Run) -> list[str]:
    """What must be as it was for a run that is done to be the one that is asked for now."""
    return _changes(recorded, now, LEARNT, RESULT)


def _changes(recorded: Run, now: Run, *marks: Mapping[str, str]) -> list[str]:
    counted = {mark[_EFFECT] for mark in marks}
    one, two = to_dict(recorded), to_dict(now)
    told = []
    for key, effect in effects().items():
        section, _, name = key.partition(".")
        before, after = one[section][name], two[section][name]
        if effect in counted and before != after:
            told.append(f"{key}: {before!r}, now {after!r}")
    return told


def _fields_of(section: Field[Any]) -> tuple[Field[Any], ...]:
    # every section's default is made by its own class
    kind: Any = section.default_factory
    return fields(kind)
