"""Reads every row of a shard: checksum of each chunk, then what the numbers must obey."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from dflash_pipeline.store import durable
from dflash_pipeline.store.checksum import crc32c
from dflash_pipeline.store.commit import Commit
from dflash_pipeline.store.reader import Store
from dflash_pipeline.store.rows import bf16_bits, bf16_to_float32
from dflash_pipeline.store.spec import ShardId

_INFINITE = 0x7F80


def check_rows(
    store: Store, shard_id: ShardId, kind: str, record: Commit, descriptor: int, name: str
) -> Iterator[str]:
    """Faults of an open shard file, by chunk.

    Good rows are finite and not all zero, and at most as large as the capture saw; rows of bad
    samples and the padding at the end are zero.
    """
    is_hidden = kind == "hidden"
    shape = store.hidden_shape if is_hidden else store.last_shape
    assert shape is not None
    crcs = record.hidden_crcs if is_hidden else record.last_crcs
    amax = record.amax[: store.spec.num_layers] if is_hidden else record.amax[-1:]
    bound = bf16_to_float32(bf16_bits(amax))
    is_good = _good_rows(store, shard_id, kind, record)
    buffer = np.empty(shape.chunk_bytes, np.uint8)
    for chunk, expected in enumerate(crcs):
        place = chunk * shape.chunk_bytes
        durable.read_all(descriptor, buffer, place)
        # what was read once for a check shall not push the trainer's data out of memory
        os.posix_fadvise(descriptor, place, shape.chunk_bytes, os.POSIX_FADV_DONTNEED)
        if crc32c(buffer) != int(expected):
            yield f"{name} (shard {shard_id}): chunk {chunk} does not match its checksum"
            continue
        size = buffer.view("<u2").reshape(shape.chunk_rows, -1, store.spec.hidden_size) & 0x7FFF
        peak_NK = size.max(2)
        good = is_good[chunk * shape.chunk_rows : (chunk + 1) * shape.chunk_rows]
        where = f"{name} (shard {shard_id}): chunk {chunk}"
        if (peak_NK[good] == 0).any():
            yield f"{where} holds an all-zero row"
        if peak_NK[~good].any():
            yield f"{where} holds rows of a bad sample, or padding that is not zero"
        peak_K = peak_NK[good].max(0, initial=0)
        if (peak_K >= _INFINITE).any():
            yield f"{where} holds NaN or Inf"
        elif (bf16_to_float32(peak_K) > bound).any():
            yield f"{where} holds larger values than its capture saw"


def _good_rows(store: Store, shard_id: ShardId, kind: str, record: Commit) -> NDArray[np.bool_]:
    """Whether each row of the shard's chunks belongs to a good sample; padding does not."""
    samples, table = store.table.of_shard(shard_id), store.table
    counts = (table.num_tokens if kind == "hidden" else table.num_teacher)[samples]
    rows = np.repeat(record.states[: len(counts)] == 0, counts)
    is_good = np.zeros(store.layout.rows_per_shard, bool)
    is_good[: len(rows)] = rows
    return is_good
