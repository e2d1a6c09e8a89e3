"""From counted work and measured costs to hours: each stage, both ways of sharing out the devices.

The costs of one device are taken for those of each; what several wait for each other is not in it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dflash_pipeline.configs.errors import UsageError
from dflash_pipeline.configs.fit import dot
from dflash_pipeline.configs.schema import Run
from dflash_pipeline.configs.sizes import size_text

HOUR_S = 3600.0
# of two ways that take about as long the plainer one is better
_SAME = 1.02


@dataclass(frozen=True, kw_only=True, slots=True)
class CaptureWork:
    """What the data are to a capture."""

    num_samples: int
    num_heldout: int
    num_tokens: int
    num_supervised: int
    num_padded: int
    """Tokens with the padding of all batches."""
    store_bytes: int
    rows_bytes: int
    """Of these, rows: what is written batch by batch and read by each epoch."""
    read_s: float
    """Seconds of reading and rendering the data."""
    batches: Sequence[float]
    """Number of batches, their places, and the places each times its padded length; sums."""
    answer_steps: float
    """Steps of generating the answers anew, in batches of generate.batch_size."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CaptureCosts:
    """What that costs one device."""

    device: str
    start_s: float
    """Until the target is ready, without reading the data."""
    fixed_s: float
    """What a worker does once: calibration, the gate."""
    busy: float
    """Share of the time in which the device has a batch, from then on."""
    batch_s: Sequence[float]
    """Seconds for each of `CaptureWork.batches`."""
    tokens_per_s: float
    """Of the sample; for the reader, nothing follows from it."""
    write_bytes_per_s: float
    read_bytes_per_s: float
    answer_step_s: float
    """0: not measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainWork:
    """What the data are to an epoch of training."""

    batches: Sequence[float]
    """Number of batches, their tokens, their blocks, and pairs of a block and its context; sums."""
    num_validated: int
    """Held-out samples replayed at a validation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainCosts:
    """What that costs one device."""

    start_s: float
    batch_s: Sequence[float]
    """Seconds for each of `TrainWork.batches`."""
    optimizer_s: float
    """Of one step."""
    validated_s: float
    """Of one held-out sample."""
    steps_per_s: float
    """Of the sample; for the reader."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """One stage on so many devices."""

    name: str
    num_devices: int
    hours: float
    device_hours: float
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
    ) -> None:
        self._run, self.work, self.capture_costs = run, work, capture
        self._train_work, self._train = train_work, train

    def generate(self, num_devices: int) -> Stage | None:
        """The answers of the data, generated anew by the target itself."""
        if not self.capture_costs.answer_step_s:
            return None
        work_s = self.work.answer_steps * self.capture_costs.answer_step_s
        work_s *= self._run.target.num_gpus
        return _stage("generate", num_devices, self.capture_costs.start_s + work_s / num_devices)

    def capture(self, num_devices: int) -> Stage:
        """One pass of the target over the data.

        UsageError unless each target gets its GPUs.
        """
        costs, work, per_target = self.capture_costs, self.work, self._run.target.num_gpus
        if num_devices % per_target:
            raise UsageError(
                f"--gpus-per-target {per_target}: {num_devices} GPUs that capture are no multiple "
                "of it"
            )
        device_s = dot(work.batches, costs.batch_s) / costs.busy * per_target / num_devices
        disk_s = work.rows_bytes / costs.write_bytes_per_s
        once_s = work.read_s + costs.start_s + costs.fixed_s
        return _stage("capture", num_devices, once_s + max(device_s, disk_s), disk_s > device_s)

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
        device_s += self._train.optimizer_s * self._epoch_steps(num_devices)
        disk_s = self.work.rows_bytes / self.capture_costs.read_bytes_per_s
        return max(device_s, disk_s), disk_s > device_s

    def _validations_s(self, num_devices: int) -> float:
        every, steps = self._run.train.validate_every, self.num_steps(num_devices)
        count = math.ceil(steps / every) if every else 1
        return count * self._train_work.num_validated * self._train.validated_s / num_devices

    def train(self, num_devices: int) -> Stage:
        """All epochs, over a store that is whole."""
        epoch_s, is_disk = self.epoch_s(num_devices)
        return _stage("train", num_devices, self._train_s(num_devices, epoch_s), is_disk)

    def _train_s(self, num_devices: int, first_epoch_s: float) -> float:
        epoch_s, _ = self.epoch_s(num_devices)
        # max_steps may end it within an epoch
        epochs = self.num_steps(num_devices) / self._epoch_steps(num_devices)
        rest_s = epoch_s * max(0.0, epochs - 1)
        once_s = self._train.start_s + self._validations_s(num_devices)
        return once_s + first_epoch_s * min(1.0, epochs) + rest_s

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
        train = _stage("train", len(train_ids), self._train_s(len(train_ids), first_s), is_disk)
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

    def predicted(self, ways: Sequence[Way]) -> Prediction:
        """Everything, with the better of the ways first."""
        best = min(way.hours for way in ways)
        ordered = sorted(ways, key=lambda way: (way.hours > _SAME * best, way.device_hours))
        num_trained, most = len(ordered[0].train_ids), len({*ways[0].capture_ids})
        missing = [
            "checkpoints",
            "captured rows read from a disk that is written at the same time",
        ]
        if num_trained > 1:
            missing.append("gradients between training devices")
        if not self.capture_costs.answer_step_s:
            missing.append("generate (its servers' speed is theirs)")
        return Prediction(
            work=self.work,
            capture=self.capture_costs,
            train=self._train,
            num_steps=self.num_steps(num_trained),
            generate=self.generate(most),
            ways=tuple(ordered),
            not_measured=tuple(missing),
        )


def _stage(name: str, num_devices: int, seconds: float, is_disk: bool = False) -> Stage:
    hours = seconds / HOUR_S
    bound = "disk" if is_disk else "device"
    return Stage(
        name=name,
        num_devices=num_devices,
        hours=hours,
        device_hours=hours * num_devices,
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


def lines(found: Prediction, epochs: int, price: float) -> list[str]:
    """The prediction for people."""
    work, capture, train = found.work, found.capture, found.train
    told = [
        f"{work.num_samples:,} samples ({work.num_heldout:,} held out), {work.num_tokens:,} "
        f"tokens, {work.num_supervised:,} supervised, "
        f"{100 * (1 - work.num_tokens / work.num_padded):.1f} % padding, a store of "
        f"{size_text(work.store_bytes)}",
        f"measured on {capture.device}: capture {capture.tokens_per_s:,.0f} tok/s, training "
        f"{train.steps_per_s:.3g} steps/s, disk {size_text(capture.write_bytes_per_s)}/s written, "
        f"{size_text(capture.read_bytes_per_s)}/s read",
    ]
    if found.generate is not None:
        told.append(f"{_stage_text(found.generate)}; not counted below: the answers are there")
    for way in found.ways:
        cost = f", cost {way.cost:,.2f}" if price else ""
        told.append(f"{way.name}: {_hours(way.hours)}, {_hours(way.device_hours)} of GPUs{cost}")
        told += [f"  {_stage_text(stage)}" for stage in way.stages]
    told.append(f"{epochs} epochs are {found.num_steps:,} steps at most")
    told.append(f"not measured: {'; '.join(found.not_measured)}")
    return told


def _stage_text(stage: Stage) -> str:
    disk = ", the disk binds" if stage.bound == "disk" else ""
    return (
        f"{stage.name:9}{stage.num_devices} x {_hours(stage.hours)} = "
        f"{_hours(stage.device_hours)} of GPUs{disk}"
    )


def _hours(hours: float) -> str:
    if hours < 1:
        return f"{60 * hours:.3g} min"
    return f"{hours:,.1f} h" if hours >= 10 else f"{hours:.3g} h"
