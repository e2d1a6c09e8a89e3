"""A sweep file: variants of one training run, each a table of what it changes.

[shallow]
drafter.num_layers = 3

[block8]
drafter.block_size = 8
loss.gamma = 4.0
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_pipeline.configs.errors import UsageError
from dflash_pipeline.configs.load import differences, from_dict, load, parse_file
from dflash_pipeline.configs.schema import Run

# what a variant may change; the rest belongs to the store, which all of them share
SECTIONS = ("drafter", "loss", "optim", "feed", "train")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True, slots=True)
class Variant:
    """One run of a sweep."""

    name: str
    """Its table's, and its folder's in OUT."""
    run: Run


def read_variants(
    path: str, config: str, sets: Sequence[str], options: Mapping[str, object]
) -> list[Variant]:
    """Each variant of the file over the run that the line describes, `train.out` its own folder.

    UsageError names the file, the variant and the key: for an unknown one, one that the line sets
    as well, and one that a variant may not change.
    """
    tables = parse_file(path)
    if not tables:
        raise UsageError(f"{path} holds no variant: write a table for each, as [shallow]")
    on_the_line = {text.partition("=")[0].strip() for text in sets}
    on_the_line |= {key for key, value in options.items() if value not in (None, ())}
    return [
        Variant(name, _resolved(path, name, table, config, sets, options, on_the_line))
        for name, table in tables.items()
    ]


def _resolved(
    path: str,
    name: str,
    table: object,
    config: str,
    sets: Sequence[str],
    options: Mapping[str, object],
    on_the_line: set[str],
) -> Run:
    origin = f"{path}: variant {name}"
    if not _NAME.fullmatch(name) or name == "logs":
        raise UsageError(f"{origin}: the name becomes a folder: use letters, digits, . _ and -")
    if not isinstance(table, dict):
        raise UsageError(f"{origin} must be a table: write [{name}] above its keys")
    for section, values in table.items():
        if section not in SECTIONS:
            raise UsageError(
                f"{origin} sets {section}: a variant changes {', '.join(SECTIONS)} alone"
            )
        for key in values if isinstance(values, dict) else ():
            if f"{section}.{key}" in on_the_line or (section, key) == ("train", "out"):
                raise UsageError(
                    f"{origin} sets {section}.{key}, and so does the line: leave it out of one"
                )
    base = load(config, sets, options, (origin, table))
    out = str(Path(base.train.out) / name)
    return load(config, sets, {**options, "train.out": out}, (origin, table))


def check_same(variant: Variant) -> None:
    """UsageError where a variant that is done was run with other settings than it has now."""
    record: dict[str, Any] = json.loads((Path(variant.run.train.out) / "run.json").read_text())
    changed = differences(from_dict(record["run"]), variant.run, ("drafter", "loss", "optim"))
    if changed:
        raise UsageError(
            f"variant {variant.name} was run with other settings ({'; '.join(changed)}): set them "
            "back, or give the new ones a name of their own"
        )
