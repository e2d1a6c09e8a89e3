"""Where the time of a step goes, by stage, without waiting for the device.

On CUDA a stage lies between two events of its stream, which are read at the next log line, when
the device has passed them anyway: the stages are the device's time, gaps between kernels included.
On a CPU they are the wall's.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterator

import torch

# in the order of a step
STAGES = (
    "h2d",
    "dequantise",
    "forward",
    "backward",
    # what the sums over ranks take beyond the backward pass that they run beside
    "reduce",
    "optimizer",
    "validate",
    "checkpoint",
)
# of these the host's time is told: they are no work of the device, or wait for it
_OF_THE_HOST = ("validate", "checkpoint")


class Clock:
    """Seconds of each stage since they were last taken. Belongs to the training thread."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._seconds = dict.fromkeys(STAGES, 0.0)
        self._spans: deque[tuple[str, torch.cuda.Event, torch.cuda.Event]] = deque()
        self._free: list[torch.cuda.Event] = []
        self.stage_now = "start-up"
        """Where the training thread is, or was last: what a hang or an error is named by."""

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Count the block, on the current stream, as `name`; a name in a profiler's trace too."""
        self.stage_now = name
        with torch.profiler.record_function(name):
            if not self._is_cuda or name in _OF_THE_HOST:
                begin = time.perf_counter()
                yield
                self._seconds[name] += time.perf_counter() - begin
                return
            first, last = self._event(), self._event()
            first.record()
            yield
            last.record()
            self._spans.append((name, first, last))

    def take(self) -> dict[str, float]:
        """Seconds by stage since the last call; spans that the device has not passed come later."""
        while self._spans and self._spans[0][2].query():
            name, first, last = self._spans.popleft()
            self._seconds[name] += first.elapsed_time(last) / 1e3
            self._free += [first, last]
        taken, self._seconds = self._seconds, dict.fromkeys(STAGES, 0.0)
        return taken

    def _event(self) -> torch.cuda.Event:
        return self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
