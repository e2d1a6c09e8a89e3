"""Shard after shard as one worker writes them: forward -> pack -> offload -> store, then the gate.

Everything that decides what a shard holds was planned before; a worker only computes. So shards may
be taken by anyone, in any order, and lost ones are taken again.
A batch is handed to the writer once the one after it is queued, be that of the next shard: a device
that waits for each shard's end stood still for 4 to 11 % of the time (H200, two batches a shard).
Letters: L = K captured layers, then `last` where it is stored.
"""

from __future__ import annotations

import contextlib
import math
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from dflash_pipeline.capture import gate
from dflash_pipeline.capture.forward import Forward, ForwardFailed
from dflash_pipeline.capture.gate import GateRefused
from dflash_pipeline.capture.offload import Offload, Parcel
from dflash_pipeline.capture.pack import bad_sequences
from dflash_pipeline.capture.stop import Stop
from dflash_pipeline.capture.target import Target
from dflash_pipeline.capture.times import BatchTime, Times
from dflash_pipeline.capture.voice import Voice
from dflash_pipeline.configs.counts import Counts
from dflash_pipeline.configs.memory import usage
from dflash_pipeline.configs.schema import CaptureConfig
from dflash_pipeline.configs.status import process_age_s
from dflash_pipeline.configs.threads import Threads
from dflash_pipeline.store.lease import Lease, Leases
from dflash_pipeline.store.reader import Store
from dflash_pipeline.store.spec import ShardId
from dflash_pipeline.store.writer import StoreWriter

NOTE_EVERY_S = 60.0


@dataclass(slots=True)
class _Tally:
    """What is known of a shard that is being written."""

    lease: Lease
    amax_L: NDArray[np.float32]
    num_tokens: int = 0
    bad: dict[int, str] = field(default_factory=dict)
    is_halved: bool = False
    is_begun: bool = False
    """The writer has it."""
    versions: frozenset[int] = frozenset()
    """Those of the compiled layers that its batches went through."""

    @property
    def shard_id(self) -> ShardId:
        return self.lease.shard_id


@dataclass(frozen=True, slots=True)
class _InFlight:
    """A batch that was queued and is not in the writer's hands yet."""

    tally: _Tally
    batch: slice
    parcel: Parcel
    is_last: bool
    """Of its shard."""


class _ShardFailed(Exception):
    """A batch of this shard could not be computed."""

    def __init__(self, tally: _Tally, why: ForwardFailed) -> None:
        super().__init__(str(why))
        self.tally, self.why = tally, why


class TooManyBad(ValueError):
    """More samples have rows that mean nothing than `capture.max_bad_share` allows."""


class Worker:
    """Writes the shards it is given."""

    def __init__(
        self,
        store: Store,
        target: Target,
        config: CaptureConfig,
        log: Voice,
        stop: Stop,
        leases: Leases,
        offload: Offload,
        writer: StoreWriter,
        times: Times,
    ) -> None:
        self._store, self._target, self._config, self._log = store, target, config, log
        self._stop, self._leases, self._offload, self._writer = stop, leases, offload, writer
        self._forward = Forward(store, target, offload.device_bytes, log.say)
        # what has passed the gate: the plain layers, and of compiled ones these versions
        self._is_gated, self._gated_versions = False, frozenset[int]()
        self._num_taken = self._num_failed = self._num_tokens = 0
        self._num_places = self._size_bytes = 0
        self._times, self._begin, self._noted_at = times, time.monotonic(), time.monotonic()
        self._device_s = 0.0
        self._last_failure = ""
        self.idle_s = 0.0
        """Seconds without a shard to take."""
        self._in_flight: list[_InFlight] = []
        # handed to the writer's thread and not yet seen committed -> tokens, bad samples
        self._submitted: dict[ShardId, tuple[int, int]] = {}
        self._num_planned = int(store.table.num_tokens.sum())
        self.refresh()

    def beat(self) -> None:
        """Between batches and while waiting: be alive, and notice a signal."""
        self._leases.beat()
        self._stop.check()

    def refresh(self) -> None:
        """See what was committed, by whomever."""
        store = self._store
        store.refresh()
        # counted anew: a release under a quota refreshes the store as well
        committed = [i for i in store.layout.shard_ids() if store.is_committed(i)]
        self._num_committed = sum(store.table.rows_of(i)[0] for i in committed)
        for shard_id in filter(store.is_committed, list(self._submitted)):
            del self._submitted[shard_id]

    def take(self, lease: Lease) -> None:
        """Write one shard; a failure that leaves the device usable is counted against the shard.

        Once the gate has passed, its last batch may be left to the next `take`, or to `settle`.
        What compiled layers alone may be to blame for is, under `auto`, no failure: the target goes
        on with its plain ones, and the shard is free to be taken again.
        """
        if self._stop.is_asked:
            # what is computed whole is kept
            self.settle()
        with self._judged():
            self._write(lease)

    def settle(self) -> None:
        """Hand over what `take` has left; before `StoreWriter.wait`. Fails as `take` does."""
        with self._judged():
            self._land_all()

    @contextlib.contextmanager
    def _judged(self) -> Iterator[None]:
        """What becomes of a failure."""
        try:
            yield
        except (GateRefused, TooManyBad) as refused:
            if not self._target.is_compiled:
                raise
            if not self._may_run_plain:
                raise ValueError(
                    f"{refused}. The target's layers were compiled: capture into another --store "
                    "with --set capture.compile=off"
                ) from refused
            self._run_plain(str(refused))
        except _ShardFailed as found:
            tally, failed = found.tally, found.why
            self._num_failed += 1
            self._last_failure = f"shard {tally.shard_id}: {failed}"
            tally.lease.fail()
            # a broken device never gives back what is in flight
            self._forward.check_device(failed)
            self._drop(tally)
            num_failures = self._leases.failures().get(tally.shard_id, 0)
            traceback.print_exception(failed)
            most = self._config.max_shard_failures
            self._log.say(f"shard {tally.shard_id} failed ({num_failures} of {most}): {failed}")
            no_memory = isinstance(failed.__cause__, torch.OutOfMemoryError)
            if self._may_run_plain and not no_memory:
                self._run_plain(str(failed))
                return
            # nothing works here: it is not the shards
            if self._num_taken == 0 and self._num_failed > self._config.max_shard_failures:
                raise ValueError(str(failed)) from failed

    @property
    def _may_run_plain(self) -> bool:
        return self._target.is_compiled and self._config.compile != "on"

    def _run_plain(self, why: str) -> None:
        """Take the compiled layers out; shards are judged anew, and what those have made goes."""
        if self._in_flight:
            self._drop(self._in_flight[0].tally)
        self._writer.abort()
        self._target.is_compiled = self._is_gated = False
        self._gated_versions = frozenset()
        for found in (self._times.batches, self._times.gated):
            found.clear()
        self._log.say(f"compiled layers do not serve ({why}): they run plain from here on")

    def check_set_aside(self) -> None:
        """ValueError that names the shards that failed too often, once they alone are left."""
        failures, most = self._leases.failures(), self._config.max_shard_failures
        left = [i for i in self._store.layout.shard_ids() if self._store.is_open(i)]
        if left and all(failures.get(i, 0) >= most for i in left):
            raise ValueError(
                f"shards {', '.join(map(str, left))} of {self._store.path} failed {most} times "
                "each and were set aside, the rest is captured; the same command tries again. "
                f"{self._last_failure or 'The logs of the other workers have the reasons'}"
            )

    def _write(self, lease: Lease) -> None:
        store = self._store
        tally = _Tally(lease, np.zeros(store.spec.num_amax, np.float32))
        batches = store.table.batches_of(lease.shard_id)
        self._target.versions.clear()
        for number, batch in enumerate(batches, 1):
            self.beat()
            buffer = self._offload.device_buffer()
            try:
                tally.is_halved |= self._forward.compute(batch, buffer)
            except ForwardFailed as failed:
                raise _ShardFailed(tally, failed) from failed
            tally.versions = frozenset(self._target.versions)
            parcel = self._offload.send(buffer, self.beat)
            self._in_flight.append(_InFlight(tally, batch, parcel, number == len(batches)))
            # the batch before goes to the disk while the device computes this one
            if len(self._in_flight) > 1:
                self._land()
        # nothing is queued behind a shard that the gate is to judge
        if not self._has_passed(tally):
            self._land_all()

    def _land_all(self) -> None:
        while self._in_flight:
            self._land()

    def _land(self) -> None:
        """Hand the oldest batch in flight to the writer, and end its shard with its last one."""
        landed = self._in_flight[0]
        tally, batch, parcel = landed.tally, landed.batch, landed.parcel
        try:
            parcel.wait()
        except RuntimeError as error:
            # what the device met long after the batch was queued
            failed = ForwardFailed(f"{type(error).__name__}: {error}")
            failed.__cause__ = error
            raise _ShardFailed(tally, failed) from error
        if not tally.is_begun:
            self._writer.begin(tally.lease)
            tally.is_begun = True
        del self._in_flight[0]
        self._device_s += parcel.device_s
        self._times.batches.append(BatchTime(*self._forward.shape(batch), parcel.device_s))
        bad = bad_sequences(parcel.largest_BL, parcel.faintest_BL)
        is_good_B = ~np.isin(np.arange(batch.stop - batch.start), list(bad))
        largest_L = parcel.largest_BL[is_good_B].max(axis=0, initial=0)
        tally.amax_L = np.maximum(tally.amax_L, largest_L)
        tally.bad |= {batch.start + sequence: reason for sequence, reason in bad.items()}
        num_tokens = len(parcel.hidden_NKR)
        self._num_places += math.prod(self._forward.shape(batch))
        self._size_bytes += parcel.hidden_NKR.nbytes + parcel.last_MR.nbytes
        last_MR = parcel.last_MR if self._store.spec.has_last else None
        self._writer.put(parcel.hidden_NKR, last_MR, parcel.release)
        tally.num_tokens += num_tokens
        self._num_tokens += num_tokens
        ahead = sum(num_tokens for num_tokens, _ in self._submitted.values()) + tally.num_tokens
        total, counts = self._num_planned, self.counts()
        self._log.counted(min(self._num_committed + ahead, total), total, "tokens", counts)
        if time.monotonic() - self._noted_at >= NOTE_EVERY_S:
            self._noted_at = time.monotonic()
            self._log.note(counts.text())
        if landed.is_last:
            self.refresh()
            self._check_bad(tally)
            self._finish(tally)
            self._num_taken += 1

    def counts(self) -> Counts:
        """What this worker has done so far."""
        used = usage(torch, self._target.device)
        return Counts(
            held_s=process_age_s(),
            seconds=time.monotonic() - self._begin,
            device_s=self._device_s,
            buffer_wait_s=self._offload.wait_s + self._writer.wait_s,
            idle_s=self.idle_s,
            num_tokens=self._num_tokens,
            num_places=self._num_places,
            size_bytes=self._size_bytes,
            device_bytes=used.reserved,
            host_bytes=used.host_peak,
        )

    def _check_bad(self, tally: _Tally) -> None:
        """Refuse the shard that raises the store's share of bad samples above the bound."""
        table = self._store.table
        for sample, reason in tally.bad.items():
            self._log.say(f"bad sample {table.key(sample)} in shard {tally.shard_id}: {reason}")
        num_bad = int(np.count_nonzero(self._store.state_N)) + len(tally.bad)
        num_bad += sum(num_bad for _, num_bad in self._submitted.values())
        if tally.bad and num_bad > self._config.max_bad_share * len(table):
            raise TooManyBad(
                f"{num_bad} of {len(table)} samples have rows that are not finite or all zero, the "
                f"last is {table.key(max(tally.bad))}; more than capture.max_bad_share = "
                f"{self._config.max_bad_share} allows. A target may overflow target.dtype"
            )

    def _has_passed(self, tally: _Tally) -> bool:
        """Whether the gate has judged rows of the code that computed this shard."""
        return self._is_gated and tally.versions <= self._gated_versions

    def _finish(self, tally: _Tally) -> None:
        store, writer = self._store, self._writer
        # int4's signed scales put each group's extreme on -8: nothing is ever cut off
        clipped_L = np.zeros(store.spec.num_amax, np.uint32)
        rows, is_compiled = (tally.amax_L, clipped_L, tally.bad), bool(tally.versions)
        if self._has_passed(tally):
            writer.submit(*rows, halved=tally.is_halved, compiled=is_compiled)
            self._submitted[tally.shard_id] = (tally.num_tokens, len(tally.bad))
            return
        writer.finish(*rows, halved=tally.is_halved, compiled=is_compiled)
        samples = store.table.of_shard(tally.shard_id)
        good = [i for i in range(samples.start, samples.stop) if i not in tally.bad]
        if good:
            for line in gate.check(
                self._target,
                store.spec,
                store.calibration,
                gate.chosen_samples(good, self._config.gate_samples),
                store.tokens,
                writer.read_back,
                Threads(torch.get_num_threads(), self.beat),
                by_other_code=is_compiled,
                times=self._times.gated,
            ):
                self._log.say(f"gate: {line}")
            self._is_gated = True
            self._gated_versions |= tally.versions
        writer.commit()
        self.refresh()

    def _drop(self, tally: _Tally) -> None:
        """Give back a shard and its buffers, and all that is queued behind it."""
        queued = self._in_flight
        first = next((i for i, one in enumerate(queued) if one.tally is tally), len(queued))
        for one in queued[first:]:
            one.parcel.wait()
            one.parcel.release()
            one.tally.lease.release()
        del queued[first:]
        if tally.is_begun:
            self._writer.abort()
