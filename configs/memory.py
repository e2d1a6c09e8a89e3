"""What holds the memory of a device, for log lines and for the day it runs out.

Both stages use torch, this folder does not: they hand it over.
"""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

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

    @property
    def outside(self) -> int:
        """What torch's allocator has not taken: CUDA's own, libraries', other processes'."""
        return max(self.total - self.free - self.reserved, 0)


def usage(torch: Any, device: Any) -> Usage:
    """Memory of this process on `device`, a torch.device; `torch` is the module."""
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
    torch: Any,
    device: Any,
    holdings: Callable[[], Mapping[str, int]],
    where: Callable[[], str],
    varying: str,
    remedy: str,
    beside: Callable[[], Mapping[str, int]] = dict,
) -> Iterator[None]:
    """Turn the device's out-of-memory error into a ValueError that says what holds it.

    The arguments are those of `usage` and `report`, asked for once the memory has run out.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        used = usage(torch, device)
        text = report(used, holdings(), where(), str(error), varying, remedy, beside())
        raise ValueError(text) from error


def report(
    used: Usage,
    holdings: Mapping[str, int],
    where: str,
    error: str,
    varying: str,
    remedy: str,
    beside: Mapping[str, int] | None = None,
) -> str:
    """One line: each holder in GiB, what a batch took at its peak, and what to lower.

    holdings: bytes of what stays from batch to batch, by name; varying: what the rest of the peak
    is; error: torch's text; remedy: what the reader can do; beside: what of the memory outside of
    torch's allocator has a name.
    """
    known, named = sum(holdings.values()), beside or {}
    parts = dict(holdings) | {
        f"{varying} at the peak": max(used.peak - known, 0),
        "the allocator's reserve": max(used.reserved - used.peak, 0),
        **named,
        "other processes and CUDA itself": max(used.outside - sum(named.values()), 0),
    }
    listed = ", ".join(f"{name} {size / _GIB:.2f}" for name, size in parts.items())
    asked = error.split(". ")[1] if error.count(". ") > 1 else error
    return (
        f"the GPU's memory ran out in {where} ({asked}): of {used.total / _GIB:.2f} GiB hold "
        f"{listed}; {remedy}"
    )


def gib(size_bytes: float) -> float:
    """Bytes in units of 2^30."""
    return size_bytes / _GIB
