"""Where the time of a loop over batches goes: the device's kernels, and what the main thread did
while the device had nothing to do. Without a GPU: what the main thread did.

`Trace()` around the loop; within it the parts of a capture named in `PARTS` are labelled.
"""

from __future__ import annotations

import bisect
import functools
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any, Self

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from dflash_pipeline.capture import forward
from dflash_pipeline.capture.offload import DeviceBuffer, Offload, Parcel
from dflash_pipeline.capture.shards import Worker
from dflash_pipeline.capture.target import Target
from dflash_pipeline.store.lease import Leases
from dflash_pipeline.store.reader import Store
from dflash_pipeline.store.tokens import TokenChunks
from dflash_pipeline.store.writer import StoreWriter

PARTS: tuple[tuple[Any, str], ...] = (
    (Worker, "take"),
    (Worker, "settle"),
    (Worker, "refresh"),
    (Worker, "counts"),
    (Worker, "_land"),
    (forward.Forward, "compute"),
    (forward, "index_batch"),
    (TokenChunks, "_read"),
    (Target, "run"),
    (DeviceBuffer, "part"),
    (Offload, "device_buffer"),
    (Offload, "send"),
    (Parcel, "wait"),
    (Leases, "claim"),
    (Leases, "beat"),
    (Store, "refresh"),
    (StoreWriter, "begin"),
    (StoreWriter, "put"),
    (StoreWriter, "submit"),
)
MOST_KERNELS = 14
SHORTEST_GAP_US = 50.0
"""Between kernels that follow each other some microseconds pass."""
Span = tuple[float, float]
"""Begin and end, microseconds."""


class Trace:
    """A loop under torch's profiler."""

    def __init__(self) -> None:
        is_cuda = torch.cuda.is_available()
        device = [ProfilerActivity.CUDA] if is_cuda else []
        self._profile = profile(activities=[ProfilerActivity.CPU, *device])
        self._plain: list[tuple[Any, str, Any]] = []
        self._labels: set[str] = set()
        self.seconds = 0.0
        self.num_batches = 0

    def __enter__(self) -> Self:
        main = threading.current_thread()
        for owner, name in PARTS:
            plain = getattr(owner, name)
            label = f"{getattr(owner, '__name__', '').rpartition('.')[2]}.{name}"
            self._plain.append((owner, name, plain))
            self._labels.add(label)
            setattr(owner, name, self._labelled(plain, label, main))
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._profile.__enter__()
        self._begin = time.perf_counter()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds = time.perf_counter() - self._begin
        self._profile.__exit__(kind, error, tb)
        for owner, name, plain in self._plain:
            setattr(owner, name, plain)

    def _labelled(
        self, plain: Callable[..., Any], label: str, main: threading.Thread
    ) -> Callable[..., Any]:
        @functools.wraps(plain)
        def run(*arguments: Any, **named: Any) -> Any:
            if threading.current_thread() is not main:
                return plain(*arguments, **named)
            self.num_batches += label == "Target.run"
            with record_function(label):
                return plain(*arguments, **named)

        return run

    @functools.cached_property
    def _events(self) -> list[Any]:
        return list(self._profile.events() or [])

    @functools.cached_property
    def kernels_ms(self) -> dict[str, float]:
        """Milliseconds of a batch by kernel or copy."""
        found: dict[str, float] = defaultdict(float)
        for event in self._device_events():
            found[event.name] += (event.time_range.end - event.time_range.start) / 1e3
        return {name: ms / self.num_batches for name, ms in found.items()}

    def _device_events(self) -> list[Any]:
        # the profiler repeats labels on the device's side
        return [
            event
            for event in self._events
            if event.device_type == DeviceType.CUDA and event.name not in self._labels
        ]

    def lines(self, num_shards: int) -> list[str]:
        """Busy and idle, and the idle time by what the main thread did."""
        labelled = [
            event
            for event in self._events
            if event.name in self._labels and event.device_type == DeviceType.CPU
        ]
        doing = innermost([(e.time_range.start, e.time_range.end, e.name) for e in labelled])
        device = [(e.time_range.start, e.time_range.end) for e in self._device_events()]
        lines = [f"{self.seconds:.2f} s, {self.num_batches} batches, {num_shards} shards"]
        if device:
            idle = gaps(device, SHORTEST_GAP_US)
            idle_ms = sum(end - begin for begin, end in idle) / 1e3
            lines[0] += f", device idle {idle_ms:.1f} ms in {len(idle)} gaps, by main thread:"
            spent = overlaps(idle, doing)
        else:
            lines[0] += ", no GPU; the main thread:"
            spent = overlaps([(-float("inf"), float("inf"))], doing)
        ordered = sorted(spent.items(), key=lambda one: -one[1])
        return lines + [
            f"  {us / 1e3 / num_shards:8.2f} ms a shard {name}" for name, us in ordered if us > 100
        ]


def comparison(ours: Trace, bare: Trace) -> list[str]:
    """Kernels and copies whose time a batch differs most, first."""
    names = ours.kernels_ms.keys() | bare.kernels_ms.keys()
    rows = [(ours.kernels_ms.get(n, 0.0), bare.kernels_ms.get(n, 0.0), n) for n in names]
    rows.sort(key=lambda row: -abs(row[0] - row[1]))
    sums = [sum(row[side] for row in rows) for side in (0, 1)]
    return [
        f"{one:9.2f} ms a batch, bare {other:9.2f}: {name[:90]}"
        for one, other, name in [(*sums, "all kernels and copies"), *rows[:MOST_KERNELS]]
    ]


def gaps(busy: Iterable[Span], shortest: float) -> list[Span]:
    """Between the first begin and the last end, the times that none of the spans covers."""
    found: list[Span] = []
    end = None
    for span in sorted(busy):
        if end is not None and span[0] - end >= shortest:
            found.append((end, span[0]))
        end = span[1] if end is None else max(end, span[1])
    return found


def innermost(nested: Sequence[tuple[float, float, str]]) -> list[tuple[float, float, str]]:
    """Nested labelled spans -> spans beside each other, each with the label within all others."""
    found: list[tuple[float, float, str]] = []
    open_spans: list[tuple[float, str]] = []
    at = 0.0

    def until(time_us: float) -> None:
        nonlocal at
        if open_spans and time_us > at:
            found.append((at, time_us, open_spans[-1][1]))
        at = time_us

    for begin, end, name in sorted(nested, key=lambda one: (one[0], -one[1])):
        while open_spans and open_spans[-1][0] <= begin:
            until(open_spans[-1][0])
            open_spans.pop()
        until(begin)
        open_spans.append((end, name))
    while open_spans:
        until(open_spans[-1][0])
        open_spans.pop()
    return found


def overlaps(
    spans: Sequence[Span], labelled: Sequence[tuple[float, float, str]]
) -> dict[str, float]:
    """How much of the spans each label covers; the rest is `between the parts`."""
    spent: dict[str, float] = defaultdict(float)
    ends = [end for _, end, _ in labelled]
    for begin, end in spans:
        covered = 0.0
        for place in range(bisect.bisect_right(ends, begin), len(labelled)):
            one, other, name = labelled[place]
            if one >= end:
                break
            shared = min(end, other) - max(begin, one)
            spent[name] += shared
            covered += shared
        if end - begin < float("inf"):
            spent["between the parts"] += end - begin - covered
    return dict(spent)
