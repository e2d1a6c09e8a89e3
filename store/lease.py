"""Who may write which shard: byte locks that die with their holder, signs of life, and a fence.

A lease is a (shard, generation) whose byte of `leases.lock` is locked. A holder that hangs keeps
its lock, so a take-over raises the generation instead and locks the next byte; whatever makes a
shard's files visible happens under the shard's fence, where an outdated generation is refused.
Trap: a worker that runs but does nothing is hung too, hence `beat` belongs into its main loop and
never into a thread of its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Self

from dflash_pipeline.configs.disk import writing
from dflash_pipeline.configs.jsonfile import read_object
from dflash_pipeline.store import durable, paths
from dflash_pipeline.store.consumers import release_lock
from dflash_pipeline.store.spec import Layout, ShardId
from dflash_pipeline.store.table import claim_order

_GENERATION = 1 << 32
_FENCE = 1 << 61
_BEAT_BYTES = 4096


class LeaseLost(ValueError):
    """The shard was taken over while this worker gave no sign of life."""


class Lease:
    """The right to write one shard, until `release`."""

    def __init__(self, leases: Leases, shard_id: ShardId, position: int, generation: int) -> None:
        self._leases = leases
        self.shard_id = shard_id
        self.position = position
        self.generation = generation

    @contextlib.contextmanager
    def fence(self) -> Iterator[None]:
        """Inside, nobody can take the shard over; LeaseLost if somebody did before."""
        with self._leases.fenced(self.position, wait=True):
            generation, _ = self._leases.state(self.position)
            if generation != self.generation:
                raise LeaseLost(
                    f"shard {self.shard_id} was taken over by another worker: this one gave no "
                    "sign of life for too long (capture.hung_s). Nothing is lost: the same command "
                    "captures what is left, if any"
                )
            yield

    def release(self) -> None:
        """Give the shard back; again is harmless."""
        self._leases.drop(self)

    def fail(self) -> None:
        """Give the shard back and count a failure against it."""
        if not self.is_held:
            return
        with self._leases.fenced(self.position, wait=True):
            generation, failures = self._leases.state(self.position)
            self._leases.set_state(self.position, generation, failures + 1)
        self.release()

    @property
    def is_held(self) -> bool:
        """Whether it was not given back."""
        return self._leases.holds(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class Leases:
    """The leases of one store as one worker sees them; made once a process, closed at its end."""

    def __init__(
        self, store: str | Path, layout: Layout, *, heartbeat_s: float, hung_s: float
    ) -> None:
        self._store = Path(store)
        directory = paths.log_directory(self._store)
        self._holders = directory / "holders"
        durable.make_directories(self._holders)
        self._order = claim_order(layout.num_shards)
        self._position = {shard_id: i for i, shard_id in enumerate(self._order)}
        self._heartbeat_s, self._hung_s = heartbeat_s, hung_s
        flags = os.O_RDWR | os.O_CREAT
        self._lock = os.open(directory / "leases.lock", flags, 0o644)
        self._state_file = directory / "leases.state"
        self._states = os.open(self._state_file, flags, 0o644)
        host = socket.gethostname()
        name = f"{host}-{os.getpid()}-{uuid.uuid4().hex[:8]}.json"
        self._beat_file = self._holders / name
        # locked before it has its name: another worker's sweep takes one that is not for a dead one
        unnamed = durable.temporary_name(self._beat_file)
        self._beat = os.open(unnamed, flags | os.O_EXCL, 0o644)
        durable.lock(self._beat, 0)
        os.rename(unnamed, self._beat_file)
        self._who = {"host": host, "pid": os.getpid()}
        self._held: dict[int, Lease] = {}
        # the writer's thread gives leases back while the main loop beats
        self._guard = threading.RLock()
        self._num_beats, self._last_beat_s = 0, 0.0
        self._seen: dict[tuple[int, int], tuple[str, float]] = {}
        self._write_beat()

    def claim(self, is_open: Callable[[ShardId], bool], *, max_failures: int) -> Lease | None:
        """The first free shard in claim order; None if each open one is held or failed too often.

        `is_open` says whether a shard still has to be captured; it is asked again once the shard is
        held. When none is free, the shard of a hung holder is taken over.
        """
        closed_to_us = []
        for shard_id in self._order:
            if not is_open(shard_id) or self._failures(shard_id) >= max_failures:
                continue
            lease = self.acquire(shard_id)
            if lease is None:
                closed_to_us.append(shard_id)
            elif is_open(shard_id):
                return lease
            else:
                lease.release()
        for shard_id in closed_to_us:
            lease = self._take_over(shard_id)
            if lease is not None and not is_open(shard_id):
                lease.release()
                lease = None
            if lease is not None:
                return lease
        return None

    def acquire(self, shard_id: ShardId) -> Lease | None:
        """The lease of a shard whose holder is gone or never was; None if it is held."""
        position = self._position[shard_id]
        if position in self._held:
            return None
        with self.fenced(position, wait=False) as is_fenced:
            if not is_fenced:
                return None
            generation, _ = self.state(position)
            if not durable.lock(self._lock, position + generation * _GENERATION):
                return None
            return self._hold(shard_id, position, generation)

    def _take_over(self, shard_id: ShardId) -> Lease | None:
        position = self._position[shard_id]
        if position in self._held:
            return None
        generation, _ = self.state(position)
        if not self._is_hung(position, generation):
            return None
        with self.fenced(position, wait=False) as is_fenced:
            now, failures = self.state(position)
            if not is_fenced or now != generation:
                return None
            if not durable.lock(self._lock, position + (generation + 1) * _GENERATION):
                return None
            self.set_state(position, generation + 1, failures)
            return self._hold(shard_id, position, generation + 1)

    def _hold(self, shard_id: ShardId, position: int, generation: int) -> Lease:
        lease = Lease(self, shard_id, position, generation)
        with self._guard:
            self._held[position] = lease
            self._write_beat()
        return lease

    def drop(self, lease: Lease) -> None:
        """What `Lease.release` does."""
        with self._guard:
            if not self.holds(lease):
                return
            del self._held[lease.position]
            durable.unlock(self._lock, lease.position + lease.generation * _GENERATION)

    def holds(self, lease: Lease) -> bool:
        """Whether this lease was not given back."""
        return self._held.get(lease.position) is lease

    def beat(self) -> None:
        """Give a sign of life; call it from the main loop, writes each `heartbeat_s` seconds."""
        with self._guard:
            if time.monotonic() - self._last_beat_s >= self._heartbeat_s:
                self._write_beat()

    def _write_beat(self) -> None:
        self._num_beats += 1
        self._last_beat_s = time.monotonic()
        held = [[lease.position, lease.generation] for lease in self._held.values()]
        content = {**self._who, "time": time.time(), "num_beats": self._num_beats, "held": held}
        with writing(self._beat_file):
            durable.write_all(self._beat, json.dumps(content).encode().ljust(_BEAT_BYTES), 0)

    def _is_hung(self, position: int, generation: int) -> bool:
        """Whether the holder's file stood still for `hung_s` of OUR clock: hosts' clocks differ."""
        sign = ""
        for file in self._holders.glob("*.json"):
            try:
                content = read_object(file)
                if [position, generation] in content["held"]:
                    sign = f"{file.name} {content['num_beats']}"
            except (OSError, ValueError, KeyError, TypeError):
                continue
        before, since_s = self._seen.get((position, generation), ("never", 0.0))
        if sign != before:
            self._seen[position, generation] = (sign, time.monotonic())
            return False
        return time.monotonic() - since_s > self._hung_s

    @contextlib.contextmanager
    def fenced(self, position: int, *, wait: bool) -> Iterator[bool]:
        """Hold the fence of a shard; gives False if another process holds it and `wait` is off."""
        # a second descriptor: locks of one open file do not exclude each other
        descriptor = os.open(paths.log_directory(self._store) / "leases.lock", os.O_RDWR)
        try:
            yield durable.lock(descriptor, _FENCE + position, wait=wait)
        finally:
            os.close(descriptor)

    def state(self, position: int) -> tuple[int, int]:
        """Generation and failures of a shard."""
        content = os.pread(self._states, 8, 8 * position).ljust(8, b"\0")
        generation, failures = struct.unpack("<II", content)
        return generation, failures

    def set_state(self, position: int, generation: int, failures: int) -> None:
        """Write them; under the shard's fence only."""
        with writing(self._state_file):
            durable.write_all(self._states, struct.pack("<II", generation, failures), 8 * position)

    def _failures(self, shard_id: ShardId) -> int:
        return self.state(self._position[shard_id])[1]

    def failures(self) -> dict[ShardId, int]:
        """Shards that failed, and how often."""
        counts = {shard_id: self._failures(shard_id) for shard_id in self._order}
        return {shard_id: count for shard_id, count in counts.items() if count}

    def in_progress(self) -> set[ShardId]:
        """Shards that some worker, this one included, holds now."""
        # a second descriptor: locks of one open file do not exclude each other
        descriptor = os.open(paths.log_directory(self._store) / "leases.lock", os.O_RDWR)
        try:
            return {
                shard_id
                for position, shard_id in enumerate(self._order)
                if durable.is_locked(descriptor, position + self.state(position)[0] * _GENERATION)
            }
        finally:
            os.close(descriptor)

    def forgive(self) -> None:
        """Forget all failures, at the start of a capture."""
        for shard_id in self.failures():
            position = self._position[shard_id]
            with self.fenced(position, wait=True):
                self.set_state(position, self.state(position)[0], 0)

    def sweep(self) -> int:
        """Remove what dead workers left of shards, and their signs of life; files removed."""
        removed = 0
        # a trainer that records a release writes beside commit records as well
        with release_lock(self._store):
            for shard_id in self._order:
                if any(leftovers(self._store, shard_id)) and (lease := self.acquire(shard_id)):
                    removed += remove_leftovers(self._store, shard_id)
                    lease.release()
        for file in self._holders.glob("*.json"):
            with durable.locked(file, 0, wait_s=0) as is_dead:
                if is_dead and file != self._beat_file:
                    file.unlink(missing_ok=True)
                    removed += 1
        return removed

    def close(self) -> None:
        """Give all leases back."""
        for lease in list(self._held.values()):
            lease.release()
        self._beat_file.unlink(missing_ok=True)
        for descriptor in (self._lock, self._states, self._beat):
            os.close(descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def leftovers(store: Path, shard_id: ShardId) -> list[Path]:
    """Temporary files of a shard."""
    names = (paths.hidden_file(shard_id), paths.last_file(shard_id), paths.commit_file(shard_id))
    return [file for name in names for file in durable.temporaries((store / name).parent)]


def remove_leftovers(store: Path, shard_id: ShardId) -> int:
    """Remove them, holding the shard's lease; how many."""
    files = leftovers(store, shard_id)
    for file in files:
        file.unlink(missing_ok=True)
    return len(files)
