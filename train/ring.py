"""The feed's buffers: a ring on the host, pinned on CUDA, and two places on the device.

Only this file makes a pinned tensor or a stream for training. Owners hand over in this order: free
-> reader thread -> copy stream -> free again once the copy's event has passed. On a CPU the batch
is the host buffer itself, free again when the batch has been given back.

Shape letters: N packed tokens, K captured layers, H hidden, A anchors, R drafted rows with loss,
M rows of `last`, U distinct teacher rows; Z bytes of a stored row.
"""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dflash_pipeline.configs.schema import TrainConfig
from dflash_pipeline.store.rows import row_bytes
from dflash_pipeline.store.spec import StoreSpec
from dflash_pipeline.train.anchors import Blocks
from dflash_pipeline.train.clock import Clock
from dflash_pipeline.train.mask import TILE
from dflash_pipeline.train.shape import DrafterShape
from dflash_pipeline.train.stored import StoredRows
from dflash_pipeline.train.teacher import teacher_spans

Ints = npt.NDArray[np.int64]

# context lengths on CUDA come in so many sizes: few shapes, little padding
_NUM_CONTEXT_SIZES = 8
_NUM_PLACES = 2
# every bit set is NaN in bf16 and fp32, and an index far out of range
_POISON = 0xFF


@dataclass(frozen=True, slots=True)
class Sizes:
    """The largest batch, and how batches are padded."""

    num_tokens: int
    num_anchors: int
    num_rows: int
    num_layers: int
    row_bytes: int
    last_row_bytes: int
    """0: `last` is not read."""
    token_multiple: int
    """Context is padded to a multiple of it."""
    least_tokens: int
    """Context rows that every batch has."""
    pads_anchors: bool
    """Every batch has `num_anchors` anchors; else as many as were drawn."""

    @classmethod
    def of(
        cls,
        config: TrainConfig,
        spec: StoreSpec,
        shape: DrafterShape,
        wants_last: bool,
        padded: bool,
    ) -> Self:
        """`padded`: whole FlexAttention tiles and few shapes; else batches as they are."""
        token_multiple, anchor_multiple, least_tokens = 1, 1, 0
        if padded:
            share = math.ceil(config.batch_tokens / _NUM_CONTEXT_SIZES)
            token_multiple = _rounded(share, TILE)
            anchor_multiple = TILE // math.gcd(TILE, shape.block_size)
            # of a single tile the compiler would make a case of its own
            least_tokens = 2 * TILE
        num_anchors = _rounded(config.batch_anchors, anchor_multiple)
        return cls(
            num_tokens=_rounded(max(config.batch_tokens, least_tokens), token_multiple),
            num_anchors=num_anchors,
            num_rows=num_anchors * (shape.block_size - 1),
            num_layers=spec.num_layers,
            row_bytes=row_bytes(spec.hidden_mode, spec.hidden_size),
            last_row_bytes=row_bytes(spec.last_mode, spec.hidden_size) if wants_last else 0,
            token_multiple=token_multiple,
            least_tokens=least_tokens,
            pads_anchors=padded,
        )

    def padded(self, num_tokens: int, num_anchors: int) -> tuple[int, int]:
        """Context rows and anchors of a batch with padding."""
        anchors = self.num_anchors if self.pads_anchors else num_anchors
        return _rounded(max(num_tokens, self.least_tokens), self.token_multiple), anchors


def _rounded(number: int, multiple: int) -> int:
    return math.ceil(number / multiple) * multiple


class _Tensors:
    """Storage for one batch, anywhere."""

    def __init__(self, sizes: Sizes, device: torch.device, pinned: bool) -> None:
        def make(*size: int, dtype: torch.dtype) -> Tensor:
            return torch.empty(size, dtype=dtype, device=device, pin_memory=pinned)

        num_tokens, layers = sizes.num_tokens, sizes.num_layers
        self.hidden_NKZ = make(num_tokens, layers, sizes.row_bytes, dtype=torch.uint8)
        num_last = num_tokens if sizes.last_row_bytes else 0
        self.last_MZ = make(num_last, sizes.last_row_bytes or 2, dtype=torch.uint8)
        # positions; anchors, starts, tokens; rows, slots, labels, teacher rows twice
        num_integers = num_tokens + 3 * sizes.num_anchors + 5 * sizes.num_rows
        self.integers = make(num_integers, dtype=torch.int64)
        self.weights = make(sizes.num_rows, dtype=torch.float32)

    @property
    def num_bytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._all())

    def _all(self) -> tuple[Tensor, ...]:
        return self.hidden_NKZ, self.last_MZ, self.integers, self.weights

    def poison(self) -> None:
        for buffer in self._all():
            buffer.view(torch.uint8).fill_(_POISON)


class HostBuffer:
    """One host buffer. Between `free_buffer` and its copy it belongs to a reader thread."""

    def __init__(self, sizes: Sizes, pinned: bool, poison: bool) -> None:
        self._sizes, self._poison = sizes, poison
        self.tensors = _Tensors(sizes, torch.device("cpu"), pinned)
        self.hidden_NKZ: npt.NDArray[np.uint8] = self.tensors.hidden_NKZ.numpy()
        self.last_MZ: npt.NDArray[np.uint8] = self.tensors.last_MZ.numpy()
        self.copied: torch.cuda.Event | None = torch.cuda.Event() if pinned else None
        self.num_tokens = self.num_anchors = self.num_rows = self.num_teachers = 0
        self.num_last = self.num_filled = 0
        self.spans: tuple[tuple[int, int], ...] = ()

    def wait_until_copied(self) -> None:
        """Reader thread, before the first byte: the batch before has left for the device."""
        if self.copied is not None:
            self.copied.synchronize()
            self.clear()

    def clear(self) -> None:
        """Under test: poison what comes back."""
        if self._poison:
            self.tensors.poison()

    def write(self, blocks: Blocks, position_chunk: int) -> None:
        """Reader thread, after the last byte: the numbers of the batch, and its padding."""
        filled = len(blocks.position_N)
        num_tokens, num_anchors = self._sizes.padded(filled, len(blocks.anchor_A))
        # blocks are sorted, so a position chunk touches a short range of the distinct rows
        unique_U, index_R = np.unique(blocks.teacher_R, return_inverse=True)
        parts = (
            _padded(blocks.position_N, num_tokens),
            _padded(blocks.anchor_A, num_anchors),
            _padded(blocks.start_A, num_anchors),
            _padded(blocks.token_A, num_anchors),
            blocks.row_R,
            blocks.slot_R,
            blocks.label_R,
            index_R,
            unique_U,
        )
        joined = np.concatenate(parts)
        self.tensors.integers.numpy()[: len(joined)] = joined
        self.tensors.weights.numpy()[: len(blocks.weight_R)] = blocks.weight_R
        self.num_filled = filled
        self.num_tokens, self.num_anchors = num_tokens, num_anchors
        self.num_rows, self.num_teachers = len(blocks.row_R), len(unique_U)
        self.spans = teacher_spans(index_R, position_chunk)
        self.num_last = blocks.num_last if self._sizes.last_row_bytes else 0


def _padded(values: Ints, size: int) -> Ints:
    return np.concatenate((values, np.zeros(size - len(values), np.int64)))


@dataclass(frozen=True, slots=True)
class Lent:
    """A batch's tensors on the device, padding included."""

    feature_NKH: Tensor
    teacher_UH: Tensor
    """States of the distinct teacher rows; none where `last` is not read."""
    position_N: Tensor
    anchor_A: Tensor
    start_A: Tensor
    token_A: Tensor
    row_R: Tensor
    slot_R: Tensor
    label_R: Tensor
    teacher_index_R: Tensor
    weight_R: Tensor
    size_bytes: int


class Ring:
    """All host buffers and device places of a feed. Used from the training thread."""

    def __init__(
        self,
        sizes: Sizes,
        depth: int,
        hidden: StoredRows,
        last: StoredRows | None,
        device: torch.device,
        dtype: torch.dtype,
        poison: bool,
        clock: Clock,
    ) -> None:
        """`hidden`, `last`: how stored rows are read; `last` None: not at all."""
        self._hidden, self._last, self._clock = hidden, last, clock
        self._dtype, self._poison = dtype, poison
        self._is_cuda = device.type == "cuda"
        # on a CPU one more: the one that the step is reading
        num_buffers = depth if self._is_cuda else depth + 1
        self._free = deque(HostBuffer(sizes, self._is_cuda, poison) for _ in range(num_buffers))
        self._places: deque[tuple[_Tensors, torch.cuda.Event]] = deque()
        if self._is_cuda:
            self._stream = torch.cuda.Stream(device)
            for _ in range(_NUM_PLACES):
                self._places.append((_Tensors(sizes, device, False), torch.cuda.Event()))

    @property
    def device_bytes(self) -> int:
        """What the places on the device hold; on a CPU the host buffers."""
        on_host = [] if self._is_cuda else [buffer.tensors for buffer in self._free]
        return sum(tensors.num_bytes for tensors in on_host + [place for place, _ in self._places])

    def free_buffer(self) -> HostBuffer | None:
        """A buffer for a reader thread; None: all are in use."""
        return self._free.popleft() if self._free else None

    @contextlib.contextmanager
    def on_device(self, buffer: HostBuffer) -> Iterator[Lent]:
        """The buffer's batch on the device, until the block ends."""
        if not self._is_cuda:
            yield self._views(buffer.tensors, buffer)
            buffer.clear()
            self._free.append(buffer)
            return
        tensors, released = self._places[0]
        self._places.rotate(-1)
        self._copy(buffer, tensors, released)
        lent = self._views(tensors, buffer)
        self._free.append(buffer)
        yield lent
        if self._poison:
            tensors.poison()
        released.record()

    def _copy(self, buffer: HostBuffer, tensors: _Tensors, released: torch.cuda.Event) -> None:
        assert buffer.copied is not None
        pairs: tuple[tuple[Tensor, Tensor, int], ...] = (
            (tensors.hidden_NKZ, buffer.tensors.hidden_NKZ, buffer.num_tokens),
            (tensors.last_MZ, buffer.tensors.last_MZ, buffer.num_last),
            (tensors.integers, buffer.tensors.integers, sum(_splits(buffer))),
            (tensors.weights, buffer.tensors.weights, buffer.num_rows),
        )
        with torch.cuda.stream(self._stream):
            # the step before the last has read this place
            self._stream.wait_event(released)
        with torch.cuda.stream(self._stream), self._clock.stage("h2d"):
            for into, source, size in pairs:
                into[:size].copy_(source[:size], non_blocking=True)
        buffer.copied.record(self._stream)
        torch.cuda.current_stream().wait_event(buffer.copied)

    def _views(self, tensors: _Tensors, buffer: HostBuffer) -> Lent:
        splits = _splits(buffer)
        parts = tensors.integers[: sum(splits)].split(splits)
        position_N, anchor_A, start_A, token_A, row_R, slot_R, label_R, index_R, unique_U = parts
        stored_NKZ, stored_MZ = (
            tensors.hidden_NKZ[: buffer.num_tokens],
            tensors.last_MZ[: buffer.num_last],
        )
        with self._clock.stage("dequantise"):
            feature_NKH = self._hidden.decode(stored_NKZ, self._dtype)
            # a masked row still meets the product with 0: it must be finite
            feature_NKH[buffer.num_filled :] = 0
            teacher_UH = self._teachers(stored_MZ, unique_U)
        return Lent(
            feature_NKH=feature_NKH,
            teacher_UH=teacher_UH,
            position_N=position_N,
            anchor_A=anchor_A.to(torch.int32),
            start_A=start_A.to(torch.int32),
            token_A=token_A,
            row_R=row_R,
            slot_R=slot_R,
            label_R=label_R,
            teacher_index_R=index_R,
            weight_R=tensors.weights[: buffer.num_rows],
            size_bytes=stored_NKZ.numel() + stored_MZ.numel(),
        )

    def _teachers(self, stored_MZ: Tensor, unique_U: Tensor) -> Tensor:
        if self._last is None:
            return torch.empty((0, 0), dtype=self._dtype, device=stored_MZ.device)
        # chosen as bytes: most of the rows teach nothing of this batch
        rows_U1Z = stored_MZ.index_select(0, unique_U)[:, None]
        return self._last.decode(rows_U1Z, self._dtype)[:, 0]


def _splits(buffer: HostBuffer) -> list[int]:
    rows = [buffer.num_rows] * 4
    return [buffer.num_tokens, *[buffer.num_anchors] * 3, *rows, buffer.num_teachers]
