"""What a stage tells reaches the terminal, the status file and the metrics file."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from dflash_pipeline.configs.place import Place
from dflash_pipeline.configs.status import find_statuses
from dflash_pipeline.store.runlog import RunLog


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(
        rank=1,
        world=2,
        device="cpu",
        kind="cpu",
        log_dir=str(tmp_path / "logs"),
        stage="train",
        number=1,
        rendezvous="env://",
        threads=1,
    )


def test_without_a_launcher_lines_are_printed_plainly(
    place: Place, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DFLASH_PROGRESS_FD", raising=False)
    log = RunLog(place)
    log.say("following store x")
    log.progress(1, 4, "steps", loss=2.5)
    assert capsys.readouterr().out == "[1] following store x\n"  # rank 0 tells the progress
    log = RunLog(replace(place, rank=0, world=1))
    log.say("following store x")
    log.progress(1, 4, "steps", loss=2.5)
    log.progress(2, 4, "steps", loss=2.0)  # within a second of the last: not told
    log.progress(4, 4, "steps", loss=1.0)
    first, second, third = capsys.readouterr().out.splitlines()
    assert first == "following store x"
    assert second.startswith("train: 1 of 4 steps (25 %)")
    assert third.startswith("train: 4 of 4 steps (100 %)")
    assert "following store x" in Path(place.log_dir, "train-1.log").read_text()


def test_what_every_process_would_say_is_said_by_the_first(
    place: Place, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DFLASH_PROGRESS_FD", raising=False)
    for rank in (1, 0):
        RunLog(replace(place, rank=rank, number=rank)).say_once("following store x")
        assert "following store x" in Path(place.log_dir, f"train-{rank}.log").read_text()
    assert capsys.readouterr().out == "[0] following store x\n"


def test_under_the_launcher_they_are_messages(
    place: Place, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    read_end, write_end = os.pipe()
    monkeypatch.setenv("DFLASH_PROGRESS_FD", str(write_end))
    log = RunLog(place)
    log.say("a line\nof two")
    log.progress(4, 4, "steps", loss=1.0)
    log.part(2, 2, "answers")
    os.close(write_end)
    with os.fdopen(read_end) as pipe:
        first, second, third = (json.loads(line) for line in pipe)
    assert (second["is_part"], third["is_part"]) == (False, True)
    assert first == {"say": "a line\nof two"}
    assert (second["done"], second["total"], second["numbers"]) == (4, 4, {"loss": 1.0})
    assert capsys.readouterr().out == ""
    log.say("the parent is gone, which is no failure of this process")
    log.progress(4, 4, "steps")


def test_the_status_file_follows(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DFLASH_PROGRESS_FD", raising=False)
    log = RunLog(place)
    logs = Path(place.log_dir)
    assert find_statuses(logs)[0].state == "starting"
    log.state("waiting")
    assert find_statuses(logs)[0].state == "waiting"
    log.progress(2, 8, "steps")
    (status,) = find_statuses(logs)
    assert (status.state, status.done, status.total, status.number) == ("running", 2, 8, 1)
    log = RunLog(place)
    log.say("planned")
    log.waiting("for room")
    assert [(one.state, one.text) for one in find_statuses(logs)] == [("waiting", "for room")]
    log.progress(3, 8, "steps")
    assert [(one.state, one.text) for one in find_statuses(logs)] == [("running", "planned")]
    # nothing is told after the last line of a process
    log.say("trained")
    assert [one.text for one in find_statuses(logs)] == ["trained"]


def test_what_was_done_before_this_process_is_not_in_its_rate(place: Place) -> None:
    log = RunLog(place)
    log.progress(1000, 2000, "steps")
    (status,) = find_statuses(Path(place.log_dir))
    status.time = status.begin_time + 10
    status.done = 1050
    assert status.rate == 5.0


def test_metrics_are_json_lines_beside_the_logs(place: Place, tmp_path: Path) -> None:
    log = RunLog(place)
    log.metrics({"step": 1, "loss_sum": 3.0, "count": 2})
    log.metrics({"step": 2}, tmp_path / "other.jsonl")
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["loss_sum"] == 3.0
    assert (tmp_path / "other.jsonl").read_text() == '{"step": 2}\n'
