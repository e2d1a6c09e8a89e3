"""Work shared out over threads comes back in order, and its caller stays alive meanwhile."""

from __future__ import annotations

import threading
import time

import pytest

from dflash_pipeline.configs.threads import Threads


@pytest.mark.parametrize("threads", [Threads(), Threads(1, lambda: None), Threads(3)])
def test_results_come_in_the_order_of_the_items(threads: Threads) -> None:
    def late(number: int) -> int:
        time.sleep(0.002 * (5 - number))
        return number * number

    assert threads.map(late, range(5)) == [0, 1, 4, 9, 16]
    assert threads.map(late, []) == []


def test_no_more_than_so_many_work_at_the_same_time() -> None:
    lock, now, most = threading.Lock(), 0, 0

    def counted(_: int) -> None:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        time.sleep(0.01)
        with lock:
            now -= 1

    Threads(2).map(counted, range(8))
    assert most == 2


@pytest.mark.parametrize("threads", [Threads(), Threads(1, lambda: None), Threads(3)])
def test_the_first_error_is_raised_with_its_own_trace(threads: Threads) -> None:
    def failing(number: int) -> int:
        if number in (3, 5):
            raise ValueError(f"item {number}")
        return number

    with pytest.raises(ValueError, match="item 3") as caught:
        threads.map(failing, range(8))
    assert caught.traceback[-1].name == "failing"


@pytest.mark.parametrize("num", [1, 3])
def test_the_callers_thread_beats_while_one_item_takes_long(num: int) -> None:
    beats: list[threading.Thread] = []
    threads = Threads(num, lambda: beats.append(threading.current_thread()))
    threads.map(lambda _: time.sleep(0.5), [0])
    assert len(beats) >= 3
    assert set(beats) == {threading.current_thread()}


def test_a_beat_that_raises_ends_what_has_not_begun() -> None:
    begun: list[int] = []

    def stop() -> None:
        raise KeyboardInterrupt

    def slow(number: int) -> None:
        begun.append(number)
        time.sleep(0.2)

    with pytest.raises(KeyboardInterrupt):
        Threads(1, stop).map(slow, range(50))
    assert len(begun) < 4
