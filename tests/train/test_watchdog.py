"""A rank that hangs is named, with the stack of every thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from dflash_pipeline.configs.place import Place
from dflash_pipeline.configs.status import read_status, status_path
from dflash_pipeline.store.runlog import RunLog
from dflash_pipeline.train import watchdog as watching
from dflash_pipeline.train.clock import Clock
from dflash_pipeline.train.group import Group
from dflash_pipeline.train.watchdog import Watchdog


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """`passes(seconds)`: of the watchdog's time, which stands still but for this."""
    now = 0.0

    def passed(seconds: float) -> None:
        nonlocal now
        now += seconds
        # it has a look
        time.sleep(0.05)

    monkeypatch.setattr(watching, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(watching, "_LOOK_EVERY_S", 0.001)
    return passed


def _stuck_reader(until: threading.Event) -> None:
    until.wait(30)


def test_a_hang_is_named_with_its_stage_its_step_and_every_stack(
    place: Place,
    tmp_path: Path,
    passes: Callable[[float], None],
    capfd: pytest.CaptureFixture[str],
) -> None:
    ended = threading.Event()
    codes: list[int] = []

    def end(code: int) -> None:
        codes.append(code)
        ended.set()

    reader = threading.Thread(target=_stuck_reader, args=(ended,))
    reader.start()
    clock = Clock(torch.device("cpu"))
    with Watchdog(place, 1.0, RunLog(place), Group(place, 1.0), clock, end) as watchdog:
        for step in range(6):
            watchdog.beat(step)
            passes(0.8)
        assert not codes
        with clock.stage("backward"):
            passes(0.15)
            assert ended.wait(30)
    reader.join()
    assert codes == [1]
    status = read_status(status_path(place.log_dir, "train", 0))
    assert status is not None
    assert status.state == "failed"
    assert "rank 0 hangs: for 1 s it has been in stage 'backward' after step 5: every thread" in (
        status.error
    )
    stacks = capfd.readouterr().err
    assert "_stuck_reader" in stacks
    assert "test_a_hang_is_named" in stacks
    assert "rank 0 hangs" in (tmp_path / "out" / "logs" / "train-0.log").read_text()


def test_a_rank_that_waits_for_others_is_not_taken_for_the_one_that_hangs(
    place: Place, passes: Callable[[float], None]
) -> None:
    codes: list[int] = []
    group = Group(place, 1.0)
    clock = Clock(torch.device("cpu"))
    with (
        Watchdog(place, 1.0, RunLog(place), group, clock, codes.append),
        group._waiting(),
    ):
        passes(5.0)
    assert not codes


def test_a_rank_whose_wait_has_just_ended_is_alive(
    place: Place, passes: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    codes: list[int] = []
    group = Group(place, 1.0)
    looks, may_look = threading.Event(), threading.Event()

    def begin_to_look() -> None:
        looks.set()
        assert may_look.wait(30)

    monkeypatch.setattr(group, "tell_beat", begin_to_look)
    with Watchdog(place, 1.0, RunLog(place), group, Clock(torch.device("cpu")), codes.append):
        assert looks.wait(30)
        # a whole wait between two looks
        with group._waiting():
            passes(5.0)
        may_look.set()
        passes(0.0)
        assert not codes
        passes(5.0)
    assert codes == [1]
