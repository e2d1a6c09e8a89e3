"""Zarr v3 documents of groups and arrays, written here without zarr: canonical JSON, one line."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from dflash_pipeline.store.spec import QUANTISED_MODES, Layout, StoreSpec

Document = dict[str, Any]

DTYPE_NAMES = {"u1": "uint8", "i2": "int16", "i4": "int32", "i8": "int64", "u4": "uint32"}
DTYPE_NAMES |= {"u8": "uint64", "u2": "uint16"}
LITTLE = {"name": "bytes", "configuration": {"endian": "little"}}
BF16 = {"dtype": "bfloat16", "to_float32": "(x.astype('u4') << 16).view('f4')"}
"""Attributes of an array of raw bf16 bits."""
DIMENSIONS = {"hidden": ("token", "layer", "channel"), "last": ("token", "channel")}
"""Axes of the arrays of rows."""


def canonical(document: Document) -> bytes:
    """The one serialisation of a document that this program writes."""
    return json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def group(attributes: Document) -> Document:
    """A group's document."""
    return {"attributes": attributes, "node_type": "group", "zarr_format": 3}


def flat(dtype: str, shape: Sequence[int], dims: Sequence[str], attributes: Document) -> Document:
    """An array whose one chunk file is the array itself, C order, no compression."""
    codec = LITTLE if dtype[0] == "<" else {"name": "bytes"}
    chunk = [max(size, 1) for size in shape]
    return array(DTYPE_NAMES[dtype[1:]], shape, chunk, [codec], dims, attributes)


def sharded(
    data_type: str,
    num_rows: int,
    row: tuple[int, ...],
    layout: Layout,
    codec: Document,
    dims: Sequence[str],
) -> Document:
    """An array of shards that split axis 0, `chunk_rows` rows an inner chunk."""
    inner = {
        "chunk_shape": [layout.chunk_rows, *row],
        "codecs": [codec],
        "index_codecs": [LITTLE, {"name": "crc32c"}],
        "index_location": "end",
    }
    sharding = {"name": "sharding_indexed", "configuration": inner}
    chunk = (layout.rows_per_shard, *row)
    return array(data_type, (num_rows, *row), chunk, [sharding], dims, {})


def array(
    data_type: str,
    shape: Sequence[int],
    chunk: Sequence[int],
    codecs: Sequence[Document],
    dims: Sequence[str],
    attributes: Document,
) -> Document:
    """An array's document."""
    return {
        "attributes": attributes,
        "chunk_grid": {"configuration": {"chunk_shape": list(chunk)}, "name": "regular"},
        "chunk_key_encoding": {"configuration": {"separator": "/"}, "name": "default"},
        "codecs": list(codecs),
        "data_type": data_type,
        "dimension_names": list(dims),
        "fill_value": 0.0 if data_type == "float32" else 0,
        "node_type": "array",
        "shape": list(shape),
        "storage_transformers": [],
        "zarr_format": 3,
    }


def kinds(spec: StoreSpec) -> list[tuple[str, str, tuple[int, ...]]]:
    """Name, mode and leading axes of each array of rows."""
    found: list[tuple[str, str, tuple[int, ...]]] = [
        ("hidden", spec.hidden_mode, (spec.num_layers,))
    ]
    return [*found, ("last", spec.last_mode, ())] if spec.has_last else found


def quantised_kinds(spec: StoreSpec) -> list[tuple[str, str, tuple[int, ...]]]:
    """Those of them that need a calibration."""
    return [kind for kind in kinds(spec) if kind[1] in QUANTISED_MODES]


def packed(
    spec: StoreSpec,
    layout: Layout,
    num_shards: int,
    kind: str,
    lead: tuple[int, ...],
    configuration: Document,
) -> Document:
    """The array of float32 that the codec makes of stored rows."""
    codec = {"name": "dflash.packed_rows", "configuration": configuration}
    num_rows, row = num_shards * layout.rows_per_shard, (*lead, spec.hidden_size)
    return sharded("float32", num_rows, row, layout, codec, DIMENSIONS[kind])
