"""The processes that train one drafter together: sums over ranks, and who is missing.

Small facts travel through a key-value store, which any moment and any thread may ask; only sums of
tensors are collectives, and every rank calls them in the same order.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor

from dflash_pipeline.configs.place import Place

# torch exports its key-value stores without types
_kv: Any = dist

# the collective's own limit fires after ours, which can say who is missing
_MARGIN_S = 30.0
_BEAT_EVERY_S = 1.0


class Group:
    """`world` ranks; of one rank everything is a no-op."""

    def __init__(self, place: Place, timeout_s: float) -> None:
        self.rank, self.world = place.rank, place.world
        self._timeout_s = timeout_s
        self._step = 0
        self.is_waiting = False
        """Waits for other ranks at this moment."""
        self._beat_time = time.time()
        self._told_at = -_BEAT_EVERY_S
        self._facts: Any = None
        if place.world == 1:
            return
        limit = timedelta(seconds=timeout_s + (_MARGIN_S if place.kind == "cuda" else 0))
        self._facts = _facts(place, timedelta(seconds=timeout_s))
        device = torch.device(place.device) if place.kind == "cuda" else None
        try:
            dist.init_process_group(
                "nccl" if place.kind == "cuda" else "gloo",
                store=_kv.PrefixStore("group", self._facts),
                rank=place.rank,
                world_size=place.world,
                timeout=limit,
                device_id=device,
            )
        except RuntimeError as error:
            raise ValueError(self.missing()) from error

    def add_up(self, tensor: Tensor) -> None:
        """In-place sum over ranks. ValueError naming the ranks that did not come in time."""
        if self.world == 1:
            return
        try:
            with self._waiting():
                dist.all_reduce(tensor)
        except (RuntimeError, dist.DistBackendError) as error:
            raise ValueError(self.missing()) from error

    def beat(self, step: int) -> None:
        """This rank is alive and has done `step` steps; the others are told once a second."""
        self._step, self._beat_time = step, time.time()
        if time.monotonic() - self._told_at > _BEAT_EVERY_S:
            self.tell_beat()

    def tell_beat(self) -> None:
        """Tell the others of the last `beat`; also from a thread, while the rank itself waits."""
        self._told_at = time.monotonic()
        self.tell(f"beat/{self.rank}", f"{self._step} {self._beat_time} {int(self.is_waiting)}")

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
        self.is_waiting = True
        try:
            yield
        finally:
            self.is_waiting = False

    def behind(self) -> str:
        """Which ranks are behind this one, or gave no sign of life for longest."""
        silent = []
        for rank in range(self.world):
            step, age_s, is_waiting = self._last_beat(rank)
            if rank == self.rank:
                continue
            if step < 0:
                silent.append(f"rank {rank} (never seen)")
            elif step < self._step or (age_s > self._timeout_s / 2 and not is_waiting):
                silent.append(f"rank {rank} (last seen at step {step}, {age_s:.0f} s ago)")
        return ", ".join(silent) or "no single rank is behind"

    def missing(self) -> str:
        """What an error says that ended a wait for other ranks."""
        return (
            f"rank {self.rank} at step {self._step} waited up to {self._timeout_s:g} s for the "
            f"other ranks: {self.behind()}; see their logs, or raise train.timeout_s"
        )

    def _last_beat(self, rank: int) -> tuple[int, float, bool]:
        """Step, seconds since, and whether it waits for others itself."""
        try:
            if self._facts is None or not self._facts.check([f"beat/{rank}"]):
                return -1, 0.0, False
            step, beat_time, is_waiting = self._facts.get(f"beat/{rank}").decode().split()
        except (RuntimeError, dist.DistStoreError):
            return -1, 0.0, False  # the store died with rank 0
        return int(step), time.time() - float(beat_time), is_waiting == "1"

    def tell(self, key: str, text: str) -> None:
        """Leave a fact for the other ranks."""
        if self._facts is not None:
            self._facts.set(key, text)

    def told(self, key: str) -> str | None:
        """A fact that a rank left, if it has."""
        if self._facts is None or not self._facts.check([key]):
            return None
        fact: bytes = self._facts.get(key)
        return fact.decode()

    def agree(self, key: str, text: str) -> str:
        """Rank 0's text, on every rank; waits for it, at most `timeout_s`."""
        if self._facts is None:
            return text
        if self.rank == 0:
            self._facts.set(key, text)
            return text
        try:
            with self._waiting():
                decided: bytes = self._facts.get(key)
        except (RuntimeError, dist.DistStoreError) as error:
            raise ValueError(
                f"rank {self.rank} waited {self._timeout_s:g} s for rank 0 to decide {key!r}: "
                "see rank 0's log, or raise train.timeout_s"
            ) from error
        return decided.decode()

    def close(self) -> None:
        """Leave the group. Again is harmless."""
        if self.world > 1 and dist.is_initialized():
            dist.destroy_process_group()


def _facts(place: Place, timeout: timedelta) -> Any:
    """The key-value store of the launcher's rendezvous, or of torchrun's environment."""
    address = urlsplit(place.rendezvous)
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
    served = _kv.TCPStore(host, port, place.world, serves, timeout)
    return _kv.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), served)
