"""Where numbers first cease to be finite."""

from __future__ import annotations

import pytest
import torch

from dflash_pipeline.train.finite import PLACES, first_not_finite


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_the_first_place_is_told_whatever_follows(bad: float) -> None:
    fine, spoiled = torch.ones(3, 2).bfloat16(), torch.tensor([1.0, bad])
    told = [
        PLACES[int(first_not_finite(*tensors))]
        for tensors in (
            (fine, fine, torch.tensor(1.0)),
            (spoiled, fine, spoiled),
            (fine, spoiled, spoiled),
            (fine, fine, torch.tensor(bad)),
        )
    ]
    assert told == ["", "the stored features", "the drafter's output", "the loss"]


def test_infinities_of_both_signs_do_not_cancel() -> None:
    both = torch.tensor([float("inf"), -float("inf")])
    assert int(first_not_finite(both)) == 1
