"""What `dflash status` shows: what each process does, or how it ended, and what to do about it."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from dflash_pipeline.configs.disk import AGAIN
from dflash_pipeline.configs.errors import UsageError
from dflash_pipeline.configs.following import ONLY_BY_RESUMING
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
            message = {**asdict(one), "rate": one.rate}
            shown = progress_line(one.stage, message, is_at_work=one.is_alive)
            told.append(f"  {shown}")
        if one.error or one.text:
            told.append(f"  {one.error or one.text}")
    return told


@dataclass(frozen=True, slots=True)
class Followers:
    """The training runs of a rolling store, as far as its capture must wait for somebody."""

    num_awaited: int = 0
    """Those that must still come before the first shard is released."""
    training: str = ""
    """The line that starts one."""
    stopped: Sequence[str] = ()
    """Those that have not used all, and whose processes are not there."""
    are_gone: bool = False
    """Shards were released, and no run is left."""


def remedy(
    directory: str, found: Found, is_store_open: bool, followers: Followers = Followers()
) -> str:
    """The last line: what to do, if anything. is_store_open: a store whose shards are not all
    there."""
    statuses = [one for _, one in found]
    num_alive = sum(one.is_alive for one in statuses)
    if any(not one.is_alive and one.state != "done" for one in statuses):
        return f"once the others have ended, {AGAIN}" if num_alive else f"to go on, {AGAIN}"
    if num_alive:
        todo = "nothing to do"
        if followers.num_awaited:
            runs = f"{followers.num_awaited} training run{'s' * (followers.num_awaited != 1)}"
            todo = f"{runs} to start, by {followers.training}"
        elif is_store_open and followers.stopped:
            # the capture keeps every shard that such a run has not used
            first = shlex.quote(followers.stopped[0])
            todo = (
                f"{', '.join(followers.stopped)} not running: run its dflash train again with "
                f"--resume, or drop it by dflash status {shlex.quote(directory)} --drop {first}"
            )
        elif is_store_open and followers.are_gone:
            todo = f"no training run follows the store, {ONLY_BY_RESUMING}"
        return f"{num_alive} of {len(statuses)} at work: {todo}"
    if is_store_open:
        return f"{directory} lacks shards, as after a repair: to go on, run its capture again"
    return "all of them are done"
