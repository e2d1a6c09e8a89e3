"""What a store's zarr.json files say, and how its root is read.

The root's document carries a checksum of itself and a hash of each file that is fixed before the
first row is written, so a damaged byte anywhere is found (`check.py`) and named. Where rows are
int8 or int4, part of that is fixed by the calibration (`completion.py`): until then the root says
so by an empty `calibration_hash`, and the arrays that could not be decoded have no document.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from dflash_pipeline.store import commit, paths
from dflash_pipeline.store.calibrationgroup import calibration_files
from dflash_pipeline.store.checksum import crc32c
from dflash_pipeline.store.documents import (
    BF16,
    DIMENSIONS,
    DTYPE_NAMES,
    LITTLE,
    Document,
    array,
    canonical,
    flat,
    group,
    kinds,
    packed,
    sharded,
)
from dflash_pipeline.store.rows import row_bytes
from dflash_pipeline.store.spec import (
    FORMAT,
    Attributes,
    Layout,
    StoreSpec,
    from_dict,
    to_dict,
)
from dflash_pipeline.store.table import COLUMNS, KEY_COLUMNS

_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_ZSTD = {"name": "zstd", "configuration": {"level": 3, "checksum": False}}
TOKEN_ARRAYS = {"input_ids": "<u4", "loss_mask": "|u1"}
"""Arrays with one zstd chunk a shard, written with the plan."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Root:
    """What the root's attributes say under `dflash`."""

    format: int
    """Version of the on-disk format."""
    identity: Mapping[str, object]
    """StoreSpec."""
    layout: Mapping[str, object]
    """Layout."""
    attributes: Mapping[str, object]
    """Attributes."""
    domains: tuple[str, ...]
    """Names of the values of `samples/domain`."""
    sources: tuple[str, ...]
    """Names of the values of `samples/source`."""
    num_samples: int
    """Entries of each column."""
    num_key_bytes: int
    """Bytes of all keys."""
    num_head_rows: int
    """V if the target's head is stored; 0 if it is its embedding."""
    file_bytes: Mapping[str, object]
    """Size of each file of the target, by name."""
    plan_hash: str
    """sha256 of the sample table and of all tokens."""
    hashes: Mapping[str, object]
    """sha256 of each file that plan and calibration fix, by path; token chunks have theirs in
    `token_crc`."""


def root_document(root: Root) -> Document:
    """The root group's document, its own checksum included."""
    document = group({"dflash": to_dict(root)})
    document["attributes"]["dflash"]["crc32c"] = crc32c(canonical(document))
    return document


def read_root(store: Path) -> tuple[Root, StoreSpec, Layout, Attributes]:
    """Read and check the root's document; ValueError says in one line why it is not usable."""
    file = store / "zarr.json"
    try:
        content = file.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        planning = paths.beside(store, ".planning")
        hint = "is still being planned" if planning.exists() else "no zarr.json in it"
        raise ValueError(
            f"no store at {store} ({hint}): expected a directory that `dflash capture` wrote"
        ) from None
    try:
        document = json.loads(content)
        values = document["attributes"]["dflash"]
        found_format = values["format"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ValueError(f"{file} is damaged, or not that of a hidden-state store") from None
    try:
        if type(found_format) is not int or not 1 <= found_format <= FORMAT:
            raise ValueError(
                f"format {found_format!r} is not known here (this program reads up to {FORMAT}): "
                "update dflash-pipeline"
            )
        crc = values.pop("crc32c", None)
        if crc != crc32c(canonical(document)):
            raise ValueError("it does not match its own checksum: the file was changed or damaged")
        root = from_dict(Root, values, "dflash")
        spec, layout = StoreSpec.from_dict(root.identity), Layout.from_dict(root.layout)
        attributes = Attributes.from_dict(root.attributes)
        _check_root(root, spec, layout)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{file}: {error}") from None
    return root, spec, layout, attributes


def _check_root(root: Root, spec: StoreSpec, layout: Layout) -> None:
    if root.format != spec.format:
        raise ValueError(f"format {root.format} but identity.format {spec.format}")
    if not (1 <= root.num_samples <= 1 << 32 and 1 <= root.num_key_bytes <= 1 << 40):
        raise ValueError(f"{root.num_samples} samples with {root.num_key_bytes} bytes of keys")
    if sum(layout.num_shards) > root.num_samples:
        raise ValueError(f"{sum(layout.num_shards)} shards for {root.num_samples} samples")
    if root.num_head_rows not in (0, spec.vocab_size):
        raise ValueError(f"a head of {root.num_head_rows} rows, expected {spec.vocab_size} or 0")
    for name, size in root.file_bytes.items():
        check_file_name(name)
        if type(size) is not int or not 0 <= size <= 1 << 32:
            raise ValueError(f"file {name} of {size!r} bytes")
    rows = max(layout.num_shards) * layout.rows_per_shard
    if rows * spec.num_layers * row_bytes(spec.hidden_mode, spec.hidden_size) >= 1 << 62:
        raise ValueError("its arrays would be larger than any disk")
    for bucket, num in enumerate(layout.num_shards):
        if num * commit.width(spec, layout, bucket) >= 1 << 33:
            raise ValueError(f"the commit records of bucket {bucket} would not fit in memory")
    if set(root.hashes) != set(hashed_files(root, spec, layout)):
        raise ValueError("dflash.hashes does not list the files of such a store")


def check_file_name(name: str) -> None:
    """Refuse a name of a target's file that could lead elsewhere."""
    if not _FILE_NAME.fullmatch(name):
        raise ValueError(f"target file name {name!r}: expected letters, digits, `.`, `_` and `-`")


def hashed_files(root: Root, spec: StoreSpec, layout: Layout) -> list[str]:
    """Each file with a hash in the root: all that is fixed by now, token chunks apart."""
    chunks = [paths.column_file(name) for name in (*COLUMNS, *KEY_COLUMNS)]
    chunks += [paths.token_crc_file(b) for b, num in enumerate(layout.num_shards) if num]
    chunks += [paths.EMBED_FILE, *([paths.HEAD_FILE] if root.num_head_rows else [])]
    chunks += [paths.target_file(name) for name, size in root.file_bytes.items() if size]
    files = [f"{name}/zarr.json" for name in documents(root, spec, layout)] + chunks
    return files + (calibration_files(spec, layout) if spec.is_calibrated else [])


def documents(root: Root, spec: StoreSpec, layout: Layout) -> dict[str, Document]:
    """The document of each group and array below the root that the plan fixes, by path."""
    result = {name: group({}) for name in ("target", "target/files", "samples", "raw")}
    shape = (spec.vocab_size, spec.hidden_size)
    result["target/embed"] = flat("<u2", shape, ("token", "channel"), BF16)
    if root.num_head_rows:
        result["target/head"] = flat("<u2", shape, ("token", "channel"), BF16)
    for name, size in root.file_bytes.items():
        result[f"target/files/{name}"] = flat("|u1", (cast("int", size),), ("byte",), {})
    for name, dtype in COLUMNS.items():
        result[f"samples/{name}"] = flat(dtype, (root.num_samples,), ("sample",), {})
    result["samples/key_bytes"] = flat("|u1", (root.num_key_bytes,), ("byte",), {})
    result["samples/key_end"] = flat("<i8", (root.num_samples,), ("sample",), {})
    total = sum(n * commit.width(spec, layout, b) for b, n in enumerate(layout.num_shards))
    result["commit_sealed"] = flat("<u4", (total,), ("word",), {"buckets": "one after another"})
    for bucket, num_shards in enumerate(layout.num_shards):
        result |= _bucket(spec, layout, bucket, num_shards)
    return result


def _bucket(spec: StoreSpec, layout: Layout, bucket: int, num_shards: int) -> dict[str, Document]:
    name, rows = f"b{bucket}", layout.rows_per_shard
    num_rows = num_shards * rows
    note = {"max_len": layout.bucket_bounds[bucket], "rows_per_shard": rows}
    result = {name: group(note), f"raw/{name}": group(note)}
    for kind, mode, lead in kinds(spec):
        if mode == "bf16":
            configuration = {"mode": mode}
            document = packed(spec, layout, num_shards, kind, lead, configuration)
            result[f"{name}/{kind}"] = document
        row = (*lead, row_bytes(mode, spec.hidden_size))
        dims = (*DIMENSIONS[kind][:-1], "byte")
        one_byte = {"name": "bytes"}
        result[f"raw/{name}/{kind}"] = sharded("uint8", num_rows, row, layout, one_byte, dims)
    for kind, dtype in TOKEN_ARRAYS.items():
        bytes_codec = LITTLE if dtype == "<u4" else {"name": "bytes"}
        result[f"{name}/{kind}"] = array(
            DTYPE_NAMES[dtype[1:]], (num_rows,), (rows,), [bytes_codec, _ZSTD], ("token",), {}
        )
    width = commit.width(spec, layout, bucket)
    fields = {key: [s.start, s.stop] for key, s in commit.fields_of(spec, layout, bucket).items()}
    result[f"{name}/commit"] = array(
        "uint32", (num_shards, width), (1, width), [LITTLE], ("shard", "word"), {"fields": fields}
    )
    names = {"columns": list(TOKEN_ARRAYS)}
    result[f"{name}/token_crc"] = flat(
        "<u4", (num_shards, len(TOKEN_ARRAYS)), ("shard", "array"), names
    )
    return result
