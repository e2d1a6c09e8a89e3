"""`run.json`: what a run was begun with, written once and compared by every run that goes on.

Loads no torch: the command line asks as well, before anything else does.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from dflash_pipeline.configs.effects import changes_of_continuation
from dflash_pipeline.configs.errors import UsageError
from dflash_pipeline.configs.jsonfile import read_object
from dflash_pipeline.configs.load import RUN_FILE, from_dict, to_dict
from dflash_pipeline.configs.schema import Run
from dflash_pipeline.configs.shares import parse_stores
from dflash_pipeline.store import durable
from dflash_pipeline.store.metadata import Root

# files that stand in a run directory before the run begins
_NOT_A_RUN = {"logs"}


def begin(out: Path, run: Run, roots: Sequence[Root], resume: bool) -> None:
    """Rank 0, before anything is written: is OUT free, or is it this very run?

    roots: of the run's stores, in their order. UsageError for a non-empty OUT without `resume`,
    and for each setting or store that differs.
    """
    if resume:
        check_same(out, run, roots)
        return
    found = sorted({path.name for path in out.glob("*")} - _NOT_A_RUN)
    if found:
        if RUN_FILE in found:
            check_free(out)
        raise UsageError(
            f"{out} is not empty (it holds {found[0]}): go on with it by --resume, or name "
            "another --out"
        )
    out.mkdir(parents=True, exist_ok=True)
    content = {
        "run": to_dict(run),
        "stores": _store_records(run, roots),
        "versions": {"python": platform.python_version()}
        | {name: version(name) for name in ("dflash-pipeline", "torch", "numpy")},
    }
    try:
        # not renamed to its name: a rename would replace the record of who came first
        durable.create(out / RUN_FILE, json.dumps(content, indent=2).encode())
    except FileExistsError:
        raise UsageError(_at_work(out)) from None
    durable.sync(out)


def check_same(out: Path, run: Run, roots: Sequence[Root] | None) -> None:
    """UsageError unless OUT holds this run; it names each difference.

    roots: None where they are not known yet: settings alone are compared.
    """
    record = out / RUN_FILE
    if not record.is_file():
        raise UsageError(
            f"{out} holds no {RUN_FILE}: there is no run to resume, leave --resume out"
        )
    try:
        before = read_object(record)
        recorded, records = from_dict(before["run"]), list(before["stores"])
    except UsageError as error:
        # a section or key that this version has not: what a crash leaves is no JSON
        raise UsageError(
            f"{record} was written by another version of dflash-pipeline ({error}): go on with the "
            "version that it names, or begin a new run with another --out, from its weights by "
            f"--init-from {out}"
        ) from None
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{record} is damaged ({error}): what the run was begun with is not known; begin a new "
            f"run with another --out, from its weights by --init-from {out}"
        ) from None
    changed = changes_of_continuation(recorded, run)
    if roots is not None:
        changed += _store_changes(records, _store_records(run, roots))
    if changed:
        raise UsageError(
            f"{out} was begun with other settings ({'; '.join(changed)}): set them back, or begin "
            "a new run with another --out"
        )


@contextlib.contextmanager
def held(out: Path) -> Iterator[None]:
    """Rank 0, after `begin` and for as long as it may write: nobody else trains into OUT.

    UsageError where somebody does. The kernel gives it back whatever ends the process.
    """
    descriptor = os.open(out / RUN_FILE, os.O_RDWR)
    try:
        if not _lock(descriptor):
            raise UsageError(_at_work(out))
        yield
    finally:
        os.close(descriptor)


def check_free(out: Path) -> None:
    """UsageError where a run is at work in OUT, which holds one."""
    with held(out):
        pass


def _lock(descriptor: int) -> bool:
    try:
        return durable.lock(descriptor, 0)
    except OSError:
        # a file system without locks keeps nobody out; runs, unlike stores, may stand on one
        return True


def _at_work(out: Path) -> str:
    return (
        f"another process trains into {out} at this moment (dflash status {out}): wait until it "
        "has ended, or begin a new run with another --out"
    )


def withdraw(out: Path) -> None:
    """Take back what `begin` wrote for a new run that was refused before its first step: the same
    --out may be named again. Logs stay."""
    (out / RUN_FILE).unlink(missing_ok=True)


def _store_records(run: Run, roots: Sequence[Root]) -> list[dict[str, Any]]:
    texts = run.train.stores or (run.store.path,)
    return [
        {
            "name": text,
            "share": share.share,
            "plan_hash": root.plan_hash,
            "identity": dict(root.identity),
        }
        for text, share, root in zip(texts, parse_stores(texts), roots, strict=True)
    ]


def _store_changes(
    before: Sequence[Mapping[str, Any]], now: Sequence[Mapping[str, Any]]
) -> list[str]:
    """A store may have moved; its plan, identity and share may not have changed."""
    if len(before) != len(now):
        return [f"number of stores: {len(before)}, now {len(now)}"]
    return [
        f"store {index} ({then['name']}): another {what} at {here['name']}"
        for index, (then, here) in enumerate(zip(before, now, strict=True))
        for what in ("share", "plan_hash", "identity")
        if json.dumps(then[what], sort_keys=True) != json.dumps(here[what], sort_keys=True)
    ]
