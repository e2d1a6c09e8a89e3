"""A store opened for reading: what is committed, and its rows as views, copies or reads in place.

Only committed shards and good samples are ever given out. Opening reads the plan's columns (flat
files) and the commit records, nothing per sample; no torch and no zarr are loaded.
Letters: T tokens of a sample, M rows of its `last`, K layers, R bytes of a stored row, H, V.
"""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from dflash_pipeline.configs.mounts import root_of, split
from dflash_pipeline.store import durable, flatfiles, metadata, paths, stripes
from dflash_pipeline.store.access import Access, Range, open_committed
from dflash_pipeline.store.cache import Cache
from dflash_pipeline.store.calibrationgroup import read_calibration
from dflash_pipeline.store.checksum import crc32c
from dflash_pipeline.store.commit import Commit
from dflash_pipeline.store.commitlog import CommitLog
from dflash_pipeline.store.rolling import is_rolling
from dflash_pipeline.store.rows import decode
from dflash_pipeline.store.shard import (
    ShardShape,
    check_shard,
    hidden_shape,
    last_shape,
    map_shard,
)
from dflash_pipeline.store.spec import ShardId
from dflash_pipeline.store.table import COLUMNS, KEY_COLUMNS, SampleTable
from dflash_pipeline.store.targetgroup import TargetGroup
from dflash_pipeline.store.tokens import TokenChunks

Bytes = NDArray[np.uint8]

_CACHED_SHARDS = 32


@dataclass(frozen=True, eq=False)
class Sample:
    """One sample, decoded."""

    key: str
    ids_T: NDArray[np.uint32]
    mask_T: Bytes
    hidden_TKH: NDArray[np.float32]
    last_MH: NDArray[np.float32] | None


class Store:
    """See `open_store`. Safe to use from several threads; `refresh` belongs to one of them."""

    def __init__(self, path: str | Path, problems: list[str] | None) -> None:
        self.path = root_of(path)
        self.root, self.spec, self.layout, self.attributes = metadata.read_root(self.path)
        self._check_mounts(split(path)[1:] if isinstance(path, str) else (), problems)
        self.plan_hash = self.root.plan_hash
        self.calibration = read_calibration(self.path, self.spec)
        """What int8 and int4 rows are decoded with; empty for bf16, and before the capture has
        calibrated (`spec.is_calibrated`)."""
        self.table = self._read_table()
        self.hidden_shape = hidden_shape(self.spec, self.layout)
        self.last_shape = last_shape(self.spec, self.layout) if self.spec.has_last else None
        self._commits = CommitLog(self.path, self.spec, self.layout, self.table, problems)
        self._maps: Cache[tuple[ShardId, str], Bytes] = Cache(_CACHED_SHARDS)
        self._tokens = TokenChunks(self.path, self.layout, _CACHED_SHARDS)
        self._target = TargetGroup(self.path, self.root, self.spec)
        self._first_row = self.table.shard.astype(np.int64) * self.layout.rows_per_shard

    def __len__(self) -> int:
        """All samples, captured or not."""
        return len(self.table)

    def _check_mounts(self, named: tuple[str, ...], problems: list[str] | None) -> None:
        stripes.check_named(self.path, self.layout, named)
        missing = stripes.missing_mounts(self.path, self.layout)
        if problems is not None:
            problems += missing
        elif missing:
            raise ValueError("; ".join(missing))

    def _read_table(self) -> SampleTable:
        sizes = {"key_bytes": self.root.num_key_bytes}
        columns = {
            name: flatfiles.read_flat(
                self.path, paths.column_file(name), dtype, (sizes.get(name, self.root.num_samples),)
            )
            for name, dtype in (COLUMNS | KEY_COLUMNS).items()
        }
        table = SampleTable(**columns, domains=self.root.domains, sources=self.root.sources)
        try:
            table.check(self.layout)
        except (ValueError, IndexError) as error:
            raise ValueError(f"{self.path}: {error}: the store is damaged") from None
        return table

    # --- what is there -----------------------------------------------------------------------

    def refresh(self) -> list[ShardId]:
        """Look for shards committed since, or released; those newly committed, in claim order."""
        found = self._commits.refresh()
        # a map would keep the space of a deleted file
        self._maps.drop(lambda key: self.is_released(key[0]))
        return found

    def is_committed(self, shard_id: ShardId) -> bool:
        """Whether a shard was committed at the last refresh."""
        return self._commits.is_committed(shard_id)

    def is_released(self, shard_id: ShardId) -> bool:
        """Whether a shard was committed, used and deleted (`store/release.py`), likewise."""
        return self._commits.is_released(shard_id)

    @property
    def num_released(self) -> int:
        """Shards released, as of the last refresh."""
        return sum(self.is_released(shard_id) for shard_id in self.layout.shard_ids())

    @property
    def is_rolling(self) -> bool:
        """Whether shards are released once all registered training runs have used them."""
        return is_rolling(self.path)

    def is_open(self, shard_id: ShardId) -> bool:
        """Whether a shard still has to be captured, as the disk says now."""
        return not (
            self.is_committed(shard_id) or (self.path / paths.commit_file(shard_id)).exists()
        )

    @property
    def is_complete(self) -> bool:
        """Whether each shard was committed at the last refresh."""
        return self._commits.num_committed == sum(self.layout.num_shards)

    @property
    def is_sealed(self) -> bool:
        """Whether the capture is over and the commit records are merged into one file."""
        return (self.path / paths.SEALED_FILE).exists()

    def seal(self) -> None:
        """Merge the commit records of a complete store; followers then know that it is all."""
        self._commits.seal()

    def commit_of(self, shard_id: ShardId) -> Commit | None:
        """The commit record of a shard, None before it is committed."""
        return self._commits.get(shard_id)

    @property
    def readable_N(self) -> NDArray[np.bool_]:
        """Whether each sample is committed, not released, and good. Grows with `refresh`."""
        return self._commits.readable_N

    @property
    def captured_N(self) -> NDArray[np.bool_]:
        """Whether each sample was committed and good, be it released by now or not."""
        return self._commits.captured_N

    @property
    def state_N(self) -> Bytes:
        """Each sample's place in SAMPLE_STATES; 0 as well while it is not committed."""
        return self._commits.state_N

    def num_rows(self, i: int) -> int:
        """Tokens of a sample, 0 if its rows were bad; ValueError if they are not there."""
        shard_id = self.table.shard_id(i)
        if not self.is_committed(shard_id) or self.is_released(shard_id):
            self._readable_shard(i)
        return int(self.table.num_tokens[i]) if self.readable_N[i] else 0

    # --- one sample --------------------------------------------------------------------------

    def tokens(self, i: int) -> tuple[NDArray[np.uint32], Bytes]:
        """Token ids uint32 [T] and loss mask uint8 [T]; there from the plan on."""
        ids_N, mask_N = self.shard_tokens(self.table.shard_id(i))
        first, last = self._rows(i)
        return ids_N[first:last], mask_N[first:last]

    def shard_tokens(self, shard_id: ShardId) -> tuple[NDArray[np.uint32], Bytes]:
        """Token ids and loss mask of all rows of a shard."""
        return self._tokens.of_shard(shard_id)

    def token_crcs(self, shard_id: ShardId) -> tuple[int, int]:
        """crc32c that the chunk files of input_ids and loss_mask of a shard had at planning."""
        return self._tokens.crcs(shard_id)

    def _rows(self, i: int) -> tuple[int, int]:
        """First row and row after the last of a sample inside its shard's `hidden`."""
        first = int(self.table.start[i] - self._first_row[i])
        return first, first + int(self.table.num_tokens[i])

    def _last_rows(self, i: int) -> tuple[int, int]:
        first = int(self.table.last_start[i] - self._first_row[i])
        return first, first + int(self.table.num_teacher[i])

    def hidden(self, i: int) -> Bytes:
        """Stored rows of the captured layers, a read-only view uint8 [T, K, R] of the file."""
        first, end = self._rows(i)
        return self._map(i, "hidden")[first:end]

    def last(self, i: int) -> Bytes:
        """Stored rows of the post-norm last state, a read-only view uint8 [M, R] of the file."""
        first, end = self._last_rows(i)
        return self._map(i, "last")[first:end]

    def _map(self, i: int, kind: str) -> Bytes:
        shard_id = self._readable_shard(i)
        return self._maps.get((shard_id, kind), lambda: self._open_map(shard_id, kind))

    def _open_map(self, shard_id: ShardId, kind: str) -> Bytes:
        return map_shard(*self._place(shard_id, kind))

    def _place(self, shard_id: ShardId, kind: str) -> tuple[Path, int, ShardShape]:
        rows, last_rows = self.table.rows_of(shard_id)
        if kind == "hidden":
            return self.path / paths.hidden_file(shard_id), rows, self.hidden_shape
        if self.last_shape is None:
            raise ValueError(f"{self.path} holds no last state (store.last_mode = none)")
        return self.path / paths.last_file(shard_id), last_rows, self.last_shape

    def _readable_shard(self, i: int) -> ShardId:
        shard_id = self.table.shard_id(i)
        if not self.readable_N[i]:
            reason = "is not captured yet"
            if self.is_released(shard_id):
                reason = (
                    f"was in shard {shard_id}, which was released: under capture --quota, data "
                    "that all training runs have used is deleted"
                )
            elif self.is_committed(shard_id):
                reason = "has no good rows"
            raise ValueError(f"sample {i} of {self.path} {reason}")
        return shard_id

    def read_into(self, i: int, hidden_out: Any, last_out: Any, access: Access) -> None:
        """Read a sample's stored rows into two C-contiguous buffers, one read an array.

        The buffers have exactly T K R and M R bytes; `last_out` None leaves `last` unread.
        """
        for kind, buffer in (("hidden", hidden_out), ("last", last_out)):
            if buffer is None:
                continue
            place, view = self.place_of(i, kind), memoryview(buffer)
            if view.nbytes != place.num_bytes:
                raise ValueError(
                    f"{kind}: a buffer of {view.nbytes} bytes, expected {place.num_bytes}"
                )
            if view.nbytes == 0:
                continue
            try:
                access.read(place, np.frombuffer(view, np.uint8))
            except (OSError, ValueError) as error:
                reason = error.strerror if isinstance(error, OSError) else error
                where = f"{place.file}: " if isinstance(error, OSError) else ""
                raise ValueError(
                    f"{where}{reason} (while reading sample {i}, {self.table.key(i)})"
                ) from error

    def place_of(self, i: int, kind: str) -> Range:
        """Where a sample's rows of `hidden` or `last` stand; ValueError if they are not there."""
        shard_id = self._readable_shard(i)
        file, num_rows, shape = self._place(shard_id, kind)
        first, end = self._rows(i) if kind == "hidden" else self._last_rows(i)
        row_bytes = shape.row_bytes
        return Range(file, first * row_bytes, (end - first) * row_bytes, shape.file_bytes(num_rows))

    @property
    def all_rows_bytes(self) -> int:
        """Bytes of all rows of all samples, captured or not."""
        size = int(self.table.num_tokens.sum(dtype=np.int64)) * self.hidden_shape.row_bytes
        if self.last_shape is not None:
            size += int(self.table.num_teacher.sum(dtype=np.int64)) * self.last_shape.row_bytes
        return size

    def sample(self, i: int) -> Sample:
        """One sample decoded to float32."""
        ids_T, mask_T = self.tokens(i)
        last_MH = self.decode_last(self.last(i)) if self.spec.has_last else None
        hidden_TKH = self.decode_hidden(self.hidden(i))
        return Sample(self.table.key(i), ids_T, mask_T, hidden_TKH, last_MH)

    def decode_hidden(self, rows_TKR: Bytes) -> NDArray[np.float32]:
        """Values float32 [..., K, H] of stored rows of the captured layers."""
        return decode(rows_TKR, self.spec.hidden_mode, self.calibration.hidden)

    def decode_last(self, rows_MR: Bytes) -> NDArray[np.float32]:
        """Values float32 [..., H] of stored rows of the post-norm last state."""
        return decode(rows_MR, self.spec.last_mode, self.calibration.last)

    def check_sample(self, i: int) -> None:
        """Compare the checksums of the chunks that a sample touches; ValueError names the chunk."""
        shard_id = self._readable_shard(i)
        self.check_chunks(shard_id, "hidden", self._rows(i))
        if self.spec.has_last:
            self.check_chunks(shard_id, "last", self._last_rows(i))

    def check_chunks(self, shard_id: ShardId, kind: str, rows: tuple[int, int]) -> None:
        """Compare the checksums of the chunks that hold these rows of a shard."""
        file, num_rows, shape = self._place(shard_id, kind)
        record = cast("Commit", self.commit_of(shard_id))
        crcs = record.hidden_crcs if kind == "hidden" else record.last_crcs
        descriptor = open_committed(file, os.O_RDONLY)
        try:
            check_shard(descriptor, str(file), num_rows, shape)
            buffer = np.empty(shape.chunk_bytes, np.uint8)
            for chunk in range(rows[0] // shape.chunk_rows, shape.num_present(rows[1])):
                durable.read_all(descriptor, buffer, chunk * shape.chunk_bytes)
                if crc32c(buffer) != int(crcs[chunk]):
                    raise ValueError(
                        f"{file}: chunk {chunk} does not match its checksum; dflash verify --deep "
                        f"--repair {shlex.quote(str(self.path))} uncommits what is damaged"
                    )
        finally:
            os.close(descriptor)

    # --- the target --------------------------------------------------------------------------

    def embed(self) -> NDArray[np.uint16]:
        """The target's embedding as raw bf16 bits, a read-only view uint16 [V, H]."""
        return self._target.embed()

    @property
    def is_tied(self) -> bool:
        """Whether the target's head is its embedding."""
        return self._target.is_tied

    def head(self) -> NDArray[np.uint16]:
        """The target's head as raw bf16 bits, a read-only view uint16 [V, H]."""
        return self._target.head()

    def files(self) -> dict[str, bytes]:
        """The target's configuration, tokenizer and template files, by name."""
        return self._target.files()

    def target_config(self) -> dict[str, Any]:
        """The target's config.json."""
        return self._target.config()


def open_store(path: str | Path) -> Store:
    """Open a store, complete or still growing; ValueError says in one line why it cannot be.

    `path`: its directory, or all directories that it is striped over, separated by commas.
    """
    return Store(path, None)
