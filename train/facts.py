"""The key-value store that ranks share, each answer within a limit of time.

The client of torch waits without end for a server that took the question and stands still, as one
on a stopped process or a frozen machine does; whoever asks why a rank is late would hang as well.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import wait as until_done
from typing import Any, TypeVar

_T = TypeVar("_T")

ANSWER_S = 30.0
"""Longest that the server, a thread of its own in rank 0's process, is waited for."""
_POLL_S = (0.002, 0.2)


def within(limit_s: float, call: Callable[[], _T], name: str) -> _T:
    """What the call returns or raises; TimeoutError where it has not after `limit_s`.

    Only a thread that nobody waits for may be left behind in a call of torch without end.
    """
    result: Future[_T] = Future()

    def work() -> None:
        try:
            result.set_result(call())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=work, name=name, daemon=True).start()
    if not until_done([result], limit_s).done:
        raise TimeoutError(f"no answer within {limit_s:g} s")
    return result.result()


class Facts:
    """Texts by key. Every call raises RuntimeError where the store is gone or stays silent."""

    def __init__(self, store: Any, answer_s: float = ANSWER_S) -> None:
        """store: of torch; answer_s: longest wait for one answer. While one is late, no other is
        asked for."""
        self._store, self._answer_s = store, answer_s
        self._late: Future[Any] | None = None
        self._asked: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        # only a thread that nobody waits for may be left behind in a call without end
        threading.Thread(target=self._work, name="facts", daemon=True).start()

    def set(self, key: str, text: str) -> None:
        """Leave a text."""
        self._ask(lambda: self._store.set(key, text))

    def find(self, key: str) -> str | None:
        """The text, if it is there."""
        found: bytes | None = self._ask(
            lambda: self._store.get(key) if self._store.check([key]) else None
        )
        return None if found is None else found.decode()

    def wait(self, key: str, timeout_s: float) -> str:
        """The text once it is there; RuntimeError where that takes longer than `timeout_s`.

        It asks again and again: a question that waits at the server would hold up all others.
        """
        end, pause_s = time.monotonic() + timeout_s, _POLL_S[0]
        while (found := self.find(key)) is None:
            if time.monotonic() > end:
                raise RuntimeError(f"{key} was not told within {timeout_s:g} s")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _POLL_S[1])
        return found

    def answers(self) -> bool:
        """Whether the store can still be asked."""
        try:
            self._ask(lambda: self._store.check(["anything"]))
        except RuntimeError:
            return False
        return True

    def _ask(self, question: Callable[[], Any]) -> Any:
        if self._late is not None and not self._late.done():
            raise RuntimeError("the key-value store of the ranks answers no longer")
        answer: Future[Any] = Future()
        self._asked.put((question, answer))
        try:
            return answer.result(self._answer_s)
        except TimeoutError as error:
            self._late = answer
            raise RuntimeError("the key-value store of the ranks does not answer") from error

    def _work(self) -> None:
        while True:
            question, answer = self._asked.get()
            try:
                answer.set_result(question())
            except BaseException as error:
                answer.set_exception(error)
