"""Reads every row of a shard: checksum of each chunk, then what the numbers must obey."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from dflash_pipeline.store import durable
from dflash_pipeline.store.bf16 import bf16_bits, bf16_to_float32
from dflash_pipeline.store.checksum import crc32c
from dflash_pipeline.store.commit import Commit
from dflash_pipeline.store.quantise import Calibration, decode_rotated
from dflash_pipeline.store.reader import Store
from dflash_pipeline.store.spec import ShardId

Bytes = NDArray[np.uint8]

_INFINITE = 0x7F80
# an e4m3 scale is rounded up by 1/16 at most
_SLACK = 1.07
_ZERO, _NOT_FINITE, _TOO_LARGE = (
    "an all-zero row",
    "NaN or Inf",
    "larger values than its capture saw",
)


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
    amax_L = record.amax[: store.spec.num_layers] if is_hidden else record.amax[-1:]
    bound_L = bf16_to_float32(bf16_bits(amax_L))
    calibrations = store.calibration.hidden if is_hidden else store.calibration.last
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
        rows_NKR = buffer.reshape(shape.chunk_rows, len(bound_L), -1)
        good = is_good[chunk * shape.chunk_rows : (chunk + 1) * shape.chunk_rows]
        where = f"{name} (shard {shard_id}): chunk {chunk}"
        if rows_NKR[~good].any():
            yield f"{where} holds rows of a bad sample, or padding that is not zero"
        faults = set()
        for layer, bound in enumerate(bound_L):
            if calibrations:
                faults |= _quantised_faults(rows_NKR[good, layer], bound, calibrations[layer])
            else:
                faults |= _bf16_faults(rows_NKR[good, layer], bound)
        yield from (f"{where} holds {fault}" for fault in sorted(faults))


def _bf16_faults(rows_NR: Bytes, bound: np.float32) -> set[str]:
    faults = set()
    size_NH = rows_NR.view("<u2") & 0x7FFF
    peak_N = size_NH.max(axis=1, initial=0)
    if (peak_N == 0).any():
        faults.add(_ZERO)
    peak = peak_N.max(initial=0)
    if peak >= _INFINITE:
        faults.add(_NOT_FINITE)
    elif bf16_to_float32(peak) > bound:
        faults.add(_TOO_LARGE)
    return faults


def _quantised_faults(rows_NR: Bytes, bound: np.float32, calibration: Calibration) -> set[str]:
    """Judges the rotated values: their largest is `block * encode_factor` times that of a row."""
    faults = set()
    # a record of zeros is the centre itself, which no state is
    if not rows_NR.any(axis=1).all():
        faults.add(_ZERO)
    y_NH, kept_Nk = decode_rotated(rows_NR, calibration)
    if not (np.isfinite(y_NH).all() and np.isfinite(kept_Nk).all()):
        return faults | {_NOT_FINITE}
    centre = np.abs(bf16_to_float32(calibration.centre_H)).max()
    y_bound = _SLACK * calibration.block * calibration.encode_factor * (bound + centre)
    if np.abs(kept_Nk).max(initial=0) > bound or np.abs(y_NH).max(initial=0) > y_bound:
        faults.add(_TOO_LARGE)
    return faults


def _good_rows(store: Store, shard_id: ShardId, kind: str, record: Commit) -> NDArray[np.bool_]:
    """Whether each row of the shard's chunks belongs to a good sample; padding does not."""
    samples, table = store.table.of_shard(shard_id), store.table
    counts = (table.num_tokens if kind == "hidden" else table.num_teacher)[samples]
    rows = np.repeat(record.states[: len(counts)] == 0, counts)
    is_good = np.zeros(store.layout.rows_per_shard, bool)
    is_good[: len(rows)] = rows
    return is_good
