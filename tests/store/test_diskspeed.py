"""The disks' speeds are those of bytes that were written, and nothing of them is left."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from dflash_pipeline.store import diskspeed, durable


def test_every_folder_is_written_read_and_left_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: Counter[int] = Counter()

    def write_all(descriptor: int, data: object, offset: int) -> None:
        whole(descriptor, data, offset)
        sizes[offset >> 20] += 1

    whole = durable.write_all
    folders = [tmp_path / name for name in ("first", "second")]
    for folder in folders:
        folder.mkdir()
    monkeypatch.setattr(durable, "write_all", write_all)
    monkeypatch.setattr(diskspeed, "_BLOCK_BYTES", 1 << 20)
    monkeypatch.setattr(diskspeed, "_MOST_BYTES", 8 << 20)
    for name in ("_ALONE_S", "_TOGETHER_S", "_READ_S"):
        monkeypatch.setattr(diskspeed, name, 60.0)
    speed = diskspeed.disk_speed(folders)
    # 8 blocks alone, then four threads that share as many
    assert sizes == {0: 5, 1: 5, **dict.fromkeys(range(2, 8), 1)}
    assert speed.worker > 0
    assert len(speed.write) == len(speed.read) == 2
    assert min(*speed.write, *speed.read) > 0
    assert [list(folder.iterdir()) for folder in folders] == [[], []]


def test_a_disk_that_is_nearly_full_is_tried_with_one_block_a_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offsets: list[int] = []
    whole = durable.write_all
    monkeypatch.setattr(
        durable,
        "write_all",
        lambda descriptor, data, offset: (
            offsets.append(offset),
            whole(descriptor, data, offset),
        ),
    )
    monkeypatch.setattr(diskspeed, "_BLOCK_BYTES", 1 << 20)
    monkeypatch.setattr(durable, "free_bytes", lambda _folder: 3 << 20)
    assert diskspeed.disk_speed([tmp_path]).worker > 0
    assert offsets == [0, 0, 0]
