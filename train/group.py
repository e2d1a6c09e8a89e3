"""The processes that train one drafter together: sums over ranks, and who is missing.

Small facts travel through a key-value store, which any moment and any thread may ask; only sums of
tensors are collectives, and every rank calls them in the same order.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor

from dflash_pipeline.configs.errors import first_line
from dflash_pipeline.configs.place import Place
from dflash_pipeline.train.facts import ANSWER_S, Facts, within

# torch exports its key-value stores without types
_kv: Any = dist

# the collective's own limit fires after ours, which can say who is missing
_MARGIN_S = 30.0
# at the start ours comes after: torch's waits have limits, but for a server that stands still
_START_MARGIN_S = 5.0
_BEAT_EVERY_S = 1.0
_LOOK_EVERY_S = 0.02
# a stop that came while the others were awaited is theirs too
_STOPPED_S = 3.0
# beats after which a rank that told nothing is taken to have ended
_LOST_BEATS = 2.5
# the key under which rank 0 leaves the names of ranks that have ended
_ENDED = "ended"


@dataclass(frozen=True, slots=True)
class _Beat:
    """What a rank told of itself last."""

    step: int
    """-1: nothing."""
    beat_time: float
    """When it was last known to be at work."""
    is_waiting: bool
    """For other ranks."""
    told_time: float

    @property
    def age_s(self) -> float:
        return time.time() - self.beat_time if self.step >= 0 else 0.0

    def __str__(self) -> str:
        if self.step < 0:
            return "never seen"
        return f"last seen at step {self.step}, {self.age_s:.0f} s ago"


_NEVER = _Beat(-1, 0.0, False, 0.0)


class Group:
    """`world` ranks; of one rank everything is a no-op."""

    def __init__(self, place: Place, timeout_s: float) -> None:
        self.rank, self.world = place.rank, place.world
        self._timeout_s = timeout_s
        self._step = 0
        self._waits_since: float | None = None
        self.num_waits = 0
        """How often it has waited for other ranks, and they came."""
        self._beat_time = time.time()
        self._told_at = -_BEAT_EVERY_S
        self._heard = ""
        self._facts: Facts | None = None
        if place.world == 1:
            return
        limit = timedelta(seconds=timeout_s + (_MARGIN_S if place.kind == "cuda" else 0))
        served = _served(place, timeout_s)
        self._facts = Facts(served, min(timeout_s, ANSWER_S))

        def join() -> None:
            dist.init_process_group(
                "nccl" if place.kind == "cuda" else "gloo",
                store=_kv.PrefixStore("group", served),
                rank=place.rank,
                world_size=place.world,
                timeout=limit,
                device_id=torch.device(place.device) if place.kind == "cuda" else None,
            )

        try:
            within(limit.total_seconds() + _START_MARGIN_S, join, "join")
        except (RuntimeError, TimeoutError) as error:
            raise ValueError(self.missing()) from error

    def add_up(self, tensor: Tensor) -> None:
        """In-place sum over ranks. ValueError naming the ranks that did not come in time."""
        self.add_up_aside(tensor)()

    def add_up_aside(self, tensor: Tensor) -> Callable[[], None]:
        """The same while this rank goes on; what is returned waits for it: on CUDA the current
        stream does, not the host. The tensor is the sum's alone until then."""
        if self.world == 1:
            return lambda: None
        with self._together():
            work = dist.all_reduce(tensor, async_op=True)
        assert work is not None

        def wait() -> None:
            with self._together(), self._waiting():
                work.wait()

        return wait

    @contextlib.contextmanager
    def _together(self) -> Iterator[None]:
        """What a collective meets when another rank does not come, or has ended, as a ValueError
        that names it."""
        try:
            yield
        except (RuntimeError, dist.DistBackendError) as error:
            is_late = "timed out" in str(error).lower() or "timeout" in str(error).lower()
            raise ValueError(self.missing() if is_late else self.lost()) from error

    def beat(self, step: int) -> None:
        """This rank is alive and has done `step` steps; the others are told once a second."""
        self._step, self._beat_time = step, time.time()
        if time.monotonic() - self._told_at > _BEAT_EVERY_S:
            # whether rank 0 is gone or only stands still, the next sum over ranks tells
            with contextlib.suppress(RuntimeError):
                self.tell_beat()

    def tell_beat(self) -> None:
        """Tell the others of the last `beat`; also from a thread, while the rank itself waits.
        RuntimeError where the key-value store is gone or stands still."""
        self._told_at = time.monotonic()
        if self._facts is None:
            return
        self._facts.set(
            f"beat/{self.rank}",
            f"{self._step} {self._beat_time} {int(self.is_waiting)} {time.time()}",
        )
        # kept here: the store ends with rank 0, which may end before this rank sees why
        self._heard = self._heard or self._facts.find(_ENDED) or ""

    def wait_for(self, event: torch.cuda.Event) -> None:
        """Wait for work on the device, at most `timeout_s`. ValueError naming missing ranks."""
        until = time.monotonic() + self._timeout_s
        with self._waiting():
            while not event.query():
                if time.monotonic() > until:
                    raise ValueError(self.missing())
                time.sleep(0.0005)

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        self._waits_since = time.monotonic()
        try:
            yield
        finally:
            # first: who sees that nobody waits must see that somebody did
            self.num_waits += 1
            self._waits_since = None

    @property
    def is_waiting(self) -> bool:
        """Waits for other ranks at this moment."""
        return self._waits_since is not None

    @property
    def waited_s(self) -> float:
        """For how long; 0 where it does not wait."""
        since = self._waits_since
        return 0.0 if since is None else time.monotonic() - since

    def speaks(self) -> bool:
        """Whether this is the first of the ranks that wait: one line is enough for all of them."""
        return not any(self._last_beat(rank).is_waiting for rank in range(self.rank))

    def awaited(self) -> str:
        """The ranks that do not wait for others themselves: those that the others wait for."""
        last = {rank: self._last_beat(rank) for rank in self._others()}
        named = [f"rank {rank} ({beat})" for rank, beat in last.items() if not beat.is_waiting]
        return ", ".join(named) or "the other ranks"

    def behind(self) -> str:
        """Which ranks are behind this one, or gave no sign of life for longest."""
        if not self._store_answers():
            return "rank 0, which holds the key-value store of all, answers no longer"
        silent = []
        for rank in self._others():
            last = self._last_beat(rank)
            is_silent = last.age_s > self._timeout_s / 2 and not last.is_waiting
            if last.step < self._step or is_silent:
                silent.append(f"rank {rank} ({last})")
        return ", ".join(silent) or "no single rank is behind"

    def missing(self) -> str:
        """What an error says that ended a wait for other ranks."""
        return (
            f"rank {self.rank} at step {self._step} waited up to {self._timeout_s:g} s for the "
            f"other ranks: {self.behind()}; see their logs, or raise train.timeout_s"
        )

    def lost(self) -> str:
        """What an error says when another rank has ended: the one that tells nothing any longer."""
        return (
            f"rank {self.rank} at step {self._step} lost its connection: {self._ended()} has "
            "ended, see its log; run the same line with --resume to go on from the last checkpoint"
        )

    def _ended(self) -> str:
        if not self._store_answers():
            return self._heard or "rank 0, which holds the key-value store of all,"
        before = {rank: self._last_beat(rank) for rank in self._others()}
        # all that are there tell of themselves meanwhile
        time.sleep(_LOST_BEATS * _BEAT_EVERY_S)
        ended = [
            f"rank {rank} ({last})"
            for rank, last in before.items()
            if self._last_beat(rank).told_time == last.told_time
        ]
        if self.rank == 0:
            if ended and self._facts is not None:
                with contextlib.suppress(RuntimeError):  # where torchrun's store is gone
                    self._facts.set(_ENDED, ", ".join(ended))
            # the others ask this rank's key-value store the same, or hear it with their next beat
            time.sleep(_LOST_BEATS * _BEAT_EVERY_S)
        return ", ".join(ended) or "another rank"

    def _store_answers(self) -> bool:
        return self._facts is not None and self._facts.answers()

    def _others(self) -> list[int]:
        return [rank for rank in range(self.world) if rank != self.rank]

    def _last_beat(self, rank: int) -> _Beat:
        try:
            told = self._facts.find(f"beat/{rank}") if self._facts is not None else None
        except RuntimeError:
            return _NEVER  # the store died with rank 0
        if told is None:
            return _NEVER
        step, beat_time, is_waiting, told_time = told.split()
        return _Beat(int(step), float(beat_time), is_waiting == "1", float(told_time))

    def tell(self, key: str, text: str) -> None:
        """Leave a fact for the other ranks. ValueError where rank 0, which keeps them, is gone."""
        if self._facts is not None:
            with self._with_rank_0():
                self._facts.set(key, text)

    def told(self, key: str) -> str | None:
        """A fact that a rank left, if it has. ValueError as of `tell`."""
        if self._facts is None:
            return None
        with self._with_rank_0():
            return self._facts.find(key)

    @contextlib.contextmanager
    def _with_rank_0(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise ValueError(self.lost()) from error

    def agree(self, key: str, text: str) -> str:
        """Rank 0's text, on every rank; waits for it, at most `timeout_s`."""
        if self._facts is None:
            return text
        if self.rank == 0:
            self._facts.set(key, text)
            return text
        try:
            with self._waiting():
                return self._facts.wait(key, self._timeout_s)
        except dist.DistNetworkError as error:
            raise ValueError(self.lost()) from error
        except RuntimeError as error:
            raise ValueError(
                f"rank {self.rank} waited {self._timeout_s:g} s for rank 0 to decide {key!r}: "
                "see rank 0's log, or raise train.timeout_s"
            ) from error

    def leave(self, wants_stop: Callable[[], bool]) -> None:
        """The run is over on this rank. Rank 0, which keeps what all tell one another, stays until
        the others are as far: one that is slower may have something to ask. ValueError naming those
        that do not come in time; who wants it to stop waits little."""
        self.tell(f"left/{self.rank}", "")
        begin = time.monotonic()
        while self.rank == 0 and not all(
            self.told(f"left/{rank}") == "" for rank in self._others()
        ):
            waited_s = time.monotonic() - begin
            if waited_s > _STOPPED_S and wants_stop():
                return
            if waited_s > self._timeout_s:
                raise ValueError(self.missing())
            time.sleep(_LOOK_EVERY_S)

    def close(self) -> None:
        """Leave the group. Again is harmless."""
        if self.world > 1 and dist.is_initialized():
            dist.destroy_process_group()


def _served(place: Place, timeout_s: float) -> Any:
    """The key-value store of the launcher's rendezvous, or of torchrun's environment."""
    address, timeout = urlsplit(place.rendezvous), timedelta(seconds=timeout_s)
    if address.scheme == "file":
        store = _kv.FileStore(address.path, place.world)
        store.set_timeout(timeout)
        return store
    if address.scheme == "tcp":
        host, port, serves = address.hostname or "localhost", address.port or 0, place.rank == 0
    else:
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        # under torchrun the agent serves the store already, and keeps it over a restart
        agent_serves = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        serves = place.rank == 0 and not agent_serves

    def reach() -> Any:
        return _kv.TCPStore(host, port, place.world, serves, timeout)

    try:
        served = within(timeout_s + _START_MARGIN_S, reach, "reach")
    except (RuntimeError, TimeoutError) as error:
        what = (
            f"could not reach the key-value store of all ranks at {host}:{port} within "
            f"{timeout_s:g} s"
        )
        if serves:
            what = f"waited {timeout_s:g} s for all {place.world} ranks to start"
        raise ValueError(
            f"rank {place.rank} {what}: see the logs of the others, or raise train.timeout_s "
            f"({first_line(error)})"
        ) from error
    return _kv.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), served)
