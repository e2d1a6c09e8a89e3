"""From disk to the device: reader threads, a fixed ring of buffers, a copy stream.

The trap: every buffer is made once and lent again and again. A host buffer is refilled only after
its copy has left it, a device buffer is overwritten only after the step that read it; under test
each is filled with NaN when it comes back, so that a late reader fails at once.

Shape letters: N packed tokens, K captured layers, H hidden, A anchors, R drafted rows with loss,
M rows of `last`, U distinct teacher rows.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dflash_pipeline.configs.schema import FeedConfig, Run
from dflash_pipeline.store.access import Access, Say
from dflash_pipeline.store.choice import open_access
from dflash_pipeline.store.reader import Store
from dflash_pipeline.train.anchors import Blocks, Tokens, pack_blocks, slot_weights
from dflash_pipeline.train.clock import Clock
from dflash_pipeline.train.follow import Draw, Draws
from dflash_pipeline.train.forward import is_compiled
from dflash_pipeline.train.order import Catalog
from dflash_pipeline.train.ring import HostBuffer, Ring, Sizes
from dflash_pipeline.train.shape import DrafterShape
from dflash_pipeline.train.stored import StoredRows
from dflash_pipeline.train.teacher import Teacher

Ints = npt.NDArray[np.int64]

_POLL_S = 0.05
# samples among which `feed.io = auto` finds enough to measure
_NUM_TRIED = 192


@dataclass(frozen=True, slots=True)
class Batch:
    """One packed batch on the device; valid until the next one is asked for."""

    feature_NKH: Tensor
    """Compute type; rows of padding are zero."""
    position_N: Tensor
    """Position of each row in its own document."""
    anchor_A: Tensor
    """int32 packed row; padding anchors stand at row 0 of a document at row 0: no context."""
    start_A: Tensor
    token_A: Tensor
    row_R: Tensor
    slot_R: Tensor
    label_R: Tensor
    weight_R: Tensor
    """By the slot's place in its block; loss.slot_weights = dpace makes its own."""
    teacher: Teacher | None
    num_blocks: int
    """Without padding."""
    samples: Ints
    """Places in the catalog."""


@dataclass(slots=True)
class FeedCounts:
    """Sums since they were last taken."""

    wait_s: float = 0.0
    """Seconds in which the step had nothing to work on."""
    size_bytes: int = 0
    num_tokens: int = 0
    num_blocks: int = 0
    num_samples: int = 0


@dataclass(slots=True)
class _Pending:
    """A batch that is being read."""

    samples: Ints
    buffer: HostBuffer
    blocks: Future[Blocks]


@dataclass(slots=True)
class _Window:
    """A step that was drawn, and how many of its batches were not asked for yet."""

    draw: Draw
    unread: deque[Ints] = field(default_factory=deque)


def feed_access(stores: Sequence[Store], config: FeedConfig, say: Say) -> Access:
    """The way to read of `feed.io`; what it is, and why, is said in one line."""
    random, places = np.random.default_rng(0), []
    for store in stores:
        readable = np.flatnonzero(store.readable_N)
        chosen = random.permutation(len(readable))[: _NUM_TRIED // len(stores)]
        places += [store.place_of(int(i), "hidden") for i in readable[chosen]]
    total_bytes = sum(store.all_rows_bytes for store in stores)
    return open_access(config.io, config.threads, places, total_bytes, say)


class Feed:
    """Batches of one rank in the order of its draws. Call `close`, or use it as a context."""

    def __init__(
        self,
        stores: Sequence[Store],
        samples: Catalog,
        order: Draws,
        run: Run,
        shape: DrafterShape,
        device: torch.device,
        dtype: torch.dtype,
        poison: bool,
        access: Access,
        clock: Clock,
    ) -> None:
        self._access, self._clock = access, clock
        self._stores, self._samples, self._order = stores, samples, order
        self._seed, self._config = run.train.seed, run.feed
        self._quota = min(run.train.anchors_per_sample, run.train.batch_anchors)
        self._position_chunk = run.loss.position_chunk
        self._weight_S = slot_weights(shape.block_size, run.loss.gamma)
        self._shape, self._wants_last = shape, run.loss.needs_last
        first = stores[0]
        padded = is_compiled(run.train, device)
        sizes = Sizes.of(run.train, first.spec, shape, self._wants_last, padded=padded)
        # stores of one identity have one calibration
        hidden = StoredRows.hidden(first, shape.layer_ids, device)
        last = StoredRows.last(first, device) if self._wants_last else None
        self._ring = Ring(sizes, run.feed.depth, hidden, last, device, dtype, poison, clock)
        self._readers = ThreadPoolExecutor(run.feed.threads, thread_name_prefix="feed")
        self._pending: deque[_Pending] = deque()
        self._windows: deque[_Window] = deque()
        self._counts = FeedCounts()

    def __enter__(self) -> Feed:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        """End the readers; what they were reading is dropped."""
        self._readers.shutdown(wait=True, cancel_futures=True)

    @property
    def device_bytes(self) -> int:
        """What its buffers hold of the device's memory."""
        return self._ring.device_bytes

    def take_counts(self) -> FeedCounts:
        """Counts since the last call."""
        counts, self._counts = self._counts, FeedCounts()
        return counts

    def step(self, wants_stop: Callable[[], bool], on_wait: Callable[[], None]) -> Draw | None:
        """The next step, read ahead; None: the run is over.

        Waits for shards where the store is still being captured (`on_wait` is called meanwhile).
        """
        begin = time.perf_counter()
        self._clock.stage_now = "wait"
        self._read_ahead(wants_stop)
        while not self._windows and not self._order.is_finished:
            on_wait()
            time.sleep(_POLL_S)
            self._read_ahead(wants_stop)
        self._counts.wait_s += time.perf_counter() - begin
        return self._windows[0].draw if self._windows else None

    def batches(self, draw: Draw) -> Iterator[Batch]:
        """The batches of the step that `step` returned, each lent until the next is asked for."""
        assert self._windows[0].draw is draw, "steps come one after another"
        for _ in draw.batches:
            if not self._pending:
                self._read_ahead(lambda: False)
            pending = self._pending.popleft()
            begin = time.perf_counter()
            self._clock.stage_now = "wait"
            blocks = pending.blocks.result()
            self._counts.wait_s += time.perf_counter() - begin
            with self._lend(pending, blocks) as batch:
                self._read_ahead(lambda: False)
                yield batch
        self._windows.popleft()

    def _read_ahead(self, wants_stop: Callable[[], bool]) -> None:
        """Keep every free buffer busy; steps without a batch of this rank cost no buffer."""
        while True:
            window = next((one for one in self._windows if one.unread), None)
            if window is None:
                # a few steps ahead are enough: a buffer is what really bounds the look-ahead
                if len(self._windows) > self._config.depth:
                    return
                draw = self._order.draw(wants_stop())
                if draw is None:
                    return
                self._windows.append(_Window(draw, deque(draw.batches)))
                continue
            buffer = self._ring.free_buffer()
            if buffer is None:
                return
            samples = window.unread.popleft()
            future = self._readers.submit(self._fill, samples, buffer, window.draw.epoch)
            self._pending.append(_Pending(samples, buffer, future))

    def _fill(self, samples: Ints, buffer: HostBuffer, epoch: int) -> Blocks:
        """Reader thread: hidden states into the buffer, and the blocks of the batch."""
        buffer.wait_until_copied()
        tokens = []
        first, first_last = 0, 0
        for place in samples.tolist():
            store = self._stores[int(self._samples.store_C[place])]
            sample = int(self._samples.sample_C[place])
            if self._config.check:
                store.check_sample(sample)
            ids_T, mask_T = store.tokens(sample)
            num_last = int(store.table.num_teacher[sample]) if self._wants_last else 0
            store.read_into(
                sample,
                buffer.hidden_NKZ[first : first + len(ids_T)],
                buffer.last_MZ[first_last : first_last + num_last] if self._wants_last else None,
                self._access,
            )
            first, first_last = first + len(ids_T), first_last + num_last
            tokens.append(Tokens(int(self._samples.sample_id_C[place]), ids_T, mask_T))
        blocks = pack_blocks(
            tokens,
            quota=self._quota,
            seed=self._seed,
            epoch=epoch,
            block_size=self._shape.block_size,
            weight_S=self._weight_S,
            last_rows=self._stores[0].spec.last_rows,
        )
        buffer.write(blocks, self._position_chunk)
        return blocks

    @contextlib.contextmanager
    def _lend(self, pending: _Pending, blocks: Blocks) -> Iterator[Batch]:
        with self._ring.on_device(pending.buffer) as lent:
            teacher = None
            if self._wants_last:
                teacher = Teacher(
                    state_UH=lent.teacher_UH,
                    index_R=lent.teacher_index_R,
                    spans=pending.buffer.spans,
                )
            counts = self._counts
            counts.num_tokens += len(blocks.position_N)
            counts.num_blocks += len(blocks.anchor_A)
            counts.num_samples += len(pending.samples)
            counts.size_bytes += lent.size_bytes
            yield Batch(
                feature_NKH=lent.feature_NKH,
                position_N=lent.position_N,
                anchor_A=lent.anchor_A,
                start_A=lent.start_A,
                token_A=lent.token_A,
                row_R=lent.row_R,
                slot_R=lent.slot_R,
                label_R=lent.label_R,
                weight_R=lent.weight_R,
                teacher=teacher,
                num_blocks=len(blocks.anchor_A),
                samples=pending.samples,
            )
