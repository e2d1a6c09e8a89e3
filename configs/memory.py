"""What holds the memory of a device, for log lines and for the day it runs out.

Both stages use torch, this folder does not: they hand it over.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

_GIB = 1 << 30
# begins the text of an error of the host's memory
_HOST = "host: "


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
def host_told_alike(torch: Any) -> Iterator[None]:
    """Raise torch.OutOfMemoryError also where it is the host's memory that runs out: torch has a
    RuntimeError for that, Python and NumPy a MemoryError."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        is_torchs = "DefaultCPUAllocator" in str(error)
        if not is_torchs and not isinstance(error, MemoryError):
            raise
        found = re.search(r"tried to allocate (\d+) bytes", str(error))
        asked = f"Tried to allocate {int(found[1]) / _GIB:.2f} GiB" if found else str(error)
        raise torch.OutOfMemoryError(f"{_HOST}{asked or 'it was not told how much'}") from error


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
    """Turn an out-of-memory error of device or host into a ValueError that says what holds it.

    The arguments are those of `usage` and `report`, asked for once the memory has run out.
    """
    try:
        with host_told_alike(torch):
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
    if error.startswith(_HOST):
        return _host_report(used, holdings, where, error.removeprefix(_HOST), varying, remedy)
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


def _host_report(
    used: Usage, holdings: Mapping[str, int], where: str, asked: str, varying: str, remedy: str
) -> str:
    # what a GPU holds is none of the host's
    held = {} if used.total else dict(holdings)
    held[f"{varying if held else 'all'} at the peak"] = used.host_peak - sum(held.values())
    listed = ", ".join(f"{name} {max(size, 0) / _GIB:.2f}" for name, size in held.items())
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / _GIB
    return (
        f"the host's memory ran out in {where} ({asked}): of {total:.2f} GiB this process held "
        f"{listed}; {remedy}"
    )


def gib(size_bytes: float) -> float:
    """Bytes in units of 2^30."""
    return size_bytes / _GIB
