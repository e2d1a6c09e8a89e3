"""A trace of the steps that `train.profile` names, for a browser's trace viewer."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from dflash_pipeline.configs.sizes import size_text
from dflash_pipeline.store import durable

_TAIL = 64


class Profiler:
    """Traces steps FIRST to LAST of one rank into OUT/profile. Costs nothing outside of them."""

    def __init__(
        self,
        window: str,
        out: Path,
        rank: int,
        device: torch.device,
        say: Callable[[str], None],
    ) -> None:
        """`window`: `FIRST-LAST` as the log counts steps; empty: no trace."""
        self._say = say
        self._first, self._last = 0, 0
        if window:
            self._first, self._last = (int(number) for number in window.split("-"))
        self._folder, self._rank = out / "profile", rank
        self._activities = [ProfilerActivity.CPU]
        if device.type == "cuda":
            self._activities.append(ProfilerActivity.CUDA)
        self._running: profile | None = None

    def before(self, step: int) -> None:
        """Step `step` begins."""
        if step == self._first > 0:
            self._running = profile(activities=self._activities)
            self._running.start()

    def after(self, step: int) -> None:
        """Step `step` has been asked of the device; the window's last one writes the trace."""
        if step >= self._last:
            self.close(step)

    def close(self, step: int) -> None:
        """The run, or the window, ends after `step`."""
        if self._running is None:
            return
        # waits for the device: the steps are then in the trace to their end
        self._running.stop()
        durable.make_directories(self._folder)
        path = self._folder / f"rank{self._rank}-steps-{self._first}-{step}.json"
        self._running.export_chrome_trace(str(path))
        self._running = None
        if _is_whole(path):
            self._say(f"steps {self._first} to {step} are traced in {path}")
            return
        for left in (path, path.with_name(f"{path.name}.tmp")):
            if left.is_file():
                # emptied first: the profiler still holds it open, and the run needs the room
                os.truncate(left, 0)
                left.unlink()
        self._say(
            f"the trace of steps {self._first} to {step} cannot be written to {path} "
            f"({size_text(durable.free_bytes(self._folder))} free): the run goes on without it"
        )


def _is_whole(trace: Path) -> bool:
    """The profiler raises nothing where a trace finds no room: it is not there, or cut off."""
    if not trace.is_file():
        return False
    with trace.open("rb") as file:
        file.seek(-min(trace.stat().st_size, _TAIL), os.SEEK_END)
        return file.read().rstrip().endswith(b"}")
