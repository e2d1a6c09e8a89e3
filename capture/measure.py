"""The capture's part of `dflash plan`: how much work the data are, and what it costs here.

A sample of the data, even in length, is captured for real into a small store beside the one that
is meant; `train/measure.py` then trains on it. What was counted and what was measured are left as
JSON, and the lengths of all samples as arrays: `configs/prediction.py` puts both stages together.
Letters: B sequences, T positions.
"""

from __future__ import annotations

import heapq
import json
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dflash_pipeline.capture import preflight
from dflash_pipeline.capture.answerer import Answerer
from dflash_pipeline.capture.answers import dialogues
from dflash_pipeline.capture.batches import Int
from dflash_pipeline.capture.construction import arranged, build_store, fill_checked, store_spec
from dflash_pipeline.capture.model import TargetFiles, resolve
from dflash_pipeline.capture.samples import Conversation, Dropped, hash64, read
from dflash_pipeline.capture.spool import Spool
from dflash_pipeline.capture.stop import Stop
from dflash_pipeline.capture.target import Target, compute_dtype
from dflash_pipeline.capture.warmup import num_positions, planned_shapes, warm_up
from dflash_pipeline.capture.worker import BatchTime, capture, explained_start, prepare_torch, seal
from dflash_pipeline.configs import inputs
from dflash_pipeline.configs.counts import Counts
from dflash_pipeline.configs.fit import fitted
from dflash_pipeline.configs.place import Place
from dflash_pipeline.configs.prediction import CaptureCosts, CaptureWork
from dflash_pipeline.configs.schema import Run
from dflash_pipeline.configs.status import process_age_s
from dflash_pipeline.store.build import estimate_bytes
from dflash_pipeline.store.diskspeed import disk_speed
from dflash_pipeline.store.reader import Store
from dflash_pipeline.store.rows import row_bytes
from dflash_pipeline.store.runlog import RunLog
from dflash_pipeline.store.table import HELD_OUT

CAPTURE_S = 20.0
"""Seconds of capture that the sample is meant to take."""
ANSWER_TOKENS = 48
"""Length of the answers whose generation is timed, at most."""
LENGTHS = ("sample_id", "num_tokens", "num_anchors", "split")
"""Columns of the plan that training's batches follow from."""
_MOST_SAMPLED = 8192
# enough for a calibration, and for more than one batch
_LEAST_SAMPLED = 96
_NUM_TRIED = 8


def main(run: Run, place: Place, extra: dict[str, object]) -> None:
    """Count the data of `run`, and measure on this device what its capture costs.

    extra: `folder` (where the results go: work.json, lengths.npz, costs.json and the small store),
    `is_measured` (only count).
    """
    prepare_torch(place)
    log, folder = RunLog(place), Path(str(extra["folder"]))
    inputs.check_data(run.data.files)
    files = resolve(run.target)
    sampled = Sampled(_MOST_SAMPLED)
    work, lengths = count(run, files, place, sampled)
    (folder / "work.json").write_text(json.dumps(asdict(work)))
    np.savez(folder / "lengths.npz", **lengths)
    log.say(f"{work.num_samples:,} samples, {work.num_tokens:,} tokens counted")
    if extra["is_measured"]:
        return
    costs = measure(run, files, place, sampled.conversations, work, folder, log)
    (folder / "costs.json").write_text(json.dumps(asdict(costs)))


@dataclass(slots=True)
class Sampled:
    """Of the conversations that pass through, those with the smallest hash of their key."""

    most: int
    _kept: list[tuple[int, int, Conversation]] = field(default_factory=list)

    def through(self, conversations: Iterable[Conversation]) -> Iterator[Conversation]:
        for number, conversation in enumerate(conversations):
            entry = (-hash64(conversation.key), number, conversation)
            if len(self._kept) < self.most:
                heapq.heappush(self._kept, entry)
            else:
                heapq.heappushpop(self._kept, entry)
            yield conversation

    @property
    def conversations(self) -> list[Conversation]:
        """The smallest hash first."""
        return [conversation for _, _, conversation in sorted(self._kept, reverse=True)]


def count(
    run: Run, files: TargetFiles, place: Place, sampled: Sampled
) -> tuple[CaptureWork, dict[str, Any]]:
    """What the whole capture is, and the columns that training's batches follow from."""
    begin, dropped = time.monotonic(), Dropped()
    with Spool(None, run.store.last_rows) as spool:
        conversations = sampled.through(read(run.data.files, run.data.limit, dropped))
        fill_checked(spool, run, files, conversations, dropped, place.threads)
        spec = store_spec(run, files, place.kind, "not read")
        made = arranged(spool, spec, run)
        answers = spool.column("num_anchors")
        num_supervised = spool.num_supervised
    table, layout = made.table, made.layout
    shapes = [
        (batch.stop - batch.start, num_positions(int(table.num_tokens[batch].max()), layout))
        for shard_id in layout.shard_ids()
        for batch in table.batches_of(shard_id)
    ]
    token_bytes = spec.num_layers * row_bytes(spec.hidden_mode, spec.hidden_size)
    last_bytes = row_bytes(spec.last_mode, spec.hidden_size) if spec.has_last else 0
    rows_bytes = token_bytes * int(table.num_tokens.sum()) + last_bytes * int(
        table.num_teacher.sum()
    )
    work = CaptureWork(
        num_samples=len(table),
        num_heldout=int((table.split == HELD_OUT).sum()),
        num_tokens=int(table.num_tokens.sum()),
        num_supervised=num_supervised,
        num_padded=made.plan.num_padded_tokens,
        store_bytes=estimate_bytes(spec, layout, table),
        rows_bytes=rows_bytes,
        read_s=time.monotonic() - begin,
        batches=_sums([_amounts(*shape) for shape in shapes]),
        answer_steps=answer_steps(answers, run.generate.batch_size) * run.generate.samples,
    )
    return work, {name: np.asarray(getattr(table, name)) for name in LENGTHS}


def _amounts(num_sequences: int, width: int) -> list[float]:
    """What a batch's time may depend on: that it is one, its places, its pairs of places."""
    places = num_sequences * width
    return [1.0, float(places), float(places * width)]


def _sums(rows: list[list[float]]) -> list[float]:
    return [sum(column) for column in zip(*rows, strict=True)]


def answer_steps(num_tokens_M: Int, batch_size: int) -> float:
    """Steps of generating answers of these lengths in batches: the longest of each batch counts.

    The longest of `batch_size` drawn at random is expected; whole batches are assumed.
    """
    size = min(batch_size, len(num_tokens_M))
    share = (np.arange(len(num_tokens_M) + 1) / len(num_tokens_M)) ** size
    longest = float((np.sort(num_tokens_M) * np.diff(share)).sum())
    return longest * len(num_tokens_M) / size


def measure(
    run: Run,
    files: TargetFiles,
    place: Place,
    conversations: list[Conversation],
    work: CaptureWork,
    folder: Path,
    log: RunLog,
) -> CaptureCosts:
    """Capture a sample for real, into `folder`/store, and fit what its batches took."""
    preflight.check(run, files, conversations[:_NUM_TRIED], log.say)
    dtype = compute_dtype(run.target.dtype, place.kind)
    with explained_start(place):
        layer_ids, num_gpus = files.layer_ids(run.target), run.target.num_gpus
        target = Target.load(files, layer_ids, place.device, dtype, num_gpus)
    tried_at = time.monotonic()
    num_tokens = CAPTURE_S * _tokens_per_s(run, target, work)
    tried_s = time.monotonic() - tried_at
    mean = work.num_tokens / work.num_samples
    chosen = conversations[: max(_LEAST_SAMPLED, round(num_tokens / mean))]
    trial = replace(
        run,
        store=replace(run.store, path=str(folder / "store")),
        data=replace(run.data, max_bad_share=1.0),
        # whether int8 or int4 is good enough for this target is not asked here
        capture=replace(run.capture, quota="", num_consumers=1, calibration_from="", force=True),
    )
    dropped = Dropped(num_rows=len(chosen))
    store = build_store(trial, files, place.kind, chosen, dropped, "", 1, lambda _text: None)
    warm_up(target, planned_shapes(store))
    log.say(f"measuring the capture of {len(store.table):,} samples on {place.device}")
    start_s = process_age_s() - work.read_s - tried_s
    voice, timed, begin = _Voice(), list[BatchTime](), time.monotonic()
    with Stop() as stop:
        store = capture(store, target, trial.capture, voice, stop, timed)
    seal(store, trial.capture)
    fixed_s, busy = voice.overhead(begin)
    speed = disk_speed(folder)
    return CaptureCosts(
        device=torch.cuda.get_device_name() if place.kind == "cuda" else "CPU",
        start_s=start_s,
        fixed_s=fixed_s,
        busy=busy,
        batch_s=fitted(
            [_amounts(one.num_sequences, one.num_positions) for one in timed],
            [one.device_s for one in timed],
        ),
        tokens_per_s=_rate(store, timed, busy),
        write_bytes_per_s=speed.write,
        read_bytes_per_s=speed.read,
        answer_step_s=0.0 if run.generate.endpoints else _answer_step_s(run, files, target, place),
    )


def _rate(store: Store, timed: list[BatchTime], busy: float) -> float:
    return int(store.table.num_tokens.sum()) / sum(one.device_s for one in timed) * busy


def _tokens_per_s(run: Run, target: Target, work: CaptureWork) -> float:
    """A first guess of the speed: one batch of the mean length, after one that warms up."""
    width = max(1, work.num_tokens // work.num_samples)
    # an eighth of a batch: whether a whole one fits is found out by the capture itself
    ids_BT = torch.zeros((max(1, run.capture.token_budget // width // 8), width), dtype=torch.int64)
    ids_BT = ids_BT.to(target.device)
    seconds = 0.0
    for _ in range(2):
        begin = time.monotonic()
        last_BTH = target.run(ids_BT, lambda _place, _hidden_BTH: None)
        last_BTH[0, 0, 0].item()
        seconds = time.monotonic() - begin
    return ids_BT.numel() / seconds


def _answer_step_s(run: Run, files: TargetFiles, target: Target, place: Place) -> float:
    """Seconds of a step of generating one batch, the prompts' part shared out over its steps."""
    config = replace(
        run.generate,
        max_new_tokens=min(ANSWER_TOKENS, run.generate.max_new_tokens),
        samples=1,
        temperature=0.0,
    )
    answerer = Answerer(files, run.target, config, run.data, place, target)
    found = dialogues(run.data, 1, 0, 1, Dropped())
    batch = list(islice(found, run.generate.batch_size))
    for dialogue in batch:
        # one turn: its steps are those of its longest answer
        del dialogue.questions[1:]
    begin = time.monotonic()
    answerer.answer(batch, lambda _count: None)
    seconds = time.monotonic() - begin
    longest = max(
        (end - start for one in batch for start, end in one.loss_spans), default=ANSWER_TOKENS
    )
    return seconds / longest


class _Voice:
    """Listens to a capture instead of telling people about it."""

    def __init__(self) -> None:
        self._counted: list[tuple[float, float]] = []
        self._num_before_gate = 0

    def say(self, text: str) -> None:
        """The gate's lines end what a worker does once."""
        if text.startswith("gate:"):
            self._num_before_gate = len(self._counted)

    def note(self, text: str) -> None:
        """Nothing."""

    def state(self, state: str) -> None:
        """Nothing."""

    def waiting(self, text: str) -> None:
        """Nothing."""

    def counted(self, done: float, total: float, unit: str, counts: Counts) -> None:
        """A batch is done."""
        self._counted.append((time.monotonic(), counts.device_s))

    def overhead(self, begin: float) -> tuple[float, float]:
        """Seconds that a worker needs once, and the device's busy share beside them."""
        before, after = self._num_before_gate, len(self._counted) - 1
        last_at, all_device_s = self._counted[after]
        # the first batch after the gate begins with it
        busy = 1.0
        if after > before:
            first_at, device_s = self._counted[before]
            busy = min(1.0, (all_device_s - device_s) / max(last_at - first_at, 1e-9))
        return max(0.0, last_at - begin - all_device_s / busy), busy
