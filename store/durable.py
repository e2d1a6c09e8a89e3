"""Files that survive a power cut (written aside, synced, renamed) and locks that die with a holder.

Trap: POSIX locks (F_SETLK) fall when any descriptor of the file is closed; only locks of open file
descriptions (F_OFD_SETLK) are used here.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from dflash_pipeline.configs.disk import nearest, writing
from dflash_pipeline.configs.sizes import size_text


def temporary_name(path: Path) -> Path:
    """A fresh name beside `path` for the file that will replace it."""
    return path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")


def temporaries(directory: Path) -> list[Path]:
    """Files that `temporary_name` named and nobody renamed."""
    try:
        return sorted(Path(e.path) for e in os.scandir(directory) if is_temporary(e.name))
    except FileNotFoundError:
        return []


def temporaries_below(directory: str | Path) -> list[str]:
    """The same in all folders below, links not followed. A store has tens of thousands of them."""
    found, folders = [], [str(directory)]
    while folders:
        try:
            with os.scandir(folders.pop()) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
                    elif is_temporary(entry.name):
                        found.append(entry.path)
        except OSError:
            # removed meanwhile, or not ours to read
            continue
    return found


def is_temporary(name: str) -> bool:
    """Whether `temporary_name` gave this name."""
    return name.startswith(".") and name.endswith(".tmp")


def sync(path: Path) -> None:
    """Make a file's bytes, or the names in a directory, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_directories(directory: Path) -> None:
    """Make a directory and its parents, each durable."""
    missing = []
    while not directory.is_dir():
        missing.append(directory)
        directory = directory.parent
    for path in reversed(missing):
        path.mkdir(exist_ok=True)
        sync(path.parent)


def write_all(descriptor: int, data: Any, offset: int) -> None:
    """pwrite all bytes of a contiguous buffer."""
    view = memoryview(data).cast("B")
    while view.nbytes:
        written = os.pwrite(descriptor, view[: 1 << 30], offset)
        view, offset = view[written:], offset + written


def read_all(descriptor: int, buffer: Any, offset: int) -> int:
    """preadv into a contiguous buffer; the bytes read, fewer only at the end of the file."""
    view = memoryview(buffer).cast("B")
    total = 0
    while view.nbytes:
        got = os.preadv(descriptor, [view[: 1 << 30]], offset)
        if got == 0:
            break
        view, offset, total = view[got:], offset + got, total + got
    return total


def rename(source: Path, target: Path) -> None:
    """Rename and make the new name durable."""
    os.rename(source, target)
    sync(target.parent)


def create(path: Path, data: Any) -> None:
    """Write and sync a file that is not there yet. FileExistsError where it is: of several who
    write it, one alone does."""
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
    try:
        with writing(path):
            write_all(descriptor, data, 0)
            os.fdatasync(descriptor)
    except BaseException:
        path.unlink()
        raise
    finally:
        os.close(descriptor)


def write_aside(path: Path, data: Any) -> Path:
    """Write and sync the file that shall become `path`; returns its temporary name."""
    temporary = temporary_name(path)
    create(temporary, data)
    return temporary


def write_durably(path: Path, data: Any) -> None:
    """Write a file so that it is there whole or not at all."""
    rename(write_aside(path, data), path)


def free_bytes(path: Path) -> int:
    """Bytes that a user may still write on the file system of `path` or its nearest parent."""
    status = os.statvfs(nearest(path))
    return status.f_bavail * status.f_frsize


def check_space(path: Path, needed_bytes: int) -> None:
    """Refuse what cannot fit: a ValueError that names what is needed and what is free."""
    free = free_bytes(path)
    if needed_bytes > free:
        raise ValueError(
            f"no space for {path}: {size_text(needed_bytes)} are needed, {size_text(free)} are "
            "free; free some space, choose another store path, or capture less with --limit"
        )


def lock(descriptor: int, byte: int, *, wait: bool = False) -> bool:
    """Take the write lock of one byte; False if another open file holds it."""
    request = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLKW if wait else fcntl.F_OFD_SETLK, request)
    except (BlockingIOError, PermissionError):
        return False
    return True


def is_locked(descriptor: int, byte: int) -> bool:
    """Whether another open file holds the write lock of a byte."""
    request = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)
    answer: bytes = fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, request)
    kind: int = struct.unpack("hhqqi4x", answer)[0]
    return kind != fcntl.F_UNLCK


def unlock(descriptor: int, byte: int) -> None:
    """Give a byte's lock back."""
    request = struct.pack("hhqqi4x", fcntl.F_UNLCK, os.SEEK_SET, byte, 1, 0)
    fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, request)


@contextlib.contextmanager
def locked(
    path: Path, byte: int, *, wait_s: float, waiting: Callable[[], None] = lambda: None
) -> Iterator[bool]:
    """Hold a byte of a lock file; gives False if it was not free within `wait_s` seconds.

    `waiting` is called again and again meanwhile.
    """
    make_directories(path.parent)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        end = time.monotonic() + wait_s
        while not (held := lock(descriptor, byte)) and time.monotonic() < end:
            waiting()
            time.sleep(0.05)
        yield held
    finally:
        os.close(descriptor)


def check_file_system(directory: Path) -> None:
    """Refuse a file system without working locks, rename, symlinks and fsync."""
    try:
        make_directories(directory)
    except OSError as error:
        raise ValueError(f"cannot make {directory}: {error.strerror}") from error
    probe = directory / f".probe.{uuid.uuid4().hex}.tmp"
    link, moved = probe.with_suffix(".link"), probe.with_suffix(".moved")
    what = "create a file"
    descriptors: list[int] = []
    try:
        descriptors.extend(os.open(probe, os.O_RDWR | os.O_CREAT, 0o644) for _ in range(2))
        what = "lock bytes (open-file-description locks)"
        _expect(lock(descriptors[0], 3) and not lock(descriptors[1], 3), "a lock did not exclude")
        unlock(descriptors[0], 3)
        _expect(lock(descriptors[1], 3), "a lock was not given back")
        what = "fsync"
        write_all(descriptors[0], b"x", 0)
        os.fdatasync(descriptors[0])
        what = "rename and fsync a directory"
        rename(probe, moved)
        what = "make a symbolic link"
        link.symlink_to(moved.name)
        _expect(link.read_bytes() == b"x", "a link did not lead to its file")
    except OSError as error:
        raise ValueError(
            f"the file system of {directory} cannot {what}: {error.strerror or error}; "
            "put the store on a local disk"
        ) from error
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
        for path in (probe, link, moved):
            path.unlink(missing_ok=True)


def _expect(holds: bool, message: str) -> None:
    if not holds:
        raise OSError(errno.ENOLCK, message)
