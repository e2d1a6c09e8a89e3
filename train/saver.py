"""Checkpoints written while training goes on: copied to host memory, then written by a thread.

The trap: the copy is lent to the thread until it has written it. A checkpoint that comes before the
last one is on disk waits; the time is the run's, and is counted where it is spent.
"""

from __future__ import annotations

import shutil
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from dflash_pipeline.train import checkpoint
from dflash_pipeline.train.checkpoint import Progress
from dflash_pipeline.train.shape import DrafterShape

# where a tensor may begin in the copy, in bytes
_ALIGNMENT = 64


class Saver:
    """Belongs to rank 0. The thread's first error is raised at the next call."""

    def __init__(
        self,
        out: Path,
        shape: DrafterShape,
        keep: int,
        state: Mapping[str, Tensor],
        trained_on: Mapping[str, str] | None = None,
    ) -> None:
        """`state`: what each checkpoint will hold; only sizes and types count here.

        trained_on: see `remembered.trained_on`.
        """
        self._out, self._shape, self._keep = out, shape, keep
        self._trained_on = trained_on
        self._saved: Progress | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        # pinning gigabytes takes seconds, and the first checkpoint is far
        self._made = self._thread.submit(_HostCopy, state)
        self._pending: deque[Future[None]] = deque()
        # what a killed run had begun to write or to remove
        for left in out.glob(".*step-*"):
            shutil.rmtree(left)

    def found(self, progress: Progress) -> None:
        """The checkpoint of this step is on disk already: the run goes on from it."""
        self._saved = progress

    def save(
        self,
        state: Mapping[str, Tensor],
        progress: Progress,
        is_best: bool,
        told: Callable[[], None],
    ) -> None:
        """Take a copy of `state` now and write it soon; once a step, of which `progress` alone may
        come again, after a validation. `is_best`: OUT/best, too.

        `told` is called in the thread as soon as the checkpoint is durable.
        """
        self.check()
        if self._saved is None or progress.step != self._saved.step:
            self._wait()
            copy = self._made.result()
            copy.take(state)
            rng = torch.get_rng_state()
            job = self._thread.submit(self._write, copy, progress, rng, told)
            self._pending.append(job)
        elif progress != self._saved:
            self._pending.append(self._thread.submit(checkpoint.tell, self._out, progress))
        self._saved = progress
        if is_best:
            self._pending.append(self._thread.submit(self._point_best, progress.step))

    def cost(self, state: Mapping[str, Tensor]) -> tuple[float, int]:
        """Seconds that a checkpoint stops the training, and the bytes that are then written.

        Nothing is written, and no checkpoint may come after this.
        """
        copy = self._made.result()
        begin = time.perf_counter()
        copy.take(state)
        num_bytes = sum(tensor.nbytes for tensor in copy.tensors.values())
        # beside masters and two moments, in fp32, the masters once more in bf16
        return time.perf_counter() - begin, num_bytes + num_bytes // 6

    def check(self) -> None:
        """Raise what the thread has met since the last call, if anything."""
        while self._pending and self._pending[0].done():
            self._pending.popleft().result()

    def close(self) -> None:
        """Wait until all is on disk."""
        self._thread.shutdown(wait=True)
        self.check()

    def _wait(self) -> None:
        while self._pending:
            self._pending.popleft().result()

    def _write(
        self, copy: _HostCopy, progress: Progress, rng: Tensor, told: Callable[[], None]
    ) -> None:
        state = copy.tensors | {"rng": rng}
        checkpoint.save(self._out, self._shape, state, progress, self._trained_on)
        checkpoint.prune(self._out, self._keep)
        told()

    def _point_best(self, step: int) -> None:
        found = checkpoint.step_directory(self._out, step)
        if not found.is_dir():
            # the job before could not write it, and tells so: the best before must stay
            return
        checkpoint.point(self._out, "best", found)
        # the best before is an ordinary checkpoint now
        checkpoint.prune(self._out, self._keep)


class _HostCopy:
    """One block of host memory, pinned where the tensors are on a GPU, for all of them."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._is_cuda = any(tensor.is_cuda for tensor in tensors.values())
        starts, size = {}, 0
        for name, tensor in tensors.items():
            starts[name] = size
            size += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        # one block: torch rounds each pinned one up to a power of two. Zeros: the system hands out
        # memory when it is first written, which is slower than the copy itself
        block = torch.zeros(size, dtype=torch.uint8, pin_memory=self._is_cuda)
        self.tensors = {
            name: block[starts[name] : starts[name] + tensor.nbytes]
            .view(tensor.dtype)
            .view(tensor.shape)
            for name, tensor in tensors.items()
        }

    def take(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy all; returns when the copy is whole."""
        for name, tensor in tensors.items():
            self.tensors[name].copy_(tensor.detach(), non_blocking=True)
        if self._is_cuda:
            copied = torch.cuda.Event()
            copied.record()
            copied.synchronize()
