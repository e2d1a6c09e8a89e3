"""Lays down a store before anything is captured: all that the plan fixes, hashed, then one rename.

with plan_lock(path, wait_s=3600):
    store = existing(path)
    if store is None:
        table = build_table(keys, columns, layout, domains, sources)
        with StoreBuilder(path, spec, layout, table, attributes, quota_bytes) as builder:
            builder.write_target(embed_VH, head_VH, {"config.json": b"..."})
            for shard_id in layout.shard_ids():
                builder.write_tokens(shard_id, ids_N, mask_N)
            store = builder.publish()
with (
    Leases(path, layout, heartbeat_s=10, hung_s=600) as leases,
    StoreWriter(store, leases, depth=4) as writer,
):
    while lease := leases.claim(store.is_open, max_failures=3):
        writer.begin(lease)
        for samples in table.batches_of(lease.shard_id):
            writer.put(hidden_NKR, last_MR, release)
        writer.finish(amax, clipped, {}, halved=False)
        writer.commit()
store.seal()
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np
from numcodecs.zstd import Zstd
from numpy.typing import NDArray

from dflash_pipeline.configs.disk import writing
from dflash_pipeline.store import commit, durable, flatfiles, metadata, paths
from dflash_pipeline.store.checksum import crc32c
from dflash_pipeline.store.documents import canonical, kinds
from dflash_pipeline.store.metadata import Root
from dflash_pipeline.store.reader import Store, open_store
from dflash_pipeline.store.rolling import ONE, make_rolling
from dflash_pipeline.store.shard import hidden_shape, last_shape
from dflash_pipeline.store.spec import FORMAT, Attributes, Layout, ShardId, StoreSpec
from dflash_pipeline.store.table import SampleTable

_PLAN_BYTE, _BUILD_BYTE = 0, 1
_ZSTD = Zstd(level=3)


def _lock_file(path: Path) -> Path:
    return paths.log_directory(path) / "plan.lock"


@contextlib.contextmanager
def plan_lock(
    path: str | Path, *, wait_s: float, waiting: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """Held by the one process that plans a store; a second one waits, then finds the store.

    `waiting` is called again and again meanwhile; ValueError after `wait_s` seconds.
    """
    store = Path(path)
    durable.check_file_system(paths.log_directory(store))
    lock = durable.locked(_lock_file(store), _PLAN_BYTE, wait_s=wait_s, waiting=waiting)
    with lock as is_held:
        if not is_held:
            raise ValueError(
                f"another process has been planning {store} for over {wait_s:.0f} s: "
                "wait for it or end it"
            )
        yield


def existing(path: str | Path) -> Store | None:
    """The store at `path`, None if there is nothing; ValueError if there is something else."""
    store = Path(path)
    if store.is_dir() and not any(store.iterdir()):
        return None
    return open_store(store) if os.path.lexists(store) else None


def estimate_bytes(spec: StoreSpec, layout: Layout, table: SampleTable) -> int:
    """Bytes that a whole store takes, its shard files to the byte, the rest from above."""
    target = 2 * spec.vocab_size * spec.hidden_size * 2
    plan = sum(column.nbytes for column in table.columns().values()) + 5 * int(
        table.num_tokens.sum()
    )
    return target + plan + sum(shard_bytes(spec, layout, table, i) for i in layout.shard_ids())


def shard_bytes(spec: StoreSpec, layout: Layout, table: SampleTable, shard_id: ShardId) -> int:
    """Bytes of a shard's data files and commit record."""
    rows, last_rows = table.rows_of(shard_id)
    total = hidden_shape(spec, layout).file_bytes(rows)
    if spec.has_last:
        total += last_shape(spec, layout).file_bytes(last_rows)
    return total + 4 * commit.width(spec, layout, shard_id.bucket)


def remaining_bytes(store: Store) -> int:
    """Bytes that the shards not committed yet will take."""
    args = (store.spec, store.layout, store.table)
    open_ids = [i for i in store.layout.shard_ids() if not store.is_committed(i)]
    return sum(shard_bytes(*args, i) for i in open_ids)


class StoreBuilder:
    """Writes `<store>.planning` and renames it; made under `plan_lock`."""

    def __init__(
        self,
        path: str | Path,
        spec: StoreSpec,
        layout: Layout,
        table: SampleTable,
        attributes: Attributes,
        quota_bytes: int,
        *,
        elsewhere_bytes: int = 0,
    ) -> None:
        """`quota_bytes`: the most that the store shall take; above 0 it is a rolling store.

        `elsewhere_bytes`: of shards that take no room here: hard links, or on other mounts.
        """
        self._path = Path(path)
        self._spec, self._layout, self._table = spec, layout, table
        self._attributes = attributes
        table.check(layout)
        durable.check_file_system(paths.log_directory(self._path))
        self._quota_bytes = quota_bytes
        needed_bytes = estimate_bytes(spec, layout, table) - elsewhere_bytes
        durable.check_space(self._path, min(needed_bytes, quota_bytes or needed_bytes))
        self._exit = contextlib.ExitStack()
        lock = durable.locked(_lock_file(self._path), _BUILD_BYTE, wait_s=0)
        if not self._exit.enter_context(lock):
            raise ValueError(f"another process is building {self._path}")
        self._directory = paths.beside(self._path, ".planning")
        # what a killed planner left
        shutil.rmtree(self._directory, ignore_errors=True)
        self._directory.mkdir()
        self._token_digests: dict[ShardId, bytes] = {}
        self._token_crcs = [np.zeros((n, 2), "<u4") for n in layout.num_shards]
        self._num_head_rows = 0
        self._file_bytes: dict[str, int] | None = None
        self._hashes: dict[str, str] = {}

    def write_target(
        self,
        embed_VH: NDArray[np.uint16],
        head_VH: NDArray[np.uint16] | None,
        files: Mapping[str, bytes],
    ) -> None:
        """Keep the target's embedding and head (raw bf16 bits; None: tied) and its small files."""
        shape = (self._spec.vocab_size, self._spec.hidden_size)
        for name, array in (("embedding", embed_VH), ("head", head_VH)):
            if array is not None and (array.shape != shape or array.dtype != np.uint16):
                raise ValueError(
                    f"the target's {name} is {array.dtype} {array.shape}, expected uint16 {shape}"
                )
        self._write(paths.EMBED_FILE, np.ascontiguousarray(embed_VH, "<u2"))
        if head_VH is not None:
            self._write(paths.HEAD_FILE, np.ascontiguousarray(head_VH, "<u2"))
            self._num_head_rows = shape[0]
        for name, content in files.items():
            metadata.check_file_name(name)
            if content:
                self._write(paths.target_file(name), np.frombuffer(content, np.uint8))
        self._file_bytes = {name: len(content) for name, content in files.items()}

    def write_tokens(self, shard_id: ShardId, ids_N: NDArray[Any], mask_N: NDArray[Any]) -> None:
        """Keep the token ids and the loss mask of all rows of a shard, in plan order; once each."""
        rows, _ = self._table.rows_of(shard_id)
        if shard_id in self._token_digests:
            raise ValueError(f"the tokens of shard {shard_id} were written before")
        if len(ids_N) != rows or len(mask_N) != rows:
            raise ValueError(f"shard {shard_id}: {len(ids_N)} ids, {len(mask_N)} mask, {rows} rows")
        if rows and int(ids_N.max()) >= self._spec.vocab_size:
            raise ValueError(
                f"shard {shard_id}: token id {int(ids_N.max())} outside the vocabulary"
            )
        pairs = zip(metadata.TOKEN_ARRAYS.items(), (ids_N, mask_N), strict=True)
        for column, ((name, dtype), values) in enumerate(pairs):
            padded = np.zeros(self._layout.rows_per_shard, dtype)
            padded[:rows] = values
            chunk = _ZSTD.encode(padded)
            self._write(paths.token_file(shard_id, name), np.frombuffer(chunk, np.uint8))
            self._token_crcs[shard_id.bucket][shard_id.shard, column] = crc32c(chunk)
        self._token_digests[shard_id] = token_digest(ids_N, mask_N)

    def publish(self, fill: Callable[[Path], None] = lambda _directory: None) -> Store:
        """Write what is left, make it durable and give the store its name.

        `fill` is called just before with the directory of the planned store, to bring in more.
        """
        missing = [i for i in self._layout.shard_ids() if i not in self._token_digests]
        if missing or self._file_bytes is None:
            what = f"tokens of {len(missing)} shards" if missing else "the target's files"
            raise ValueError(f"{self._path} is not whole yet: {what} were not written")
        for name, column in self._table.columns().items():
            self._write(paths.column_file(name), column)
        for bucket, crcs in enumerate(self._token_crcs):
            if len(crcs):
                self._write(paths.token_crc_file(bucket), crcs)
        root = self._root(plan_hash(self._table, self._token_digests), {})
        for name, document in metadata.documents(root, self._spec, self._layout).items():
            self._write(f"{name}/zarr.json", canonical(document))
        names = metadata.hashed_files(root, self._spec, self._layout)
        hashes = {name: flatfiles.sha256_of(self._directory / name) for name in names}
        self._link_raw()
        document = metadata.root_document(self._root(root.plan_hash, hashes))
        self._write("zarr.json", canonical(document))
        if self._quota_bytes:
            make_rolling(self._directory, self._layout, ONE.num_consumers)
        fill(self._directory)
        _sync_tree(self._directory)
        if self._path.is_dir():
            # `existing` said that it is empty; rmdir refuses if it no longer is
            self._path.rmdir()
        durable.rename(self._directory, self._path.absolute())
        self.close()
        return open_store(self._path)

    def _root(self, plan: str, hashes: Mapping[str, str]) -> Root:
        return Root(
            format=FORMAT,
            identity=self._spec.to_dict(),
            layout=self._layout.to_dict(),
            attributes=self._attributes.to_dict(),
            domains=self._table.domains,
            sources=self._table.sources,
            num_samples=len(self._table),
            num_key_bytes=len(self._table.key_bytes),
            num_head_rows=self._num_head_rows,
            file_bytes=self._file_bytes or {},
            plan_hash=plan,
            hashes=hashes,
        )

    def _link_raw(self) -> None:
        """The raw companion arrays are other documents over the same chunk files."""
        for bucket in range(len(self._layout.num_shards)):
            for kind, mode, _ in kinds(self._spec):
                if mode == "bf16":
                    # a folder without a document would be a foreign one to zarr
                    (self._directory / f"b{bucket}/{kind}/c").mkdir()
                link = self._directory / f"raw/b{bucket}/{kind}/c"
                link.symlink_to(f"../../../b{bucket}/{kind}/c")

    def _write(self, name: str, data: Any) -> None:
        file = self._directory / name
        file.parent.mkdir(parents=True, exist_ok=True)
        with writing(file), file.open("wb") as stream:
            stream.write(memoryview(data).cast("B"))

    def close(self) -> None:
        """Remove what was not published and let others plan."""
        shutil.rmtree(self._directory, ignore_errors=True)
        self._exit.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def token_digest(ids_N: NDArray[Any], mask_N: NDArray[Any]) -> bytes:
    """sha256 over the ids (uint32) and the mask (uint8) of a shard's rows."""
    digest = hashlib.sha256()
    for dtype, values in zip(metadata.TOKEN_ARRAYS.values(), (ids_N, mask_N), strict=True):
        digest.update(np.ascontiguousarray(values, dtype).tobytes())
    return digest.digest()


def plan_hash(table: SampleTable, token_digests: Mapping[ShardId, bytes]) -> str:
    """sha256 over the columns, then over the sha256 of the tokens of each shard in order."""
    digest = hashlib.sha256()
    for name, column in table.columns().items():
        digest.update(f"{name} {column.dtype.str} {len(column)}\n".encode())
        digest.update(column.tobytes())
    for names in (table.domains, table.sources):
        digest.update(repr(names).encode())
    for shard_id in sorted(token_digests):
        digest.update(token_digests[shard_id])
    return digest.hexdigest()


def _sync_tree(directory: Path) -> None:
    for parent, _, names in os.walk(directory):
        for name in names:
            if (Path(parent) / name).is_symlink():
                continue
            durable.sync(Path(parent) / name)
        durable.sync(Path(parent))
