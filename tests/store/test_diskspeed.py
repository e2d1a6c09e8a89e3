"""The disk's speed is that of bytes that were written, and nothing of them is left."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash_pipeline.store import diskspeed, durable


def test_a_file_is_written_read_and_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = []

    def write_all(descriptor: int, data: object, offset: int) -> None:
        whole(descriptor, data, offset)
        sizes.append(offset)

    whole = durable.write_all
    monkeypatch.setattr(durable, "write_all", write_all)
    monkeypatch.setattr(diskspeed, "_BLOCK_BYTES", 1 << 20)
    monkeypatch.setattr(diskspeed, "_MOST_BYTES", 5 << 20)
    speed = diskspeed.disk_speed(tmp_path)
    assert sizes == [block << 20 for block in range(5)]
    assert speed.write > 0
    assert speed.read > 0
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_is_nearly_full_is_tried_with_one_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(diskspeed, "_BLOCK_BYTES", 1 << 20)
    monkeypatch.setattr(durable, "free_bytes", lambda _folder: 3 << 20)
    assert diskspeed.disk_speed(tmp_path).write > 0
