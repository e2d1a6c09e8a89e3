"""What a process leaves behind says whether it lives and how it ended."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from dflash_pipeline.configs.status import (
    end_status,
    find_runs,
    find_statuses,
    new_status,
    read_status,
    status_path,
    write_status,
)


def test_a_living_process_is_alive_and_a_dead_one_is_not(tmp_path: Path) -> None:
    status = new_status("train", 0, "cpu")
    write_status(str(tmp_path), status)
    read = read_status(status_path(str(tmp_path), "train", 0))
    assert read == status
    assert read.is_alive
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        pass
    status.pid = ended.pid
    assert not status.is_alive


def test_a_reused_process_id_is_not_taken_for_the_process(tmp_path: Path) -> None:
    status = new_status("train", 0, "cpu")
    status.start_ticks -= 1
    assert status.pid == os.getpid()
    assert not status.is_alive


def test_its_times_are_seconds_since_1970(tmp_path: Path) -> None:
    status = new_status("train", 0, "cpu")
    write_status(str(tmp_path), status)
    assert 0 <= status.time - status.started_at < 3600
    assert abs(time.time() - status.time) < 60


def test_the_end_keeps_what_was_counted(tmp_path: Path) -> None:
    status = new_status("capture", 1, "cpu")
    status.done, status.total, status.unit = 3, 9, "samples"
    write_status(str(tmp_path), status)
    end_status(str(tmp_path), "capture", 1, "failed", "no space")
    (ended,) = find_statuses(tmp_path)
    assert (ended.state, ended.error, ended.done) == ("failed", "no space", 3)
    assert not ended.is_alive


def test_statuses_are_found_from_the_run_the_store_and_the_answer_file(tmp_path: Path) -> None:
    write_status(str(tmp_path / "run" / "logs"), new_status("train", 0, "cpu"))
    write_status(str(tmp_path / "hs.logs"), new_status("capture", 0, "cpu"))
    write_status(str(tmp_path / "a.jsonl.logs"), new_status("generate", 0, "cpu"))
    (tmp_path / "run" / "logs" / "torn.status.json").write_text('{"stage": "tr')
    assert [one.stage for one in find_statuses(tmp_path / "run")] == ["train"]
    assert [one.stage for one in find_statuses(tmp_path / "hs")] == ["capture"]
    assert [one.stage for one in find_statuses(tmp_path / "a.jsonl")] == ["generate"]
    assert find_statuses(tmp_path / "nothing") == []


def test_variants_are_found_beside_what_the_sweep_s_own_directory_holds(tmp_path: Path) -> None:
    """A wrong start in the directory of a sweep leaves logs there."""
    for folder in ("a", "b", "."):
        write_status(str(tmp_path / folder / "logs"), new_status("train", 0, "cpu"))
    (tmp_path / "step-00000001").mkdir()
    assert [variant for variant, _ in find_runs(tmp_path)] == ["", "a", "b"]
