"""How long work takes on a device, and how much memory: one clock for all that is compared.

Imports torch alone: it also runs in the environments of other packages.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable

import torch


def median_ms(work: Callable[[int], object], num_timed: int, is_cuda: bool) -> float:
    """Of `num_timed` calls of `work(turn)` after three that are not counted; `turn` says which of
    rotated inputs to take. By CUDA events, without a wait between the calls; by the host's clock
    where `is_cuda` is false."""
    for turn in range(3):
        work(turn)
    if not is_cuda:
        marks = [time.perf_counter()]
        for turn in range(num_timed):
            work(turn)
            marks.append(time.perf_counter())
        return statistics.median(b - a for a, b in itertools.pairwise(marks)) * 1e3
    events = [torch.cuda.Event(enable_timing=True) for _ in range(num_timed + 1)]
    events[0].record()
    for turn, event in enumerate(events[1:]):
        work(turn)
        event.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(events))


def peak_gib(work: Callable[[int], object], is_cuda: bool) -> float:
    """Memory of `work(0)` above what was held before it; 0 without CUDA, where none is counted."""
    if not is_cuda:
        return 0.0
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    work(0)
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**30
