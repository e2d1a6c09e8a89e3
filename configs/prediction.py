"""From counted work and measured costs to hours: each stage, both ways of sharing out the devices.

The costs of one device are taken for those of each; what several wait for each other is not in it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass

from dflash_pipeline.configs.costs import (
    CPU,
    CaptureCosts,
    CaptureWork,
    DiskCosts,
    TrainCosts,
    TrainWork,
)
from dflash_pipeline.configs.errors import UsageError
from dflash_pipeline.configs.fit import dot
from dflash_pipeline.configs.schema import Run

HOUR_S = 3600.0
# of two ways that take about as long the plainer one is better
_SAME = 1.02


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """One stage on so many devices."""

    name: str
    num_devices: int
    hours: float
    device_hours: float
    rate: float
    """Tokens (capture) or steps (train) a second of all devices, once it runs; 0: not told."""
    bound: str
    """What it waits for: the device or the disk."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """Capture and training on given devices."""

    name: str
    capture_ids: tuple[int, ...]
    train_ids: tuple[int, ...]
    stages: tuple[Stage, ...]
    hours: float
    device_hours: float
    cost: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """All that `dflash plan` says."""

    work: CaptureWork
    capture: CaptureCosts
    train: TrainCosts
    disk: DiskCosts
    num_steps: int
    """Of training on the devices of the better way."""
    generate: Stage | None
    """As if the answers were generated anew; in no way's hours. None: not measured."""
    ways: tuple[Way, ...]
    """The better one first."""
    not_measured: tuple[str, ...]


class Predictor:
    """Hours by number of devices."""

    def __init__(
        self,
        run: Run,
        work: CaptureWork,
        capture: CaptureCosts,
        train_work: TrainWork,
        train: TrainCosts,
        disk: DiskCosts,
    ) -> None:
        self._run, self.work, self.capture_costs = run, work, capture
        self._train_work, self._train, self._disk = train_work, train, disk

    def generate(self, num_devices: int) -> Stage | None:
        """The answers of the data, generated anew by the target itself."""
        costs = self.capture_costs
        if not costs.answer_step_s:
            return None
        work_s = self.work.answer_steps * costs.answer_step_s
        work_s *= self._run.target.num_gpus / num_devices
        return _stage("generate", num_devices, costs.import_s + costs.load_s + work_s, 0.0)

    def capture(self, num_devices: int) -> Stage:
        """One pass of the target over the data.

        UsageError unless each target gets its GPUs.
        """
        per_target = self._run.target.num_gpus
        if num_devices % per_target:
            raise UsageError(
                f"--gpus-per-target {per_target}: {num_devices} GPUs that capture are no multiple "
                "of it"
            )
        num_workers = num_devices // per_target
        device_s, disk_s = self._captured_s(num_workers)
        work_s = max(device_s, disk_s)
        seconds = self._capture_start_s(num_workers) + work_s
        rate = self.work.num_tokens / work_s
        return _stage("capture", num_devices, seconds, rate, disk_s > device_s)

    def _captured_s(self, num_workers: int) -> tuple[float, float]:
        """Seconds that the batches need of the devices, and their rows of the disks."""
        costs, work = self.capture_costs, self.work
        device_s = dot(work.batches, costs.batch_s) / costs.busy / num_workers
        worker_s = work.rows_bytes / self._disk.worker_bytes_per_s / num_workers
        return device_s, max(worker_s, self._disks_s(self._disk.write_bytes_per_s))

    def _capture_start_s(self, num_workers: int) -> float:
        """What is done once, by the one process that plans and by each worker."""
        costs, work = self.capture_costs, self.work
        plan_s = work.read_s + costs.plan_s + costs.token_s * work.num_tokens
        # one worker plans as well, in the same process
        num_processes = 1 if num_workers == 1 else 2
        worker_s = costs.load_s + dot(work.warm_batches, costs.batch_s) + costs.fixed_s
        worker_s += dot(work.calibrated, costs.calibrated_s) + dot(work.gated, costs.gated_s)
        return num_processes * costs.import_s + plan_s + worker_s

    def _disks_s(self, bytes_per_s: Sequence[float]) -> float:
        """Seconds that all rows need at these speeds of the mounts: the slowest one's."""
        rows_share = self.work.rows_bytes / self.work.store_bytes
        mounts = zip(self.work.mounts, bytes_per_s, strict=True)
        return max(rows_share * mount.needed_bytes / speed for mount, speed in mounts)

    def num_steps(self, num_devices: int) -> int:
        """Optimizer steps of the whole training."""
        config = self._run.train
        steps = config.epochs * self._epoch_steps(num_devices)
        return min(steps, config.max_steps) if config.max_steps else steps

    def _epoch_steps(self, num_devices: int) -> int:
        return math.ceil(self._train_work.batches[0] / (num_devices * self._run.train.accumulate))

    def epoch_s(self, num_devices: int) -> tuple[float, bool]:
        """Seconds of a whole epoch, and whether the disk binds."""
        batches = self._train_work.batches
        # the last step waits for its fullest rank
        rounds = self._epoch_steps(num_devices) * self._run.train.accumulate
        share = max(rounds / batches[0], 1 / num_devices) if num_devices > 1 else 1.0
        device_s = dot(batches, self._train.batch_s) * share
        disk_s = 0.0
        if self.work.rows_bytes > self._disk.cached_bytes:
            disk_s = self._disks_s(self._disk.read_bytes_per_s)
        return max(device_s, disk_s), disk_s > device_s

    def _validations(self, num_devices: int) -> int:
        every, steps = self._run.train.validate_every, self.num_steps(num_devices)
        return (math.ceil(steps / every) if every else 1) if self._train_work.validated[0] else 0

    def _pauses_s(self, num_devices: int) -> float:
        """Validations and checkpoints of the whole training."""
        steps, save_every = self.num_steps(num_devices), self._run.train.save_every
        count = self._validations(num_devices)
        validated_s = dot(self._train_work.validated, self._train.validated_s) / num_devices
        write_s = self._train.checkpoint_bytes / self._disk.worker_bytes_per_s
        # each validation may find the best step so far, and the last step is kept in any case
        num_saved = max(math.ceil(steps / save_every), count)
        apart_s = self.epoch_s(num_devices)[0] / self._epoch_steps(num_devices)
        apart_s *= steps / num_saved
        waited_s = (num_saved - 1) * max(0.0, write_s - apart_s)
        return count * validated_s + num_saved * self._train.checkpoint_s + waited_s + write_s

    def train(self, num_devices: int) -> Stage:
        """All epochs, over a store that is whole."""
        epoch_s, is_disk = self.epoch_s(num_devices)
        return self._trained(num_devices, epoch_s, is_disk)

    def _trained(self, num_devices: int, first_epoch_s: float, is_disk: bool) -> Stage:
        epoch_s, _ = self.epoch_s(num_devices)
        # max_steps may end it within an epoch
        epochs = self.num_steps(num_devices) / self._epoch_steps(num_devices)
        rest_s = epoch_s * max(0.0, epochs - 1)
        once_s = self._train.start_s + self._pauses_s(num_devices)
        seconds = once_s + first_epoch_s * min(1.0, epochs) + rest_s
        rate = self._epoch_steps(num_devices) / epoch_s
        return _stage("train", num_devices, seconds, rate, is_disk)

    def one_after_the_other(self, ids: Sequence[int], price: float) -> Way:
        """All devices capture, then all of them train."""
        stages = self.capture(len(ids)), self.train(len(ids))
        return _way("one after the other", ids, ids, stages, sum(s.hours for s in stages), price)

    def side_by_side(
        self, capture_ids: Sequence[int], train_ids: Sequence[int], price: float
    ) -> Way:
        """Training follows the capture: its first epoch takes no less time than that does."""
        capture = self.capture(len(capture_ids))
        epoch_s, is_disk = self.epoch_s(len(train_ids))
        first_s = max(epoch_s, capture.hours * HOUR_S - self._train.start_s)
        train = self._trained(len(train_ids), first_s, is_disk)
        hours = max(capture.hours, train.hours)
        return _way("side by side", capture_ids, train_ids, (capture, train), hours, price)

    def best_split(self, ids: Sequence[int], price: float) -> Way | None:
        """The split of the devices that takes the least time side by side; None: too few."""
        per_target = self._run.target.num_gpus
        counts = range(per_target, len(ids), per_target)
        ways = [self.side_by_side(ids[:n], ids[n:], price) for n in counts]
        return min(ways, key=lambda way: way.hours, default=None)

    def both_ways(
        self, ids: Sequence[int], sides: tuple[Sequence[int], Sequence[int]] | None, price: float
    ) -> Prediction:
        """On all devices one after the other, and side by side on `sides`, or on the best split."""
        ways = [self.one_after_the_other(ids, price)]
        if len(ids) > 1:
            side = self.side_by_side(*sides, price) if sides else self.best_split(ids, price)
            ways += [side] if side else []
        return self.predicted(ways)

    def training_alone(self, ids: Sequence[int], price: float) -> Prediction:
        """Of a store that is captured whole."""
        stages = (self.train(len(ids)),)
        return self.predicted([_way("training alone", (), ids, stages, stages[0].hours, price)])

    def predicted(self, ways: Sequence[Way]) -> Prediction:
        """Everything, with the better of the ways first."""
        best = min(way.hours for way in ways)
        ordered = sorted(ways, key=lambda way: (way.hours > _SAME * best, way.device_hours))
        num_trained, most = len(ordered[0].train_ids), len(ways[0].capture_ids or ways[0].train_ids)
        missing = []
        if ways[0].capture_ids:
            missing.append("captured rows read from a disk that is written at the same time")
        if num_trained > 1:
            missing.append("gradients between training devices")
        most_at_once = max(len({*way.capture_ids, *way.train_ids}) for way in ways)
        if self.capture_costs.device == CPU and most_at_once > 1:
            cores = len(os.sched_getaffinity(0))
            missing.append(
                f"what CPU workers take from one another: they share the {cores} cores of this "
                "machine, all of which the one that was measured had to itself"
            )
        if self._run.capture.quota and ways[0].capture_ids:
            missing.append("what capture and training wait for each other under --quota")
        if ways[0].capture_ids and not self.capture_costs.answer_step_s:
            missing.append("generate (its servers' speed is theirs)")
        return Prediction(
            work=self.work,
            capture=self.capture_costs,
            train=self._train,
            disk=self._disk,
            num_steps=self.num_steps(num_trained),
            generate=self.generate(most),
            ways=tuple(ordered),
            not_measured=tuple(missing),
        )


def _stage(
    name: str, num_devices: int, seconds: float, rate: float, is_disk: bool = False
) -> Stage:
    hours = seconds / HOUR_S
    bound = "disk" if is_disk else "device"
    return Stage(
        name=name,
        num_devices=num_devices,
        hours=hours,
        device_hours=hours * num_devices,
        rate=rate,
        bound=bound,
    )


def _way(
    name: str,
    capture_ids: Sequence[int],
    train_ids: Sequence[int],
    stages: tuple[Stage, ...],
    hours: float,
    price: float,
) -> Way:
    # devices are held until they are free for good: beside each other both wait for the later end
    device_hours = hours * len({*capture_ids, *train_ids})
    return Way(
        name=name,
        capture_ids=tuple(capture_ids),
        train_ids=tuple(train_ids),
        stages=stages,
        hours=hours,
        device_hours=device_hours,
        cost=price * device_hours,
    )
