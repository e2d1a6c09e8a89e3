"""Ending early and cleanly: a signal becomes a wish, and all ranks end after the same step."""

from __future__ import annotations

import signal
import threading
from collections import deque
from types import FrameType
from typing import Any, Self

import torch
from torch import Tensor

from dflash_pipeline.train.group import Group

# votes are read this many steps late, when the device is done with them anyway
_LAG_STEPS = 2


class StopWish:
    """Set by SIGTERM, SIGINT or SIGHUP; a second one interrupts at once."""

    def __init__(self) -> None:
        self._asked = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        # only the main thread may set handlers; elsewhere (a notebook's worker) there is no wish
        if threading.current_thread() is threading.main_thread():
            for kind in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                self._before[kind] = signal.signal(kind, self._ask)
        return self

    def __exit__(self, *_error: object) -> None:
        for kind, handler in self._before.items():
            signal.signal(kind, handler)

    def is_asked(self) -> bool:
        """Whether a signal asked this process to end."""
        return self._asked

    def _ask(self, _number: int, _frame: FrameType | None) -> None:
        if self._asked:
            raise KeyboardInterrupt
        self._asked = True


class StopVote:
    """Reads the summed wishes of all ranks without stopping the device.

    The sum is the same on every rank at the same step, so all ranks leave the loop together.
    """

    def __init__(self, group: Group, device: torch.device) -> None:
        self._group, self._is_cuda = group, device.type == "cuda"
        self._cast: deque[tuple[Tensor, torch.cuda.Event]] = deque()
        self._free: deque[tuple[Tensor, torch.cuda.Event]] = deque()
        if self._is_cuda:
            for _ in range(_LAG_STEPS + 1):
                self._free.append((torch.zeros((), pin_memory=True), torch.cuda.Event()))

    def is_carried(self, votes: Tensor) -> bool:
        """Add this step's votes; whether those of `_LAG_STEPS` before hold a wish to stop."""
        if not self._is_cuda:
            return float(votes) > 0
        ballot, event = self._free.popleft()
        ballot.copy_(votes, non_blocking=True)
        event.record()
        self._cast.append((ballot, event))
        if len(self._cast) <= _LAG_STEPS:
            return False
        ballot, event = self._cast.popleft()
        self._group.wait_for(event)
        self._free.append((ballot, event))
        return float(ballot) > 0
