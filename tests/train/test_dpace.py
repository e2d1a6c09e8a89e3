"""Weights by how far the drafter gets."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from dflash_pipeline.train.dpace import dpace_weights


def test_a_slot_weighs_the_chances_of_all_prefixes_that_hold_it() -> None:
    # blocks of four: one whole, one that a document ends after a slot, one of padding
    row_R = torch.tensor([1, 2, 3, 5])
    chance_R = [0.5, 0.25, 0.8, 0.1]
    ce_R = -torch.tensor(chance_R).log()
    mixed = [0.75 * chance + 0.25 for chance in chance_R]
    prefixes = list(itertools.accumulate(mixed[:3], lambda one, two: one * two))
    wanted = [sum(prefixes), sum(prefixes[1:]), prefixes[2], mixed[3]]
    assert dpace_weights(ce_R, row_R, 3, 4, 0.25).tolist() == pytest.approx(wanted)


@pytest.mark.parametrize(("ce", "mass"), [(math.inf, 2.0), (0.0, 120.0)])
def test_a_block_of_sixteen_weighs_2_to_120(ce: float, mass: float) -> None:
    weight_R = dpace_weights(torch.full((15,), ce), torch.arange(1, 16), 1, 16, 0.5)
    assert float(weight_R.sum()) == pytest.approx(mass, rel=1e-3)


def test_no_gradient_passes_through_a_weight() -> None:
    ce_R = torch.ones(3, requires_grad=True)
    assert not dpace_weights(ce_R, torch.arange(1, 4), 1, 4, 0.5).requires_grad
