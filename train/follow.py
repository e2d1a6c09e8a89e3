"""The order of a run, drawn step by step; also from stores that are still being captured.

While shards are missing, the first epoch is made of segments: rank 0 takes the shards committed
since the last segment, writes their names to OUT/order and tells the other ranks. Everything else
follows from those names, so a run that is resumed draws the very same samples again.

A shard of a rolling store goes once its segment is trained. So a segment takes half of the shards
that are there: while it is trained the other half waits, and then capture fills its place.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from dflash_pipeline.configs.disk import writing
from dflash_pipeline.configs.schema import TrainConfig
from dflash_pipeline.store.reader import Store
from dflash_pipeline.store.rolling import awaited_text
from dflash_pipeline.store.table import claim_order
from dflash_pipeline.train.group import Group
from dflash_pipeline.train.order import (
    Catalog,
    Position,
    rank_batches,
    segment_batches,
    shard_number,
    steps_of,
)
from dflash_pipeline.train.schedule import Shares
from dflash_pipeline.train.segments import (
    Segment,
    Shard,
    Shards,
    parse_line,
    parsed,
    recorded,
    segment_line,
)

Ints = npt.NDArray[np.int64]

_LOOK_EVERY_S = 1.0
# without a new shard for so long, a rolling store is taken to be full
_STALLED_S = 30.0
_NO_STEP = 1e-6


@dataclass(frozen=True, slots=True)
class Draw:
    """One optimizer step of this rank."""

    epoch: int
    batches: tuple[Ints, ...]
    """Places in the catalog, one array a batch; fewer than train.accumulate at an epoch's end."""
    after: Position
    """Where the run is once this step is done."""
    share: float | None
    """Of the run's planned data before this step; None: no store is followed."""
    num_left: int
    """Steps of the epochs after this one, as far as is known by now: each epoch is packed anew, and
    one that follows stores in parts."""


class Draws(Protocol):
    """What a feed reads ahead from."""

    is_finished: bool
    """No further step will come."""

    def draw(self, wants_stop: bool) -> Draw | None:
        """The next step; None: finished, or not known yet. Never waits."""


class Order:
    """Draws steps one after another. `draw` never waits."""

    def __init__(
        self,
        samples: Catalog,
        stores: Sequence[Store],
        config: TrainConfig,
        group: Group,
        path: Path,
        position: Position,
        say: Callable[[str], None],
        num_planned: int,
    ) -> None:
        """`path`: OUT/order, read when it is there. `position`: where to begin. `say` is told of
        steps that are smaller than configured. `num_planned`: steps of the run by its plan."""
        self._samples, self._stores, self._config, self._group = samples, stores, config, group
        self._position, self._num_planned = position, num_planned
        self._batches: list[Ints] | None = None
        self._num_batches: dict[int, int] = {}
        self._is_last = False
        self._shares_before, self._share = 0.0, 0.0
        """Of an epoch's planned data: before the segment at hand, and its own."""
        self.is_finished = False
        """No further step will come: the epochs are done, or the run stops here."""
        self.is_stopped = False
        """The ranks agreed to stop while they waited for shards."""
        # a store that was not whole when the run began is followed to its end; rank 0 decides
        follows = path.exists() or not all(store.is_sealed for store in stores)
        is_following = group.agree("follows", str(follows)) == "True"
        self._following = (
            _Following(samples, stores, config, group, path, say) if is_following else None
        )

    @property
    def is_following(self) -> bool:
        """Whether a store was not whole when the run began; stays so."""
        return self._following is not None

    def used(self, at: Position) -> set[Shard]:
        """Shards whose samples were all drawn before `at`; empty where nothing is followed."""
        if self._following is None:
            return set()
        known = self._following.known
        num_whole = len(known) if at.epoch > 0 else at.segment
        if num_whole < len(known):
            if num_whole not in self._num_batches:
                self._num_batches[num_whole] = len(self._packed(at, known[num_whole]))
            num_whole += at.batch >= self._num_batches[num_whole]
        whole = known[:num_whole]
        return {shard for segment in whole for shard in segment.shards or ()}

    def draw(self, wants_stop: bool) -> Draw | None:
        """The next step; None: finished, or not known before more shards are committed."""
        config, group, at = self._config, self._group, self._position
        while not self.is_finished:
            if self._batches is None and not self._enter(at, wants_stop):
                return None
            assert self._batches is not None
            if at.batch < len(self._batches):
                break
            at = Position(at.epoch, at.segment + 1, 0)
            if self._is_last:
                at = Position(at.epoch + 1, 0, 0)
            self._position, self._batches = at, None
            self.is_finished = at.epoch >= config.epochs
        if self.is_finished or self._batches is None:
            return None
        own = rank_batches(self._batches, at.batch, group.rank, group.world, config.accumulate)
        end = min(at.batch + group.world * config.accumulate, len(self._batches))
        self._position = Position(at.epoch, at.segment, end)
        share, num_left = self._share_before(at), self._num_left(self._position)
        return Draw(at.epoch, tuple(own), self._position, share, num_left)

    def _share_before(self, at: Position) -> float | None:
        if self._following is None:
            return None
        assert self._batches is not None
        within = self._share * at.batch / len(self._batches)
        return (at.epoch + self._shares_before + within) / self._config.epochs

    def _num_left(self, after: Position) -> int:
        """Steps from there to the run's end: of what is not packed yet by the plan, or as many as
        of the epoch at hand."""
        config, world = self._config, self._group.world
        assert self._batches is not None
        left = steps_of(len(self._batches) - after.batch, world, config.accumulate)
        num_epochs = config.epochs - after.epoch - 1
        if self._following is None or after.epoch > 0:
            return left + num_epochs * steps_of(len(self._batches), world, config.accumulate)
        unseen = 0.0 if self._is_last else 1 - self._shares_before - self._share
        coming = self._num_planned / config.epochs * (num_epochs + unseen)
        # of all shards the shares add up to 1 but for rounding, which is no step
        return left + math.ceil(coming - _NO_STEP)

    def _enter(self, at: Position, wants_stop: bool) -> bool:
        """Pack the segment at `at`; False: it is not known yet, or the run stops here."""
        if at.epoch >= self._config.epochs:
            self.is_finished = True
            return False
        segment: Segment | None = Segment(None, is_last=True)
        if self._following is not None and at.epoch == 0:
            segment = self._following.segment(at.segment, wants_stop)
        if segment is None:
            return False
        if segment.is_stop:
            self.is_finished = self.is_stopped = True
            return False
        self._batches = self._packed(at, segment)
        self._is_last = segment.is_last
        if self._following is not None:
            self._shares_before, self._share = self._following.shares(at)
        return True

    def _packed(self, at: Position, segment: Segment) -> list[Ints]:
        config = self._config
        return segment_batches(
            self._samples,
            _candidates(self._samples, self._stores, segment),
            config.seed,
            at.epoch,
            config.batch_tokens,
            config.batch_anchors,
        )


def _candidates(samples: Catalog, stores: Sequence[Store], segment: Segment) -> Ints:
    """Good samples of a segment's shards, as places in the catalog; of released ones as well, so
    that a run which goes on packs the batches that it packed before."""
    for store in stores:
        store.refresh()
    is_in = np.zeros(len(samples), bool)
    for number, store in enumerate(stores):
        own = np.flatnonzero(samples.store_C == number)
        is_in[own] = store.captured_N[samples.sample_C[own]]
        if segment.shards is not None:
            shards = [shard for owner, shard in segment.shards if owner == number]
            is_in[own] &= np.isin(samples.shard_C[own], np.array(shards, np.int64))
    return np.flatnonzero(is_in).astype(np.int64)


class _Following:
    """The segments of the first epoch, known one after another."""

    def __init__(
        self,
        samples: Catalog,
        stores: Sequence[Store],
        config: TrainConfig,
        group: Group,
        path: Path,
        say: Callable[[str], None],
    ) -> None:
        self._samples, self._stores, self._config, self._group = samples, stores, config, group
        self._path, self._say = path, say
        told = group.agree("order", recorded(path) if group.rank == 0 else "")
        self.known = parsed(told, path)
        self._shares = Shares(samples, config)
        self._looked_at = -_LOOK_EVERY_S
        self._num_seen, self._grew_at = 0, time.monotonic()

    def shares(self, at: Position) -> tuple[float, float]:
        """Of an epoch's planned data: before the segment at `at`, which is known, and its own."""
        if at.epoch > 0:
            return 0.0, 1.0
        before = (shard for one in self.known[: at.segment] for shard in one.shards or ())
        return self._shares.of(before), self._shares.of(self.known[at.segment].shards or ())

    def segment(self, index: int, wants_stop: bool) -> Segment | None:
        if index < len(self.known):
            return self.known[index]
        now = time.monotonic()
        if now - self._looked_at < _LOOK_EVERY_S and not wants_stop:
            return None
        self._looked_at = now
        found = self._decide(wants_stop) if self._group.rank == 0 else self._hear(index, wants_stop)
        if found is not None and not found.is_stop:
            self.known.append(found)
        return found

    def _hear(self, index: int, wants_stop: bool) -> Segment | None:
        if wants_stop:
            self._group.tell("stop asked", "")
        line = self._group.told(f"segment/{index}")
        return None if line is None else parse_line(line)

    def _decide(self, wants_stop: bool) -> Segment | None:
        key = f"segment/{len(self.known)}"
        if wants_stop or self._group.told("stop asked") is not None:
            segment = Segment((), is_last=False, is_stop=True)
            self._group.tell(key, segment_line(segment))
            return segment
        fresh = self._fresh_shards()
        is_last = all(store.is_sealed for store in self._stores)
        chosen = fresh if is_last else self._chosen(fresh)
        if not is_last and not chosen:
            return None
        segment = Segment(chosen, is_last)
        with writing(self._path), self._path.open("a") as file:
            file.write(segment_line(segment) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self._group.tell(key, segment_line(segment))
        return segment

    def _chosen(self, fresh: Shards) -> Shards:
        """The shards of the next segment; none: it is too early for one."""
        part: list[Shard] = []
        for number, store in enumerate(self._stores):
            own = [shard for shard in fresh if shard[0] == number]
            part += own[: -(-len(own) // 2)] if store.is_rolling else own
        for shards in (tuple(part), fresh):
            if self._is_enough(shards):
                return shards
        return fresh if fresh and self._is_stalled(fresh) else ()

    def _is_stalled(self, fresh: Shards) -> bool:
        """Whether more shards will not come before these are used and released."""
        rolling = [store for store in self._stores if store.is_rolling]
        # until all runs are there nothing goes, so nothing can come
        is_gathering = any(awaited_text(store.path, store.layout) for store in rolling)
        if len(fresh) != self._num_seen or is_gathering or not rolling:
            self._num_seen, self._grew_at = len(fresh), time.monotonic()
        is_stalled = time.monotonic() - self._grew_at >= _STALLED_S
        if is_stalled:
            self._say(
                f"{len(fresh)} shards hold less than a whole step for {self._group.world} "
                f"processes, and no other came for {_STALLED_S:.0f} s: training a smaller step. A "
                "larger capture --quota, or a smaller train.accumulate, avoids it"
            )
        return is_stalled

    def _fresh_shards(self) -> Shards:
        """Committed shards that no segment has taken, by store, then in the order of claims."""
        taken = {shard for segment in self.known for shard in segment.shards or ()}
        fresh = []
        for number, store in enumerate(self._stores):
            store.refresh()
            fresh += [
                (number, shard_number(shard_id))
                for shard_id in claim_order(store.layout.num_shards)
                if store.is_committed(shard_id)
            ]
        return tuple(shard for shard in fresh if shard not in taken)

    def _is_enough(self, shards: Shards) -> bool:
        """At least one whole step for every rank, so that no rank idles at a segment's end."""
        if not shards:
            return False
        config, samples = self._config, self._samples
        chosen = _candidates(samples, self._stores, Segment(shards, is_last=False))
        share = np.array(samples.shares)[samples.store_C[chosen]]
        num_batches = max(
            float((samples.num_tokens_C[chosen] * share).sum()) / config.batch_tokens,
            float((samples.num_anchors_C[chosen] * share).sum()) / config.batch_anchors,
        )
        return num_batches >= self._group.world * config.accumulate
