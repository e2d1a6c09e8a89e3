"""Of processes that compile the same code one goes first, the others then go side by side."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from dflash_pipeline.capture import turns
from dflash_pipeline.capture.turns import WAITING, turn


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))


def _unheard(text: str = "") -> None:
    pytest.fail(f"nobody was to wait: {text}")


class _Waiting:
    """Ends what it waits for at the second look."""

    def __init__(self, end: Callable[[], object]) -> None:
        self.said: list[str] = []
        self.num_looks = 0
        self._end = end

    def wait(self) -> None:
        self.num_looks += 1
        if self.num_looks == 2:
            self._end()


def test_the_first_goes_alone_and_the_others_then_side_by_side() -> None:
    with ExitStack() as first, ExitStack() as others:
        first.enter_context(turn("code", _unheard, _unheard))
        second, third = _Waiting(first.close), _Waiting(_unheard)
        others.enter_context(turn("code", second.said.append, second.wait))
        assert (second.said, second.num_looks) == ([WAITING], 2)
        # the second is at it still; what it makes is in the cache already
        others.enter_context(turn("code", third.said.append, third.wait))
        assert (third.said, third.num_looks) == ([WAITING], 0)
    with turn("code", _unheard, _unheard):
        pass


def test_who_compiles_something_else_waits_for_nobody() -> None:
    with turn("code", _unheard, _unheard), turn("other code", _unheard, _unheard):
        pass


def test_a_failure_to_compile_ends_the_turn() -> None:
    with pytest.raises(ValueError, match="cannot"), turn("code", _unheard, _unheard):
        raise ValueError("cannot be compiled")
    with turn("code", _unheard, _unheard):
        pass


def test_nobody_waits_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "LONGEST_S", 0.0)
    said: list[str] = []
    with turn("code", _unheard, _unheard), turn("code", said.append, _unheard):
        assert said == [WAITING]


def test_without_a_cache_to_share_nobody_waits(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(turns, "cache_dir", lambda: str(tmp_path / "file"))
    with turn("code", _unheard, _unheard), turn("code", _unheard, _unheard):
        pass
    # what then stops the compiler is told without what the cache had to say
    with pytest.raises(ValueError, match="cannot") as failed, turn("code", _unheard, _unheard):
        raise ValueError("cannot be compiled")
    assert failed.value.__context__ is None


def _compile_for_ever(directory: str, is_begun: Any) -> None:
    # the server that it was forked from may have another
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = directory
    with turn("code", _unheard, _unheard):
        is_begun.set()
        threading.Event().wait()


def test_the_turn_of_a_killed_process_is_over(tmp_path: Path) -> None:
    processes = multiprocessing.get_context("forkserver")
    is_begun = processes.Event()
    process = processes.Process(target=_compile_for_ever, args=(str(tmp_path), is_begun))
    process.start()
    try:
        assert is_begun.wait(timeout=100)
        other = _Waiting(lambda: (process.kill(), process.join()))
        with turn("code", other.said.append, other.wait):
            assert (other.said, other.num_looks) == ([WAITING], 2)
        assert process.exitcode == -signal.SIGKILL
    finally:
        process.kill()
        process.join()
