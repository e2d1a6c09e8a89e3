"""What the command line finds out about a capture or answers before it launches them.

Everything here is told again by the stage itself, with all it knows; this spares a person the wait
for its imports. Where something cannot be read, that is the stage's to say.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import takewhile
from pathlib import Path

from dflash_pipeline.capture import settings
from dflash_pipeline.capture.arguments import template_arguments_text
from dflash_pipeline.capture.continuing import (
    identity_differences,
    plan_differences,
    refuse,
    refuse_merged,
)
from dflash_pipeline.capture.samples import Dropped, read
from dflash_pipeline.configs.schema import Run
from dflash_pipeline.store import glance

NUM_ROWS = 1000
"""Rows that are looked at."""


def check_data(run: Run, say: Callable[[str], object]) -> None:
    """`check_rows` of the data that a run reads."""
    check_rows(run.data.files, run.data.limit, run.data.max_bad_share, say)


def check_capture(run: Run, only_count: bool = False) -> None:
    """UsageError where answers among the data, or the store that is there, were made otherwise.

    only_count: nothing goes into the store.
    """
    told = {"template_args": template_arguments_text(run.target)}
    settings.check_generated(run.data.files, told)
    found = None if only_count else glance.root(run.store.path)
    if found is not None:
        _, spec, _, attributes = found
        refuse_merged(run.store.path, attributes)
        differing = identity_differences(spec, run) + plan_differences(spec, attributes, run)
        refuse(run.store.path, differing)


def is_of_other_data(store: str, file: str) -> bool:
    """Whether a store is there that was not captured from this one data file, by its name."""
    found = glance.root(store)
    data = found[3].run.get("data") if found is not None else None
    files = data.get("files") if isinstance(data, dict) else None
    return isinstance(files, list) and [Path(str(one)).resolve() for one in files] != [
        Path(file).resolve()
    ]


def check_generate(run: Run) -> None:
    """UsageError where the answers that are there were given with other settings."""
    settings.check_told(run.generate.out, settings.told_settings(run))


def check_rows(
    files: Sequence[str], limit: int, max_bad_share: float, say: Callable[[str], object]
) -> None:
    """Look at the first rows of the data, those of a Hugging Face data set excepted.

    ValueError where these are all and too many of them are unusable; where more follow, which
    may change the share, it is said. limit: rows read at most; 0: all.
    """
    local = list(takewhile(lambda file: not file.startswith("hf:"), files))
    most, dropped = min(limit or NUM_ROWS, NUM_ROWS), Dropped()
    if not local:
        return
    for _ in read(local, most, dropped):
        pass
    is_end = len(local) == len(files) and dropped.num_rows < most
    if is_end or most == limit:
        # by the reasons that need no tokenizer
        further = " at least (what its template and length leave out is counted later)"
        dropped.check(max_bad_share, further)
    elif dropped.num_bad > max_bad_share * dropped.num_rows:
        reasons = "; ".join(dropped.lines())
        say(f"of the first {dropped.num_rows} rows {dropped.num_bad} are unusable: {reasons}")
