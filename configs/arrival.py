"""A store that a capture is about to make: a capture has it once it has read all the data."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from dflash_pipeline.configs import status
from dflash_pipeline.configs.errors import UsageError
from dflash_pipeline.configs.inputs import STORE_FILE, refuse_other

APPEAR_S = 5.0
"""How long a capture that was started at the same time may take to be seen at work."""
_LOOK_EVERY_S = 0.2


def await_store(store: Path, who: str, follow: bool, say: Callable[[str], object]) -> None:
    """Return once the store is there; `say` is told what is waited for, in the name of `who`.

    UsageError where no capture is at work, without `follow`, or where something else stands.
    """
    began, said = time.monotonic(), ""
    # it appears whole, in one rename
    while not (store / STORE_FILE).is_file():
        refuse_other(store)
        found = status.find_statuses(store)
        is_planning = any(one.is_alive for one in found)
        if not follow or not (is_planning or time.monotonic() - began < APPEAR_S):
            raise UsageError(_no_store(store, who, is_planning, [one.error for one in found]))
        text = f"{who}: waiting until the capture into {store} has made its plan"
        if not is_planning:
            text = f"{who}: there is no store {store}, waiting {APPEAR_S:g} s for its capture"
        if text != said:
            say(text)
            said = text
        time.sleep(_LOOK_EVERY_S)


def _no_store(store: Path, who: str, is_planning: bool, errors: Sequence[str]) -> str:
    """Why there is nothing to follow, and what to do."""
    told = f"there is no store {store}"
    if is_planning:
        return f"{told} yet, its capture is still planning: leave --no-follow out to wait for it"
    if error := next(filter(None, errors), ""):
        return f"{told}, its capture failed: {error}; start dflash capture again"
    return f"{told}: write it with dflash capture; {who} follows it once that has begun"
