"""The numbers of a stage's processes: no two that are at work at once in a log directory share one.

A number belongs to whoever holds the lock of its log. The launcher takes it, and its process
inherits the open file, so it is free again when both are gone, however they ended.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import BinaryIO

from dflash_pipeline.configs.status import log_path, read_status, status_path


@contextlib.contextmanager
def claimed(log_dir: str, stage: str, num_processes: int) -> Iterator[dict[int, BinaryIO]]:
    """The lowest free numbers, ascending, each with its log, held until the end of the block."""
    Path(log_dir).mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        logs = dict[int, BinaryIO]()
        for number in count():
            if len(logs) == num_processes:
                break
            if (log := _claim(log_dir, stage, number)) is not None:
                logs[number] = stack.enter_context(log)
        yield logs


def forget_ended(log_dir: str, stage: str) -> None:
    """Remove what processes of a stage left whose launch has ended; one may have had more of them.

    What a launch that is still at work has done stays, though a process of it has ended.
    """
    for path in Path(log_dir).glob(f"{stage}-*.status.json"):
        number = path.name.removeprefix(f"{stage}-").removesuffix(".status.json")
        if not number.isdigit() or not log_path(log_dir, stage, int(number)).exists():
            status = read_status(path)
            if status is None or not status.is_alive:
                path.unlink(missing_ok=True)
        elif (log := _claim(log_dir, stage, int(number))) is not None:
            with log:
                path.unlink(missing_ok=True)


def _claim(log_dir: str, stage: str, number: int) -> BinaryIO | None:
    """The log of a number, locked; None where the number is in use."""
    path = log_path(log_dir, stage, number)
    with contextlib.ExitStack() as stack:
        while True:
            log = stack.enter_context(path.open("ab"))
            try:
                fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return None
            except OSError:
                # a file system without locks: the status below tells nearly as much
                break
            with contextlib.suppress(FileNotFoundError):
                # a refused launch has removed the file between the two lines above
                if os.path.samestat(os.fstat(log.fileno()), path.stat()):
                    break
            stack.close()
        # a process without a launcher holds no lock, nor does one on another host everywhere
        status = read_status(status_path(log_dir, stage, number))
        if status is not None and status.is_alive:
            return None
        stack.pop_all()
        return log
