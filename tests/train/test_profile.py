"""Traces of steps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from dflash_pipeline.train.profile import Profiler
from limits import small_files

CPU = torch.device("cpu")


def test_the_steps_of_the_window_alone_are_traced(tmp_path: Path) -> None:
    said: list[str] = []
    profiler = Profiler("2-3", tmp_path, 1, CPU, said.append)
    for step in range(1, 5):
        profiler.before(step)
        torch.ones(3).add_(1)
        assert said == []
        if step == 3:
            break
        profiler.after(step)
    profiler.after(3)
    (trace,) = (tmp_path / "profile").iterdir()
    assert said == [f"steps 2 to 3 are traced in {trace}"]
    names = [event.get("name") for event in json.loads(trace.read_text())["traceEvents"]]
    assert names.count("aten::add_") == 2
    profiler.before(4)
    profiler.close(4)
    assert len(said) == 1


@pytest.mark.parametrize("most_bytes", [500, 20_000])
def test_a_trace_that_finds_no_room_is_told_keeps_none_and_ends_no_run(
    most_bytes: int, tmp_path: Path
) -> None:
    """A small one is cut off, a large one not even named."""
    said: list[str] = []
    profiler = Profiler("1-1", tmp_path, 0, CPU, said.append)
    profiler.before(1)
    for _ in range(300):
        torch.ones(3).add_(1)
    with small_files(most_bytes):
        profiler.after(1)
    (told,) = said
    path = tmp_path / "profile" / "rank0-steps-1-1.json"
    assert told.startswith(f"the trace of steps 1 to 1 cannot be written to {path} (")
    assert told.endswith(" free): the run goes on without it")
    assert not list(path.parent.iterdir())
