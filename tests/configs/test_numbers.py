"""Who has a number, when it is free again, and what of an earlier launch is forgotten."""

from __future__ import annotations

import errno
import fcntl
from pathlib import Path

import pytest

from dflash_pipeline.configs.numbers import claimed, forget_ended
from dflash_pipeline.configs.status import (
    find_statuses,
    log_path,
    new_status,
    status_path,
    write_status,
)


def test_a_number_is_held_until_the_end_of_the_block_and_by_one_alone(tmp_path: Path) -> None:
    logs = str(tmp_path / "logs")
    with claimed(logs, "capture", 2) as first:
        with claimed(logs, "capture", 2) as second, claimed(logs, "plan", 1) as other:
            assert (list(first), list(second), list(other)) == ([0, 1], [2, 3], [0])
        with claimed(logs, "capture", 1) as third:
            assert list(third) == [2]
    with claimed(logs, "capture", 1) as fourth:
        assert list(fourth) == [0]


def test_the_number_of_a_living_process_without_a_launcher_is_left_to_it(tmp_path: Path) -> None:
    write_status(str(tmp_path), new_status("train", 0, "cpu"))
    with claimed(str(tmp_path), "train", 1) as logs:
        assert list(logs) == [1]
    forget_ended(str(tmp_path), "train")
    assert [one.number for one in find_statuses(tmp_path)] == [0]


def test_what_a_launch_has_done_is_forgotten_when_all_of_it_has_ended(tmp_path: Path) -> None:
    with claimed(str(tmp_path), "capture", 2) as logs:
        for number in logs:
            status = new_status("capture", number, "cpu")
            status.state = "done"
            write_status(str(tmp_path), status)
        status_path(str(tmp_path), "capture", 1).write_text("torn")
        forget_ended(str(tmp_path), "capture")
        assert len(list(tmp_path.glob("*.status.json"))) == 2
    forget_ended(str(tmp_path), "capture")
    assert not list(tmp_path.glob("*.status.json"))


def test_a_log_that_is_removed_while_it_is_claimed_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a refused launch, which leaves none: the lock would be on a file without a name."""
    path, lock = log_path(str(tmp_path), "capture", 0), fcntl.flock
    removed: list[Path] = []

    def removing(log: int, how: int) -> None:
        lock(log, how)
        if not removed:
            removed.append(path)
            path.unlink()

    monkeypatch.setattr(fcntl, "flock", removing)
    with claimed(str(tmp_path), "capture", 1) as logs:
        assert (removed, list(logs), path.exists()) == ([path], [0], True)
        with claimed(str(tmp_path), "capture", 1) as others:
            assert list(others) == [1]


def test_without_locks_the_status_tells_who_is_at_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(_log: int, _how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refused)
    write_status(str(tmp_path), new_status("capture", 0, "cpu"))
    ended = new_status("capture", 1, "cpu")
    ended.state = "done"
    write_status(str(tmp_path), ended)
    with claimed(str(tmp_path), "capture", 1) as logs:
        assert list(logs) == [1]
    forget_ended(str(tmp_path), "capture")
    assert [one.number for one in find_statuses(tmp_path)] == [0]
