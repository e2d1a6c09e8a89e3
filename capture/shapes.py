"""The shapes of the planned batches: what they are padded to, the extremes, the largest.

Letters: B sequences, T positions.
"""

from __future__ import annotations

from collections.abc import Sequence

from dflash_pipeline.capture.offload import BatchSizes
from dflash_pipeline.store.reader import Store
from dflash_pipeline.store.rows import row_bytes
from dflash_pipeline.store.spec import Layout
from dflash_pipeline.store.table import SampleTable

Shape = tuple[int, int]
"""Sequences B and padded length T of a batch."""


def shape_of(batch: slice, table: SampleTable, layout: Layout) -> Shape:
    """The shape of a batch of samples."""
    longest = int(table.num_tokens[batch].max())
    padded = -(-longest // layout.pad_multiple) * layout.pad_multiple
    return batch.stop - batch.start, padded


def planned_shapes(table: SampleTable, layout: Layout) -> list[list[Shape]]:
    """The shapes of all batches of a plan, a list for each bucket."""
    found: list[list[Shape]] = [[] for _ in layout.num_shards]
    for shard_id in layout.shard_ids():
        batches = table.batches_of(shard_id)
        found[shard_id.bucket] += [shape_of(batch, table, layout) for batch in batches]
    return found


def extremes(planned: Sequence[Sequence[Shape]]) -> list[Shape]:
    """The smallest and the largest shape of each bucket, largest first, each once."""
    shapes: set[Shape] = set()
    for found in planned:
        by_size = sorted(found, key=lambda shape: (shape[0] * shape[1], shape))
        shapes.update(by_size[:1] + by_size[-1:])
    return sorted(shapes, key=lambda shape: (-shape[0] * shape[1], shape))


def largest_batch(store: Store) -> BatchSizes:
    """What the buffers must hold: the largest of all planned batches in each respect."""
    table, layout, spec = store.table, store.layout, store.spec
    shapes = [shape for found in planned_shapes(table, layout) for shape in found]
    batches = [batch for one in layout.shard_ids() for batch in table.batches_of(one)]
    last_rows = max(int(table.num_teacher[batch].sum()) for batch in batches)
    return BatchSizes(
        num_places=max(count * width for count, width in shapes),
        num_sequences=max(count for count, _ in shapes),
        num_rows=max(int(table.num_tokens[batch].sum()) for batch in batches),
        num_last_rows=last_rows if spec.has_last else 0,
        num_layers=spec.num_layers,
        num_bounds=spec.num_amax,
        row_bytes=row_bytes(spec.hidden_mode, spec.hidden_size),
        last_row_bytes=row_bytes(spec.last_mode, spec.hidden_size) if spec.has_last else 0,
    )
