"""Ending between two batches when a signal asks for it."""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any


class Stop:
    """SIGINT, SIGTERM and SIGHUP end the work between two batches; a second one at once.

    One that nobody looked for is raised as the block is left.
    """

    def __init__(self) -> None:
        self._signal = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Stop:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if kind is None:
            # one that came after the last look must not be lost: the work goes on behind this block
            self.check()

    @property
    def is_asked(self) -> bool:
        """A signal came."""
        return bool(self._signal)

    def check(self) -> None:
        """KeyboardInterrupt if a signal came."""
        if self._signal:
            raise KeyboardInterrupt(f"stopped by {signal.Signals(self._signal).name}")

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if self._signal:
            raise KeyboardInterrupt
        self._signal = number
