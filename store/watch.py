"""`dflash inspect --follow`: how far a capture is, told again whenever something was committed."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from dflash_pipeline.store import glance
from dflash_pipeline.store.completion import is_calibrated
from dflash_pipeline.store.describe import describe_progress
from dflash_pipeline.store.reader import open_store
from dflash_pipeline.store.report import progress_text

LOOK_EVERY_S = 1.0


def watch(path: str, wait: Callable[[float], None]) -> Iterator[dict[str, Any]]:
    """Where the store stands, now and after each change, until it is sealed; `waiting`: what its
    capture waits for under a quota, or empty.

    `wait` is called with the seconds between two looks.
    """
    store = open_store(path)
    last: tuple[object, ...] = ()
    while True:
        if not store.spec.is_calibrated and is_calibrated(path):
            # the identity that was opened is not the one that rows are read by
            store = open_store(path)
        store.refresh()
        is_sealed, waiting = store.is_sealed, glance.capture_wait(path)
        found = {**describe_progress(store), "waiting": waiting}
        # the text alone tells the time as well
        state = found["state"], found["total"]["committed_shards"], bool(waiting)
        if state != last:
            yield found
        if is_sealed:
            return
        last = state
        wait(LOOK_EVERY_S)


def main(run: object, place: object, extra: Mapping[str, object]) -> None:
    """Entry of `dflash inspect --follow`; extra: path, json. A line for each state."""
    for found in watch(str(extra["path"]), time.sleep):
        print(json.dumps(found) if extra["json"] else progress_text(found), flush=True)
