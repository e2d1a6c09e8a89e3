"""The tokens of a store, and the checksums that their chunks had when the plan was made."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numcodecs.zstd import Zstd
from numpy.typing import NDArray

from dflash_pipeline.store import flatfiles, paths
from dflash_pipeline.store.cache import Cache
from dflash_pipeline.store.metadata import TOKEN_ARRAYS
from dflash_pipeline.store.spec import Layout, ShardId

Bytes = NDArray[np.uint8]


class TokenChunks:
    """Decoded a shard at a time, the last ones kept. From several threads."""

    def __init__(self, path: Path, layout: Layout, num_kept: int) -> None:
        self._path, self._layout = path, layout
        self._kept: Cache[ShardId, tuple[NDArray[np.uint32], Bytes]] = Cache(num_kept)
        self._crcs: Cache[int, NDArray[np.uint32]] = Cache(len(layout.num_shards))

    def of_shard(self, shard_id: ShardId) -> tuple[NDArray[np.uint32], Bytes]:
        """Token ids and loss mask of all rows of a shard."""
        return self._kept.get(shard_id, lambda: self._read(shard_id))

    def _read(self, shard_id: ShardId) -> tuple[NDArray[np.uint32], Bytes]:
        arrays = []
        for name, dtype in TOKEN_ARRAYS.items():
            file = flatfiles.inside(self._path, paths.token_file(shard_id, name))
            size = self._layout.rows_per_shard * np.dtype(dtype).itemsize
            out = np.empty(size, np.uint8)
            try:
                # `out` of the promised size: a hostile frame cannot make us allocate more
                Zstd().decode(file.read_bytes(), out)
            except (OSError, RuntimeError, ValueError) as error:
                raise ValueError(f"{file} cannot be read ({error}): the store is damaged") from None
            arrays.append(out.view(dtype))
        return arrays[0], arrays[1]

    def crcs(self, shard_id: ShardId) -> tuple[int, int]:
        """crc32c that the chunk files of input_ids and loss_mask of a shard had at planning."""
        bucket = shard_id.bucket
        crcs = self._crcs.get(bucket, lambda: self._read_crcs(bucket))
        return int(crcs[shard_id.shard, 0]), int(crcs[shard_id.shard, 1])

    def _read_crcs(self, bucket: int) -> NDArray[np.uint32]:
        shape = (self._layout.num_shards[bucket], len(TOKEN_ARRAYS))
        return flatfiles.read_flat(self._path, paths.token_crc_file(bucket), "<u4", shape)
