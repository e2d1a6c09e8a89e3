"""From the run that a store records to the configuration and options that say the same again."""

from __future__ import annotations

import json
from collections.abc import Container, Mapping
from dataclasses import dataclass

from dflash_pipeline.configs.errors import UsageError
from dflash_pipeline.configs.load import from_dict, load, preset_names, to_dict

CAPTURE_SECTIONS = ("target", "data", "store", "capture")


@dataclass(frozen=True, slots=True)
class Retold:
    """What a line has to say."""

    config: str
    """For --config; empty: the working directory's own file says it."""
    told: Mapping[str, object]
    """Schema key -> value, for options."""
    sets: tuple[str, ...]
    """For --set: what no option says."""


def config_of(recorded: Mapping[str, object]) -> str:
    """The preset of the target that was captured; empty: the usual file names it, or none does."""
    target = recorded.get("target")
    name = target.get("id") if isinstance(target, dict) else None
    if not name or _target_of("") == name:
        return ""
    return next((preset for preset in preset_names() if _target_of(preset) == name), "")


def retold(recorded: Mapping[str, object], options: Container[str]) -> Retold:
    """The capture of a store once more; `options`: schema keys that the command has options for.

    UsageError where another version of the package recorded it.
    """
    config = config_of(recorded)
    wanted, usual = to_dict(from_dict(recorded)), to_dict(load(config, (), {}))
    differing = {
        f"{section}.{name}": value
        for section in CAPTURE_SECTIONS
        for name, value in wanted[section].items()
        if value != usual[section][name]
    }
    # an option cannot say that something is empty or off
    told = {key: value for key, value in differing.items() if key in options and value}
    sets = tuple(f"{key}={_text(value)}" for key, value in differing.items() if key not in told)
    plain = {key: tuple(one) if isinstance(one, list) else one for key, one in told.items()}
    return Retold(config, plain, sets)


def _target_of(config: str) -> str:
    try:
        return load(config, (), {}).target.id
    except UsageError:
        # a file that this command does not need
        return ""


def _text(value: object) -> str:
    """As --set reads it: text in quotes that it takes off, all else as TOML."""
    return f'"{value}"' if isinstance(value, str) else json.dumps(value)
