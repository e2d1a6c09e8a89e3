"""How much work the data are: the first part of `dflash plan`, which needs no device.

The plan of the capture is made as the capture makes it, in memory: what is counted is exact. Its
table is kept for training's part, whose batches follow from it.
Letters: B sequences, T positions.
"""

from __future__ import annotations

import heapq
import json
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from dflash_pipeline.capture.batches import Int
from dflash_pipeline.capture.calibrating import chosen_samples as calibration_samples
from dflash_pipeline.capture.compiled import is_wanted
from dflash_pipeline.capture.construction import Arranged, arranged, fill_checked, store_spec
from dflash_pipeline.capture.gate import chosen_samples
from dflash_pipeline.capture.model import TargetFiles
from dflash_pipeline.capture.samples import Conversation, Dropped, hash64, read
from dflash_pipeline.capture.shapes import extremes, planned_shapes
from dflash_pipeline.capture.spool import Spool
from dflash_pipeline.configs.costs import CaptureWork, Mount
from dflash_pipeline.configs.disk import nearest, write_whole, writing
from dflash_pipeline.configs.mounts import split
from dflash_pipeline.configs.schema import Run
from dflash_pipeline.store import durable, stripes
from dflash_pipeline.store.build import estimate_bytes, shard_bytes
from dflash_pipeline.store.rows import row_bytes
from dflash_pipeline.store.spec import StoreSpec
from dflash_pipeline.store.table import HELD_OUT, SampleTable, claim_order


@dataclass(frozen=True, slots=True)
class Planned(Arranged):
    """A plan in memory, and the store that it is of."""

    spec: StoreSpec
    num_supervised: int
    """Tokens."""


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
    run: Run, files: TargetFiles, kind: str, num_processes: int, sampled: Sampled
) -> tuple[CaptureWork, SampleTable]:
    """What the whole capture is on devices of this kind (cuda or cpu), and its samples in plan
    order. `num_processes` may render at the same time."""
    begin, dropped = time.monotonic(), Dropped()
    conversations = sampled.through(read(run.data.files, run.data.limit, dropped))
    made = in_memory(run, files, kind, num_processes, conversations, dropped)
    read_s, spec = time.monotonic() - begin, made.spec
    table, layout = made.table, made.layout
    by_bucket = planned_shapes(table, layout)
    # nothing is warmed on a CPU
    warmed = extremes(by_bucket) if kind == "cuda" else []
    token_bytes = spec.num_layers * row_bytes(spec.hidden_mode, spec.hidden_size)
    last_bytes = row_bytes(spec.last_mode, spec.hidden_size) if spec.has_last else 0
    num_tokens = int(table.num_tokens.sum())
    made_from, judged_by = calibration_samples(table) if spec.is_quantised else ([], [])
    calibrated = judged_by if run.capture.calibration_from else made_from + judged_by
    first = table.of_shard(claim_order(layout.num_shards)[0])
    gated = range(first.start, first.stop)
    work = CaptureWork(
        num_samples=len(table),
        num_heldout=int((table.split == HELD_OUT).sum()),
        num_tokens=num_tokens,
        num_supervised=made.num_supervised,
        num_padded=made.plan.num_padded_tokens,
        store_bytes=estimate_bytes(spec, layout, table),
        rows_bytes=token_bytes * num_tokens + last_bytes * int(table.num_teacher.sum()),
        mounts=mounts_of(run.store.path, made),
        read_s=read_s,
        batches=_sums([amounts(*shape) for shapes in by_bucket for shape in shapes], 3),
        warm_batches=_sums([amounts(*shape) for shape in warmed], 3),
        calibrated=_alone(table, calibrated),
        gated=_alone(table, chosen_samples(gated, run.capture.gate_samples)),
        answer_steps=answer_steps(table.num_anchors, run.generate.batch_size)
        * run.generate.samples,
        is_compiled=is_wanted(run.capture.compile, kind, run.target.num_gpus > 1, num_tokens),
    )
    return work, table


def in_memory(
    run: Run,
    files: TargetFiles,
    kind: str,
    num_processes: int,
    conversations: Iterable[Conversation],
    dropped: Dropped,
) -> Planned:
    """The plan of the capture as the capture makes it, written nowhere. ValueError where too many
    rows are unusable."""
    with Spool(None, run.store.last_rows) as spool:
        fill_checked(spool, run, files, conversations, dropped, num_processes)
        spec = store_spec(run, files, kind, "not read")
        made = arranged(spool, spec, run)
        return Planned(made.plan, made.layout, made.table, spec, spool.num_supervised)


def mounts_of(store: str, made: Planned) -> list[Mount]:
    """What each directory that a store is written as would take, its own first."""
    spec = made.spec
    paths = [Path(path).absolute() for path in split(store)]
    turns = stripes.elsewhere(made.layout, len(paths))
    needed = [0] * len(paths)
    for shard_id, turn in turns.items():
        needed[turn] += shard_bytes(spec, made.layout, made.table, shard_id)
    needed[0] = estimate_bytes(spec, made.layout, made.table) - sum(needed)
    found = []
    for path, needed_bytes in zip(paths, needed, strict=True):
        folder = nearest(path)
        found.append(
            Mount(
                path=str(path),
                needed_bytes=needed_bytes,
                free_bytes=durable.free_bytes(folder),
                device_id=folder.stat().st_dev,
            )
        )
    return found


def keep_table(table: SampleTable, folder: Path) -> None:
    """Leave a table for `train/measure.py`: samples.npz, and names.json beside it."""
    columns: dict[str, Any] = table.columns()
    with writing(folder / "samples.npz"):
        np.savez(folder / "samples.npz", **columns)
    names = {"domains": table.domains, "sources": table.sources}
    write_whole(folder / "names.json", json.dumps(names).encode())


def amounts(num_sequences: int, width: int) -> list[float]:
    """What a batch's time may depend on: that it is one, its places, its pairs of places."""
    places = num_sequences * width
    return [1.0, float(places), float(places * width)]


def amounts_alone(num_tokens: int) -> list[float]:
    """What the time of a sample that is computed alone depends on: that it is one, its tokens."""
    return [1.0, float(num_tokens)]


def _alone(table: SampleTable, samples: Sequence[int]) -> list[float]:
    return _sums([amounts_alone(int(table.num_tokens[i])) for i in samples], 2)


def _sums(rows: list[list[float]], size: int) -> list[float]:
    return [sum(column) for column in zip([0.0] * size, *rows, strict=True)]


def answer_steps(num_tokens_M: Int, batch_size: int) -> float:
    """Steps of generating answers of these lengths in batches: the longest of each batch counts.

    The longest of `batch_size` drawn at random is expected; whole batches are assumed.
    """
    size = min(batch_size, len(num_tokens_M))
    share = (np.arange(len(num_tokens_M) + 1) / len(num_tokens_M)) ** size
    longest = float((np.sort(num_tokens_M) * np.diff(share)).sum())
    return longest * len(num_tokens_M) / size
