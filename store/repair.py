"""`dflash verify --repair`: damaged shards become uncommitted, and the same capture redoes them.

What is removed is the commit record of each shard whose data or record is damaged, and the seal,
which says that all shards are there. Nothing else is touched: data without a record does not exist,
and the capture replaces it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from dflash_pipeline.configs.errors import UsageError
from dflash_pipeline.configs.mounts import root_of
from dflash_pipeline.configs.schema import CaptureConfig
from dflash_pipeline.store import durable, paths
from dflash_pipeline.store.build import plan_lock
from dflash_pipeline.store.check import Report, verify
from dflash_pipeline.store.lease import Leases
from dflash_pipeline.store.metadata import read_root

_LOCK_WAIT_S = 1.0
_NAMED_PROBLEMS = 20


def repair(path: str | Path, report: Report) -> list[str]:
    """Uncommit what `report`, of this store, found damaged; a line for each thing done.

    UsageError for a merged store, which no capture can redo, and while a mount is not there.
    """
    root = root_of(path)
    if not (report.damaged_shards or report.is_seal_damaged):
        return []
    if report.no_repair:
        raise UsageError(f"{report.no_repair}. Nothing was uncommitted")
    _, _, layout, _ = read_root(root)
    # nobody is taken over here: a shard that another process holds is left alone
    done, usual = [], CaptureConfig()
    with (
        plan_lock(root, wait_s=_LOCK_WAIT_S),
        Leases(root, layout, heartbeat_s=usual.heartbeat_s, hung_s=usual.hung_s) as leases,
    ):
        if _remove(root / paths.SEALED_FILE):
            done.append("the seal was removed: the capture seals the store again")
        for shard_id in report.damaged_shards:
            lease = leases.acquire(shard_id)
            if lease is None:
                done.append(f"shard {shard_id} is being written by a capture: left alone")
                continue
            with lease:
                if _remove(root / paths.commit_file(shard_id)):
                    done.append(f"shard {shard_id} is uncommitted: the capture redoes it")
    return done


def _remove(file: Path) -> bool:
    """Whether there was such a file."""
    try:
        file.unlink()
    except FileNotFoundError:
        return False
    durable.sync(file.parent)
    return True


def main(run: object, place: object, extra: Mapping[str, object]) -> None:
    """Entry of `dflash verify --repair`; extra: path, deep, json.

    ValueError with all that is still wrong afterwards.
    """
    path, deep = str(extra["path"]), bool(extra["deep"])
    report = verify(path, deep=deep)
    done = repair(path, report)
    after = verify(path, deep=deep) if done else report
    if extra["json"]:
        print(
            json.dumps({"before": asdict(report), "done": done, "after": asdict(after)}, indent=1)
        )
    else:
        for line in (*report.problems, *(f"repair: {line}" for line in done)):
            print(line)
        if not report.problems:
            unread = "" if deep else "; rows were not read, --deep compares their checksums"
            print(f"nothing to repair{unread}")
        elif not after.problems:
            left = after.num_shards - after.num_committed
            print(f"the command that captured {path} redoes {left} of {after.num_shards} shards")
    if after.problems:
        raise ValueError(
            f"{after.count_text()} left in {path}: {'; '.join(after.problems[:_NAMED_PROBLEMS])}; "
            "--repair helps shards that no capture is writing, the rest must be captured anew"
        )
