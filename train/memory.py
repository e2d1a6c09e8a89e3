"""What holds the memory of a device, for log lines and for the day it runs out."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch

_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Usage:
    """Bytes of one process; on a CPU its own memory stands for the device's."""

    peak: int
    """Most that tensors have held at a time."""
    reserved: int
    """What torch's allocator has taken from the device."""
    total: int
    """The device's; 0: not told."""
    free: int
    host_peak: int


def usage(device: torch.device) -> Usage:
    host_peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if device.type != "cuda":
        return Usage(host_peak, host_peak, 0, 0, host_peak)
    free, total = torch.cuda.mem_get_info(device)
    return Usage(
        peak=torch.cuda.max_memory_allocated(device),
        reserved=torch.cuda.memory_reserved(device),
        total=total,
        free=free,
        host_peak=host_peak,
    )


@contextlib.contextmanager
def explained(
    device: torch.device, holdings: Callable[[], Mapping[str, int]], where: Callable[[], str]
) -> Iterator[None]:
    """Turn the device's out-of-memory error into a ValueError that says what holds it."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ValueError(report(usage(device), holdings(), where(), str(error))) from error


def report(used: Usage, holdings: Mapping[str, int], where: str, error: str) -> str:
    """One line: each holder in GiB, what a batch took at its peak, and what to lower.

    `holdings`: bytes of what stays from step to step, by name.
    """
    known = sum(holdings.values())
    parts = dict(holdings) | {
        "activations and logits at the peak": max(used.peak - known, 0),
        "the allocator's reserve": max(used.reserved - used.peak, 0),
        "other processes and CUDA itself": max(used.total - used.free - used.reserved, 0),
    }
    listed = ", ".join(f"{name} {size / _GIB:.2f}" for name, size in parts.items())
    asked = error.split(". ")[1] if error.count(". ") > 1 else error
    return (
        f"the GPU's memory ran out in {where} ({asked}): of {used.total / _GIB:.2f} GiB hold "
        f"{listed}; lower train.batch_anchors or train.batch_tokens (activations), or "
        "loss.position_chunk (logits)"
    )


def gib(size_bytes: int) -> float:
    return size_bytes / _GIB
