"""From the run that a store records to the configuration and options that say the same again."""

from __future__ import annotations

import json
from collections.abc import Container, Mapping
from dataclasses import dataclass, replace

from dflash_pipeline.configs.errors import UsageError
from dflash_pipeline.configs.load import differences, from_dict, load, preset_names, to_dict
from dflash_pipeline.configs.schema import Run

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


def as_captured(run: Run, recorded: Mapping[str, object], given: Container[str]) -> Run:
    """`run` over the data of the capture that made its store, and with that capture's settings.

    As it is where it names data of its own, and where no capture alone made the store, as with
    stores that were merged. UsageError where another version of the package recorded it, and for
    one of the `given` keys (`section.field`) whose value the capture did not have.
    """
    if run.data.files or not recorded:
        return run
    before = from_dict(recorded)
    found = replace(
        run,
        target=replace(before.target, num_gpus=run.target.num_gpus),
        data=before.data,
        store=replace(before.store, path=run.store.path),
        capture=replace(before.capture, price=run.capture.price),
    )
    others = differences(found, run, CAPTURE_SECTIONS)
    if wrong := [text for text in others if text.partition(":")[0] in given]:
        raise UsageError(
            f"{run.store.path} is captured whole, with other settings: {'; '.join(wrong)}. Leave "
            "these out to plan the training on it, or name another --store"
        )
    return found


def _target_of(config: str) -> str:
    try:
        return load(config, (), {}).target.id
    except UsageError:
        # a file that this command does not need
        return ""


def _text(value: object) -> str:
    """As --set reads it: text in quotes that it takes off, all else as TOML."""
    return f'"{value}"' if isinstance(value, str) else json.dumps(value)
