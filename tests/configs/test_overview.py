"""What `dflash status` says of processes, and what to do about them."""

from __future__ import annotations

import json

import pytest

from dflash_pipeline.configs.overview import Followers, json_text, lines, remedy
from dflash_pipeline.configs.status import Status, new_status


def _status(state: str, is_alive: bool = True) -> tuple[str, Status]:
    status = new_status("capture", 0, "cpu")
    status.state = state
    status.start_ticks -= not is_alive
    return "", status


@pytest.mark.parametrize(
    ("found", "is_open", "told"),
    [
        ([_status("running"), _status("done")], False, "1 of 2 at work: nothing to do"),
        ([_status("running"), _status("failed")], False, "once the others have ended, run the"),
        ([_status("running", is_alive=False)], False, "to go on, run the same command again"),
        ([_status("stopped")], True, "to go on, run the same command again"),
        ([_status("done")], True, "hs lacks shards, as after a repair: to go on, run its capture"),
        ([_status("done")], False, "all of them are done"),
    ],
)
def test_the_last_line_says_what_to_do(
    found: list[tuple[str, Status]], is_open: bool, told: str
) -> None:
    assert remedy("hs", found, is_open).startswith(told)


def test_training_runs_that_a_store_awaits_are_to_be_started() -> None:
    awaited = Followers(num_awaited=1, training="dflash train --store 'h s' --epochs 1")
    told = remedy("h s", [_status("waiting")], True, awaited)
    assert told == (
        "1 of 1 at work: 1 training run to start, by dflash train --store 'h s' --epochs 1"
    )


def test_a_training_run_that_ended_is_to_be_gone_on_with_or_dropped() -> None:
    waiting = [_status("waiting")]
    stopped = Followers(stopped=["/runs/a"])
    assert remedy("h s", waiting, True, stopped) == (
        "1 of 1 at work: /runs/a not running: run its dflash train again with --resume, or drop it "
        "by dflash status 'h s' --drop /runs/a"
    )
    # a store that is whole releases nothing more
    assert remedy("h s", waiting, False, stopped) == "1 of 1 at work: nothing to do"


def test_a_store_that_has_lost_its_runs_is_not_said_to_need_nothing() -> None:
    told = remedy("hs", [_status("waiting")], True, Followers(are_gone=True))
    assert "go on with one that used them (its dflash train line with --resume)" in told


@pytest.mark.parametrize(
    ("state", "is_alive"),
    [("running", True), ("done", True), ("failed", True), ("stopped", True), ("running", False)],
)
def test_only_a_process_at_work_has_time_left(state: str, is_alive: bool) -> None:
    """Of two workers each ends with a part of the shards, the rest done by the other."""
    variant, status = _status(state, is_alive)
    status.done, status.total, status.unit = 75, 100, "rows"
    status.begin_time, status.time = 2.0, 10.0
    (shown,) = [line for line in lines([(variant, status)]) if "75 of 100 rows (75 %)" in line]
    assert "rows/s" in shown
    assert ("left" in shown) is (state == "running" and is_alive)


def test_people_and_programs_are_told_the_same() -> None:
    variant, status = "shallow", _status("running", is_alive=False)[1]
    status.done, status.total, status.unit, status.error = 5, 10, "rows", "it hangs"
    first, progress, error = lines([(variant, status)])
    assert first.startswith("shallow/capture-0  dead, was running  ")
    assert progress.startswith("  capture: 5 of 10 rows (50 %)")
    assert error == "  it hangs"
    (found,) = json.loads(json_text([(variant, status)]))
    assert (found["variant"], found["alive"], found["state"]) == ("shallow", False, "running")
