"""Whether what the shards of a store consist of is whole: records, seal, rows, tokens."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator

import numpy as np

from dflash_pipeline.store import commit, paths
from dflash_pipeline.store.build import plan_hash, token_digest
from dflash_pipeline.store.checksum import crc32c
from dflash_pipeline.store.commitlog import read_sealed
from dflash_pipeline.store.metadata import TOKEN_ARRAYS
from dflash_pipeline.store.reader import Store
from dflash_pipeline.store.rowcheck import check_rows
from dflash_pipeline.store.shard import ShardShape, check_shard
from dflash_pipeline.store.spec import ShardId
from dflash_pipeline.store.table import teacher_positions, valid_anchors


def sealed_faults(store: Store) -> Iterator[str]:
    """Faults of the merged records of a sealed store, each compared with the record itself."""
    file = store.path / paths.SEALED_FILE
    try:
        sealed = read_sealed(store.path, store.spec, store.layout)
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:
        yield str(error)
        return
    records = itertools.chain.from_iterable(sealed)
    for shard_id, words in zip(store.layout.shard_ids(), records, strict=True):
        expected = commit.width(store.spec, store.layout, shard_id.bucket)
        why = commit.problem(words, expected, store.table.rows_of(shard_id))
        record = store.path / paths.commit_file(shard_id)
        if why:
            yield f"{file}: the record of shard {shard_id} {why}"
        elif not record.exists():
            yield f"{record} is missing although the store is sealed"
        elif store.is_committed(shard_id) and _as_committed(record.read_bytes()) != words.tobytes():
            yield f"{file}: the record of shard {shard_id} differs from {record}"


def _as_committed(content: bytes) -> bytes:
    """A whole record as it was before its shard was released; the seal is not told of that."""
    words = np.frombuffer(content, "<u4")
    return commit.with_state(words, commit.COMMITTED).tobytes()


def lost_its_record(store: Store, shard_id: ShardId) -> bool:
    """Whether a record that should be there is damaged, or missing from a sealed store."""
    if store.is_committed(shard_id):
        return False
    return store.is_sealed or (store.path / paths.commit_file(shard_id)).exists()


def token_chunk_faults(store: Store, shard_id: ShardId, deep: bool) -> Iterator[str]:
    """Faults of a shard's token chunks and of their checksums, which the plan fixed."""
    planned, record = _planned_crcs(store, shard_id), store.commit_of(shard_id)
    if record is not None and record.token_crcs != planned:
        yield f"shard {shard_id}: commit record and plan differ in the tokens' checksums"
    for name, expected in zip(TOKEN_ARRAYS, planned, strict=True):
        file = store.path / paths.token_file(shard_id, name)
        if not file.exists():
            yield f"{file} is missing"
        elif deep and expected is not None:
            try:
                is_whole = crc32c(file.read_bytes()) == expected
            except OSError as error:
                yield f"{file} cannot be read: {error.strerror}"
                continue
            if not is_whole:
                yield f"{file} (shard {shard_id}) does not match its checksum"


def shard_faults(store: Store, shard_id: ShardId, deep: bool) -> tuple[list[str], int]:
    """Faults of a shard's rows, and the bytes that were read."""
    faults: list[str] = []
    num_bytes = 0
    record = store.commit_of(shard_id)
    if record is None or record.state != commit.COMMITTED:
        return faults, num_bytes
    kinds: list[tuple[str, ShardShape]] = [("hidden", store.hidden_shape)]
    if store.last_shape is not None:
        kinds.append(("last", store.last_shape))
    for kind, shape in kinds:
        name = paths.hidden_file(shard_id) if kind == "hidden" else paths.last_file(shard_id)
        num_rows = record.rows if kind == "hidden" else record.last_rows
        file = store.path / name
        try:
            descriptor = os.open(file, os.O_RDONLY)
        except OSError as error:
            faults.append(f"{file} is committed but cannot be opened: {error.strerror}")
            continue
        try:
            check_shard(descriptor, str(file), num_rows, shape)
            if deep:
                faults += check_rows(store, shard_id, kind, record, descriptor, str(file))
                num_bytes += shape.file_bytes(num_rows)
        except (OSError, ValueError) as error:
            faults.append(f"{file}: {error}" if isinstance(error, OSError) else str(error))
        finally:
            os.close(descriptor)
    return faults, num_bytes


def _planned_crcs(store: Store, shard_id: ShardId) -> tuple[int | None, int | None]:
    try:
        return store.token_crcs(shard_id)
    except ValueError:
        return None, None


def token_faults(store: Store) -> Iterator[str]:
    """The tokens must be those the plan was hashed with, and its counts must follow from them."""
    digests, table = {}, store.table
    for shard_id in store.layout.shard_ids():
        rows, _ = table.rows_of(shard_id)
        try:
            ids_N, mask_N = store.shard_tokens(shard_id)
        except ValueError as error:
            yield str(error)
            return
        digests[shard_id] = token_digest(ids_N[:rows], mask_N[:rows])
        for i in range(len(table))[table.of_shard(shard_id)]:
            _, mask_T = store.tokens(i)
            num_teacher = len(teacher_positions(mask_T, store.spec.last_rows))
            found = num_teacher, len(valid_anchors(mask_T))
            planned = int(table.num_teacher[i]), int(table.num_anchors[i])
            if found != planned:
                yield f"sample {i} (shard {shard_id}): (teacher, anchors) {found}, plan {planned}"
    if plan_hash(table, digests) != store.plan_hash:
        yield f"{store.path}: sample table and tokens do not match dflash.plan_hash"
