"""A refused command changes nothing: how earlier work ended is told as before, no file is left."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Before:
    """How the log directory of a stage stood before the stage was launched."""

    log_dir: Path
    name: str
    """The pattern of the stage's files, without what kind of file it is."""
    statuses: Mapping[Path, bytes]
    missing: tuple[Path, ...]
    """The directory and those above it that were not there, innermost first."""

    def restore(self) -> None:
        """Put the stage's status files back; of a directory that was not there, remove its logs."""
        for path in self.log_dir.glob(f"{self.name}.status.json"):
            path.unlink(missing_ok=True)
        for path, content in self.statuses.items():
            path.write_bytes(content)
        if not self.missing:
            return
        for path in self.log_dir.glob(f"{self.name}.log"):
            path.unlink(missing_ok=True)
        for directory in self.missing:
            # somebody else has put something there meanwhile
            with contextlib.suppress(OSError):
                directory.rmdir()


def before(log_dir: str, stage: str, rank: int | None = None) -> Before:
    """Of one rank, or of all; to be taken before anything is written to `log_dir`."""
    path, name = Path(log_dir), f"{stage}-{'*' if rank is None else rank}"
    statuses = dict[Path, bytes]()
    for one in path.glob(f"{name}.status.json"):
        # another launch may remove it meanwhile
        with contextlib.suppress(FileNotFoundError):
            statuses[one] = one.read_bytes()
    absolute = path.absolute()
    missing = takewhile(lambda one: not one.exists(), (absolute, *absolute.parents))
    return Before(path, name, statuses, tuple(missing))
