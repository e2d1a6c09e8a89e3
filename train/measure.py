"""Training's part of `dflash plan`: its batches over the data, and what a batch costs here.

The batches follow from the table that the capture's part counted; the costs from steps over the
small store that it captured, with long, short and mixed samples. No checkpoint is written. Beside
the capture's part, on a GPU, it waits for what that leaves; the disks are measured meanwhile.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch

from dflash_pipeline.configs.costs import DiskCosts, TrainCosts, TrainWork
from dflash_pipeline.configs.disk import nearest, write_whole
from dflash_pipeline.configs.fit import fitted
from dflash_pipeline.configs.jsonfile import read_object
from dflash_pipeline.configs.mounts import split
from dflash_pipeline.configs.place import Place, is_poisoned, let_memory_grow
from dflash_pipeline.configs.schema import Run, TrainConfig
from dflash_pipeline.configs.shares import StoreShare
from dflash_pipeline.configs.status import process_age_s
from dflash_pipeline.store.choice import cached_bytes
from dflash_pipeline.store.completion import is_calibrated
from dflash_pipeline.store.diskspeed import disk_speed
from dflash_pipeline.store.glance import is_whole, opened
from dflash_pipeline.store.runlog import RunLog
from dflash_pipeline.store.table import HELD_OUT, SampleTable
from dflash_pipeline.train.feed import Feed, feed_access
from dflash_pipeline.train.follow import Draw
from dflash_pipeline.train.group import Group
from dflash_pipeline.train.order import Catalog, Ints, Position, catalog, segment_batches
from dflash_pipeline.train.replay import held_out, replay
from dflash_pipeline.train.selection import kept_samples
from dflash_pipeline.train.setup import Training, build, compute_on, open_stores
from dflash_pipeline.train.stop import StopWish
from dflash_pipeline.train.window import take_step

TRAIN_S = 8.0
"""Seconds of training."""
_WARM_STEPS = 4
_WINDOW_S = 0.4
_LEAST_WINDOWS = 9
_MOST_WINDOWS = 60
_NUM_REPLAYED = 16
_LOOK_S = 0.1
# of the device's memory: what a drafter's training may need beside a target that is still there
_ROOMY = 0.5


def main(run: Run, place: Place, extra: dict[str, object]) -> None:
    """Count the work of training over the counted data, and measure what it costs this device.

    extra: `folder` (see `capture/measure.py`; gets disk.json, train_work.json and
    train_costs.json), `is_measured` (only count).
    """
    import_s = process_age_s()
    torch.set_num_threads(place.threads)
    let_memory_grow(torch.__version__)
    log, folder = RunLog(place), Path(str(extra["folder"]))
    if not extra["is_measured"]:
        log.say("measuring the disk")
        disk = disk_costs(run, folder)
        write_whole(folder / "disk.json", json.dumps(asdict(disk)).encode())
    _until((folder / "names.json").exists)
    work = count(run, table_of(folder))
    write_whole(folder / "train_work.json", json.dumps(asdict(work)).encode())
    if extra["is_measured"]:
        return
    _until(lambda: _is_calibrated(str(folder / "store")))
    if place.kind == "cuda" and not _is_roomy(place):
        _until((folder / "costs.json").exists)
    costs = measure(run, place, import_s, folder, log)
    write_whole(folder / "train_costs.json", json.dumps(asdict(costs)).encode())


def _until(is_there: Callable[[], bool]) -> None:
    """Wait for what the capture's part leaves; should that fail, this process is ended."""
    while not is_there():
        time.sleep(_LOOK_S)


def _is_calibrated(path: str) -> bool:
    """A store is there, and how its rows are stored is settled."""
    store = opened(path)
    return store is not None and (store.spec.is_calibrated or is_calibrated(path))


def _is_roomy(place: Place) -> bool:
    free, total = torch.cuda.mem_get_info(torch.device(place.device))
    return free >= _ROOMY * total


def disk_costs(run: Run, folder: Path) -> DiskCosts:
    """Of the disks of `folder`, which is beside the store, and of the store's other mounts."""
    mounts = map(Path, split(run.store.path)[1:])
    speed = disk_speed([folder, *map(nearest, mounts)])
    return DiskCosts(
        worker_bytes_per_s=speed.worker,
        write_bytes_per_s=speed.write,
        read_bytes_per_s=speed.read,
        cached_bytes=cached_bytes(),
    )


def table_of(folder: Path) -> SampleTable:
    """The table that the capture's part has left."""
    names = read_object(folder / "names.json")
    with np.load(folder / "samples.npz") as columns:
        domains, sources = tuple(names["domains"]), tuple(names["sources"])
        return SampleTable(**dict(columns), domains=domains, sources=sources)


def count(run: Run, table: SampleTable) -> TrainWork:
    """The batches of an epoch over these samples, added up, and what a validation replays.

    UsageError as training itself would raise it: for a dropped domain or sample that is not there,
    and for samples that fit no batch.
    """
    samples = catalog([table], [StoreShare(run.store.path, 1.0)], run.train)
    batches = _batches(samples, np.arange(len(samples)), run.train)
    (kept,) = kept_samples([table], run.train)
    chosen = np.flatnonzero((table.split == HELD_OUT) & kept)
    chosen = chosen[np.argsort(table.sample_id[chosen], kind="stable")]
    chosen = chosen[: run.train.validate_samples]
    return TrainWork(
        batches=np.sum([amounts(samples, batch) for batch in batches], axis=0).tolist(),
        validated=[float(len(chosen)), float(table.num_anchors[chosen].sum())],
    )


def _batches(samples: Catalog, candidates: Ints, config: TrainConfig) -> list[Ints]:
    return segment_batches(
        samples, candidates, config.seed, 0, config.batch_tokens, config.batch_anchors
    )


def amounts(samples: Catalog, batch: Ints) -> list[float]:
    """What a batch's time may depend on: that it is one, tokens, blocks, and what blocks see."""
    tokens, blocks = samples.num_tokens_C[batch], samples.num_anchors_C[batch]
    return [1.0, float(tokens.sum()), float(blocks.sum()), float((tokens * blocks).sum())]


def measure(run: Run, place: Place, import_s: float, folder: Path, log: RunLog) -> TrainCosts:
    """Train on `folder`/store for some seconds, and fit what its batches took.

    import_s: the age of a process that has loaded its libraries.
    """
    begin = time.perf_counter()
    out, store = folder / "run", str(folder / "store")
    trial = replace(
        run.train,
        out=str(out),
        stores=(store,),
        max_steps=0,
        # the capture's part is still at work on it
        follow=True,
        # what is left out by name is left out of the data, of which this is a sample
        drop_domains=(),
        drop_samples=(),
    )
    run = replace(run, train=trial)
    out.mkdir()
    with contextlib.closing(Group(place, run.train.timeout_s)) as group:
        # one that takes no signals: each of them interrupts, as there is nothing to save
        stores, samples, shape = open_stores(run, place, log, StopWish(), False)
        training = build(run, place, group, _Quiet(place), stores, samples, shape, False)
        device, dtype = compute_on(run, place)
        draws = _Draws(trial_batches(samples, run.train), run.train.accumulate)
        built_s = time.perf_counter() - begin
        _until(lambda: is_whole(store))
        stores[0].refresh()
        begin = time.perf_counter()
        access = feed_access(stores, run.feed, lambda _text: None)
        with (
            contextlib.closing(training),
            Feed(
                stores,
                samples,
                draws,
                run,
                shape,
                device,
                dtype,
                is_poisoned(),
                access,
                training.clock,
            ) as feed,
        ):
            log.say(f"measuring training on {place.device}")
            built_s += time.perf_counter() - begin
            compiled_s = _warmed(training, feed, device)
            # the steps alone need the device for themselves
            _until((folder / "costs.json").exists)
            windows = _windows(training, feed, draws, device)
            batch_s = fitted(
                [_of_draws(samples, window.draws) for window in windows],
                [window.seconds for window in windows],
            )
            assert training.saver is not None, "it is the only rank"
            checkpoint_s, checkpoint_bytes = training.saver.cost(training.optimizer.state())
            return TrainCosts(
                start_s=import_s + built_s + compiled_s,
                batch_s=batch_s,
                validated_s=_validated_s(training, device),
                checkpoint_s=checkpoint_s,
                checkpoint_bytes=checkpoint_bytes,
            )


class _Quiet(RunLog):
    """Tells nobody how far a trial is."""

    def progress(self, done: float, total: float, unit: str, **numbers: float) -> None:
        """Nothing."""


def trial_batches(samples: Catalog, config: TrainConfig) -> list[list[Ints]]:
    """Batches of all samples, of the shortest and of the longest third."""
    ascending = np.argsort(samples.num_tokens_C, kind="stable")
    third = max(1, len(ascending) // 3)
    parts = (np.sort(ascending), np.sort(ascending[:third]), np.sort(ascending[-third:]))
    return [_batches(samples, part, config) for part in parts]


class _Draws:
    """Batches of one kind after another, again and again, as an order draws them."""

    def __init__(self, kinds: Sequence[Sequence[Ints]], accumulate: int) -> None:
        self._kinds, self._accumulate = deque(map(deque, kinds)), accumulate
        self._num_drawn = 0
        self.repeat = 1
        """Steps of a kind before the next one's turn."""
        self.is_finished = False

    def draw(self, wants_stop: bool) -> Draw | None:
        """The next step; none once it is to stop."""
        if wants_stop:
            self.is_finished = True
            return None
        if self._num_drawn >= self.repeat:
            self._kinds.rotate(-1)
            self._num_drawn = 0
        self._num_drawn += 1
        chosen = []
        for _ in range(self._accumulate):
            chosen.append(self._kinds[0][0])
            self._kinds[0].rotate(-1)
        return Draw(0, tuple(chosen), Position(0, 0, 0), None, 0)


@dataclass(frozen=True, slots=True)
class _Window:
    """Steps as from one log line to the next."""

    draws: tuple[Draw, ...]
    seconds: float


def _of_draws(samples: Catalog, draws: Sequence[Draw]) -> list[float]:
    rows = [amounts(samples, batch) for draw in draws for batch in draw.batches]
    return [sum(column) for column in zip(*rows, strict=True)]


def _warmed(training: Training, feed: Feed, device: torch.device) -> float:
    """The first steps; seconds that they take longer than later ones do."""
    begin = time.perf_counter()
    for _ in range(_WARM_STEPS):
        warm = _window(training, feed, 1, device)
    return max(0.0, time.perf_counter() - begin - _WARM_STEPS * warm.seconds)


def _windows(training: Training, feed: Feed, draws: _Draws, device: torch.device) -> list[_Window]:
    """Windows for `TRAIN_S` seconds."""
    step_s = _window(training, feed, 1, device).seconds
    # the device is not waited for within a window, as it is not between two log lines
    num_steps = min(training.run.train.log_every, max(1, round(_WINDOW_S / step_s)))
    draws.repeat = num_steps
    windows, end = list[_Window](), time.perf_counter() + TRAIN_S
    while len(windows) < _LEAST_WINDOWS or (
        len(windows) < _MOST_WINDOWS and time.perf_counter() < end
    ):
        windows.append(_window(training, feed, num_steps, device))
    return windows


def _window(training: Training, feed: Feed, num_steps: int, device: torch.device) -> _Window:
    begin = _now(device)
    draws = tuple(_step(training, feed) for _ in range(num_steps))
    training.journal.line(1, 0.0, training.metrics, training.optimizer, feed)
    return _Window(draws, _now(device) - begin)


def _step(training: Training, feed: Feed) -> Draw:
    """One step as a run takes it."""
    draw = feed.step(lambda: False, lambda: None)
    assert draw is not None, "it draws for ever"
    take_step(training, feed, draw, 1, lambda: False)
    training.journal.note(1, draw)
    return draw


def _validated_s(training: Training, device: torch.device) -> list[float]:
    """Seconds of a replayed sample, of which its blocks are all, and of each of these; zeros where
    none is held out."""
    store = training.stores[0]
    chosen = held_out(store)[: _NUM_REPLAYED + 1]
    num_blocks = int(store.table.num_anchors[chosen[1:]].sum())
    # the first one loads what the others use, which are replayed together as a validation's are
    begins = []
    for samples in (chosen[:1], chosen[1:]):
        begins.append(_now(device))
        replay(store, samples, training.drafter, training.head, None)
    return [0.0, (_now(device) - begins[1]) / num_blocks if num_blocks else 0.0]


def _now(device: torch.device) -> float:
    """The time once the device has done all it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
