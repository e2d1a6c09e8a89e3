"""Time by stage."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from dflash_pipeline.train import clock as timing
from dflash_pipeline.train.clock import STAGES, Clock
from waits import no_waits


def test_a_stage_is_counted_until_it_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: now))
    clock = Clock(torch.device("cpu"))
    for _ in range(2):
        with clock.stage("forward"):
            assert clock.stage_now == "forward"
            now += 0.25
        now += 8.0
    with clock.stage("backward"):
        now += 1.0
    taken = clock.take()
    assert tuple(taken) == STAGES
    assert {name: seconds for name, seconds in taken.items() if seconds} == {
        "forward": 0.5,
        "backward": 1.0,
    }
    assert set(clock.take().values()) == {0.0}
    # what an error is named by
    assert clock.stage_now == "backward"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_stages_of_a_device_are_its_own_time_and_wait_for_nothing() -> None:
    clock = Clock(torch.device("cuda"))
    square = torch.randn(4096, 4096, device="cuda")
    square @ square  # the first product waits while its library is set up
    with no_waits():
        with clock.stage("forward"):
            for _ in range(100):
                square @ square
        assert clock.take()["forward"] == 0.0
    torch.cuda.synchronize()
    assert clock.take()["forward"] > 0.001
