"""The store as plain zarr sees it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from zarr.core.metadata.v3 import ArrayV3Metadata

from dflash_pipeline.store import metadata
from dflash_pipeline.store.codec import PackedRows
from dflash_pipeline.store.reader import open_store
from dflash_pipeline.store.rows import decode


def test_zarr_gives_each_sample_as_float32(store: Any, plan: Any) -> None:
    group = zarr.open(str(store.path), mode="r")
    for i in range(len(plan.table)):
        bucket, first = f"b{plan.table.bucket[i]}", int(plan.table.start[i])
        hidden_TKH, last_MH = plan.rows_of(i)
        found = group[bucket]["hidden"][first : first + len(hidden_TKH)]
        assert found.dtype == np.float32
        assert (found == hidden_TKH).all()
        assert (found == decode(store.hidden(i), "bf16")).all()
        first = int(plan.table.last_start[i])
        assert (group[bucket]["last"][first : first + len(last_MH)] == last_MH).all()
    ids_T, mask_T = plan.tokens_of(0)
    first = int(plan.table.start[0])
    assert (group["b0/input_ids"][first : first + len(ids_T)] == ids_T).all()
    assert (group["b0/loss_mask"][first : first + len(ids_T)] == mask_T).all()
    assert bytes(group["target/files/config.json"][:]) == b'{"model_type": "tiny"}'
    assert (group["b1/commit"][:, 0] == 1).all()


@pytest.mark.parametrize("mode", ["int8", "int4"])
def test_zarr_decodes_and_encodes_quantised_rows_as_we_do(
    mode: str, tiny: Any, tmp_path: Path
) -> None:
    golden = Path(__file__).parent.parent / "golden" / f"store-v1-{mode}"
    store, group = open_store(golden), zarr.open(str(golden), mode="r")
    for i in range(len(store.table)):
        bucket, sample = f"b{store.table.bucket[i]}", store.sample(i)
        first, first_last = int(store.table.start[i]), int(store.table.last_start[i])
        found = group[bucket]["hidden"][first : first + len(sample.ids_T)]
        assert (found == sample.hidden_TKH).all()
        assert sample.last_MH is not None
        found = group[bucket]["last"][first_last : first_last + len(sample.last_MH)]
        assert (found == sample.last_MH).all()
    ours = group["b1/hidden"]
    codec = ours.metadata.to_dict()["codecs"][0]["configuration"]["codecs"][0]
    theirs = zarr.create_array(
        str(tmp_path / "copy"),
        shape=ours.shape,
        shards=ours.shards,
        chunks=ours.chunks,
        dtype=ours.dtype,
        serializer=PackedRows.from_dict(codec),
        compressors=None,
        fill_value=0,
    )
    plan = tiny.make_plan(3, rows=192, chunk_rows=32, hidden_size=64)
    (i,) = (k for k in range(3) if store.table.bucket[k] == 1)
    values_TKH = plan.rows_of(i)[0]
    theirs[: len(values_TKH)] = values_TKH
    assert (theirs[: len(values_TKH)] == store.sample(i).hidden_TKH).all()
    assert hash(PackedRows.from_dict(codec)) == hash(PackedRows.from_dict(codec))


def test_our_shard_is_zarr_pythons_byte_for_byte(store: Any, plan: Any, tmp_path: Path) -> None:
    group = zarr.open(str(store.path), mode="r")
    for name in ("b1/hidden", "b1/last", "raw/b1/hidden"):
        ours = group[name]
        theirs = zarr.create_array(
            str(tmp_path / name),
            shape=ours.shape,
            shards=ours.shards,
            chunks=ours.chunks,
            dtype=ours.dtype,
            serializer=PackedRows() if ours.dtype == np.float32 else "auto",
            compressors=None,
            fill_value=0,
        )
        theirs[:] = ours[:]
        for shard in range(plan.layout.num_shards[1]):
            file = Path("c", str(shard), *["0"] * (ours.ndim - 1))
            wanted = (store.path / name / file).read_bytes()
            assert (tmp_path / name / file).read_bytes() == wanted


def test_zarr_takes_our_documents_as_they_are(store: Any, plan: Any) -> None:
    for name, ours in metadata.documents(store.root, plan.spec, plan.layout).items():
        if ours["node_type"] == "array":
            theirs = json.loads(json.dumps(ArrayV3Metadata.from_dict(ours).to_dict()))
            for key in ("shape", "data_type", "chunk_grid", "fill_value", "dimension_names"):
                assert theirs[key] == ours[key], (name, key)


def test_tree_and_members_find_nothing_foreign(store: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        group = zarr.open_group(str(store.path), mode="r")
        assert "hidden" in str(group.tree())
        members = dict(group.members(max_depth=None))
    assert len([name for name in members if name.endswith("/hidden")]) == 4


def test_the_raw_companion_opens_where_the_codec_is_not_installed(store: Any, plan: Any) -> None:
    code = f"""
import importlib.metadata as m
real = m.entry_points
class Hidden:
    groups = property(lambda self: real().groups)
    def select(self, **which):
        return [e for e in real().select(**which) if "dflash" not in e.name]
m.entry_points = lambda **which: Hidden().select(**which) if which else Hidden()
import sys, zarr
group = zarr.open_group({str(store.path)!r}, mode="r")
rows = group["raw/b1/hidden"][:3]
assert "dflash_pipeline" not in sys.modules
try:
    group["b1/hidden"]
    raise SystemExit("the codec was found")
except Exception as error:
    print(type(error).__name__)
print(rows.tobytes().hex())
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    name, text = found.stdout.split()
    assert name != "SystemExit"
    first = int(np.flatnonzero(plan.table.bucket == 1)[0])
    assert bytes.fromhex(text) == store.hidden(first)[:3].tobytes()


@pytest.mark.parametrize(
    "entry",
    [
        {"name": "dflash.packed_rows"},
        {"name": "dflash.packed_rows", "configuration": {"mode": "int2"}},
        {"name": "dflash.packed_rows", "configuration": {"mode": "bf16", "group": 16}},
        {"name": "other", "configuration": {"mode": "bf16"}},
        {"name": "dflash.packed_rows", "configuration": {"mode": "int4"}},
        {
            "name": "dflash.packed_rows",
            "configuration": {"mode": "int4", "group": 16, "block": 16, "layers": []},
        },
        {
            "name": "dflash.packed_rows",
            "configuration": {
                "mode": "int8",
                "group": 0,
                "block": 16,
                "layers": [{"kept": [0], "centre": "AAAA"}],
            },
        },
    ],
)
def test_a_codec_from_the_future_is_refused(entry: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"packed_rows|update|calibration of rows|multiple of 16"):
        PackedRows.from_dict(entry)


def test_the_raw_arrays_share_their_chunks_through_relative_links(store: Any) -> None:
    link = store.path / "raw" / "b1" / "hidden" / "c"
    assert os.readlink(link) == "../../../b1/hidden/c"
