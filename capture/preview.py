"""What `dflash capture --plan` says: samples, batches, shards and bytes of a capture to come."""

from __future__ import annotations

from dflash_pipeline.capture.counting import Planned, in_memory, mounts_of
from dflash_pipeline.capture.model import TargetFiles
from dflash_pipeline.capture.samples import Dropped, read
from dflash_pipeline.configs.foretold import room_lines
from dflash_pipeline.configs.schema import Run
from dflash_pipeline.configs.sizes import parse_size, size_text
from dflash_pipeline.store.build import estimate_bytes, shard_bytes
from dflash_pipeline.store.quota import check_quota, record_bytes
from dflash_pipeline.store.rows import row_bytes
from dflash_pipeline.store.table import HELD_OUT

# what the zarr.json files of a store take, and more
_METADATA_BYTES = 2**16
# proposed where the data are so few that a smaller share is none of them
_LARGER_HELDOUT = 0.2


def lines(
    run: Run, files: TargetFiles, kind: str, num_processes: int, num_workers: int
) -> list[str]:
    """All of it; nothing is written. `num_processes` may render at the same time.

    UsageError where a quota holds no shard for each of `num_workers`.
    """
    dropped = Dropped()
    conversations = read(run.data.files, run.data.limit, dropped)
    made = in_memory(run, files, kind, num_processes, conversations, dropped)
    told = [f"dropped {line}" for line in dropped.lines()]
    return told + _samples(run, made) + _batches(made) + _room(run, files, made, num_workers)


def _samples(run: Run, made: Planned) -> list[str]:
    table, spec = made.table, made.spec
    num_heldout = int((table.split == HELD_OUT).sum())
    told = [
        f"{len(table):,} samples ({num_heldout:,} held out), {int(table.num_tokens.sum()):,} "
        f"tokens, {made.num_supervised:,} supervised, layers {list(spec.layer_ids)} of "
        f"{spec.num_target_layers}"
    ]
    if not num_heldout and run.data.heldout < _LARGER_HELDOUT:
        told.append(
            "no sample is held out to measure the drafter on: to have some, "
            f"--set data.heldout={_LARGER_HELDOUT}"
        )
    return told


def _batches(made: Planned) -> list[str]:
    table, layout, plan = made.table, made.layout, made.plan
    told = []
    for bucket, bound in enumerate(layout.bucket_bounds):
        num_samples, num_shards = int((table.bucket == bucket).sum()), layout.num_shards[bucket]
        told.append(
            f"bucket {bucket}: to {bound:,} tokens, {num_samples:,} samples, {num_shards:,} shards"
        )
    padding = 1 - int(table.num_tokens.sum()) / plan.num_padded_tokens
    told.append(
        f"{plan.num_batches:,} batches of at most {layout.token_budget:,} tokens, "
        f"{100 * padding:.1f} % padding, {sum(layout.num_shards):,} shards"
    )
    return told


def _room(run: Run, files: TargetFiles, made: Planned, num_workers: int) -> list[str]:
    """What the store takes, and whether it has room."""
    spec, quota_bytes = made.spec, parse_size(run.capture.quota)
    per_token = spec.num_layers * row_bytes(spec.hidden_mode, spec.hidden_size)
    per_last = row_bytes(spec.last_mode, spec.hidden_size) if spec.has_last else 0
    total = size_text(estimate_bytes(spec, made.layout, made.table))
    mounts = mounts_of(run.store.path or ".", made)
    told = [
        f"{per_token:,} bytes a token and {per_last:,} a row of last: {total} in all, "
        f"{' + '.join(size_text(mount.free_bytes) for mount in mounts)} free",
        *room_lines(mounts, quota_bytes),
    ]
    if quota_bytes:
        told.append(_quota_line(run, files, made, quota_bytes, num_workers))
    return told


def _quota_line(
    run: Run, files: TargetFiles, made: Planned, quota_bytes: int, num_workers: int
) -> str:
    spec, layout, table = made.spec, made.layout, made.table
    shard_ids = layout.shard_ids()
    sizes = [shard_bytes(spec, layout, table, shard_id) for shard_id in shard_ids]
    # from above: what is proposed here must not be refused once the plan is written
    fixed = estimate_bytes(spec, layout, table) - sum(sizes) + _METADATA_BYTES
    fixed += 2 * record_bytes(spec, layout)
    fixed += sum(len(content) for content in files.files_for_store().values())
    if files.is_tied:
        # the head is the embedding, and is written once
        fixed -= 2 * spec.vocab_size * spec.hidden_size
    check_quota(quota_bytes, fixed, max(sizes), num_workers, run.store.path or "this capture")
    num_held = min((quota_bytes - fixed) * len(shard_ids) / sum(sizes), len(shard_ids))
    return (
        f"--quota {size_text(quota_bytes)} holds {num_held:,.0f} of {len(shard_ids):,} shards at a "
        "time"
    )
