"""The benchmark's account of idle time: what is between spans, and who it is put down to."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "bench"))
    return importlib.import_module("gaps")


def test_gaps_are_what_no_span_covers_from_the_first_begin_to_the_last_end(tool: Any) -> None:
    busy = [(40.0, 50.0), (0.0, 30.0), (5.0, 10.0), (51.0, 60.0)]
    assert tool.gaps(busy, 1.0) == [(30.0, 40.0), (50.0, 51.0)]
    assert tool.gaps(busy, 2.0) == [(30.0, 40.0)]


def test_of_nested_parts_the_inner_one_is_what_is_done(tool: Any) -> None:
    nested = [(0.0, 10.0, "take"), (2.0, 6.0, "compute"), (3.0, 4.0, "run"), (12.0, 13.0, "claim")]
    assert tool.innermost(nested) == [
        (0.0, 2.0, "take"),
        (2.0, 3.0, "compute"),
        (3.0, 4.0, "run"),
        (4.0, 6.0, "compute"),
        (6.0, 10.0, "take"),
        (12.0, 13.0, "claim"),
    ]


def test_idle_time_is_shared_out_whole(tool: Any) -> None:
    labelled = [(0.0, 2.0, "wait"), (2.0, 3.0, "claim"), (5.0, 9.0, "wait")]
    spent = tool.overlaps([(1.0, 6.0), (8.0, 10.0)], labelled)
    assert spent == {"wait": 1.0 + 1.0 + 1.0, "claim": 1.0, "between the parts": 2.0 + 1.0}
