"""From conversations to a published store without hidden states: everything that the plan fixes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dflash_pipeline.capture import sources
from dflash_pipeline.capture.arguments import template_arguments_text
from dflash_pipeline.capture.batches import Plan, plan
from dflash_pipeline.capture.model import TargetFiles, embedding_and_head
from dflash_pipeline.capture.samples import Conversation, Dropped
from dflash_pipeline.capture.spool import Spool, fill
from dflash_pipeline.configs.errors import UsageError
from dflash_pipeline.configs.load import to_dict
from dflash_pipeline.configs.mounts import split
from dflash_pipeline.configs.place import dtype_name
from dflash_pipeline.configs.schema import CaptureConfig, Run
from dflash_pipeline.configs.sizes import parse_size
from dflash_pipeline.store import stripes
from dflash_pipeline.store.build import StoreBuilder, shard_bytes
from dflash_pipeline.store.durable import check_space
from dflash_pipeline.store.reader import Store
from dflash_pipeline.store.rows import row_bytes
from dflash_pipeline.store.spec import CHUNK_ROWS, FORMAT, Attributes, Layout, StoreSpec
from dflash_pipeline.store.table import SampleTable, build_table


class NothingLeftError(ValueError):
    """No row of the data gave a sample; the text has the reasons."""


@dataclass(frozen=True, slots=True)
class Arranged:
    """A plan in the store's terms."""

    plan: Plan
    layout: Layout
    table: SampleTable


@dataclass(slots=True)
class Spent:
    """Seconds of building a store that grow with the data."""

    render_s: float = 0.0
    """Of reading and rendering the conversations."""
    tokens_s: float = 0.0
    """Of keeping their tokens in the store."""


def store_spec(run: Run, files: TargetFiles, kind: str, weight_hash: str) -> StoreSpec:
    """The identity of the store that this run asks for; `kind` is cuda or cpu.

    UsageError for int8 or int4 rows of a width that has no blocks for them.
    """
    is_quantised = bool({run.store.hidden_mode, run.store.last_mode} & {"int8", "int4"})
    if is_quantised and files.hidden_size % 16:
        raise UsageError(
            f"target {files.name} has hidden size {files.hidden_size}, which is not a multiple of "
            "16: store its rows as bf16 (--hidden-mode bf16 --last-mode bf16), not as int8 or int4"
        )
    return StoreSpec(
        format=FORMAT,
        target_id=Path(files.name).name,
        target_hash=weight_hash,
        target_dtype=dtype_name(run.target.dtype, kind),
        quantisation=files.quantisation,
        layer_ids=files.layer_ids(run.target),
        num_target_layers=files.num_layers,
        hidden_size=files.hidden_size,
        vocab_size=files.vocab_size,
        hidden_mode=run.store.hidden_mode,
        last_mode=run.store.last_mode,
        last_rows=run.store.last_rows,
        calibration_hash="",
        tokenizer_hash=files.tokenizer_hash(),
        template_hash=files.template_hash(),
        template_args=template_arguments_text(run.target),
        max_len=run.data.max_len,
        overlong=run.data.overlong,
    )


def arranged(spool: Spool, spec: StoreSpec, run: Run) -> Arranged:
    """Buckets, batches and shards of the spooled samples, and their table."""
    capture: CaptureConfig = run.capture
    token_bytes = spec.num_layers * row_bytes(spec.hidden_mode, spec.hidden_size)
    found = plan(
        spool.column("num_tokens"),
        num_buckets=capture.num_buckets,
        token_budget=capture.token_budget,
        pad_multiple=capture.pad_multiple,
        shard_rows=-(-run.store.shard_bytes // token_bytes),
        seed=capture.seed,
    )
    layout = Layout(
        # no larger than the fullest shard: a small data set makes a small store
        rows_per_shard=-(-found.num_rows_per_shard_max // CHUNK_ROWS) * CHUNK_ROWS,
        chunk_rows=CHUNK_ROWS,
        token_budget=capture.token_budget,
        pad_multiple=capture.pad_multiple,
        bucket_bounds=found.bucket_bounds,
        num_shards=found.num_shards,
        num_samples_per_shard_max=found.num_samples_per_shard_max,
        seed=capture.seed,
    )
    columns = {name: spool.column(name)[found.order_M] for name in spool.columns}
    columns |= {"bucket": found.bucket_M, "shard": found.shard_M, "batch": found.batch_M}
    # short names: the same data elsewhere is the same plan
    names = sources.stems(run.data.files)
    keys = [spool.keys[i] for i in found.order_M]
    table = build_table(keys, columns, layout, spool.domains, names)
    return Arranged(found, layout, table)


def build_store(
    run: Run,
    files: TargetFiles,
    kind: str,
    conversations: Iterable[Conversation],
    dropped: Dropped,
    data_hash: str,
    num_processes: int,
    say: Callable[[str], None],
    spent: Spent | None = None,
) -> Store:
    """Plan all conversations and publish the store at `run.store.path`, its shards still missing.

    `data_hash` is kept with the store, `num_processes` may render at the same time, `spent` is
    filled in. Raises ValueError when too many rows are unusable, none is left, or the disk has no
    room.
    """
    spent = spent or Spent()
    path, *mounts = map(Path, split(run.store.path))
    stripes.check_free(mounts)
    path.parent.mkdir(parents=True, exist_ok=True)
    # beside the store: room for all tokens is where the store will be
    with Spool(path.parent, run.store.last_rows) as spool:
        begin = time.perf_counter()
        fill_checked(spool, run, files, conversations, dropped, num_processes)
        spent.render_s = time.perf_counter() - begin
        for line in dropped.lines():
            say(f"dropped {line}")
        spec = store_spec(run, files, kind, files.weight_hash())
        made = arranged(spool, spec, run)
        attributes = Attributes(
            data_hash=data_hash,
            mask_token_id=files.mask_token_id(run.target),
            dropped=dict(sorted(dropped.counts.items())),
            run=dict(to_dict(run)),
        )
        quota_bytes = parse_size(run.capture.quota)
        # shards take turns, so no mount holds more than its part of a quota
        most_bytes = -(-quota_bytes // (len(mounts) + 1))
        turns = stripes.elsewhere(made.layout, len(mounts) + 1)
        sizes = {i: shard_bytes(spec, made.layout, made.table, i) for i in turns}
        for number, mount in enumerate(mounts, start=1):
            share_bytes = sum(sizes[i] for i, turn in turns.items() if turn == number)
            check_space(mount, min(share_bytes, most_bytes or share_bytes))
        with StoreBuilder(
            path,
            spec,
            made.layout,
            made.table,
            attributes,
            quota_bytes,
            elsewhere_bytes=sum(sizes.values()),
        ) as builder:
            embed_VH, head_VH = embedding_and_head(files)
            builder.write_target(embed_VH, head_VH, files.files_for_store())
            begin = time.perf_counter()
            for shard_id in made.layout.shard_ids():
                samples = made.table.of_shard(shard_id)
                parts = [spool.tokens(int(i)) for i in made.plan.order_M[samples]]
                ids_N, mask_N = (np.concatenate(part) for part in zip(*parts, strict=True))
                builder.write_tokens(shard_id, ids_N, mask_N)
            spent.tokens_s = time.perf_counter() - begin
            return builder.publish(
                lambda directory: stripes.lay(directory, mounts, spec, made.layout)
            )


def fill_checked(
    spool: Spool,
    run: Run,
    files: TargetFiles,
    conversations: Iterable[Conversation],
    dropped: Dropped,
    num_processes: int,
) -> None:
    """Render all conversations into the spool. Raises ValueError when too many are unusable."""
    fill(
        spool,
        conversations,
        files.tokenizer(),
        run.target,
        files.vocab_size,
        run.data,
        num_processes,
        dropped,
    )
    dropped.check(run.data.max_bad_share)
    if len(spool) == 0:
        reasons = "; ".join(dropped.lines()) or "the files hold no rows"
        raise NothingLeftError(
            f"nothing to capture: no sample in {', '.join(run.data.files)}: {reasons}"
        )
