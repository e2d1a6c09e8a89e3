"""One shard file: layout, checksums, erasing, and what is refused on reading."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from dflash_pipeline.store.checksum import crc32c
from dflash_pipeline.store.shard import ShardFile, ShardShape, map_shard

SHAPE = ShardShape((3, 4), 8, 4)


def written(file: Path, sizes: list[int], erased: list[tuple[int, int]]) -> np.ndarray:
    """A shard of random rows in pieces of these sizes; its rows as they should read."""
    rows = np.random.default_rng(1).integers(1, 255, (sum(sizes), *SHAPE.row), np.uint8)
    with ThreadPoolExecutor(1) as checksums:
        shard, place = ShardFile(file, SHAPE, checksums), 0
        for size in sizes:
            piece = rows[place : place + size].copy()
            shard.append(piece)
            # it is the caller's again
            piece[:] = 0
            place += size
        crcs = shard.finish(erased)
    shard.sync()
    shard.publish()
    shard.close()
    for first, number in erased:
        rows[first : first + number] = 0
    whole = np.zeros((SHAPE.num_present(len(rows)) * 8, *SHAPE.row), np.uint8)
    whole[: len(rows)] = rows
    assert crcs.tolist() == [crc32c(whole[i : i + 8].reshape(-1)) for i in range(0, len(whole), 8)]
    return rows


@pytest.mark.parametrize("sizes", [[], [1], [8], [5, 3, 1], [20, 12], [1] * 9, [31, 1]])
def test_rows_read_back_whatever_the_pieces_were(tmp_path: Path, sizes: list[int]) -> None:
    rows = written(tmp_path / "c" / "0", sizes, [])
    assert (map_shard(tmp_path / "c" / "0", len(rows), SHAPE) == rows).all()
    assert [file.name for file in (tmp_path / "c").iterdir()] == ["0"]


def test_erased_rows_are_zero_and_have_their_checksum(tmp_path: Path) -> None:
    rows = written(tmp_path / "0", [20], [(3, 7), (19, 1)])
    assert (map_shard(tmp_path / "0", 20, SHAPE) == rows).all()
    assert not rows[3:10].any()


def test_more_rows_than_a_shard_holds_are_refused(tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as checksums:
        shard = ShardFile(tmp_path / "0", SHAPE, checksums)
        shard.append(np.zeros((33, *SHAPE.row), np.uint8))
        with pytest.raises(ValueError, match="more than"):
            shard.finish([])
    shard.close()
    assert list(tmp_path.iterdir()) == []


def test_a_truncated_or_longer_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "0"
    written(file, [20], [])
    size = file.stat().st_size
    for wrong in (size - 1, size + 1, 0):
        os.truncate(file, wrong)
        with pytest.raises(ValueError, match=rf"{wrong} bytes, expected {size}"):
            map_shard(file, 20, SHAPE)


def test_each_byte_of_the_index_matters(tmp_path: Path, flip: Callable[[Path, int], None]) -> None:
    file = tmp_path / "0"
    written(file, [20], [])
    size = file.stat().st_size
    for place in range(size - 16 * 4 - 4, size):
        flip(file, place)
        with pytest.raises(ValueError, match="index"):
            map_shard(file, 20, SHAPE)
        flip(file, place)
    map_shard(file, 20, SHAPE)
