"""Training's part of `dflash plan`: its batches over the data, and what a batch costs here.

The batches follow from the lengths that the capture's part counted; the costs from steps over the
small store that it captured, with long, short and mixed samples. No checkpoint is written.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from dflash_pipeline.configs.fit import fitted
from dflash_pipeline.configs.place import Place, is_poisoned, let_memory_grow
from dflash_pipeline.configs.prediction import TrainCosts, TrainWork
from dflash_pipeline.configs.schema import Run, TrainConfig
from dflash_pipeline.configs.status import process_age_s
from dflash_pipeline.store.runlog import RunLog
from dflash_pipeline.store.table import HELD_OUT, TRAIN
from dflash_pipeline.train.feed import Feed, feed_access
from dflash_pipeline.train.follow import Draw
from dflash_pipeline.train.group import Group
from dflash_pipeline.train.optim import learning_rate
from dflash_pipeline.train.order import Catalog, Ints, Position, segment_batches
from dflash_pipeline.train.replay import held_out, replay
from dflash_pipeline.train.setup import Training, build, compute_on, open_stores
from dflash_pipeline.train.step import learn
from dflash_pipeline.train.stop import StopWish

TRAIN_S = 15.0
"""Seconds of training."""
_WARM_STEPS = 4
_LEAST_STEPS = 12
_MOST_STEPS = 400
_NUM_REPLAYED = 4


def main(run: Run, place: Place, extra: dict[str, object]) -> None:
    """Count the work of training over the counted data, and measure what it costs this device.

    extra: `folder` (see `capture/measure.py`; gets train_work.json and train_costs.json),
    `is_measured` (only count).
    """
    torch.set_num_threads(place.threads)
    let_memory_grow(torch.__version__)
    log, folder = RunLog(place), Path(str(extra["folder"]))
    with np.load(folder / "lengths.npz") as lengths:
        work = count(run.train, dict(lengths))
    (folder / "train_work.json").write_text(json.dumps(asdict(work)))
    if extra["is_measured"]:
        return
    costs = measure(run, place, folder, log)
    (folder / "train_costs.json").write_text(json.dumps(asdict(costs)))


def count(config: TrainConfig, lengths: Mapping[str, npt.NDArray[Any]]) -> TrainWork:
    """The batches of an epoch over samples of these lengths, added up."""
    chosen = np.flatnonzero((lengths["split"] == TRAIN) & (lengths["num_anchors"] > 0))
    most = min(config.anchors_per_sample, config.batch_anchors)
    num_tokens = lengths["num_tokens"][chosen].astype(np.int64)
    samples = Catalog(
        store_C=np.zeros(len(chosen), np.int64),
        sample_C=chosen.astype(np.int64),
        sample_id_C=lengths["sample_id"][chosen].astype(np.uint64),
        num_tokens_C=num_tokens,
        num_anchors_C=np.minimum(lengths["num_anchors"][chosen].astype(np.int64), most),
        shard_C=np.zeros(len(chosen), np.int64),
        shares=(1.0,),
    )
    batches = _batches(samples, np.arange(len(chosen)), config)
    num_heldout = int((lengths["split"] == HELD_OUT).sum())
    return TrainWork(
        batches=np.sum([amounts(samples, batch) for batch in batches], axis=0).tolist(),
        num_validated=min(config.validate_samples, num_heldout),
    )


def _batches(samples: Catalog, candidates: Ints, config: TrainConfig) -> list[Ints]:
    return segment_batches(
        samples, candidates, config.seed, 0, config.batch_tokens, config.batch_anchors
    )


def amounts(samples: Catalog, batch: Ints) -> list[float]:
    """What a batch's time may depend on: that it is one, tokens, blocks, and what blocks see."""
    tokens, blocks = samples.num_tokens_C[batch], samples.num_anchors_C[batch]
    return [1.0, float(tokens.sum()), float(blocks.sum()), float((tokens * blocks).sum())]


def measure(run: Run, place: Place, folder: Path, log: RunLog) -> TrainCosts:
    """Train on `folder`/store for some seconds, and fit what its batches took."""
    out, store = folder / "run", str(folder / "store")
    run = replace(run, train=replace(run.train, out=str(out), stores=(store,), max_steps=0))
    # what is left out by name is left out of the data, of which this is a sample
    run = replace(run, train=replace(run.train, drop_domains=(), drop_samples=()))
    out.mkdir()
    with StopWish() as wish, contextlib.closing(Group(place, run.train.timeout_s)) as group:
        stores, samples, shape = open_stores(run, place, log, wish, False)
        training = build(run, place, group, log, stores, samples, shape, False)
        device, dtype = compute_on(run, place)
        draws = _Draws(trial_batches(samples, run.train), run.train.accumulate)
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
            steps, start_s = _steps(training, feed, device, wish)
            return TrainCosts(
                start_s=start_s,
                batch_s=fitted(
                    [_of_step(samples, step.draw) for step in steps],
                    [step.batches_s for step in steps],
                ),
                optimizer_s=float(np.mean([step.optimizer_s for step in steps])),
                validated_s=_validated_s(training, device),
                steps_per_s=len(steps) / sum(step.batches_s + step.optimizer_s for step in steps),
            )


def trial_batches(samples: Catalog, config: TrainConfig) -> list[Ints]:
    """Batches of all samples, of the shortest and of the longest third, in turn."""
    ascending = np.argsort(samples.num_tokens_C, kind="stable")
    third = max(1, len(ascending) // 3)
    kinds = [
        _batches(samples, part, config)
        for part in (np.sort(ascending), np.sort(ascending[:third]), np.sort(ascending[-third:]))
    ]
    rounds = min(map(len, kinds))
    return [kind[number] for number in range(rounds) for kind in kinds]


class _Draws:
    """The same batches again and again, as an order draws them."""

    def __init__(self, batches: Sequence[Ints], accumulate: int) -> None:
        self._batches, self._accumulate = deque(batches), accumulate
        self.is_finished = False

    def draw(self, wants_stop: bool) -> Draw | None:
        """The next step; none once it is to stop."""
        if wants_stop:
            self.is_finished = True
            return None
        chosen = []
        for _ in range(self._accumulate):
            chosen.append(self._batches[0])
            self._batches.rotate(-1)
        return Draw(0, tuple(chosen), Position(0, 0, 0))


@dataclass(frozen=True, slots=True)
class _Step:
    """What one step took."""

    draw: Draw
    batches_s: float
    optimizer_s: float


def _of_step(samples: Catalog, draw: Draw) -> list[float]:
    columns = zip(*(amounts(samples, batch) for batch in draw.batches), strict=True)
    return [sum(column) for column in columns]


def _steps(
    training: Training, feed: Feed, device: torch.device, wish: StopWish
) -> tuple[list[_Step], float]:
    """Steps for `TRAIN_S` seconds, and the age of this process when the first one was timed."""
    steps, start_s, end = list[_Step](), 0.0, float("inf")
    for number in range(_MOST_STEPS):
        if number == _WARM_STEPS:
            start_s, end = process_age_s(), time.perf_counter() + TRAIN_S
        if wish.is_asked():
            raise KeyboardInterrupt
        if len(steps) >= _LEAST_STEPS and time.perf_counter() > end:
            break
        step = _step(training, feed, device)
        if number >= _WARM_STEPS:
            steps.append(step)
    return steps, start_s


def _step(training: Training, feed: Feed, device: torch.device) -> _Step:
    run, optimizer = training.run, training.optimizer
    begin = _now(device)
    draw = feed.step(lambda: False, lambda: None)
    assert draw is not None, "it draws for ever"
    for number, batch in enumerate(feed.batches(draw)):
        if number == len(draw.batches) - 1:
            optimizer.expect_last()
        learn(
            batch,
            training.forward,
            training.head,
            run.loss,
            optimizer,
            training.metrics,
            training.clock,
        )
    middle = _now(device)
    optimizer.sum_up(wants_stop=False)
    optimizer.step(learning_rate(0, training.num_steps, run.optim))
    return _Step(draw, middle - begin, _now(device) - middle)


def _validated_s(training: Training, device: torch.device) -> float:
    """Seconds that the replay of one sample takes; 0 where none is held out."""
    store, drafter = training.stores[0], training.drafter
    chosen = held_out(store)[:_NUM_REPLAYED]
    if not chosen:
        return 0.0
    begin = _now(device)
    replay(store, chosen, drafter, training.head, drafter.shape, None)
    return (_now(device) - begin) / len(chosen)


def _now(device: torch.device) -> float:
    """The time once the device has done all it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
