"""A rank that hangs says where, and ends, so that the others and whoever waits learn of it.

The trap: of ranks that wait for one another only one hangs. Its patience is a little shorter than
that of those that wait for it, and each names, beside its own place, the ranks behind it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Self

from dflash_pipeline.configs.place import Place
from dflash_pipeline.configs.status import log_path
from dflash_pipeline.store.runlog import RunLog
from dflash_pipeline.train.clock import Clock
from dflash_pipeline.train.group import Group

_SHARE = 0.9
# of train.timeout_s: a wait for other ranks so long is told
_SLOW_SHARE = 0.1
_LOOKS = 20
_LOOK_EVERY_S = 1.0


class Watchdog:
    """Ends the process when `beat` was not called for most of `timeout_s` seconds.

    A call that hangs with the interpreter's lock in hand stops this thread too; such a rank is
    named by the others alone.
    """

    def __init__(
        self,
        place: Place,
        timeout_s: float,
        log: RunLog,
        group: Group,
        clock: Clock,
        end: Callable[[int], None] = os._exit,
    ) -> None:
        """`end`: how the process is ended; a hung thread can be asked nothing."""
        self._place, self._log, self._group, self._clock = place, log, group, clock
        self._limit_s, self._end = _SHARE * timeout_s, end
        self._slow_s = _SLOW_SHARE * timeout_s
        self._step, self._beat_at = 0, time.monotonic()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._is_over.set()
        self._thread.join()

    def beat(self, step: int) -> None:
        """This rank is alive, after `step` steps; told to the other ranks as well."""
        self._step, self._beat_at = step, time.monotonic()
        self._group.beat(step)

    def _watch(self) -> None:
        is_told, num_waits = False, self._group.num_waits
        while not self._is_over.wait(min(self._limit_s / _LOOKS, _LOOK_EVERY_S)):
            # the others learn of the last step of a rank that stands still, not of one before
            with contextlib.suppress(RuntimeError):  # where rank 0 and its store are gone
                self._group.tell_beat()
            # who waits for other ranks gives up by itself, and names them; who has waited is alive
            if self._group.is_waiting or self._group.num_waits != num_waits:
                self._beat_at, num_waits = time.monotonic(), self._group.num_waits
            silent_s = time.monotonic() - self._beat_at
            if silent_s > self._limit_s:
                self._give_up(silent_s)
                return
            waited_s = self._group.waited_s
            if waited_s > self._slow_s and not is_told:
                self._tell_slow(waited_s)
            is_told = waited_s > self._slow_s

    def _tell_slow(self, waited_s: float) -> None:
        """Once a wait, by the first of the ranks that wait; no fault, but it costs all of them."""
        if self._group.speaks():
            self._log.say(
                f"rank {self._place.rank} has waited {waited_s:.0f} s for {self._group.awaited()}"
            )

    def _give_up(self, silent_s: float) -> None:
        place = self._place
        sys.stderr.flush()
        faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
        log = log_path(place.log_dir, place.stage, place.number)
        behind = f" (the others: {self._group.behind()})" if self._group.world > 1 else ""
        self._log.fail(
            f"rank {place.rank} hangs: for {silent_s:.0f} s it has been in stage "
            f"{self._clock.stage_now!r} after step {self._step}{behind}: every thread's stack is "
            f"in {log}; where the work itself takes so long, raise train.timeout_s"
        )
        self._end(1)
