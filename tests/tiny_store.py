"""Tiny stores of deterministic random rows: two buckets, three layers of width 8, shards of 512.

A plain module, so that the processes which tests start and kill can import it without pytest.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dflash_pipeline.store.bf16 import bf16_bits, bf16_to_float32
from dflash_pipeline.store.build import StoreBuilder, plan_lock
from dflash_pipeline.store.calibration import Calibrated, Calibrations, calibrate
from dflash_pipeline.store.completion import publish_calibration
from dflash_pipeline.store.lease import Lease, Leases
from dflash_pipeline.store.reader import Store
from dflash_pipeline.store.rows import encode
from dflash_pipeline.store.spec import CHUNK_ROWS, FORMAT, Attributes, Layout, StoreSpec
from dflash_pipeline.store.table import (
    SampleTable,
    build_table,
    hash64,
    teacher_positions,
    valid_anchors,
)
from dflash_pipeline.store.writer import StoreWriter

PLAIN = Calibrated()
BOUNDS, ROWS, VOCAB, WIDTH = (60, 200), 512, 97, 8


def make_spec(**changes: Any) -> StoreSpec:
    values: dict[str, Any] = {
        "format": FORMAT,
        "target_id": "tiny",
        "target_hash": "feed",
        "target_dtype": "fp32",
        "quantisation": "",
        "layer_ids": (1, 3, 5),
        "num_target_layers": 8,
        "hidden_size": WIDTH,
        "vocab_size": VOCAB,
        "hidden_mode": "bf16",
        "last_mode": "bf16",
        "last_rows": "teacher",
        "calibration_hash": "",
        "tokenizer_hash": "t0",
        "template_hash": "t1",
        "template_args": json.dumps({"thinking": "default"}),
        "max_len": 200,
        "overlong": "truncate",
    }
    return StoreSpec(**(values | changes))


def tokens(number: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Ids and mask of the sample of this number: the first third is prompt."""
    ids_T = np.random.default_rng(number).integers(0, VOCAB, length, np.uint32)
    mask_T = (np.arange(length) >= length // 3).astype(np.uint8)
    return ids_T, mask_T


@dataclass
class Plan:
    spec: StoreSpec
    layout: Layout
    table: SampleTable
    attributes: Attributes
    numbers: list[int]
    """Number of each sample, in plan order; `tokens` and `rows` follow from it."""

    def tokens_of(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        return tokens(self.numbers[i], int(self.table.num_tokens[i]))

    def rows_of(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        """Values float32 [T, K, H] and [M, H], exact in bf16."""
        _, mask_T = self.tokens_of(i)
        random = np.random.default_rng([7, self.numbers[i]])
        shape = (len(mask_T), self.spec.num_layers, self.spec.hidden_size)
        hidden_TKH = random.standard_normal(shape, np.float32)
        last_TH = random.standard_normal(shape[::2], np.float32)
        last_MH = last_TH[teacher_positions(mask_T, self.spec.last_rows)]
        return _bf16(hidden_TKH), _bf16(last_MH)


def _bf16(values: np.ndarray) -> np.ndarray:
    return bf16_to_float32(bf16_bits(values))


def make_plan(
    num_samples: int,
    *,
    rows: int = ROWS,
    chunk_rows: int = CHUNK_ROWS,
    offset: int = 0,
    **spec_changes: Any,
) -> Plan:
    """Samples of 4 to 200 tokens in batches of 3 at most and shards of what fits into `rows`.

    Their numbers begin at `offset`.
    """
    spec = make_spec(**spec_changes)
    lengths = np.random.default_rng(num_samples).integers(4, 200, num_samples)
    placed: list[tuple[int, int, int, int]] = []
    num_shards, most = [], []
    for bucket, bound in enumerate(BOUNDS):
        low = BOUNDS[bucket - 1] if bucket else 0
        mine = [i for i in range(num_samples) if low < lengths[i] <= bound]
        shard = batch = used = 0
        size_of_batch = 3 if rows > 2 * bound else 1
        for first in range(0, len(mine), size_of_batch):
            group = mine[first : first + size_of_batch]
            size = int(lengths[group].sum())
            if used + size > rows:
                shard, batch, used = shard + 1, 0, 0
            placed += [(bucket, shard, batch, i) for i in group]
            batch, used = batch + 1, used + size
        counts = [sum(p[:2] == (bucket, s) for p in placed) for s in range(shard + 1)]
        num_shards.append(shard + 1 if mine else 0)
        most.append(max(1, *counts))
    layout = Layout(
        rows_per_shard=rows,
        chunk_rows=chunk_rows,
        token_budget=600,
        pad_multiple=8,
        bucket_bounds=BOUNDS,
        num_shards=tuple(num_shards),
        num_samples_per_shard_max=tuple(most),
        seed=0,
    )
    numbers = [offset + p[3] for p in placed]
    pairs = [tokens(n, int(lengths[n - offset])) for n in numbers]
    columns = {
        "source": [0 for _ in numbers],
        "source_row": numbers,
        "domain": [n % 2 for n in numbers],
        "split": [int(n % 5 == 0) for n in numbers],
        "num_tokens": [len(ids) for ids, _ in pairs],
        "num_teacher": [len(teacher_positions(mask, spec.last_rows)) for _, mask in pairs],
        "num_anchors": [len(valid_anchors(mask)) for _, mask in pairs],
        "token_hash": [hash64(ids.tobytes()) for ids, _ in pairs],
        "bucket": [p[0] for p in placed],
        "shard": [p[1] for p in placed],
        "batch": [p[2] for p in placed],
    }
    keys = [f"sample-{n}-é" for n in numbers]
    table = build_table(keys, columns, layout, ("chat", "code"), ("data.jsonl",))
    attributes = Attributes(
        data_hash="d0", mask_token_id=96, dropped={"empty": 2}, run={"target": {"id": "tiny"}}
    )
    return Plan(spec, layout, table, attributes, numbers)


def build(plan: Plan, path: Path) -> Store:
    """A store with nothing captured yet."""
    shape = (VOCAB, plan.spec.hidden_size)
    embed_VH = np.arange(np.prod(shape), dtype=np.uint16).reshape(shape)
    files = {"config.json": b'{"model_type": "tiny"}', "empty.txt": b""}
    with (
        plan_lock(path, wait_s=10),
        StoreBuilder(path, plan.spec, plan.layout, plan.table, plan.attributes, 0) as builder,
    ):
        builder.write_target(embed_VH, embed_VH[::-1], files)
        for shard_id in plan.layout.shard_ids():
            samples = range(len(plan.table))[plan.table.of_shard(shard_id)]
            parts = [plan.tokens_of(i) for i in samples]
            ids_N, mask_N = (np.concatenate(list(part)) for part in zip(*parts, strict=True))
            builder.write_tokens(shard_id, ids_N, mask_N)
        return builder.publish()


def calibration_of(plan: Plan) -> Calibrations:
    """From all rows of the plan."""
    parts = [plan.rows_of(i) for i in range(len(plan.table))]
    hidden_NKH, last_NH = (np.concatenate(list(part)) for part in zip(*parts, strict=True))
    last = last_NH if plan.spec.has_last else None
    return calibrate(hidden_NKH, last, plan.spec.hidden_mode, plan.spec.last_mode)


def complete(plan: Plan, store: Store) -> Store:
    """The store, calibrated."""
    with Leases(store.path, plan.layout, heartbeat_s=0.1, hung_s=60) as leases:
        lease = leases.claim(store.is_open, max_failures=3)
        assert lease is not None
        return publish_calibration(store, calibration_of(plan), {"layers": []}, lease)


def put_shard(
    plan: Plan,
    writer: StoreWriter,
    lease: Lease,
    pause_s: float = 0.0,
    calibrated: Calibrated = PLAIN,
) -> np.ndarray:
    """Begin a shard and put its rows batch by batch; the amax of its layers."""
    writer.begin(lease)
    spec = plan.spec
    amax = np.zeros(plan.spec.num_amax, np.float32)
    for samples in plan.table.batches_of(lease.shard_id):
        parts = [plan.rows_of(i) for i in range(len(plan.table))[samples]]
        hidden_NKH, last_MH = (np.concatenate(list(part)) for part in zip(*parts, strict=True))
        peaks = [*np.abs(hidden_NKH).max((0, 2)), np.abs(last_MH).max(initial=0)]
        amax = np.maximum(amax, peaks[: len(amax)])
        hidden_NKR = encode(hidden_NKH, spec.hidden_mode, calibrated.hidden)
        last_MR = encode(last_MH, spec.last_mode, calibrated.last) if spec.has_last else None
        writer.put(hidden_NKR, last_MR, lambda: None)
        time.sleep(pause_s)
    return amax


def capture(
    plan: Plan,
    store: Store,
    hung_s: float = 60.0,
    pause_s: float = 0.0,
    most: int = 1 << 30,
    bad: Mapping[int, str] | None = None,
) -> int:
    """Write each open shard that is free, at most `most`; how many.

    `bad`: samples without good rows, and why.
    """
    count, clipped = 0, np.zeros(plan.spec.num_amax, np.uint32)
    with (
        Leases(store.path, plan.layout, heartbeat_s=0.1, hung_s=hung_s) as leases,
        StoreWriter(store, leases, depth=2) as writer,
    ):
        leases.sweep()
        while count < most and (lease := leases.claim(store.is_open, max_failures=3)):
            amax = put_shard(plan, writer, lease, pause_s, store.calibration)
            samples = range(len(plan.table))[plan.table.of_shard(lease.shard_id)]
            mine = {i: reason for i, reason in (bad or {}).items() if i in samples}
            writer.finish(amax, clipped, mine, halved=False)
            writer.commit()
            count += 1
    store.refresh()
    return count


def digest(path: Path) -> dict[str, str]:
    """sha256 of each file of a store."""
    return {
        str(file.relative_to(path)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(path.rglob("*"))
        if file.is_file()
    }
