"""The plan as columns: one entry a sample, sorted so that the samples of a shard stand together.

Trap: a sample's number i is its place in this order, not its place in the data; `key(i)` is the
lasting name.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dflash_pipeline.store.spec import Layout, ShardId

Array = NDArray[Any]

COLUMNS: dict[str, str] = {
    "sample_id": "<u8",
    "source": "<i4",
    "source_row": "<i8",
    "domain": "<i4",
    "split": "|u1",
    "num_tokens": "<i4",
    "num_teacher": "<i4",
    "num_anchors": "<i4",
    "token_hash": "<u8",
    "bucket": "<i2",
    "shard": "<i4",
    "batch": "<i4",
    "start": "<i8",
    "last_start": "<i8",
}
"""Fixed-width columns and their types on disk."""
KEY_COLUMNS: dict[str, str] = {"key_bytes": "|u1", "key_end": "<i8"}
"""The keys: their utf-8 bytes one after another, and where each ends."""
TRAIN, HELD_OUT = 0, 1
"""Values of `split`."""


def hash64(data: bytes) -> int:
    """64-bit hash used for `sample_id` (of the key) and `token_hash` (of the uint32 ids)."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def claim_order(num_shards: Sequence[int]) -> tuple[ShardId, ...]:
    """All shards, buckets interleaved so that each prefix holds about the same share of each.

    Shard s of n stands at (s + 1/2) / n, so whatever is committed first is even in length.
    """
    return _claim_order(tuple(num_shards))


# a follower asks for it every second
@functools.lru_cache(maxsize=8)
def _claim_order(num_shards: tuple[int, ...]) -> tuple[ShardId, ...]:
    bucket = np.repeat(np.arange(len(num_shards)), num_shards)
    shard = np.concatenate([np.arange(num) for num in num_shards])
    order = np.lexsort((bucket, (shard + 0.5) / np.asarray(num_shards)[bucket]))
    return tuple(map(ShardId, bucket[order].tolist(), shard[order].tolist()))


def valid_anchors(mask_T: Array) -> Array:
    """Positions a with mask[a] and mask[a + 1], int64 [A]: a block may start there."""
    supervised = np.asarray(mask_T) != 0
    return np.flatnonzero(supervised[:-1] & supervised[1:])


def teacher_positions(mask_T: Array, last_rows: str) -> Array:
    """Positions whose `last` is stored, int64 [M]: those whose next token is supervised, or all."""
    if last_rows == "all":
        return np.arange(len(mask_T))
    return np.flatnonzero(np.asarray(mask_T)[1:])


@dataclass(frozen=True, eq=False)
class SampleTable:
    """The columns of the plan; see COLUMNS. `start` and `last_start` are rows of the bucket."""

    sample_id: Array
    source: Array
    source_row: Array
    domain: Array
    split: Array
    num_tokens: Array
    num_teacher: Array
    num_anchors: Array
    token_hash: Array
    bucket: Array
    shard: Array
    batch: Array
    start: Array
    last_start: Array
    key_bytes: Array
    key_end: Array
    domains: tuple[str, ...] = field(default=())
    sources: tuple[str, ...] = field(default=())

    def __len__(self) -> int:
        return len(self.sample_id)

    def columns(self) -> dict[str, Array]:
        """All columns, keys included, by name."""
        return {name: getattr(self, name) for name in (*COLUMNS, *KEY_COLUMNS)}

    def key(self, i: int) -> str:
        """The sample's key."""
        begin = int(self.key_end[i - 1]) if i > 0 else 0
        return bytes(self.key_bytes[begin : int(self.key_end[i])]).decode()

    def find(self, key: str) -> int:
        """The number of the sample with this key; KeyError if there is none."""
        wanted = np.uint64(hash64(key.encode()))
        ids, order = self._sorted_ids
        for place in range(int(np.searchsorted(ids, wanted)), len(ids)):
            if ids[place] != wanted:
                break
            if self.key(int(order[place])) == key:
                return int(order[place])
        raise KeyError(key)

    def shard_id(self, i: int) -> ShardId:
        """The shard that holds sample i."""
        return ShardId(int(self.bucket[i]), int(self.shard[i]))

    def of_shard(self, shard_id: ShardId) -> slice:
        """The samples of a shard; they are contiguous."""
        return self._shards[shard_id][0]

    def batches_of(self, shard_id: ShardId) -> list[slice]:
        """The batches of a shard in order, each a slice of samples."""
        samples = self.of_shard(shard_id)
        batch = self.batch[samples]
        cuts = [0, *(np.flatnonzero(np.diff(batch)) + 1).tolist(), len(batch)]
        return [
            slice(samples.start + a, samples.start + b)
            for a, b in itertools.pairwise(cuts)
            if b > a
        ]

    def rows_of(self, shard_id: ShardId) -> tuple[int, int]:
        """Rows of a shard in `hidden` and in `last`."""
        return self._shards[shard_id][1:]

    @functools.cached_property
    def shard_bounds(self) -> Array:
        """First sample of each shard, bucket by bucket, then the number of samples."""
        return np.append(_firsts(self._ordinals), len(self))

    @functools.cached_property
    def shard_rows(self) -> tuple[Array, Array]:
        """Rows of each shard in `hidden` and in `last`, int64, bucket by bucket."""
        rows, last_rows = (
            np.add.reduceat(num, self.shard_bounds[:-1], dtype=np.int64)
            for num in (self.num_tokens, self.num_teacher)
        )
        return rows, last_rows

    @functools.cached_property
    def _shards(self) -> dict[ShardId, tuple[slice, int, int]]:
        """Samples of each shard, its rows in `hidden` and in `last`."""
        firsts, ends = self.shard_bounds[:-1], self.shard_bounds[1:]
        places = zip(self.bucket[firsts].tolist(), self.shard[firsts].tolist(), strict=True)
        rows, last_rows = (num.tolist() for num in self.shard_rows)
        columns = zip(places, firsts.tolist(), ends.tolist(), rows, last_rows, strict=True)
        return {
            ShardId(*place): (slice(first, end), num, num_last)
            for place, first, end, num, num_last in columns
        }

    @functools.cached_property
    def _ordinals(self) -> Array:
        ordinals: Array = _ordinal(self.bucket.astype(np.int64), self.shard.astype(np.int64))
        return ordinals

    @functools.cached_property
    def _sorted_ids(self) -> tuple[Array, Array]:
        order = np.argsort(self.sample_id, kind="stable")
        return self.sample_id[order], order

    def check(self, layout: Layout) -> None:
        """Raise ValueError unless the columns agree with each other and with the layout."""
        num_buckets, rows = len(layout.num_shards), layout.rows_per_shard
        for name, array in self.columns().items():
            want = len(self.key_bytes) if name == "key_bytes" else len(self)
            _need(array.ndim == 1 and len(array) == want, f"column {name} has a wrong length")
        _need(len(self) > 0, "the plan holds no sample")
        lengths = np.diff(self.key_end, prepend=0)
        _need(bool((lengths > 0).all()), "column key_end does not ascend")
        _need(
            int(self.key_end[-1]) == len(self.key_bytes), "column key_end does not end at the end"
        )
        _need(_within(self.bucket, num_buckets), "column bucket names a bucket that is not there")
        num_shards = np.asarray(layout.num_shards)[self.bucket]
        _need(_within(self.shard, num_shards), "column shard names a shard that is not there")
        _need(_within(self.domain, len(self.domains)), "column domain names an unknown domain")
        _need(_within(self.source, len(self.sources)), "column source names an unknown source")
        _need(_within(self.split, 2), "column split holds something else than 0 and 1")
        bounds = np.asarray(layout.bucket_bounds)[self.bucket]
        _need(bool((self.num_tokens > 0).all()), "a sample has no tokens")
        _need(bool((self.num_tokens <= bounds).all()), "a sample is longer than its bucket's bound")
        for name in ("num_teacher", "num_anchors"):
            _need(_within(getattr(self, name), self.num_tokens + 1), f"column {name} out of range")
        ordinals = self._ordinals
        _need(
            bool((np.diff(ordinals) >= 0).all()), "the samples are not sorted by bucket and shard"
        )
        num_filled = 1 + int((np.diff(ordinals) > 0).sum())
        _need(num_filled == sum(layout.num_shards), "a shard holds no sample")
        same = np.diff(ordinals) == 0
        _need(
            bool((np.diff(self.batch)[same] >= 0).all()), "the batches of a shard are not in order"
        )
        for start, num in (("start", self.num_tokens), ("last_start", self.num_teacher)):
            wanted = _starts(self.shard, ordinals, num, rows)
            _need(bool((getattr(self, start) == wanted).all()), f"column {start} leaves gaps")
            end = wanted + num - self.shard.astype(np.int64) * rows
            _need(bool((end <= rows).all()), f"a shard holds more than its {rows} rows")
        for bucket, most in enumerate(layout.num_samples_per_shard_max):
            counts = np.bincount(self.shard[self.bucket == bucket], minlength=1)
            _need(
                int(counts.max()) <= most, f"a shard of bucket {bucket} holds over {most} samples"
            )


def _need(holds: bool, message: str) -> None:
    if not holds:
        raise ValueError(f"sample table: {message}")


def _within(values: Array, end: Any) -> bool:
    return bool(((values >= 0) & (values < end)).all())


def _ordinal(bucket: Any, shard: Any) -> Any:
    return (bucket << 32) | shard


def _firsts(ordinals: Array) -> Array:
    """Where each run of one shard's samples begins."""
    return np.flatnonzero(np.diff(ordinals, prepend=-1))


def _starts(shard: Array, ordinals: Array, num: Array, rows_per_shard: int) -> Array:
    """First row of each sample in its bucket: its shard's first row and the rows before it."""
    before, firsts = np.cumsum(num, dtype=np.int64) - num, _firsts(ordinals)
    before -= np.repeat(before[firsts], np.diff(firsts, append=len(ordinals)))
    result: Array = shard.astype(np.int64) * rows_per_shard + before
    return result


def build_table(
    keys: Sequence[str],
    columns: Mapping[str, Any],
    layout: Layout,
    domains: Sequence[str],
    sources: Sequence[str],
) -> SampleTable:
    """A checked table from keys and columns, both already in plan order.

    `columns` holds COLUMNS without sample_id, start and last_start, which follow from the rest.
    """
    derived = ("sample_id", "start", "last_start")
    wanted = [name for name in COLUMNS if name not in derived]
    if sorted(columns) != sorted(wanted):
        raise ValueError(f"sample table: got columns {sorted(columns)}, expected {sorted(wanted)}")
    encoded = [key.encode() for key in keys]
    given = {name: np.asarray(columns[name]).astype(COLUMNS[name]) for name in wanted}
    ordinals = _ordinal(given["bucket"].astype(np.int64), given["shard"].astype(np.int64))
    rows = layout.rows_per_shard
    table = SampleTable(
        **given,
        sample_id=np.array([hash64(key) for key in encoded], COLUMNS["sample_id"]),
        start=_starts(given["shard"], ordinals, given["num_tokens"], rows),
        last_start=_starts(given["shard"], ordinals, given["num_teacher"], rows),
        key_bytes=np.frombuffer(b"".join(encoded), np.uint8),
        key_end=np.cumsum([len(key) for key in encoded], dtype=np.int64),
        domains=tuple(domains),
        sources=tuple(sources),
    )
    table.check(layout)
    if len(np.unique(table.sample_id)) != len(table):
        raise ValueError("sample table: two samples have the same key")
    return table
