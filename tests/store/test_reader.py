"""Reading: only what is committed, by view, copy or in place; and refusals."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from dflash_pipeline.store import metadata, paths
from dflash_pipeline.store.access import Plain
from dflash_pipeline.store.build import StoreBuilder
from dflash_pipeline.store.lease import Leases
from dflash_pipeline.store.reader import Store, open_store
from dflash_pipeline.store.rows import decode
from dflash_pipeline.store.spec import Layout, ShardId
from dflash_pipeline.store.table import build_table
from dflash_pipeline.store.writer import StoreWriter


def test_each_way_of_reading_gives_the_rows_that_were_written(store: Store, plan: Any) -> None:
    assert len(store) == len(plan.table)
    for i in range(len(store)):
        hidden_TKH, last_MH = plan.rows_of(i)
        ids_T, mask_T = plan.tokens_of(i)
        sample = store.sample(i)
        assert (sample.hidden_TKH == hidden_TKH).all()
        assert sample.last_MH is not None
        assert (sample.last_MH == last_MH).all()
        assert (sample.ids_T == ids_T).all()
        assert (sample.mask_T == mask_T).all()
        hidden_out = np.empty(store.hidden(i).shape, np.uint8)
        last_out = bytearray(store.last(i).nbytes)
        store.read_into(i, hidden_out, memoryview(last_out), Plain(False))
        assert (decode(hidden_out, "bf16") == hidden_TKH).all()
        assert bytes(last_out) == store.last(i).tobytes()
        store.check_sample(i)
        assert store.num_rows(i) == len(ids_T)


def test_views_are_of_the_file_and_read_only(store: Store) -> None:
    hidden_TKR = store.hidden(0)
    assert isinstance(hidden_TKR, np.memmap)
    with pytest.raises(ValueError, match="read-only"):
        hidden_TKR[0] = 0


def test_a_buffer_of_the_wrong_size_is_refused(store: Store) -> None:
    with pytest.raises(ValueError, match=r"a buffer of 3 bytes, expected \d+"):
        store.read_into(0, bytearray(3), None, Plain(False))


def test_the_target_is_in_the_store(store: Store, tiny: ModuleType) -> None:
    embed_VH = store.embed()
    assert embed_VH.shape == (tiny.VOCAB, 8)
    assert (store.head() == embed_VH[::-1]).all()
    assert store.files() == {"config.json": b'{"model_type": "tiny"}', "empty.txt": b""}
    assert store.target_config() == {"model_type": "tiny"}
    assert store.attributes.mask_token_id == 96


def test_a_follower_sees_shards_as_they_are_committed(
    tiny: ModuleType, plan: Any, empty_store: Store
) -> None:
    follower = open_store(empty_store.path)
    with pytest.raises(ValueError, match="not captured yet"):
        follower.hidden(0)
    with pytest.raises(ValueError, match="not captured yet"):
        follower.num_rows(0)
    assert (follower.tokens(0)[0] == plan.tokens_of(0)[0]).all()
    seen = []
    with (
        Leases(empty_store.path, plan.layout, heartbeat_s=1, hung_s=9) as leases,
        StoreWriter(empty_store, leases, depth=2) as writer,
    ):
        for shard_id in (ShardId(1, 3), ShardId(0, 0)):
            amax = tiny.put_shard(plan, writer, leases.acquire(shard_id))
            writer.finish(amax, np.zeros(4, np.uint32), {}, halved=False)
            assert follower.refresh() == []
            writer.commit()
            assert follower.refresh() == [shard_id]
            seen.append(shard_id)
            readable = {follower.table.shard_id(i) for i in np.flatnonzero(follower.readable_N)}
            assert readable == set(seen)
    assert not follower.is_complete


def test_a_committed_shard_that_is_gone_is_an_error_not_zeros(store: Store) -> None:
    i = int(np.flatnonzero(store.table.bucket == 1)[0])
    (store.path / paths.hidden_file(ShardId(1, 0))).unlink()
    for read in (store.hidden, store.check_sample):
        with pytest.raises(ValueError, match="missing although it is committed"):
            read(i)
    with pytest.raises(ValueError, match="missing although it is committed"):
        store.read_into(i, bytearray(int(store.table.num_tokens[i]) * 48), None, Plain(False))


def test_check_sample_names_the_chunk(store: Store, flip: Callable[[Path, int], None]) -> None:
    shard_id = ShardId(1, 1)
    samples = range(len(store.table))[store.table.of_shard(shard_id)]
    flip(store.path / paths.hidden_file(shard_id), 256 * 48 + 5)
    store.check_sample(samples[0])
    with pytest.raises(ValueError, match=r"b1/hidden/c/1/0/0: chunk 1 ") as found:
        store.check_sample(samples[-1])
    assert f"; dflash verify --deep --repair {store.path} uncommits" in str(found.value)


def test_a_truncated_shard_is_named_by_each_way_of_reading(store: Store) -> None:
    i = int(np.flatnonzero(store.table.bucket == 1)[0])
    file = store.path / paths.hidden_file(ShardId(1, 0))
    os.truncate(file, file.stat().st_size - 100)
    buffer = bytearray(int(store.table.num_tokens[i]) * 48)
    read_into = partial(store.read_into, hidden_out=buffer, last_out=None, access=Plain(False))
    for read in (store.hidden, store.check_sample, read_into):
        with pytest.raises(ValueError, match=r"b1/hidden/c/0/0/0 has \d+ bytes, expected"):
            read(i)


# --- refusals ------------------------------------------------------------------------------------


def test_what_is_no_store_is_one_clear_line(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(ValueError, match=r"no store at .*: expected a directory"):
            open_store(path)
    (tmp_path / "hs.planning").mkdir()
    with pytest.raises(ValueError, match="still being planned"):
        open_store(tmp_path / "hs")
    for text in ("", "{", "[]", '{"attributes": {}}', "[" * 100_000, "\ufeff{}", "null"):
        (tmp_path / "zarr.json").write_text(text)
        with pytest.raises(ValueError, match="damaged, or not that of"):
            open_store(tmp_path)


def rewrite(store: Store, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the root's attributes and give them a fitting checksum, as an attacker would."""
    file = store.path / "zarr.json"
    document = json.loads(file.read_bytes())
    values = document["attributes"]["dflash"]
    del values["crc32c"]
    change(values)
    values["crc32c"] = metadata.crc32c(metadata.canonical(document))
    file.write_bytes(metadata.canonical(document))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda v: v.update(format=2), "update dflash-pipeline"),
        (lambda v: v.update(format="1"), "update dflash-pipeline"),
        (lambda v: v.update(colour="red"), "unknown fields"),
        (lambda v: v["layout"].update(colour="red"), "unknown fields"),
        (lambda v: v["identity"].update(hidden_mode="int2"), "update dflash-pipeline"),
        (lambda v: v.update(num_samples=1 << 60), "samples with"),
        (lambda v: v.update(num_samples=25), "bytes, expected"),
        (lambda v: v.update(num_key_bytes=1 << 39), "bytes, expected"),
        (lambda v: v["layout"].update(rows_per_shard=1 << 32), "larger than any disk|gaps"),
        (lambda v: v["layout"].update(num_shards=[1, 1 << 24]), "16777217 shards for 24 samples"),
        (lambda v: v["identity"].update(hidden_size=1 << 19, num_target_layers=1), "outside"),
        (lambda v: v["file_bytes"].update({"../../etc/passwd": 3}), "file name"),
        (lambda v: v["file_bytes"].update({"config.json": 1 << 40}), "of 1099511627776 bytes"),
        (lambda v: v["hashes"].update({"../x": "00"}), "hashes"),
        (lambda v: v["attributes"].update(mask_token_id=None), "mask_token_id"),
        (lambda v: v.update(identity=[]), "must be a table"),
        (lambda v: v.pop("layout"), "lacks the fields"),
    ],
)
def test_hostile_metadata_is_refused(
    store: Store, change: Callable[[dict[str, Any]], None], text: str
) -> None:
    rewrite(store, change)
    with pytest.raises(ValueError, match=text):
        open_store(store.path)


def test_metadata_without_a_fitting_checksum_is_refused(store: Store) -> None:
    file = store.path / "zarr.json"
    file.write_bytes(file.read_bytes().replace(b'"mask_token_id":96', b'"mask_token_id":95'))
    with pytest.raises(ValueError, match="own checksum"):
        open_store(store.path)


def test_a_link_out_of_the_store_is_not_followed(store: Store, tmp_path: Path) -> None:
    outside = tmp_path / "secret"
    file = store.path / paths.target_file("config.json")
    outside.write_bytes(b"x" * file.stat().st_size)
    file.unlink()
    file.symlink_to(outside)
    with pytest.raises(ValueError, match="leads out of the store"):
        store.files()


def test_a_token_chunk_cannot_make_us_allocate(store: Store) -> None:
    from numcodecs.zstd import Zstd

    bomb = Zstd(level=3).encode(np.zeros(1 << 24, np.uint8))
    (store.path / paths.token_file(ShardId(0, 0), "input_ids")).write_bytes(bomb)
    with pytest.raises(ValueError, match="cannot be read"):
        store.tokens(0)


def test_a_hundred_thousand_samples_open_quickly(tiny: ModuleType, tmp_path: Path) -> None:
    """The long form, a million in two seconds, is a benchmark."""
    number, in_shard = 100_000, 5000
    num_shards = number // in_shard
    layout = Layout(
        rows_per_shard=20480,
        chunk_rows=256,
        token_budget=64,
        pad_multiple=1,
        bucket_bounds=(4,),
        num_shards=(num_shards,),
        num_samples_per_shard_max=(in_shard,),
        seed=0,
    )
    zero = np.zeros(number, np.int64)
    place = np.arange(number)
    columns = dict.fromkeys(("source", "domain", "split", "token_hash"), zero)
    columns |= {"source_row": place, "num_tokens": zero + 4, "num_teacher": zero + 3}
    columns |= {"num_anchors": zero + 3, "bucket": zero, "shard": place // in_shard}
    columns |= {"batch": place % in_shard // 8}
    table = build_table([f"k{i}" for i in place], columns, layout, ("all",), ("f",))
    spec, attributes = tiny.make_spec(), tiny.make_plan(3).attributes
    with StoreBuilder(tmp_path / "hs", spec, layout, table, attributes, 0) as builder:
        builder.write_target(np.zeros((tiny.VOCAB, 8), np.uint16), None, {})
        ids_N, mask_N = np.zeros(4 * in_shard, np.uint32), np.ones(4 * in_shard, np.uint8)
        for shard_id in layout.shard_ids():
            builder.write_tokens(shard_id, ids_N, mask_N)
        builder.publish()
    begin = time.process_time()
    store = open_store(tmp_path / "hs")
    assert store.table.find("k77777") == 77777
    assert time.process_time() - begin < 0.5
