"""Which samples a run leaves out: whole domains, and samples named by their keys; why none is left.

Letters: C samples of a store, in plan order.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from dflash_pipeline.configs.errors import UsageError
from dflash_pipeline.configs.schema import TrainConfig
from dflash_pipeline.store.reader import Store
from dflash_pipeline.store.table import HELD_OUT, SampleTable

_SHOWN_NAMES = 5

Kept = npt.NDArray[np.bool_]


def kept_samples(tables: Sequence[SampleTable], config: TrainConfig) -> list[Kept]:
    """Of each store, whether each sample stays, [C].

    UsageError for a domain or a key that no store has; it names the nearest one there is.
    """
    kept = [np.ones(len(table.sample_id), bool) for table in tables]
    for domain in config.drop_domains:
        numbers = [_number(table, domain) for table in tables]
        _check_known("domain", domain, numbers, lambda: _domains(tables))
        for kept_C, table, number in zip(kept, tables, numbers, strict=True):
            if number is not None:
                kept_C &= table.domain != number
    for key in config.drop_samples:
        numbers = [_place(table, key) for table in tables]
        _check_known("sample", key, numbers, lambda: _keys(tables))
        for kept_C, place in zip(kept, numbers, strict=True):
            if place is not None:
                kept_C[place] = False
    return kept


def dropped_lines(
    paths: Sequence[str], tables: Sequence[SampleTable], kept: Sequence[Kept]
) -> list[str]:
    """A line for each store that samples were left out of."""
    lines = []
    for path, table, kept_C in zip(paths, tables, kept, strict=True):
        num_dropped = int((~kept_C).sum())
        if num_dropped:
            num_held_out = int((~kept_C & (table.split == HELD_OUT)).sum())
            lines.append(
                f"dropped {num_dropped} of {len(table)} samples of {path} ({num_held_out} of them "
                "held out)"
            )
    held_out = [table.split == HELD_OUT for table in tables]
    is_left = any((one & kept_N).any() for one, kept_N in zip(held_out, kept, strict=True))
    if lines and not is_left and any(one.any() for one in held_out):
        lines.append(
            "all held-out samples were dropped: no validation, no best step and no early end; keep "
            "some of them, or measure with dflash eval --prompts"
        )
    return lines


def none_held_out(store: Store) -> str:
    """Why a store has no sample to replay, and what to do."""
    is_held_out_N = store.table.split == HELD_OUT
    if num_planned := int(is_held_out_N.sum()):
        why = f"none of the {num_planned} held-out samples of {store.path} is there"
        if store.num_released:
            num_shards = len(store.layout.shard_ids())
            why += (
                f": {store.num_released} of {num_shards} shards were released, once the runs that "
                "followed the capture had used them"
            )
        return f"{why}; give --prompts and --target"
    return (
        f"store {store.path} has no held-out sample: set data.heldout at capture, or give "
        "--prompts and --target"
    )


def doubled_lines(paths: Sequence[str], tables: Sequence[SampleTable]) -> list[str]:
    """A line for each two stores that hold the same token sequences: an epoch draws those twice."""
    lines = []
    for number, table in enumerate(tables):
        for before in range(number):
            num_shared = int(np.isin(table.token_hash, tables[before].token_hash).sum())
            if num_shared:
                lines.append(
                    f"{num_shared} of {len(table)} samples of {paths[number]} stand in "
                    f"{paths[before]} as well: an epoch draws them from both"
                )
    return lines


def _check_known(
    what: str, name: str, found: Sequence[int | None], names: Callable[[], list[str]]
) -> None:
    if any(number is not None for number in found):
        return
    known = names()
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else f"; there are {_few(known)}"
    raise UsageError(f"train.drop_{what}s: no store has a {what} {name!r}{hint}")


def _few(names: Sequence[str]) -> str:
    shown = ", ".join(map(repr, names[:_SHOWN_NAMES]))
    return f"{shown} and {len(names) - _SHOWN_NAMES} more" if len(names) > _SHOWN_NAMES else shown


def _number(table: SampleTable, domain: str) -> int | None:
    return table.domains.index(domain) if domain in table.domains else None


def _place(table: SampleTable, key: str) -> int | None:
    try:
        return table.find(key)
    except KeyError:
        return None


def _domains(tables: Sequence[SampleTable]) -> list[str]:
    return sorted({name for table in tables for name in table.domains})


def _keys(tables: Sequence[SampleTable]) -> list[str]:
    return [table.key(i) for table in tables for i in range(len(table))]
