"""The array `consumers`: the training runs that follow a rolling store, and what each has used.

A store is rolling while it has this array (`rolling.py`). A run is a row, one chunk
file, uint8: JSON text that says who it is, a byte a shard (1: used), crc32c of all before. Nobody
but the run itself writes its row; whoever removes the file drops it. Rows change and shards are
released under one lock, so that a run cannot register beside a release.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dflash_pipeline.configs.errors import UsageError
from dflash_pipeline.configs.screen import duration
from dflash_pipeline.store import durable, paths
from dflash_pipeline.store.checksum import crc32c
from dflash_pipeline.store.spec import Layout

MOST_CONSUMERS = 64
"""Rows of the array."""
ABOUT_BYTES, CRC_BYTES = 1024, 4
"""Of a row: who the run is, and the checksum at its end."""
_LOCK_WAIT_S = 60.0
_BEAT_EVERY_S = 5.0


@dataclass(frozen=True, eq=False, slots=True)
class Consumer:
    """A training run as its row tells it."""

    number: int
    """Of its row in the array."""
    id: str
    """Drawn once a run directory."""
    name: str
    """The run directory."""
    used: NDArray[np.bool_]
    """Whether each shard was used, in the order of `Layout.shard_ids`."""


@contextlib.contextmanager
def release_lock(store: Path) -> Iterator[None]:
    """Held while rows change or shards are released; ValueError if another holds it for long."""
    file = paths.release_lock_file(store)
    with durable.locked(file, 0, wait_s=_LOCK_WAIT_S) as is_held:
        if not is_held:
            raise ValueError(f"{file} has been locked for {_LOCK_WAIT_S:.0f} s: end what hangs")
        yield


def consumers(store: Path, layout: Layout) -> list[Consumer]:
    """Every registered run, by number. ValueError for a damaged row: what it used is not known."""
    found = [_read(store, layout, number) for number in _numbers(store)]
    return [one for one in found if one is not None]


def _numbers(store: Path) -> list[int]:
    directory = store / paths.CONSUMERS / "c"
    names = os.listdir(directory) if directory.is_dir() else []
    return sorted(int(name) for name in names if name.isdecimal() and int(name) < MOST_CONSUMERS)


def _read(store: Path, layout: Layout, number: int) -> Consumer | None:
    file = store / paths.consumer_file(number)
    try:
        content = file.read_bytes()
    except FileNotFoundError:
        return None
    size = ABOUT_BYTES + len(layout.shard_ids()) + CRC_BYTES
    try:
        if len(content) != size or _crc(content[:-CRC_BYTES]) != content[-CRC_BYTES:]:
            raise ValueError("its size or checksum is wrong")
        about = json.loads(content[:ABOUT_BYTES])
        used = np.frombuffer(content, np.bool_, size - ABOUT_BYTES - CRC_BYTES, ABOUT_BYTES)
        return Consumer(number, about["id"], about["name"], used)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{file} is damaged ({error}): nothing is released until it is removed, which drops "
            "the training run that it belongs to"
        ) from None


def _crc(content: bytes) -> bytes:
    return crc32c(np.frombuffer(content, np.uint8)).to_bytes(CRC_BYTES, "little")


def write_row(store: Path, consumer: Consumer) -> None:
    """Write a run's row, whole and durable; under `release_lock`."""
    about = json.dumps({"id": consumer.id, "name": consumer.name}).encode().ljust(ABOUT_BYTES)
    if len(about) > ABOUT_BYTES:
        raise UsageError(f"{consumer.name} is too long a path for a run that follows a quota")
    content = about + consumer.used.astype(np.uint8).tobytes()
    file = store / paths.consumer_file(consumer.number)
    durable.make_directories(file.parent)
    # of a run that was killed here
    for leftover in durable.temporaries(file.parent):
        leftover.unlink(missing_ok=True)
    durable.write_durably(file, content + _crc(content))


def free_number(store: Path) -> int:
    """A row that nobody has; UsageError if there is none."""
    for number in range(MOST_CONSUMERS):
        if not (store / paths.consumer_file(number)).exists():
            return number
    raise UsageError(
        f"{store} has {MOST_CONSUMERS} consumers already: drop one (dflash status --drop)"
    )


def remove_row(store: Path, consumer: Consumer) -> None:
    """Forget a run; under `release_lock`."""
    file = store / paths.consumer_file(consumer.number)
    file.unlink(missing_ok=True)
    durable.sync(file.parent)


def consumer_line(name: str, num_used: int, num_shards: int, presence: str) -> str:
    """What one run has done so far."""
    return f"training run {name}: has used {num_used} of {num_shards} shards, {presence}"


class Presence:
    """A sign of life of a run that uses a store: a locked file that is touched now and then."""

    def __init__(self, store: Path, consumer_id: str) -> None:
        file = _presence_file(store, consumer_id)
        durable.make_directories(file.parent)
        self._file = file
        self._descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
        if not durable.lock(self._descriptor, 0):
            os.close(self._descriptor)
            raise UsageError(
                f"a process that trains the same run on {store} is alive: wait for it, or end it"
            )
        self._beat_at = -_BEAT_EVERY_S
        self.beat()

    def beat(self) -> None:
        """Give a sign of life; call it from the main loop, writes each few seconds."""
        if time.monotonic() - self._beat_at >= _BEAT_EVERY_S:
            self._beat_at = time.monotonic()
            os.utime(self._descriptor)

    def close(self) -> None:
        """The process ends here; whoever waits for it sees that. Again is harmless."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def forget(self) -> None:
        """As `close`, and it will not come back."""
        self._file.unlink(missing_ok=True)
        self.close()


def _presence_file(store: Path, consumer_id: str) -> Path:
    return paths.log_directory(store) / "consumers" / f"{consumer_id}.alive"


NOT_RUNNING = "not running"


def presence_text(store: Path, consumer: Consumer) -> str:
    """Whether the run's process lives: `last sign of life 0:00:03 ago`, or NOT_RUNNING."""
    file = _presence_file(store, consumer.id)
    try:
        descriptor = os.open(file, os.O_RDWR)
    except OSError:
        return NOT_RUNNING
    try:
        # only asked: a lock taken here would refuse the run itself if it started just now
        if not durable.is_locked(descriptor, 0):
            return NOT_RUNNING
        age_s = max(0.0, time.time() - os.fstat(descriptor).st_mtime)
        return f"last sign of life {duration(age_s)} ago"
    finally:
        os.close(descriptor)
