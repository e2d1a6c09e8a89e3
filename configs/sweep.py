"""A sweep file: variants of one training run, each a table of what it changes.

[shallow]
drafter.num_layers = 3

[block8]
drafter.block_size = 8
loss.gamma = 4.0
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dflash_pipeline.configs.effects import changes_of_result, sections
from dflash_pipeline.configs.errors import UsageError
from dflash_pipeline.configs.jsonfile import read_object
from dflash_pipeline.configs.load import RUN_FILE, differences, from_dict, load, parse_file
from dflash_pipeline.configs.schema import Run

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
# what stands in the directory of a sweep or of a run: a variant's folder is taken for it
_TAKEN = re.compile(r"logs|best|last|order|profile|tensorboard|step-.*|.*\.jsonl?")


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
    if not _NAME.fullmatch(name):
        raise UsageError(f"{origin}: the name becomes a folder: use letters, digits, . _ and -")
    if _TAKEN.fullmatch(name):
        raise UsageError(f"{origin}: the name becomes a folder, and this one has a meaning there")
    if not isinstance(table, dict):
        raise UsageError(f"{origin} must be a table: write [{name}] above its keys")
    for section, values in table.items():
        # the rest belongs to the store, which all of them share
        if section not in sections():
            raise UsageError(
                f"{origin} sets {section}: a variant changes {', '.join(sections())} alone"
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
    file = Path(variant.run.train.out) / RUN_FILE
    try:
        recorded = from_dict(read_object(file)["run"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"variant {variant.name} is done, but what it was run with cannot be read from {file} "
            f"({error}): remove {file.parent}, so that it is trained anew"
        ) from None
    changed = changes_of_result(recorded, variant.run)
    if not recorded.train.stores:
        changed += [
            text
            for text in differences(recorded, variant.run, ("store",))
            if text.startswith("store.path:")
        ]
    if changed:
        raise UsageError(
            f"variant {variant.name} was run with other settings ({'; '.join(changed)}): set them "
            "back, or give the new ones a name of their own"
        )
