"""What this run has used of rolling stores, told after each checkpoint so that shards may go.

A shard counts as used only when a durable checkpoint lies behind all of its samples: whatever a
crash takes back is still there to be trained on again.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from dflash_pipeline.configs.errors import UsageError
from dflash_pipeline.configs.status import find_statuses
from dflash_pipeline.store import durable
from dflash_pipeline.store.consumers import (
    Consumer,
    Presence,
    consumers,
    free_number,
    release_lock,
    remove_row,
    write_row,
)
from dflash_pipeline.store.reader import Store, open_store
from dflash_pipeline.store.release import Releases
from dflash_pipeline.store.rolling import gather
from dflash_pipeline.store.spec import ShardId
from dflash_pipeline.train.follow import Order
from dflash_pipeline.train.order import Position, shard_number
from dflash_pipeline.train.segments import Shard

_LOOK_EVERY_S = 1.0


class Consumption:
    """Rank 0's to do; on the other ranks it does nothing. Closed at the end of the process."""

    def __init__(
        self, stores: Sequence[Store], order: Order, out: Path, position: Position, rank: int
    ) -> None:
        """Registers the run, which stands at `position`, with each rolling store.

        UsageError where shards that it has not used were released.
        """
        self._order, self._used = order, order.used(position)
        self._looked_at = -_LOOK_EVERY_S
        self._memberships: list[_Membership] = []
        if rank != 0 or not order.is_following:
            return
        try:
            for number, store in enumerate(stores):
                if store.is_rolling:
                    self._memberships.append(_Membership(number, store, out))
                    self._memberships[-1].register(self._used)
        except BaseException:
            self.close()
            raise

    def has_used(self, number: int, shard_id: ShardId) -> bool:
        """Whether a shard of store `number` was told to be used, and may go any moment."""
        return bool(self._memberships) and (number, shard_number(shard_id)) in self._used

    def beat(self) -> None:
        """Be alive, between steps and while waiting."""
        for membership in self._memberships:
            membership.presence.beat()

    def is_owed(self, position: Position) -> bool:
        """Whether a checkpoint at `position` would let shards go."""
        if not self._memberships or time.monotonic() - self._looked_at < _LOOK_EVERY_S:
            return False
        self._looked_at = time.monotonic()
        return self._order.used(position) != self._used

    def is_awaited(self, position: Position) -> bool:
        """Whether a capture has no room left and would find some by it."""
        return self.is_owed(position) and any(one.is_full for one in self._memberships)

    def telling(self, position: Position) -> Callable[[], None]:
        """What to do once a checkpoint at `position` is durable, in any one thread: tell what it
        lies behind, and let that go. It raises ValueError when the run was dropped.
        """
        if not self._memberships:
            return lambda: None
        used = self._used = self._order.used(position)

        def tell() -> None:
            for membership in self._memberships:
                membership.tell(used)

        return tell

    def leave(self) -> None:
        """The run is over: nobody shall wait for it."""
        for membership in self._memberships:
            membership.leave()

    def close(self) -> None:
        """This process ends; the run stays registered until `leave`."""
        for membership in self._memberships:
            membership.presence.close()


class _Membership:
    """This run in the array `consumers` of one store."""

    def __init__(self, number: int, store: Store, out: Path) -> None:
        # of its own: it is used in the thread that writes checkpoints
        self._store = open_store(store.path)
        self._number, self._name = number, str(out.absolute())
        self._id, self._row_number = _consumer_id(out), -1
        self._releases = Releases(self._store)
        self.presence = Presence(store.path, self._id)

    def register(self, used: set[Shard]) -> None:
        store = self._store
        with release_lock(store.path):
            store.refresh()
            is_used = self._flags(used)
            gone = [
                str(shard_id)
                for shard_id, flag in zip(store.layout.shard_ids(), is_used, strict=True)
                if store.is_released(shard_id) and not flag
            ]
            if gone:
                raise UsageError(
                    f"{self._name} has not trained on {len(gone)} shards of {store.path} that were "
                    f"released (the first is {gone[0]}): it was dropped, or its last checkpoint "
                    "is gone; begin anew on another --store"
                )
            found = {one.id: one.number for one in consumers(store.path, store.layout)}
            number = found.get(self._id)
            self._row_number = free_number(store.path) if number is None else number
            write_row(store.path, Consumer(self._row_number, self._id, self._name, is_used))
            gather(store.path, store.layout)

    def tell(self, used: set[Shard]) -> None:
        with release_lock(self._store.path):
            if self._own() is None:
                raise ValueError(
                    f"{self._name} was dropped from {self._store.path} (dflash status --drop): "
                    "shards that it has not used may be deleted. The checkpoint is written; "
                    "--resume goes on if none of them is"
                )
            row = Consumer(self._row_number, self._id, self._name, self._flags(used))
            write_row(self._store.path, row)
        self._releases.run()

    def leave(self) -> None:
        with release_lock(self._store.path):
            if (own := self._own()) is not None:
                remove_row(self._store.path, own)
        self.presence.forget()

    @property
    def is_full(self) -> bool:
        """Whether a capture into the store waits, as its processes tell."""
        return capture_state(self._store.path) == "waiting"

    def _own(self) -> Consumer | None:
        found = consumers(self._store.path, self._store.layout)
        return next((one for one in found if one.id == self._id), None)

    def _flags(self, used: set[Shard]) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        shard_ids = self._store.layout.shard_ids()
        return np.array([(self._number, shard_number(i)) in used for i in shard_ids], bool)


def capture_state(store: Path) -> str:
    """What the processes of a capture into this store do: running, waiting, or nothing (empty)."""
    found = [one for one in find_statuses(store) if one.stage == "capture" and one.is_alive]
    if not found:
        return ""
    return "waiting" if any(one.state == "waiting" for one in found) else "running"


def _consumer_id(out: Path) -> str:
    """Drawn once a run directory, so that it may move."""
    file = out / "consumer"
    if not file.exists():
        durable.write_durably(file, uuid.uuid4().hex.encode())
    return file.read_text()
