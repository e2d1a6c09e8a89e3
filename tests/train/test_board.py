"""TensorBoard's file of a run."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from dflash_pipeline.configs.disk import full_text, is_full
from dflash_pipeline.train.board import Board
from limits import small_files


def test_points_of_curves_are_kept(tmp_path: Path) -> None:
    board = Board(tmp_path / "board")
    for step in (1, 2):
        board.add({"loss": 3.0 / step, "lr": 0.1}, step)
    board.close()
    (file,) = (tmp_path / "board").iterdir()
    content = file.read_bytes()
    assert (content.count(b"loss"), content.count(b"lr")) == (2, 2)


def test_a_full_disk_names_the_directory_and_says_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # the thread that writes tells its error itself, as it ends, and at a later call
    monkeypatch.setattr(threading, "excepthook", lambda _told: None)
    others = set(threading.enumerate())
    board = Board(tmp_path / "board")
    with small_files(2000), pytest.raises(OSError, match="File too large") as caught:
        board.add(dict.fromkeys(map(str, range(100_000)), 3.0), 1)
    for thread in set(threading.enumerate()) - others:
        thread.join(60)
    assert is_full(caught.value)
    told = full_text(caught.value)
    assert told.startswith(f"no space left to write {tmp_path}/board (File too large; ")
    assert told.endswith("free): free some, then run the same command again (train: with --resume)")
