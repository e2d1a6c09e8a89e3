"""The planned batch shapes, and one forward of each extreme before the clock starts.

Kernels are chosen, tuned and loaded at a shape's first use, and the allocator grows to its largest:
all of that belongs here, in the main thread, not into the first batches.
"""

from __future__ import annotations

import torch

from dflash_pipeline.capture.offload import BatchSizes
from dflash_pipeline.capture.target import Target
from dflash_pipeline.store.reader import Store
from dflash_pipeline.store.rows import row_bytes
from dflash_pipeline.store.spec import Layout


def num_positions(longest: int, layout: Layout) -> int:
    """Padded length T of a batch whose longest sequence has `longest` tokens."""
    return -(-longest // layout.pad_multiple) * layout.pad_multiple


def largest_batch(store: Store) -> BatchSizes:
    """What the buffers must hold: the largest of all planned batches in each respect."""
    table, spec = store.table, store.spec
    places = sequences = rows = last_rows = 0
    for shard_id in store.layout.shard_ids():
        for batch in table.batches_of(shard_id):
            count = batch.stop - batch.start
            longest = int(table.num_tokens[batch].max())
            places = max(places, count * num_positions(longest, store.layout))
            sequences = max(sequences, count)
            rows = max(rows, int(table.num_tokens[batch].sum()))
            last_rows = max(last_rows, int(table.num_teacher[batch].sum()))
    return BatchSizes(
        num_places=places,
        num_sequences=sequences,
        num_rows=rows,
        num_last_rows=last_rows if spec.has_last else 0,
        num_layers=spec.num_layers,
        num_bounds=spec.num_amax,
        row_bytes=row_bytes(spec.hidden_mode, spec.hidden_size),
        last_row_bytes=row_bytes(spec.last_mode, spec.hidden_size) if spec.has_last else 0,
    )


def planned_shapes(store: Store) -> list[tuple[int, int]]:
    """The smallest and the largest [B, T] of each bucket, largest first, each once."""
    shapes: set[tuple[int, int]] = set()
    for bucket in range(len(store.layout.num_shards)):
        found = [
            (
                batch.stop - batch.start,
                num_positions(int(store.table.num_tokens[batch].max()), store.layout),
            )
            for shard_id in store.layout.shard_ids()
            if shard_id.bucket == bucket
            for batch in store.table.batches_of(shard_id)
        ]
        by_size = sorted(found, key=lambda shape: (shape[0] * shape[1], shape))
        shapes.update(by_size[:1] + by_size[-1:])
    return sorted(shapes, key=lambda shape: (-shape[0] * shape[1], shape))


def warm_up(target: Target, shapes: list[tuple[int, int]]) -> None:
    """One forward of each shape on CUDA; on a CPU there is nothing to warm.

    A shape that does not fit is left to the capture, which halves it.
    """
    if target.device.type != "cuda":
        return
    for shape in shapes:
        try:
            ids_BT = torch.zeros(shape, dtype=torch.int64, device=target.device)
            target.run(ids_BT, lambda _place, _hidden_BTH: None)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
    torch.cuda.synchronize(target.device)
