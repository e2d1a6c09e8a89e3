"""A signal ends the work between two batches, and none is lost."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest

from dflash_pipeline.capture.stop import Stop


def _in_block(work: Callable[[Stop], None]) -> None:
    with Stop() as stop:
        work(stop)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_is_noticed_at_the_next_look(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    done = []

    def batches(stop: Stop) -> None:
        for batch in range(3):
            stop.check()
            done.append(batch)
            signal.raise_signal(number)

    with pytest.raises(KeyboardInterrupt, match=number.name):
        _in_block(batches)
    assert done == [0]
    assert signal.getsignal(number) == before


def test_a_signal_after_the_last_look_is_raised_as_the_block_ends() -> None:
    with pytest.raises(KeyboardInterrupt, match="SIGTERM"):
        _in_block(lambda _: signal.raise_signal(signal.SIGTERM))


def _signals_then_error(num_signals: int) -> None:
    for _ in range(num_signals):
        signal.raise_signal(signal.SIGTERM)
    raise ValueError("the disk is full")


def test_an_error_is_not_hidden_by_a_signal() -> None:
    with pytest.raises(ValueError, match="the disk is full"):
        _in_block(lambda _: _signals_then_error(1))


def test_a_second_signal_ends_it_at_once() -> None:
    with pytest.raises(KeyboardInterrupt):
        _in_block(lambda _: _signals_then_error(2))
