"""The way of reading that is chosen, and what is said of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dflash_pipeline.store import choice
from dflash_pipeline.store.access import ALIGNMENT, Range
from dflash_pipeline.store.choice import Trial, best, open_access

BLOCK = ALIGNMENT
SIZE = 9 * BLOCK + 1234
"""Of the fixture `file`."""


def test_processor_time_decides_between_equally_fast_ways() -> None:
    trials = {"read": Trial(1.0e9, 0.3), "mmap": Trial(0.5e9, 0.01), "direct": Trial(0.95e9, 0.1)}
    assert best(trials) == "direct"
    trials["direct"] = Trial(0.8e9, 0.1)
    assert best(trials) == "read"


@pytest.fixture
def places(file: Path, monkeypatch: pytest.MonkeyPatch) -> list[Range]:
    """Enough rows to measure."""
    monkeypatch.setattr(choice, "_LEAST_BYTES", 1)
    monkeypatch.setattr(choice, "_TRIAL_BYTES", 2 * BLOCK)
    return [Range(file, 100 * i, 2 * BLOCK + i, SIZE) for i in range(12)]


@pytest.mark.parametrize(("share", "has_direct"), [(0.4, False), (0.6, True)])
def test_auto_measures_and_says_what_it_took(
    share: float, has_direct: bool, places: list[Range], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choice, "memory_bytes", lambda: 1000)
    said: list[str] = []
    way = open_access("auto", 2, places, int(1000 * share), said.append)
    assert len(said) == 1
    assert said[0].startswith(f"feed.io = auto: {way.name} (read ")
    assert ", mmap " in said[0]
    # what fits into memory is there from the second pass on: not read from the disk again
    assert (", direct " in said[0]) == has_direct
    assert ("page cache dropped after reading" in said[0]) == has_direct


def test_auto_takes_no_way_that_is_refused(
    places: list[Range], no_direct: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choice, "memory_bytes", lambda: 1)
    said: list[str] = []
    way = open_access("auto", 1, places, 10, said.append)
    assert way.name in ("read", "mmap")
    assert no_direct
    assert "refuses O_DIRECT" in said[0]
    assert ", direct " not in said[1]


@pytest.mark.parametrize("memory", [1, 1 << 40])
@pytest.mark.parametrize("is_all", [False, True])
def test_shards_that_are_released_meanwhile_are_passed_over(
    is_all: bool, memory: int, places: list[Range], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choice, "memory_bytes", lambda: memory)
    gone = [replace(place, file=place.file.with_name("gone")) for place in places[::2]]
    said: list[str] = []
    way = open_access("auto", 2, gone if is_all else [*gone, *places[1::2]], 10, said.append)
    assert way.name == "read" if is_all else way.name in ("read", "mmap", "direct")
    assert ("were released" in said[0]) == is_all


def test_a_damaged_file_is_not_passed_over(places: list[Range]) -> None:
    damaged = [replace(place, file_bytes=SIZE + 1) for place in places]
    with pytest.raises(ValueError, match=f"has {SIZE} bytes, expected {SIZE + 1}"):
        open_access("auto", 1, damaged, 10, print)


def test_the_memory_of_this_machine_is_known() -> None:
    assert 1 << 24 < choice.memory_bytes() < 1 << 50
