"""What the command line asks of a store: for the line that comes next, and to refuse early.

Where a store cannot be read the answer is that nothing is known: the stage itself says why.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dflash_pipeline.configs.following import training_on_open
from dflash_pipeline.configs.mounts import root_of
from dflash_pipeline.configs.overview import Followers
from dflash_pipeline.configs.status import find_statuses
from dflash_pipeline.store import paths
from dflash_pipeline.store.consumers import consumers
from dflash_pipeline.store.metadata import Root, read_root
from dflash_pipeline.store.reader import Store, open_store
from dflash_pipeline.store.rolling import consumer_lines, is_rolling, num_missing, stopped_runs
from dflash_pipeline.store.spec import Attributes, Layout, StoreSpec
from dflash_pipeline.store.table import HELD_OUT
from dflash_pipeline.store.targetgroup import TargetGroup


def root(store: str) -> tuple[Root, StoreSpec, Layout, Attributes] | None:
    """What a store says of itself; None: it cannot be read."""
    try:
        return read_root(root_of(store))
    except (OSError, ValueError):
        return None


def target_config(store: str) -> Mapping[str, Any] | None:
    """config.json of a store's target; None: it cannot be read."""
    about = root(store)
    if about is None:
        return None
    try:
        return TargetGroup(root_of(store), about[0], about[1]).config()
    except (OSError, ValueError):
        return None


def opened(store: str) -> Store | None:
    """A store with its table of samples; None: it cannot be read."""
    try:
        return open_store(store)
    except (OSError, ValueError):
        return None


def recorded_run(store: str) -> Mapping[str, object]:
    """The run that captured a store, or the first of those that were merged; empty: unknown."""
    about = root(store)
    if about is None:
        return {}
    found = about[3].run
    merged = found.get("merged")
    return merged[0] if isinstance(merged, list) and merged else found


def own_capture(store: str) -> Mapping[str, object]:
    """The run that captured a store which is whole; empty: unknown, or there were several."""
    found = root(store) if store and is_whole(store) else None
    return {} if found is None or "merged" in found[3].run else found[3].run


def is_open(store: str) -> bool:
    """Whether there is a store whose shards are not all there: it is sealed once they are."""
    path = root_of(store)
    return (path / "zarr.json").is_file() and not (path / paths.SEALED_FILE).exists()


def is_whole(store: str) -> bool:
    """Whether there is a store whose shards were all captured."""
    return root(store) is not None and not is_open(store)


def is_at_work(store: str) -> bool:
    """Whether a process of a capture into this store is alive."""
    return any(one.is_alive for one in find_statuses(root_of(store)))


def has_stopped(store: str) -> bool:
    """Whether a capture into this store has told of itself, and no process of one is alive."""
    every = find_statuses(root_of(store))
    return any(one.stage == "capture" for one in every) and not any(one.is_alive for one in every)


def is_abandoned(store: str) -> bool:
    """Whether there is a store whose shards are not all there, and no capture into it at work."""
    return root(store) is not None and is_open(store) and not is_at_work(store)


def capture_wait(store: str) -> str:
    """What the capture into a rolling store waits for; empty: one of its processes is at work, or
    there is none."""
    every = find_statuses(root_of(store))
    found = [one for one in every if one.stage == "capture" and one.is_alive]
    is_waiting = bool(found) and all(one.state == "waiting" for one in found)
    return found[0].text if is_waiting and is_rolling(root_of(store)) else ""


def lines_of_consumers(directory: str) -> list[str]:
    """A line for each training run that a rolling store waits for; none for anything else. Where
    they cannot be read, why."""
    try:
        return consumer_lines(Path(directory))
    except (OSError, ValueError) as error:
        return [str(error)]


def followers(directory: str) -> Followers:
    """Whom the capture of a rolling store waits for; of anything else, and where that cannot be
    read, nobody."""
    store = rolling(directory)
    if store is None:
        return Followers()
    try:
        missing = 0 if store.num_released else num_missing(store.path, store.layout)
        stopped = stopped_runs(store.path, store.layout)
        are_gone = bool(store.num_released) and not consumers(store.path, store.layout)
    except (OSError, ValueError):
        return Followers()
    training = training_on_open(directory, recorded_run(directory))
    return Followers(missing, training, stopped, are_gone)


def rolling(store: str) -> Store | None:
    """A store whose shards are released once they were used; None: any other, or unreadable."""
    return opened(store) if is_rolling(root_of(store)) else None


def has_held_out(store: Store) -> bool:
    """Whether a held-out sample is there to be replayed."""
    return bool(((store.table.split == HELD_OUT) & store.readable_N).any())


def may_be_trained_on(store: str) -> bool:
    """Whether a sample is there that is not held out; where that cannot be read there may be."""
    found = opened(store)
    return found is None or bool((found.table.split != HELD_OUT).any())


def may_be_replayed(store: str) -> bool:
    """The same of a store that may not be readable: then it may be."""
    found = opened(store)
    return found is None or has_held_out(found)
