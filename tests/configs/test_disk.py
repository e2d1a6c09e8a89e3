"""Small files written whole, and the text of a full disk."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from dflash_pipeline.configs.disk import full_text, is_full, write_whole, writing
from limits import small_files


def test_a_file_that_does_not_fit_is_named_and_the_one_before_stays(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    write_whole(path, b"before")
    with small_files(10), pytest.raises(OSError, match="File too large") as caught:
        write_whole(path, b"far too long a text")
    assert is_full(caught.value)
    assert caught.value.filename == str(path)
    assert [one.name for one in tmp_path.iterdir()] == ["status.json"]
    assert path.read_bytes() == b"before"


def test_the_system_itself_names_no_file_that_cannot_be_written() -> None:
    with (
        pytest.raises(OSError, match="No space left") as caught,
        Path("/dev/full").open("w") as file,
    ):
        file.write("x")
    assert caught.value.filename is None


def test_an_error_that_names_its_file_keeps_it() -> None:
    with pytest.raises(FileNotFoundError) as caught, writing("other"):
        Path("/nowhere/file").read_bytes()
    assert caught.value.filename == "/nowhere/file"


def test_a_full_disk_is_told_with_the_file_the_room_and_how_to_go_on(tmp_path: Path) -> None:
    error = OSError(errno.ENOSPC, "No space left on device", str(tmp_path / "metrics.jsonl"))
    told = full_text(error)
    assert told.startswith(f"no space left to write {tmp_path}/metrics.jsonl (No space left on")
    assert " free): free some, then run the same command again (train: with --resume)" in told
    # the folder may be gone again
    gone = full_text(OSError(errno.ENOSPC, "No space left on device", "/nowhere/file"))
    assert "/nowhere/file (No space left on device; " in gone
