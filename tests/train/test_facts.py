"""What ranks tell one another is there, is missing, or is not waited for any longer."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import pytest

from dflash_pipeline.train.facts import Facts

LIMIT_S = 0.5


class Served:
    """A store that may stand still or be gone."""

    def __init__(self) -> None:
        self.told: dict[str, bytes] = {}
        self.goes_on = threading.Event()
        self.goes_on.set()
        self.is_gone = False

    def _answer(self) -> None:
        self.goes_on.wait()
        if self.is_gone:
            raise RuntimeError("Broken pipe")

    def set(self, key: str, text: str) -> None:
        self._answer()
        self.told[key] = text.encode()

    def check(self, keys: Sequence[str]) -> bool:
        self._answer()
        return all(key in self.told for key in keys)

    def get(self, key: str) -> bytes:
        self._answer()
        return self.told[key]


def test_a_text_is_found_once_it_is_told() -> None:
    served = Served()
    facts = Facts(served, LIMIT_S)
    assert facts.answers()
    assert facts.find("a") is None
    facts.set("a", "x ü")
    assert facts.find("a") == facts.wait("a", 0.0) == "x ü"
    threading.Timer(0.1, lambda: served.set("later", "y")).start()
    assert facts.wait("later", 10.0) == "y"
    with pytest.raises(RuntimeError, match=r"never was not told within 0\.05 s"):
        facts.wait("never", 0.05)


def test_a_store_that_is_gone_is_an_error_for_whoever_asks() -> None:
    served = Served()
    facts = Facts(served, LIMIT_S)
    served.is_gone = True
    for ask in (lambda: facts.find("a"), lambda: facts.set("a", ""), lambda: facts.wait("a", 9.0)):
        with pytest.raises(RuntimeError, match="Broken pipe"):
            ask()
    assert not facts.answers()


def test_a_store_that_stands_still_is_waited_for_once() -> None:
    served = Served()
    facts = Facts(served, LIMIT_S)
    served.goes_on.clear()
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="does not answer"):
        facts.find("a")
    for _ in range(100):
        with pytest.raises(RuntimeError, match="answers no longer"):
            facts.set("a", "")
    assert not facts.answers()
    assert LIMIT_S <= time.monotonic() - began < 10 * LIMIT_S
    # it goes on: so do all that ask it, once it has given the late answer
    served.goes_on.set()
    while not facts.answers():
        assert time.monotonic() - began < 20 * LIMIT_S
        time.sleep(0.01)
    facts.set("a", "x")
    assert facts.find("a") == "x"
