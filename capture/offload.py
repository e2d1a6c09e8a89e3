"""Device rows to host buffers on a copy stream, and a batch's ids the other way.

All buffers are made once, at the largest batch of the plan, and belong to this module: those of the
device, and a `Parcel`'s on the host. No tensor of the allocator crosses a stream, and a buffer is
lent again only after its event has passed. Trap: a view of a parcel is garbage after
its `release`; under test every byte of it is then 0xFF, a NaN.
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dflash_pipeline.capture.pack import BatchIndex, DeviceIndex, PackedRows
from dflash_pipeline.configs.memory import gib

# torch.cuda's own annotations are partial
cuda: Any = torch.cuda

POISON = 0xFF
WAIT_S = 0.2


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchSizes:
    """The largest batch of a plan, in each respect, and the fixed widths."""

    num_places: int
    """Tokens with padding, B * T."""
    num_sequences: int
    num_rows: int
    num_last_rows: int
    """0 where `last` is not stored."""
    num_layers: int
    """K."""
    num_bounds: int
    """L: the captured layers, then `last` where it is stored."""
    row_bytes: int
    """R of `hidden`."""
    last_row_bytes: int
    """R of `last`; 0 where it is not stored."""


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """A batch, or half of one, inside a device buffer."""

    ids_BT: torch.Tensor
    index: DeviceIndex
    out: PackedRows


@dataclass(frozen=True, slots=True, eq=False)
class _Marks:
    """Where one batch stands on the device. Made for each: a parcel may be waited for after its
    device buffer was lent again, and must not be told of that batch."""

    # between these two the device works on it
    begun: Any = field(default_factory=lambda: cuda.Event(enable_timing=True))
    packed: Any = field(default_factory=lambda: cuda.Event(enable_timing=True))
    copied: Any = field(default_factory=lambda: cuda.Event())


class DeviceBuffer:
    """Device memory of one batch: ids and index going in, packed rows going out."""

    def __init__(self, sizes: BatchSizes, device: torch.device, pin: Callable[[int], torch.Tensor]):
        # ids, then the four columns of the index
        self._counts = (
            sizes.num_places,
            sizes.num_rows,
            sizes.num_rows,
            sizes.num_last_rows,
            sizes.num_last_rows,
        )
        self._host = pin(8 * sum(self._counts)).view(torch.int64)
        self._device = torch.empty_like(self._host, device=device)
        hidden = (sizes.num_rows, sizes.num_layers, sizes.row_bytes)
        last = (sizes.num_last_rows, sizes.last_row_bytes)
        self.rows = PackedRows(
            hidden_NKR=torch.empty(hidden, dtype=torch.uint8, device=device),
            last_MR=torch.empty(last, dtype=torch.uint8, device=device),
            largest_BL=torch.empty((sizes.num_sequences, sizes.num_bounds), device=device),
            faintest_BL=torch.empty((sizes.num_sequences, sizes.num_bounds), device=device),
        )
        self.marks: _Marks | None = None
        """Those of the batch it was lent for last; None before, and on a CPU, whose work is done
        when asked."""
        self.begun_at = 0.0
        self.clear()

    @property
    def size_bytes(self) -> int:
        """Device memory it holds."""
        rows = self.rows
        tensors = (self._device, rows.hidden_NKR, rows.last_MR, rows.largest_BL, rows.faintest_BL)
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def clear(self) -> None:
        """Forget the parts."""
        self._used = [0] * len(self._counts)
        self.num_sequences = self.num_rows = self.num_last_rows = 0

    def part(self, ids_BT: NDArray[np.int64], index: BatchIndex) -> Part:
        """Send the ids and the index of the next part to the device; where its rows belong."""
        columns = (index.row_N, index.sequence_N, index.teacher_M, index.teacher_sequence_M)
        ids, row_N, sequence_N, teacher_M, teacher_sequence_M = (
            self._upload(place, values)
            for place, values in enumerate((ids_BT.reshape(-1), *columns))
        )
        sequences = slice(self.num_sequences, self.num_sequences + len(ids_BT))
        rows = slice(self.num_rows, self.num_rows + len(row_N))
        last_rows = slice(self.num_last_rows, self.num_last_rows + len(teacher_M))
        self.num_sequences, self.num_rows = sequences.stop, rows.stop
        self.num_last_rows = last_rows.stop
        return Part(
            ids.view(ids_BT.shape),
            DeviceIndex(row_N, sequence_N, teacher_M, teacher_sequence_M),
            PackedRows(
                hidden_NKR=self.rows.hidden_NKR[rows],
                last_MR=self.rows.last_MR[last_rows],
                largest_BL=self.rows.largest_BL[sequences],
                faintest_BL=self.rows.faintest_BL[sequences],
            ),
        )

    def _upload(self, column: int, values: NDArray[np.int64]) -> torch.Tensor:
        used = self._used[column]
        if used + len(values) > self._counts[column]:
            raise ValueError("a batch is larger than the largest batch of the plan")
        begin = sum(self._counts[:column]) + used
        place = slice(begin, begin + len(values))
        self._used[column] = used + len(values)
        self._host[place] = torch.from_numpy(values)
        # pinned, and not written again before its batch's `copied` has passed
        return self._device[place].copy_(self._host[place], non_blocking=True)


@dataclass(slots=True, eq=False)
class Parcel:
    """One batch on the host, lent until `release`."""

    hidden_NKR: NDArray[np.uint8]
    last_MR: NDArray[np.uint8]
    largest_BL: NDArray[np.float32]
    faintest_BL: NDArray[np.float32]
    release: Callable[[], None]
    """Gives the buffer back; any thread, once."""
    _marks: _Marks | None
    device_s: float = 0.0
    """Seconds in which the device worked on it; known once it was waited for."""

    def wait(self) -> None:
        """Until the bytes are there; other threads run meanwhile."""
        if self._marks is not None:
            self._marks.copied.synchronize()
            self.device_s = self._marks.begun.elapsed_time(self._marks.packed) / 1e3


class _HostBuffer:
    """Host memory of one batch."""

    def __init__(self, sizes: BatchSizes, pin: Callable[[int], torch.Tensor]) -> None:
        bounds_bytes = 4 * sizes.num_sequences * sizes.num_bounds
        # the widest type first, so that each view is aligned
        counts = (
            bounds_bytes,
            bounds_bytes,
            sizes.num_rows * sizes.num_layers * sizes.row_bytes,
            sizes.num_last_rows * sizes.last_row_bytes,
        )
        self.memory = pin(sum(counts))
        largest, faintest, hidden, last = torch.split(self.memory, list(counts))
        self.hidden_NKR = hidden.view(sizes.num_rows, sizes.num_layers, sizes.row_bytes)
        self.last_MR = last.view(sizes.num_last_rows, sizes.last_row_bytes)
        bounds = (sizes.num_sequences, sizes.num_bounds)
        self.largest_BL = largest.view(torch.float32).view(bounds)
        self.faintest_BL = faintest.view(torch.float32).view(bounds)


class Offload:
    """The buffers of a capture and the stream between them. Use it as a context manager."""

    def __init__(
        self,
        sizes: BatchSizes,
        device: torch.device,
        *,
        num_device_buffers: int,
        num_host_buffers: int,
        poison: bool,
    ) -> None:
        """`poison` overwrites a buffer when it comes back, so that a late reader is found out."""
        self._device, self._poison = device, poison
        self._registered: list[torch.Tensor] = []
        self._stream = cuda.Stream(device) if device.type == "cuda" else None
        buffers = [DeviceBuffer(sizes, device, self._pinned) for _ in range(num_device_buffers)]
        self.device_bytes = sum(buffer.size_bytes for buffer in buffers)
        """Device memory of all device buffers."""
        self._device_buffers = itertools.cycle(buffers)
        self._free: queue.SimpleQueue[_HostBuffer] = queue.SimpleQueue()
        for _ in range(num_host_buffers):
            self._free.put(_HostBuffer(sizes, self._pinned))
        self.wait_s = 0.0
        """Seconds spent waiting for a host buffer: the disk is slower than the device."""

    def __enter__(self) -> Offload:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Unpin the memory; nothing may be lent any more."""
        if self._stream is not None:
            self._stream.synchronize()
        while self._registered:
            cuda.cudart().cudaHostUnregister(self._registered.pop().data_ptr())

    def device_buffer(self) -> DeviceBuffer:
        """The next device buffer, free and empty."""
        buffer = next(self._device_buffers)
        if buffer.marks is not None:
            buffer.marks.copied.synchronize()
        if self._poison:
            for rows in (buffer.rows.hidden_NKR, buffer.rows.last_MR):
                rows.fill_(POISON)
        buffer.clear()
        buffer.begun_at = time.perf_counter()
        if self._stream is not None:
            buffer.marks = _Marks()
            buffer.marks.begun.record(cuda.current_stream(self._device))
        return buffer

    def send(self, source: DeviceBuffer, waiting: Callable[[], None]) -> Parcel:
        """Copy a device buffer's rows to a host buffer; returns at once, see `Parcel.wait`.

        `waiting` is called again and again while no host buffer is free; what it raises is raised
        here, so that a writer that has failed does not leave us waiting.
        """
        worked_s = time.perf_counter() - source.begun_at
        marks = source.marks
        if marks is not None:
            marks.packed.record(cuda.current_stream(self._device))
        host = self._take(waiting)
        num_rows, num_last_rows = source.num_rows, source.num_last_rows
        sequences = slice(source.num_sequences)
        pairs = (
            (host.hidden_NKR[:num_rows], source.rows.hidden_NKR[:num_rows]),
            (host.last_MR[:num_last_rows], source.rows.last_MR[:num_last_rows]),
            (host.largest_BL[sequences], source.rows.largest_BL[sequences]),
            (host.faintest_BL[sequences], source.rows.faintest_BL[sequences]),
        )
        if self._stream is None or marks is None:
            for there, here in pairs:
                there.copy_(here)
        else:
            with cuda.stream(self._stream):
                self._stream.wait_event(marks.packed)
                for there, here in pairs:
                    there.copy_(here, non_blocking=True)
                marks.copied.record(self._stream)
        hidden, last, largest, faintest = (there for there, _ in pairs)
        return Parcel(
            hidden.numpy(),
            last.numpy(),
            largest.numpy(),
            faintest.numpy(),
            self._releaser(host),
            marks,
            worked_s,
        )

    def _take(self, waiting: Callable[[], None]) -> _HostBuffer:
        started = time.monotonic()
        while True:
            try:
                buffer = self._free.get(timeout=WAIT_S)
            except queue.Empty:
                waiting()
                continue
            self.wait_s += time.monotonic() - started
            return buffer

    def _releaser(self, buffer: _HostBuffer) -> Callable[[], None]:
        once = threading.Lock()

        def release() -> None:
            if not once.acquire(blocking=False):
                raise AssertionError("a buffer was released twice")
            if self._poison:
                buffer.memory.fill_(POISON)
            self._free.put(buffer)

        return release

    def _pinned(self, size_bytes: int) -> torch.Tensor:
        """Page-locked memory of exactly this size; torch's own would round up to a power of two."""
        memory = torch.empty(max(size_bytes, 8), dtype=torch.uint8)
        if self._device.type == "cuda":
            status = cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0)
            if int(status) != 0:
                raise ValueError(
                    f"cannot lock {gib(memory.numel()):.1f} GiB of host memory (CUDA error "
                    f"{int(status)}): lower capture.token_budget or capture.host_buffers"
                )
            self._registered.append(memory)
        return memory[:size_bytes]
