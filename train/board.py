"""TensorBoard's file of a run.

The trap: its own thread writes, and what stops that is raised at a later call, naming no file.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from dflash_pipeline.configs.disk import writing

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class Board:
    """Curves in a directory, a file for each process that has written there."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with writing(path):
            self._writer = _writer(path)

    def add(self, numbers: Mapping[str, float], step: int) -> None:
        """A point on each curve."""
        with writing(self._path):
            for name, value in numbers.items():
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Finish the file."""
        with writing(self._path):
            self._writer.close()


def _writer(path: Path) -> SummaryWriter:
    # tensorboard costs a second to import, and warns about its own dependencies
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.utils.tensorboard import SummaryWriter

        return SummaryWriter(str(path))
