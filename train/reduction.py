"""The gradients of all ranks, added up while the backward pass that makes them still runs.

A bucket is a run of parameters in the flat gradient. Once the window's last batch has finished all
of them, its sum over ranks is started, in place, and backward goes on; `finish` waits for what is
left. torch's DistributedDataParallel has no place here: it sums gradients of the parameters' own
type in buffers as large as all of them, ours are fp32 sums over a window; and it wraps one call of
the network, ours is compiled layer by layer.

The trap: every rank must start the same sums in the same order, or all wait for ever. A batch may
leave parameters without gradient and a rank may have no batch at all, so a bucket is started after
those before it, and whatever no hook has started `finish` starts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dflash_pipeline.configs.memory import usage
from dflash_pipeline.train.group import Group

# numbers of a bucket at least: 64 MiB, where links between GPUs run at their full rate
BUCKET_NUMBERS = 1 << 24


def bucketed(rooms: Sequence[int], num_matrices: int, least: int) -> list[range]:
    """The parameters of each bucket, in the order in which backward finishes buckets.

    rooms: how many numbers of the flat gradient each parameter takes, matrices first, in the order
    of the forward pass; backward finishes the last matrix first. Vectors (norms), which all layers
    have, come last, as one small bucket. least: numbers of a bucket, or all that are left.
    """
    buckets, end, size = list[range](), num_matrices, 0
    for index in reversed(range(num_matrices)):
        size += rooms[index]
        if size >= least or index == 0:
            buckets.append(range(index, end))
            end, size = index, 0
    return [*buckets, range(num_matrices, len(rooms))]


def length_of(vector: Tensor) -> Tensor:
    """Its Euclidean length, where it is."""
    length: Tensor = torch.linalg.vector_norm(vector)
    return length


class Reduction:
    """Sums over ranks of one flat gradient, window after window. Nothing waits for the device."""

    def __init__(
        self, gradient: Tensor, rooms: Sequence[int], num_matrices: int, group: Group
    ) -> None:
        """`gradient`, fp32: the rooms end to end; what stands behind them is summed with them."""
        self._group = group
        self._members = bucketed(rooms, num_matrices, BUCKET_NUMBERS)
        starts = [sum(rooms[: members.start]) for members in self._members]
        ends = [sum(rooms[: members.stop]) for members in self._members]
        self._own = [gradient[start:end] for start, end in zip(starts, ends, strict=True)]
        ends[-1] = len(gradient)
        self._summed = [gradient[start:end] for start, end in zip(starts, ends, strict=True)]
        self._bucket_of = {
            index: number for number, members in enumerate(self._members) for index in members
        }
        self._flat = gradient[: sum(rooms)]
        self._begin()
        self.connection_bytes = 0
        """What sums over GPUs hold of the device, beside torch's own memory; `connect` tells."""

    def connect(self) -> None:
        """Sum once, before anything counts: connections between GPUs are made by their first sums,
        which takes seconds and memory that is then missing in the middle of a step. Zeros stay
        zeros. On a CPU there is nothing to make."""
        if self._group.world == 1 or not self._flat.is_cuda:
            return
        before = usage(torch, self._flat.device).outside
        self.finish()
        summed = torch.cuda.Event()
        summed.record()
        self._group.wait_for(summed)
        self.connection_bytes = max(usage(torch, self._flat.device).outside - before, 0)

    def _begin(self) -> None:
        self._unfinished = [set(members) for members in self._members]
        self._lengths: list[Tensor] = []
        self._waits: list[Callable[[], None]] = []

    @property
    def num_started(self) -> int:
        """Buckets of this window whose sum has been asked for."""
        return len(self._waits)

    def note(self, index: int) -> None:
        """The window's gradient of parameter `index` is final. Called by backward's hooks."""
        bucket = self._bucket_of[index]
        assert index in self._unfinished[bucket], "a gradient came after the window's last batch"
        self._unfinished[bucket].discard(index)
        if self._group.world == 1:
            return
        # the last one holds sums that are known only after backward
        while self.num_started < len(self._members) - 1 and not self._unfinished[self.num_started]:
            self._start()

    def finish(self) -> Tensor:
        """Have the whole gradient summed; the length, before, of this rank's own."""
        if self._group.world == 1:
            self._begin()
            return length_of(self._flat)
        while self.num_started < len(self._members):
            self._start()
        for wait in self._waits:
            wait()
        own_length = length_of(torch.stack(self._lengths))
        self._begin()
        return own_length

    @torch.no_grad()
    def _start(self) -> None:
        bucket = self.num_started
        self._lengths.append(length_of(self._own[bucket]))
        self._waits.append(self._group.add_up_aside(self._summed[bucket]))
