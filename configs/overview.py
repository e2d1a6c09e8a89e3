"""What `dflash status` shows: what each process does, or how it ended, and what to do about it."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from dflash_pipeline.configs.disk import AGAIN
from dflash_pipeline.configs.errors import UsageError
from dflash_pipeline.configs.screen import duration, progress_line
from dflash_pipeline.configs.status import ACTIVE, Status, find_runs, places_of

Found = Sequence[tuple[str, Status]]


def found_in(directory: str) -> Found:
    """Each status of a run, a store, an answer file or a log directory, with "", and of a sweep's
    variants, with the variant's name. UsageError where there is none."""
    path = Path(directory).resolve()
    found = find_runs(path)
    if not found:
        places = ", ".join(map(str, places_of(path)))
        raise UsageError(f"{directory}: no run has left its status; looked in {places}")
    return found


def json_text(found: Found) -> str:
    """All that the statuses say, for programs."""
    listed = [
        {"variant": variant, **asdict(one), "alive": one.is_alive, "rate": one.rate}
        for variant, one in found
    ]
    return json.dumps(listed, indent=1)


def lines(found: Found) -> list[str]:
    """The same for people: who, how far, and the last thing said."""
    told = []
    for variant, one in found:
        is_lost = one.state in ACTIVE and not one.is_alive
        state = f"dead, was {one.state}" if is_lost else one.state
        age = duration(max(0.0, time.time() - one.time))
        name = f"{variant}/{one.stage}" if variant else one.stage
        told.append(f"{name}-{one.number}  {state}  {one.host}:{one.pid}  {age} ago")
        if one.unit:
            shown = progress_line(one.stage, {**asdict(one), "rate": one.rate})
            told.append(f"  {shown}")
        if one.error or one.text:
            told.append(f"  {one.error or one.text}")
    return told


def remedy(
    directory: str,
    found: Found,
    is_store_open: bool,
    num_awaited: int = 0,
    stopped: Sequence[str] = (),
) -> str:
    """The last line: what to do, if anything. is_store_open: a store whose shards are not all
    there; num_awaited: training runs that it needs before it releases its first shard; stopped:
    those that follow it, and whose processes are not there."""
    statuses = [one for _, one in found]
    num_alive = sum(one.is_alive for one in statuses)
    if any(not one.is_alive and one.state != "done" for one in statuses):
        return f"once the others have ended, {AGAIN}" if num_alive else f"to go on, {AGAIN}"
    if num_alive:
        todo = "nothing to do"
        if num_awaited:
            runs = f"{num_awaited} training run{'s' * (num_awaited != 1)}"
            training = f"dflash train --store {shlex.quote(directory)} --epochs 1"
            todo = f"{runs} to start, by {training}"
        elif stopped and is_store_open:
            # the capture keeps every shard that such a run has not used
            dropping = f"dflash status {shlex.quote(directory)} --drop {shlex.quote(stopped[0])}"
            todo = (
                f"{', '.join(stopped)} not running: run its dflash train again with --resume, or "
                f"drop it by {dropping}"
            )
        return f"{num_alive} of {len(statuses)} at work: {todo}"
    if is_store_open:
        return f"{directory} lacks shards, as after a repair: to go on, run its capture again"
    return "all of them are done"
