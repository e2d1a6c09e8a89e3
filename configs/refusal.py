"""A refused command changes nothing: how earlier work ended is told as before, no file is left."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from dflash_pipeline.configs.disk import write_whole
from dflash_pipeline.configs.status import log_path, read_status, status_path


@dataclass(frozen=True, slots=True)
class Before:
    """How the log directory of a stage stood before the stage was launched."""

    log_dir: str
    stage: str
    statuses: Mapping[Path, bytes]
    """Of processes that had ended."""
    missing: tuple[Path, ...]
    """The directory and those above it that were not there, innermost first."""

    def restore(self, numbers: Iterable[int]) -> None:
        """Put the stage's status files back; of a directory that was not there, remove its logs.

        numbers: of the refused processes; what others write at the same time is left to them.
        """
        numbers = list(numbers)
        for number in numbers:
            status_path(self.log_dir, self.stage, number).unlink(missing_ok=True)
        for path, content in self.statuses.items():
            if not path.exists():
                write_whole(path, content)
        if not self.missing:
            return
        for number in numbers:
            log_path(self.log_dir, self.stage, number).unlink(missing_ok=True)
        for directory in self.missing:
            # somebody else has put something there meanwhile
            with contextlib.suppress(OSError):
                directory.rmdir()


def before(log_dir: str, stage: str) -> Before:
    """To be taken before anything is written to `log_dir`."""
    path, statuses = Path(log_dir), dict[Path, bytes]()
    for one in path.glob(f"{stage}-*.status.json"):
        # another launch may remove it meanwhile
        with contextlib.suppress(FileNotFoundError):
            content, status = one.read_bytes(), read_status(one)
            if status is None or not status.is_alive:
                statuses[one] = content
    absolute = path.absolute()
    missing = takewhile(lambda one: not one.exists(), (absolute, *absolute.parents))
    return Before(log_dir, stage, statuses, tuple(missing))
