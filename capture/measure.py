"""The capture's part of `dflash plan`: how much work the data are, and what it costs here.

A sample of the data, even in length, is captured for real into a small store beside the one that
is meant; `train/measure.py` then trains on it. What was counted and what was measured are left as
JSON, and the table of all samples: `configs/prediction.py` puts both stages together.
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path

import torch

from dflash_pipeline.capture import preflight
from dflash_pipeline.capture.answerer import Answerer
from dflash_pipeline.capture.answers import dialogues
from dflash_pipeline.capture.construction import Spent, build_store
from dflash_pipeline.capture.counting import Sampled, amounts, amounts_alone, count, keep_table
from dflash_pipeline.capture.model import TargetFiles, resolve
from dflash_pipeline.capture.samples import Conversation, Dropped
from dflash_pipeline.capture.shapes import extremes, planned_shapes
from dflash_pipeline.capture.stop import Stop
from dflash_pipeline.capture.target import Target, compute_dtype
from dflash_pipeline.capture.times import SampleTime, Times
from dflash_pipeline.capture.voice import Silence
from dflash_pipeline.capture.warmup import warm_up
from dflash_pipeline.capture.worker import capture, compiled, explained_start, prepare_torch, seal
from dflash_pipeline.configs import inputs
from dflash_pipeline.configs.costs import CPU, CaptureCosts, CaptureWork
from dflash_pipeline.configs.counts import Counts
from dflash_pipeline.configs.disk import write_whole
from dflash_pipeline.configs.fit import dot, fitted, steady
from dflash_pipeline.configs.place import Place
from dflash_pipeline.configs.schema import Run
from dflash_pipeline.configs.status import process_age_s
from dflash_pipeline.store.runlog import RunLog

CAPTURE_S = 5.0
"""Seconds of capture that the sample is meant to take."""
ANSWER_TOKENS = 8, 32
"""Lengths of the answers whose generation is timed, at most: what differs is the steps' alone."""
_MOST_SAMPLED = 8192
# enough for a calibration, and for more than one batch
_LEAST_SAMPLED = 96
_NUM_TRIED = 8
# to calibrate from, and as many to judge by: they tell what one takes
_NUM_CALIBRATED = 12
# of so many a median is worth more than a mean
_MANY = 12


def main(run: Run, place: Place, extra: dict[str, object]) -> None:
    """Count the data of `run`, and measure on this device what its capture costs.

    extra: `folder` (where the results go: work.json, the table, costs.json and the small store),
    `is_measured` (only count), `kind` (cuda or cpu: where the target will run),
    `with_answers` (measure generating them as well).
    """
    import_s = process_age_s()
    prepare_torch(place)
    log, folder = RunLog(place), Path(str(extra["folder"]))
    inputs.check_data(run.data.files)
    files = resolve(run.target)
    sampled = Sampled(_MOST_SAMPLED)
    work, table = count(run, files, str(extra["kind"]), place.threads, sampled)
    write_whole(folder / "work.json", json.dumps(asdict(work)).encode())
    keep_table(table, folder)
    log.say(f"{work.num_samples:,} samples, {work.num_tokens:,} tokens counted")
    if extra["is_measured"]:
        return
    with_answers = bool(extra["with_answers"]) and not run.generate.endpoints
    costs = measure(
        run, files, place, sampled.conversations, work, import_s, folder, log, with_answers
    )
    # the device is the training's once they are told: nothing of the target stays on it
    gc.collect()
    if place.kind == "cuda":
        torch.cuda.empty_cache()
    write_whole(folder / "costs.json", json.dumps(asdict(costs)).encode())


class _Laps:
    """Seconds between one look and the next."""

    def __init__(self) -> None:
        self._at = time.monotonic()

    def take(self) -> float:
        before, self._at = self._at, time.monotonic()
        return self._at - before


def _seconds_of(work: Callable[[], object]) -> float:
    laps = _Laps()
    work()
    return laps.take()


def measure(
    run: Run,
    files: TargetFiles,
    place: Place,
    conversations: list[Conversation],
    work: CaptureWork,
    import_s: float,
    folder: Path,
    log: RunLog,
    with_answers: bool,
) -> CaptureCosts:
    """Capture a sample for real, into `folder`/store, and fit what its batches took."""
    laps = _Laps()
    preflight.check(run, files, conversations[:_NUM_TRIED], log.say)
    preflight_s = laps.take()
    dtype = compute_dtype(run.target.dtype, place.kind)
    with explained_start(place):
        layer_ids, num_gpus = files.layer_ids(run.target), run.target.num_gpus
        target = Target.load(files, layer_ids, place.device, dtype, num_gpus)
    load_s = laps.take()
    chosen = conversations[: _num_chosen(run, target, work)]
    trial = replace(
        run,
        store=replace(run.store, path=str(folder / "store")),
        data=replace(run.data, max_bad_share=1.0),
        # whether int8 or int4 is good enough for this target is not asked here
        capture=replace(run.capture, quota="", num_consumers=1, calibration_from="", force=True),
    )
    dropped, spent = Dropped(num_rows=len(chosen)), Spent()
    laps.take()
    store = build_store(trial, files, place.kind, chosen, dropped, "", 1, Silence().say, spent)
    plan_s = preflight_s + laps.take() - spent.render_s - spent.tokens_s
    planned = planned_shapes(store.table, store.layout)
    # as the whole capture will decide, not this sample of it
    compiled(target, planned, trial.capture, work.num_tokens, log)
    warmed = warm_up(target, extremes(planned)[:1])
    ready_s = laps.take()
    log.say(f"measuring the capture of {len(store.table):,} samples on {place.device}")
    heard, times = _Heard(), Times()
    laps.take()
    with Stop() as stop:
        store = capture(store, target, trial.capture, heard, stop, times, _NUM_CALIBRATED)
    seal(store, trial.capture)
    whole_s = laps.take()
    shapes = [(one.num_sequences, one.num_positions) for one in times.batches]
    # what the first one loads for the others is no cost of a batch
    timed = slice(1 if len(shapes) > 1 else 0, None)
    batch_s = fitted(
        [amounts(*shape) for shape in shapes[timed]],
        [one.device_s for one in times.batches[timed]],
    )
    busy = heard.busy()
    device_s = sum(dot(amounts(*shape), batch_s) for shape in shapes)
    warmed_s = sum(dot(amounts(*shape), batch_s) for shape in warmed)
    calibrated_s, gated_s = _alone_s(times.calibrated), _alone_s(times.gated)
    alone_s = _alone_work_s(times.calibrated, calibrated_s) + _alone_work_s(times.gated, gated_s)
    answer_step_s = 0.0
    if with_answers:
        log.say("measuring answers")
        answer_step_s = _answer_step_s(run, files, target, place, work)
    return CaptureCosts(
        device=torch.cuda.get_device_name() if place.kind == "cuda" else CPU,
        is_compiled=work.is_compiled,
        import_s=import_s,
        plan_s=plan_s,
        token_s=spent.tokens_s / int(store.table.num_tokens.sum()),
        load_s=load_s + max(0.0, ready_s - warmed_s),
        fixed_s=max(0.0, whole_s - heard.wait_s - device_s / busy - alone_s),
        calibrated_s=calibrated_s,
        gated_s=gated_s,
        busy=busy,
        batch_s=batch_s,
        answer_step_s=answer_step_s,
    )


def _num_chosen(run: Run, target: Target, work: CaptureWork) -> int:
    """Samples that take about `CAPTURE_S`, by one batch of the mean length after one that warms."""
    mean = work.num_tokens / work.num_samples
    width = max(1, round(mean))
    # an eighth of a batch: whether a whole one fits is found out by the capture itself
    num_sequences = max(1, run.capture.token_budget // width // 8)
    ids_BT = torch.zeros((num_sequences, width), dtype=torch.int64, device=target.device)
    seconds = 0.0
    for _ in range(2):
        begin = time.monotonic()
        last_BTH = target.run(ids_BT, lambda _place, _hidden_BTH: None)
        last_BTH[0, 0, 0].item()
        seconds = time.monotonic() - begin
    return max(_LEAST_SAMPLED, round(CAPTURE_S * ids_BT.numel() / seconds / mean))


def _alone_s(times: Sequence[SampleTime]) -> list[float]:
    """Seconds of a sample that is computed alone and of each of its tokens; zeros: none was."""
    # the first one loads what the others use
    told = times[1:] or times
    if not told:
        return [0.0, 0.0]
    seconds = [one.seconds for one in told]
    if len(told) >= _MANY:
        return steady([one.num_tokens for one in told], seconds)
    return fitted([amounts_alone(one.num_tokens) for one in told], seconds)


def _alone_work_s(times: Sequence[SampleTime], costs: Sequence[float]) -> float:
    return sum(dot(amounts_alone(one.num_tokens), costs) for one in times)


def _answer_step_s(
    run: Run, files: TargetFiles, target: Target, place: Place, work: CaptureWork
) -> float:
    """Seconds of a step of generating one batch, the prompts' part shared out over its steps."""

    def answered(most: int) -> tuple[int, float]:
        """Steps of one batch of answers so long, and their seconds."""
        config = replace(run.generate, max_new_tokens=most, samples=1, temperature=0.0)
        answerer = Answerer(files, run.target, config, run.data, place, target)
        batch = list(islice(dialogues(run.data, 1, 0, 1, Dropped()), run.generate.batch_size))
        for dialogue in batch:
            # one turn: its steps are those of its longest answer
            del dialogue.questions[1:]
        seconds = _seconds_of(lambda: answerer.answer(batch, lambda _count: None))
        return max(
            (end - begin for one in batch for begin, end in one.loss_spans), default=0
        ), seconds

    few, many = (min(most, run.generate.max_new_tokens) for most in ANSWER_TOKENS)
    # the first ones load what the others use
    answered(few)
    (num_few, few_s), (num_many, many_s) = answered(few), answered(many)
    if num_many <= num_few:
        return many_s / max(1, num_many)
    step_s = max(0.0, many_s - few_s) / (num_many - num_few)
    prompts_s = max(0.0, few_s - num_few * step_s)
    num_batches = work.num_samples * run.generate.samples / run.generate.batch_size
    return step_s + prompts_s * max(1.0, num_batches) / work.answer_steps


class _Heard(Silence):
    """Listens to a capture instead of telling people about it."""

    def __init__(self) -> None:
        self._counted: list[tuple[float, Counts]] = []
        self._num_before_gate = 0

    def say(self, text: str) -> None:
        """The gate's lines end what a worker does once."""
        if text.startswith("gate:"):
            self._num_before_gate = len(self._counted)

    def counted(self, done: float, total: float, unit: str, counts: Counts) -> None:
        """A batch is done."""
        self._counted.append((time.monotonic(), counts))

    @property
    def wait_s(self) -> float:
        """Seconds in which the device waited for the disk."""
        return self._counted[-1][1].buffer_wait_s

    def busy(self) -> float:
        """The device's share of the time, after the gate, in which the disk let it work."""
        # at both ends the next batch is on the device: the last one ends with nothing behind it
        before, after = self._num_before_gate, len(self._counted) - 2
        if after <= before:
            return 1.0
        (begin, first), (end, last) = self._counted[before], self._counted[after]
        own_s = end - begin - (last.buffer_wait_s - first.buffer_wait_s)
        return min(1.0, (last.device_s - first.device_s) / max(own_s, 1e-9))
