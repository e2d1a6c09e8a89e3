"""What the command line asks of a store: for the line that comes next, and to refuse early.

Where a store cannot be read the answer is that nothing is known: the stage itself says why.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from dflash_pipeline.configs.mounts import root_of
from dflash_pipeline.store import paths
from dflash_pipeline.store.metadata import read_root
from dflash_pipeline.store.reader import Store, open_store
from dflash_pipeline.store.rolling import consumer_lines, is_rolling


def recorded_run(store: str) -> Mapping[str, object]:
    """The run that captured a store, or the first of those that were merged; empty: unknown."""
    try:
        found = read_root(root_of(store))[3].run
    except (OSError, ValueError):
        return {}
    merged = found.get("merged")
    return merged[0] if isinstance(merged, list) and merged else found


def is_open(store: str) -> bool:
    """Whether there is a store whose shards are not all there: it is sealed once they are."""
    root = root_of(store)
    return (root / "zarr.json").is_file() and not (root / paths.SEALED_FILE).exists()


def lines_of_consumers(directory: str) -> list[str]:
    """A line for each training run that a rolling store waits for; none for anything else."""
    return consumer_lines(Path(directory))


def rolling(store: str) -> Store | None:
    """A store whose shards are released once they were used; None: any other."""
    return open_store(store) if is_rolling(root_of(store)) else None
