"""The order of a run, drawn step by step; also from stores that are still being captured.

While shards are missing, the first epoch is made of segments: rank 0 takes the shards committed
since the last segment, writes their names to OUT/order and tells the other ranks. Everything else
follows from those names, so a run that is resumed draws the very same samples again.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dflash_pipeline.configs.schema import TrainConfig
from dflash_pipeline.store.reader import Store
from dflash_pipeline.train.group import Group
from dflash_pipeline.train.order import (
    Catalog,
    Position,
    rank_batches,
    segment_batches,
    shard_number,
)

Ints = npt.NDArray[np.int64]

_LOOK_EVERY_S = 1.0


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of an epoch."""

    shards: tuple[tuple[int, int], ...] | None
    """(store, shard number) of each shard; None: all of them."""
    is_last: bool
    is_stop: bool = False
    """Not a segment: a rank was told to stop while all waited for shards."""


@dataclass(frozen=True, slots=True)
class Draw:
    """One optimizer step of this rank."""

    epoch: int
    batches: tuple[Ints, ...]
    """Places in the catalog, one array a batch; fewer than train.accumulate at an epoch's end."""
    after: Position
    """Where the run is once this step is done."""


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
    ) -> None:
        """`path`: OUT/order, read when it is there. `position`: where to begin."""
        self._samples, self._stores, self._config, self._group = samples, stores, config, group
        self._position = position
        self._batches: list[Ints] | None = None
        self._is_last = False
        self.is_finished = False
        """No further step will come: the epochs are done, or the run stops here."""
        self.is_stopped = False
        """The ranks agreed to stop while they waited for shards."""
        self._following = _following(samples, stores, config, group, path)

    @property
    def is_following(self) -> bool:
        return self._following is not None

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
        return Draw(at.epoch, tuple(own), self._position)

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
        config = self._config
        candidates = _candidates(self._samples, self._stores, segment)
        self._batches = segment_batches(
            self._samples,
            candidates,
            config.seed,
            at.epoch,
            config.batch_tokens,
            config.batch_anchors,
        )
        self._is_last = segment.is_last
        return True


def _candidates(samples: Catalog, stores: Sequence[Store], segment: Segment) -> Ints:
    """Readable samples of a segment's shards, as places in the catalog."""
    for store in stores:
        store.refresh()
    is_in = np.zeros(len(samples), bool)
    for number, store in enumerate(stores):
        own = np.flatnonzero(samples.store_C == number)
        is_in[own] = store.readable_N[samples.sample_C[own]]
        if segment.shards is not None:
            shards = [shard for owner, shard in segment.shards if owner == number]
            is_in[own] &= np.isin(samples.shard_C[own], np.array(shards, np.int64))
    return np.flatnonzero(is_in).astype(np.int64)


def _following(
    samples: Catalog, stores: Sequence[Store], config: TrainConfig, group: Group, path: Path
) -> _Following | None:
    """None where every store was whole from the run's beginning; rank 0 decides."""
    follows = path.exists() or not all(store.is_sealed for store in stores)
    if group.agree("follows", str(follows)) == "False":
        return None
    return _Following(samples, stores, config, group, path)


class _Following:
    """The segments of the first epoch, known one after another."""

    def __init__(
        self,
        samples: Catalog,
        stores: Sequence[Store],
        config: TrainConfig,
        group: Group,
        path: Path,
    ) -> None:
        self._samples, self._stores, self._config, self._group = samples, stores, config, group
        self._path = path
        recorded = group.agree("order", _recorded(path) if group.rank == 0 else "")
        self._known = [_parse(line) for line in recorded.splitlines()]
        self._looked_at = -_LOOK_EVERY_S

    def segment(self, index: int, wants_stop: bool) -> Segment | None:
        if index < len(self._known):
            return self._known[index]
        now = time.monotonic()
        if now - self._looked_at < _LOOK_EVERY_S and not wants_stop:
            return None
        self._looked_at = now
        found = self._decide(wants_stop) if self._group.rank == 0 else self._hear(index, wants_stop)
        if found is not None and not found.is_stop:
            self._known.append(found)
        return found

    def _hear(self, index: int, wants_stop: bool) -> Segment | None:
        if wants_stop:
            self._group.tell("stop asked", "")
        line = self._group.told(f"segment/{index}")
        return None if line is None else _parse(line)

    def _decide(self, wants_stop: bool) -> Segment | None:
        key = f"segment/{len(self._known)}"
        if wants_stop or self._group.told("stop asked") is not None:
            segment = Segment((), is_last=False, is_stop=True)
            self._group.tell(key, _line(segment))
            return segment
        fresh = self._fresh_shards()
        is_last = all(store.is_sealed for store in self._stores)
        if not is_last and not self._is_enough(fresh):
            return None
        segment = Segment(fresh, is_last)
        with self._path.open("a") as file:
            file.write(_line(segment) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self._group.tell(key, _line(segment))
        return segment

    def _fresh_shards(self) -> tuple[tuple[int, int], ...]:
        """Committed shards that no segment has taken, by store and in the layout's order."""
        taken = {shard for segment in self._known for shard in segment.shards or ()}
        fresh = []
        for number, store in enumerate(self._stores):
            store.refresh()
            fresh += [
                (number, shard_number(shard_id))
                for shard_id in store.layout.shard_ids()
                if store.is_committed(shard_id)
            ]
        return tuple(shard for shard in fresh if shard not in taken)

    def _is_enough(self, shards: tuple[tuple[int, int], ...]) -> bool:
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


def _recorded(path: Path) -> str:
    """The whole lines of OUT/order; one that a kill tore is cut off."""
    if not path.exists():
        return ""
    text = path.read_text()
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        os.truncate(path, len(whole.encode()))
    return whole


def _line(segment: Segment) -> str:
    return json.dumps({"shards": segment.shards, "last": segment.is_last, "stop": segment.is_stop})


def _parse(line: str) -> Segment:
    entry: dict[str, Any] = json.loads(line)
    shards = tuple((int(store), int(shard)) for store, shard in entry["shards"])
    return Segment(shards, bool(entry["last"]), bool(entry["stop"]))
