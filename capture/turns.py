"""Processes of a machine that compile the same code: one does, the others find what it has made.

The compilers keep their results in directories of the user (TORCHINDUCTOR_CACHE_DIR,
TRITON_CACHE_DIR), but workers that start together all find them empty, and would make the same code
side by side on the same cores.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from torch._inductor.runtime.cache_dir_utils import cache_dir

WAITING = "waiting: another process compiles the same"
LONGEST_S = 600.0
"""A process that compiles for longer may hang: nobody waits for it any more."""


@contextlib.contextmanager
def turn(what: str, say: Callable[[str], None], wait: Callable[[], None]) -> Iterator[None]:
    """Compile `what` in here: the first process alone, then those that met it there side by side.

    what: names the code, the same in each process; `wait`, which takes a moment, is called again
    and again until the first is done, or dead: the kernel gives its lock back at a kill -9 too.
    """
    name = hashlib.sha256(what.encode()).hexdigest()[:16]
    lock = _opened(f"dflash-{name}.lock")
    if lock is None:
        yield
        return
    try:
        if not _taken(lock, fcntl.LOCK_EX):
            say(WAITING)
            end = time.monotonic() + LONGEST_S
            while not _taken(lock, fcntl.LOCK_SH) and time.monotonic() < end:
                wait()
        yield
    finally:
        with contextlib.suppress(OSError):
            # closing alone would leave it to a process that was forked meanwhile
            fcntl.flock(lock, fcntl.LOCK_UN)
        os.close(lock)


def _opened(name: str) -> int | None:
    """A file of the cache; None where there is no cache to share."""
    try:
        return os.open(Path(cache_dir()) / name, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError:
        return None


def _taken(lock: int, kind: int) -> bool:
    try:
        fcntl.flock(lock, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        # a file system without locks: nobody waits
        return True
    return True
