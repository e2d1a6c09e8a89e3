"""One optimizer step: what is asked of whom, in which order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dflash_pipeline.configs.schema import OptimConfig, Run
from dflash_pipeline.train import window
from dflash_pipeline.train.checkpoint import at_the_beginning
from dflash_pipeline.train.clock import Clock
from dflash_pipeline.train.follow import Draw
from dflash_pipeline.train.order import Position


@pytest.mark.parametrize("num_batches", [0, 1, 3])
def test_gradients_leave_within_the_last_backward_and_a_wish_to_stop_is_asked_for_late(
    num_batches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[Any] = []

    class Asked:
        def expect_last(self) -> None:
            done.append("last")

        def sum_up(self, wants_stop: bool) -> torch.Tensor:
            done.append(("sum", wants_stop))
            return torch.tensor(1.0)

        def step(self, lr: float) -> None:
            done.append(lr)

    def batches(draw: Draw) -> Iterator[Any]:
        yield from (SimpleNamespace(feature_NKH=number) for number in range(len(draw.batches)))

    monkeypatch.setattr(window, "learn", lambda *_arguments: done.append("learn"))
    noise = SimpleNamespace(add=lambda *arguments: done.append(arguments))
    training: Any = SimpleNamespace(
        optimizer=Asked(),
        clock=Clock(torch.device("cpu")),
        noise=noise,
        forward=None,
        head=None,
        metrics=None,
        run=Run(optim=OptimConfig(lr=1.0, warmup=0.0, schedule="linear")),
        # goes on with other ranks: the schedule is not where the steps are
        progress=replace(at_the_beginning(8), step=7, schedule_step=2),
    )
    samples = torch.zeros(1).numpy()
    draw = Draw(0, (samples,) * num_batches, Position(0, 0, 0), None, 0)
    feed: Any = SimpleNamespace(batches=batches)
    lr, votes = window.take_step(training, feed, draw, 8, lambda: len(done) >= 2 * num_batches)
    learnt: list[Any] = [
        one for number in range(num_batches) for one in ((number, 8, number), "learn")
    ]
    if learnt:
        learnt.insert(-1, "last")
    assert done == [*learnt, ("sum", True), 0.75]
    assert (lr, float(votes)) == (0.75, 1.0)
