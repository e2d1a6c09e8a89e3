"""What a capture tells while it works."""

from __future__ import annotations

from typing import Protocol

from dflash_pipeline.configs.counts import Counts


class Voice(Protocol):
    """The part of a RunLog that a capture uses."""

    def say(self, text: str) -> None:
        """A line for people."""

    def note(self, text: str) -> None:
        """A line for the log file alone."""

    def state(self, state: str) -> None:
        """running, waiting, ..."""

    def waiting(self, text: str) -> None:
        """What the capture waits for."""

    def counted(self, done: float, total: float, unit: str, counts: Counts) -> None:
        """How far the whole capture is, and what this worker has done."""


class Silence:
    """A voice that nobody hears: of trials, which tell by failing."""

    def say(self, text: str) -> None:
        """Nothing."""

    def note(self, text: str) -> None:
        """Nothing."""

    def state(self, state: str) -> None:
        """Nothing."""

    def waiting(self, text: str) -> None:
        """Nothing."""

    def counted(self, done: float, total: float, unit: str, counts: Counts) -> None:
        """Nothing."""
