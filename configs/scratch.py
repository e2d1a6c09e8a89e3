"""Temporary directories that do not outlive their process, however it ended.

Each is locked by whoever uses it; the kernel gives the lock back at a kill -9 too, and the next one
who makes such a directory removes those that nobody holds.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from dflash_pipeline.configs.errors import UsageError


@contextlib.contextmanager
def scratch(
    name: str, parent: Path | None = None, is_kept: Callable[[Path], bool] = lambda _path: False
) -> Iterator[Path]:
    """A new directory `dflash-<name>-...` below `parent`, removed at the end.

    parent: None: the system's temporary directory. is_kept: asked at the end whether it stays,
    until the next one of this name is made.
    """
    prefix, parent = f"dflash-{name}-", parent or Path(tempfile.gettempdir())
    for left in parent.glob(f"{prefix}*"):
        _remove_unheld(left)
    path, lock = _made(prefix, parent)
    try:
        yield path
    finally:
        if not is_kept(path):
            shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def _made(prefix: str, parent: Path) -> tuple[Path, int]:
    """UsageError where the file system knows no locks."""
    while True:
        path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        # a sweep may come in between and take the directory for one left behind
        with contextlib.suppress(FileNotFoundError):
            lock = os.open(path, os.O_RDONLY)
            try:
                fcntl.flock(lock, fcntl.LOCK_SH)
            except OSError as error:
                os.close(lock)
                path.rmdir()
                raise UsageError(
                    f"{parent} is on a file system without locks ({error.strerror}), which a "
                    "temporary directory needs: set TMPDIR to another"
                ) from None
            if path.is_dir():
                return path, lock
            os.close(lock)


def _remove_unheld(path: Path) -> None:
    # not ours, or gone meanwhile: somebody else sees to it
    with contextlib.suppress(OSError):
        lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
        finally:
            os.close(lock)
