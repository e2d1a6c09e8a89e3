"""Each way of reading gives the same bytes; what cannot be read is named; how one is chosen."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_pipeline.store import access, paths
from dflash_pipeline.store.access import (
    ALIGNMENT,
    Access,
    Direct,
    Mapped,
    Plain,
    Range,
)
from dflash_pipeline.store.reader import Store
from dflash_pipeline.store.spec import ShardId

BLOCK = ALIGNMENT
SIZE = 9 * BLOCK + 1234
"""Of the fixture `file`."""


def _fail(text: str) -> None:
    pytest.fail(text)


WAYS: dict[str, Callable[[bool], Access]] = {
    "read": Plain,
    "mmap": Mapped,
    "direct": lambda drops_cache: Direct(drops_cache, print),
}


@pytest.fixture(params=[(name, drops) for name in WAYS for drops in (False, True)], ids=str)
def way(request: pytest.FixtureRequest) -> Access:
    name, drops_cache = request.param
    return WAYS[name](drops_cache)


def test_any_range_is_read_into_any_address_and_nothing_beside_it(file: Path, way: Access) -> None:
    content = np.frombuffer(file.read_bytes(), np.uint8)
    edges = (0, 1, 48, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 5)
    ranges = [(o, n) for o in edges for n in (1, *edges[2:], 5 * BLOCK)]
    ranges += [(SIZE - n, n) for n in (1, 1234, 1235, BLOCK, 6 * BLOCK + 17)] + [(0, SIZE)]
    for offset, number in ranges:
        for shift in (0, 1, 640, BLOCK - 1):
            slab = np.full(number + 3 * BLOCK, 7, np.uint8)
            first = -slab.ctypes.data % BLOCK + shift
            way.read(Range(file, offset, number, SIZE), slab[first : first + number])
            expected = np.full_like(slab, 7)
            expected[first : first + number] = content[offset : offset + number]
            assert np.array_equal(slab, expected), (offset, number, shift)


def test_the_rows_of_a_store_are_the_same_each_way(store: Store, way: Access) -> None:
    offsets = set()
    for i in range(len(store.table)):
        hidden, last = (np.empty(view.shape, np.uint8) for view in (store.hidden(i), store.last(i)))
        store.read_into(i, hidden, last, way)
        assert np.array_equal(hidden, store.hidden(i))
        assert np.array_equal(last, store.last(i))
        offsets.add(store.place_of(i, "hidden").offset % BLOCK)
    # first samples of shards and others, whose rows start inside a block
    assert 0 in offsets
    assert len(offsets) > 5


def test_a_direct_read_reads_no_more_than_two_blocks_in_vain(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    real = os.preadv

    def preadv(descriptor: int, parts: list[Any], offset: int) -> int:
        assert offset % BLOCK == 0
        for part in parts:
            assert part.ctypes.data % BLOCK == 0
            assert part.size % BLOCK == 0
        calls.append(sum(part.size for part in parts))
        return real(descriptor, parts, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    way = Direct(False, _fail)
    for offset in (0, 100, BLOCK - 1):
        for number in (1, 3 * BLOCK, 4 * BLOCK + 7):
            for shift in (0, 3, 4000):
                slab = np.empty(number + 2 * BLOCK, np.uint8)
                way.read(Range(file, offset, number, SIZE), slab[shift : shift + number])
                assert len(calls) == 1
                assert calls.pop() <= number + 2 * BLOCK


def test_short_reads_go_on_where_they_ended(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.preadv

    def one_block(descriptor: int, parts: list[Any], offset: int) -> int:
        return real(descriptor, [memoryview(parts[0])[:BLOCK]], offset)

    monkeypatch.setattr(os, "preadv", one_block)
    for way in (Plain(False), Direct(False, _fail)):
        out = np.empty(SIZE - 100, np.uint8)
        way.read(Range(file, 100, out.size, SIZE), out)
        assert out.tobytes() == file.read_bytes()[100:]


def test_a_truncated_shard_is_named_with_the_sample(store: Store, way: Access) -> None:
    i = int(np.flatnonzero(store.table.bucket == 1)[0])
    hidden = np.empty(store.place_of(i, "hidden").num_bytes, np.uint8)
    shard = store.path / paths.hidden_file(ShardId(1, 0))
    os.truncate(shard, shard.stat().st_size // 2)
    with pytest.raises(ValueError, match=rf"b1/hidden/c/0/0/0 has .*truncated.*sample {i}, "):
        store.read_into(i, hidden, None, way)


@pytest.mark.parametrize("name", WAYS)
def test_a_file_that_ends_during_the_read_is_named(
    name: str, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(access, "check_file_bytes", lambda *_: None)
    for offset in (SIZE - 10, SIZE + BLOCK):
        with pytest.raises(ValueError, match=r"rows: \d+ bytes could be read at \d+, expected 50"):
            WAYS[name](False).read(Range(file, offset, 50, SIZE), np.empty(50, np.uint8))


def test_a_page_that_the_disk_cannot_give_is_an_error_with_file_and_sample(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(Mapped, "_populate", lambda *_: errno.EFAULT)
    monkeypatch.setattr(os, "preadv", fail)
    hidden = np.empty(store.hidden(3).shape, np.uint8)
    for make in WAYS.values():
        with pytest.raises(ValueError, match=r"b\d/hidden/c/\d/0/0: (Bad|Input).*sample 3, "):
            store.read_into(3, hidden, None, make(False))


def test_what_is_not_committed_is_not_read(empty_store: Store, way: Access) -> None:
    with pytest.raises(ValueError, match=r"sample 0 of .* is not captured yet"):
        empty_store.read_into(0, bytearray(48), None, way)


def test_a_refused_direct_read_is_said_once_and_read_anyway(
    store: Store, no_direct: list[int]
) -> None:
    said: list[str] = []
    way = Direct(False, said.append)
    for i in range(4):
        hidden = np.empty(store.hidden(i).shape, np.uint8)
        store.read_into(i, hidden, None, way)
        assert np.array_equal(hidden, store.hidden(i))
    assert way.is_refused
    assert len(no_direct) == 1
    assert len(said) == 1
    assert "refuses O_DIRECT (Invalid argument): reading it through the page cache" in said[0]


def _num_resident(file: Path) -> int:
    with file.open("r+b") as stream, mmap.mmap(stream.fileno(), 0) as mapped:
        pages = np.frombuffer(mapped, np.uint8)
        states = np.zeros(-(-pages.size // mmap.PAGESIZE), np.uint8)
        mincore = ctypes.CDLL(None).mincore
        mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
        assert mincore(pages.ctypes.data, pages.size, states.ctypes.data) == 0
        del pages
    return int((states & 1).sum())


def _uncached_file(file: Path) -> Range:
    """1 MiB in the middle of 8, none of which is in the page cache."""
    size = 8 << 20
    with file.open("wb") as stream:
        stream.write(os.urandom(size))
        stream.flush()
        # pages that wait to be written cannot be dropped
        os.fsync(stream.fileno())
        access.drop_cached(stream.fileno(), Range(file, 0, size, size))
    if _num_resident(file):
        pytest.skip("here a file is its page cache")
    return Range(file, (2 << 20) + 100, 1 << 20, size)


@pytest.mark.parametrize("name", WAYS)
def test_what_was_read_and_dropped_is_not_in_the_page_cache(name: str, tmp_path: Path) -> None:
    kept, dropped = (_uncached_file(tmp_path / name) for name in ("kept", "dropped"))
    WAYS[name](False).read(kept, np.empty(kept.num_bytes, np.uint8))
    assert (_num_resident(kept.file) > 0) == (name != "direct")
    WAYS[name](True).read(dropped, np.empty(dropped.num_bytes, np.uint8))
    # the first and the last page are in part a neighbour's
    assert _num_resident(dropped.file) <= 2


def test_several_threads_read_through_one_way(store: Store, way: Access) -> None:
    def equals(i: int) -> bool:
        hidden = np.empty(store.hidden(i).shape, np.uint8)
        store.read_into(i, hidden, None, way)
        return bool(np.array_equal(hidden, store.hidden(i)))

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(equals, list(range(len(store.table))) * 5))
