"""Nothing stays in the temporary directory, however a process ended."""

from __future__ import annotations

import errno
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dflash_pipeline.configs.errors import UsageError
from dflash_pipeline.configs.scratch import scratch

HOLD = """
import sys, time
from dflash_pipeline.configs.scratch import scratch
with scratch("trial") as path:
    (path / "file").touch()
    print(path, flush=True)
    time.sleep(60)
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def test_an_error_leaves_nothing(temporary: Path) -> None:
    def fail() -> None:
        with scratch("trial") as path:
            (path / "file").touch()
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert list(temporary.iterdir()) == []


def test_a_file_system_without_locks_is_named(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_descriptor: int, _operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    with (
        pytest.raises(UsageError, match=r"without locks \(No locks.*set TMPDIR"),
        scratch("trial"),
    ):
        pass
    assert list(temporary.iterdir()) == []


def test_what_is_kept_stays_until_the_next_of_its_name(temporary: Path) -> None:
    for _ in range(3):
        with scratch("logs", is_kept=lambda path: (path / "error").exists()) as path:
            (path / "error").touch()
        assert list(temporary.iterdir()) == [path]
    with scratch("logs"):
        pass
    assert list(temporary.iterdir()) == []


def test_what_a_killed_process_left_is_removed_and_what_a_living_one_holds_is_not(
    temporary: Path,
) -> None:
    holders = [
        subprocess.Popen([sys.executable, "-c", HOLD], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    try:
        killed, held = (Path(one.stdout.readline().strip()) for one in holders if one.stdout)
        holders[0].kill()
        holders[0].wait()
        assert killed.is_dir()
        with scratch("other"):
            assert killed.is_dir()
        with scratch("trial") as path:
            assert sorted(temporary.iterdir()) == sorted([held, path])
            assert (held / "file").exists()
    finally:
        for one in holders:
            one.kill()
            one.communicate()


def test_many_at_a_time_do_not_take_each_other_away(temporary: Path) -> None:
    code = """
from dflash_pipeline.configs.scratch import scratch
for _ in range(200):
    with scratch("trial") as path:
        (path / "file").touch()
        assert (path / "file").exists()
"""
    deadline = time.monotonic() + 60
    racers = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(3)]
    assert [one.wait(deadline - time.monotonic()) for one in racers] == [0, 0, 0]
    assert list(temporary.iterdir()) == []
