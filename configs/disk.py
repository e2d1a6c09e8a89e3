"""Files written whole, and what a failed write says: its file, the room left, how to go on.

The trap: the system names a file that cannot be opened, but none that cannot be written to.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from dflash_pipeline.configs.sizes import size_text

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
AGAIN = "run the same command again (train: with --resume)"
"""How every stage is gone on with."""


def nearest(path: Path) -> Path:
    """The directory, or the next one above it that is there."""
    path = path.absolute()
    return next(folder for folder in (path, *path.parents) if folder.is_dir())


def is_full(error: OSError) -> bool:
    """Whether an error says that no more can be written there."""
    return error.errno in _FULL


@contextlib.contextmanager
def writing(path: str | Path) -> Iterator[None]:
    """An OSError of the block that names no file is one of this file."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.filename = str(path)
        raise


def write_whole(path: Path, data: bytes) -> None:
    """Replace a small file in one step: a reader never sees half of one. It is not synced."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with writing(path):
            aside.write_bytes(data)
        os.replace(aside, path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


def full_text(error: OSError) -> str:
    """One line for a disk, quota or limit that is full (`is_full`)."""
    if not isinstance(error.filename, str):
        return f"{error.strerror}: free some space where the command writes, then {AGAIN}"
    free = size_text(shutil.disk_usage(nearest(Path(error.filename).parent)).free)
    return (
        f"no space left to write {error.filename} ({error.strerror}; {free} free): free some, then "
        f"{AGAIN}"
    )
