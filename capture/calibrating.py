"""Calibrates a store of int8 or int4 rows before its first shard, and judges whether they serve.

Whoever holds the first shard's lease does it, the others wait. What comes out depends on the plan
and the target alone, so that anybody may take over. A calibration taken from another store is
judged by the samples of this one.
Letters: S samples, N rows, K captured layers, M rows of `last`, H hidden.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from dflash_pipeline.capture.donor import donated
from dflash_pipeline.capture.target import Target
from dflash_pipeline.capture.times import SampleTime
from dflash_pipeline.configs.schema import CaptureConfig
from dflash_pipeline.configs.threads import Threads
from dflash_pipeline.store import guard
from dflash_pipeline.store.calibration import (
    NUM_SAMPLES,
    Calibrations,
    calibrate,
    calibration_positions,
)
from dflash_pipeline.store.completion import is_calibrated, publish_calibration
from dflash_pipeline.store.lease import LeaseLost, Leases
from dflash_pipeline.store.reader import Store, open_store
from dflash_pipeline.store.spec import QUANTISED_MODES, ShardId
from dflash_pipeline.store.table import SampleTable, claim_order, teacher_positions


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """States to calibrate from, or to judge by."""

    hidden_NKH: NDArray[np.float32]
    last_MH: NDArray[np.float32] | None


def calibrated(
    store: Store,
    target: Target,
    config: CaptureConfig,
    leases: Leases,
    say: Callable[[str], None],
    beat: Callable[[], None],
    wait: Callable[[], None],
    times: list[SampleTime] | None = None,
    num_samples: int = NUM_SAMPLES,
) -> Store:
    """The store with its calibration: it has one, this worker makes it, or another one does.

    `beat` is called again and again meanwhile, or `wait`, which takes a moment, while another one
    works; times: what each sample took is added to it; num_samples: see `chosen_samples`. Raises
    ValueError when a mode misses its error bounds and `capture.force` is off; nothing is written
    then.
    """
    if store.spec.is_calibrated:
        return store
    first = claim_order(store.layout.num_shards)[0]

    def is_open(shard_id: ShardId) -> bool:
        return shard_id == first and not is_calibrated(store.path)

    is_told, made = False, list[SampleTime]() if times is None else times
    while not is_calibrated(store.path):
        lease = leases.claim(is_open, max_failures=config.max_shard_failures)
        if lease is None:
            if not is_told:
                say("waiting for the calibration that another worker makes")
            is_told = True
            wait()
            continue
        with lease:
            calibrations, record = _calibrate(store, target, config, say, beat, made, num_samples)
            # lost: this worker hung, and another one calibrates in its place
            with contextlib.suppress(LeaseLost):
                publish_calibration(store, calibrations, record, lease)
    return open_store(store.path)


def _calibrate(
    store: Store,
    target: Target,
    config: CaptureConfig,
    say: Callable[[str], None],
    beat: Callable[[], None],
    times: list[SampleTime],
    num_samples: int,
) -> tuple[Calibrations, dict[str, object]]:
    # what the place gives this process, as `prepare_torch` has set it
    spec, threads = store.spec, Threads(torch.get_num_threads(), beat)
    chosen, others = chosen_samples(store.table, num_samples)
    if config.calibration_from:
        calibrations = donated(config.calibration_from, spec)
        say(f"calibration of {config.calibration_from} taken over")
    else:
        say(f"calibrating {spec.hidden_mode} / {spec.last_mode} from {len(chosen)} samples")
        rows = _rows(store, target, chosen, beat, times)
        modes = spec.hidden_mode, spec.last_mode
        calibrations = calibrate(rows.hidden_NKH, rows.last_MH, *modes, threads)
    judged = _rows(store, target, others, beat, times)
    layers = guard.layer_reports(
        judged.hidden_NKH, judged.last_MH, spec.layer_ids, calibrations, threads
    )
    head = None
    if judged.last_MH is not None and spec.last_mode in QUANTISED_MODES:
        places = np.linspace(0, len(judged.last_MH) - 1, guard.NUM_HEAD_ROWS, dtype=int)
        calibration = calibrations[-1]
        assert calibration is not None
        head = guard.head_report(
            judged.last_MH[np.unique(places)],
            calibration,
            store.head(),
            target.logit_scale,
            target.soft_cap,
            threads,
        )
    missed = guard.violations(layers, head)
    record = guard.report_record(layers, head, missed)
    for line in guard.report_lines(record | {"missed": []}):
        say(f"calibration: {line}")
    if missed and config.calibration_from and not config.force:
        raise ValueError(
            f"{'; '.join(missed)}: the calibration of {config.calibration_from} does not serve "
            "this data; capture into another --store without --calibration-from (this one holds a "
            "plan and no rows: it may be deleted); --force captures nevertheless"
        )
    if missed and not config.force:
        raise ValueError(
            f"{'; '.join(missed)}: the rows of this target should be stored as "
            f"{_offer(spec.hidden_mode, spec.last_mode, missed)}, in another --store (this one "
            "holds a plan and no rows: it may be deleted); --force captures nevertheless"
        )
    for line in missed:
        say(f"calibration: accepted by --force: {line}")
    return calibrations, record


def _offer(hidden_mode: str, last_mode: str, missed: Sequence[str]) -> str:
    """The options of the next more careful mode, for what missed its bound."""
    better = {"int4": "int8", "int8": "bf16"}
    options = []
    if any(text.startswith("layer") for text in missed):
        options.append(f"--hidden-mode {better[hidden_mode]}")
    if any(text.startswith("last") for text in missed):
        options.append(f"--last-mode {better[last_mode]}")
    return " ".join(options)


def chosen_samples(
    table: SampleTable, num_samples: int = NUM_SAMPLES
) -> tuple[list[int], list[int]]:
    """Samples to calibrate from and to judge by, evenly spread over the plan and its buckets.

    num_samples: of either, at most. Every domain has one at least to calibrate from. A plan too
    small for both is judged by the samples that it is calibrated from.
    """
    chosen = _spread(range(len(table)), num_samples)
    missing = set(range(len(table.domains))) - set(table.domain[chosen].tolist())
    firsts = [np.flatnonzero(table.domain == domain)[:1] for domain in sorted(missing)]
    chosen = sorted({*chosen, *(int(i) for found in firsts for i in found)})
    others = sorted(set(range(len(table))) - set(chosen))
    return chosen, _spread(others, num_samples) or chosen


def _spread(samples: Sequence[int], most: int) -> list[int]:
    places = np.linspace(0, len(samples) - 1, min(most, len(samples))).round()
    return [samples[int(place)] for place in np.unique(places)]


def _rows(
    store: Store,
    target: Target,
    samples: Sequence[int],
    beat: Callable[[], None],
    times: list[SampleTime],
) -> _Rows:
    """States of the samples, computed alone, at `calibration_positions`; bad samples left out."""
    spec, table = store.spec, store.table
    hidden: list[NDArray[np.float32]] = []
    last: list[NDArray[np.float32]] = []
    teachers = [teacher_positions(store.tokens(i)[1], spec.last_rows) for i in samples]
    positions = calibration_positions([int(table.num_tokens[i]) for i in samples])
    of_last = calibration_positions([len(teacher) for teacher in teachers])
    for i, position_N, teacher, place_M in zip(samples, positions, teachers, of_last, strict=True):
        beat()
        begin = time.perf_counter()
        ids_1T = torch.from_numpy(store.tokens(i)[0].astype(np.int64))[None].to(target.device)
        hidden_KBTH, last_BTH = target.forward(ids_1T)
        position = torch.from_numpy(position_N).to(target.device)
        states = torch.stack([layer[0].index_select(0, position) for layer in hidden_KBTH], 1)
        teacher_M = torch.from_numpy(teacher[place_M]).to(target.device)
        lasts = last_BTH[0].index_select(0, teacher_M)
        if not (_is_good(states) and _is_good(lasts)):
            continue
        hidden.append(states.float().cpu().numpy())
        last.append(lasts.float().cpu().numpy())
        times.append(SampleTime(int(table.num_tokens[i]), time.perf_counter() - begin))
    if not hidden:
        raise ValueError(
            f"none of {len(samples)} samples gives rows to calibrate from: they are not finite or "
            "all zero. The target may overflow target.dtype"
        )
    return _Rows(np.concatenate(hidden), np.concatenate(last) if spec.has_last else None)


def _is_good(states: torch.Tensor) -> bool:
    largest = states.abs().amax(dim=-1)
    return bool((torch.isfinite(largest) & (largest > 0)).all())
