"""Progress as a line: an ETA from one sum over one count, few lines where nobody watches."""

from __future__ import annotations

import io

import pytest

from dflash_pipeline.configs.screen import Screen, duration, progress_line


def _message(done: float, total: float, rate: float) -> dict[str, object]:
    return {"done": done, "total": total, "unit": "samples", "rate": rate, "numbers": {}}


def test_a_line_holds_share_rate_and_time_left() -> None:
    message = {**_message(1200, 9000, 41.0), "numbers": {"loss": 2.3125}}
    assert progress_line("capture", message) == (
        "capture: 1,200 of 9,000 samples (13 %), 41 samples/s, 0:03:10 left, loss 2.312"
    )


def test_an_unknown_total_promises_no_end() -> None:
    assert progress_line("train", _message(5, 0, 2.5)) == "train: 5 samples, 2.5 samples/s"


def test_durations() -> None:
    assert [duration(seconds) for seconds in (0.4, 61, 3723)] == ["0:00:00", "0:01:01", "1:02:03"]


def test_a_file_gets_the_first_and_the_last_line_of_a_quick_run() -> None:
    lines = io.StringIO()
    screen = Screen(lines, "capture", world=2)
    for done in range(1, 101):
        screen.progress(0, _message(done, 100, 10.0))
    screen.progress(1, _message(100, 100, 9.0))  # the other rank tells the end as well
    screen.close()
    assert [line.split(" samples")[0] for line in lines.getvalue().splitlines()] == [
        "capture: 1 of 100",
        "capture: 100 of 100",
    ]


def test_parts_of_several_processes_are_one_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of three ranks had answered its 16 prompts of 60: 100 %, it said."""
    lines = io.StringIO()
    screen = Screen(lines, "generate", world=3)

    def tell(rank: int, done: int, total: int) -> None:
        numbers = {"tokens_written": 10 * done}
        message = _message(done, total, float(done)) | {"is_part": True, "numbers": numbers}
        screen.progress(rank, message)

    for rank, total in enumerate((18, 26, 16)):
        tell(rank, 0, total)
    monkeypatch.setattr("dflash_pipeline.configs.screen.PLAIN_EVERY_S", 0.0)
    for rank, done, total in ((1, 6, 26), (2, 16, 16), (0, 18, 18), (1, 26, 26)):
        tell(rank, done, total)
    assert lines.getvalue().splitlines() == [
        "generate: 0 of 60 samples (0 %), tokens_written 0",
        "generate: 6 of 60 samples (10 %), 6 samples/s, 0:00:09 left, tokens_written 60",
        # who is done does not help the one that is not
        "generate: 22 of 60 samples (37 %), 6 samples/s, 0:00:06 left, tokens_written 220",
        "generate: 40 of 60 samples (67 %), 6 samples/s, 0:00:03 left, tokens_written 400",
        "generate: 60 of 60 samples (100 %), 60 samples/s, tokens_written 600",
    ]


def test_what_all_processes_have_is_not_known_before_each_has_told() -> None:
    lines = io.StringIO()
    screen = Screen(lines, "generate", world=2)
    screen.progress(0, _message(0, 18, 0.0) | {"is_part": True})
    assert lines.getvalue() == ""
    screen.progress(0, _message(18, 18, 2.0) | {"is_part": True})
    assert lines.getvalue() == "generate: 18 samples, 2 samples/s\n"


def test_a_wait_is_told_in_full_once_a_minute_and_kept_on_a_terminals_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = "14 of 40 shards captured; waiting for runs/a"
    lines = io.StringIO()
    screen = Screen(lines, "capture", world=2)
    for _ in range(3):
        screen.waiting(text)
    assert lines.getvalue() == f"capture: {text}\n"
    monkeypatch.setattr("dflash_pipeline.configs.screen.WAITING_EVERY_S", 0.0)
    screen.waiting(text)
    assert lines.getvalue() == 2 * f"capture: {text}\n"

    terminal = Terminal()
    monkeypatch.setenv("COLUMNS", "21")
    screen = Screen(terminal, "capture", world=1)
    screen.waiting(text)
    screen.say(0, "room again")
    begin = f"capture: {text}"[:20]
    assert terminal.getvalue() == f"capture: {text}\n\r\x1b[K{begin}\r\x1b[Kroom again\n"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_one_rewritten_line_that_gives_way_to_what_is_said() -> None:
    lines = Terminal()
    screen = Screen(lines, "train", world=1)
    screen.progress(0, _message(1, 10, 1.0))
    screen.say(0, "saved")
    screen.progress(0, _message(2, 10, 1.0))
    screen.close()
    first = "\r\x1b[Ktrain: 1 of 10 samples (10 %), 1 samples/s, 0:00:09 left"
    second = "\r\x1b[Ktrain: 2 of 10 samples (20 %), 1 samples/s, 0:00:08 left"
    assert lines.getvalue() == f"{first}\r\x1b[Ksaved\n{second}\n"
