"""Sums and counts of the drafter's hits."""

from __future__ import annotations

import pytest
import torch

from dflash_pipeline.train.loss import RowStats
from dflash_pipeline.train.metrics import Metrics


def test_accepted_length_is_the_joint_prefix_and_slots_are_counted_alone() -> None:
    metrics = Metrics(4, "cpu")
    # block 0: right, wrong, right; block 1: right, right (then a document ends); block 2: padding
    row_R = torch.tensor([1, 2, 3, 5, 6])
    slot_R = torch.tensor([1, 2, 3, 1, 2])
    weight_R = torch.tensor([1.0, 0.5, 0.25, 1.0, 0.5])
    correct_R, ce_R = torch.tensor([[1.0, 0, 1, 1, 1], [1.0, 2, 3, 4, 5]])
    loss_R, kl_R, entropy_R, overlap_R = torch.arange(20.0).view(4, 5)
    stats = RowStats(correct_R, ce_R, kl_R, entropy_R, overlap_R)
    for _ in range(2):
        metrics.add(loss_R, stats, row_R, slot_R, weight_R, num_anchors=3, num_blocks=2)
    summary = metrics.summary(metrics.sums)
    assert summary.accuracy_by_slot == (1.0, 0.5, 1.0)
    assert summary.accepted == pytest.approx((1 + 2) / 2)
    assert summary.tau == pytest.approx(2.5)
    assert summary.ce == pytest.approx((1 + 1 + 0.75 + 4 + 2.5) / 3.25)
    assert summary.loss == pytest.approx((0 + 0.5 + 0.5 + 3 + 2) / 3.25)
    found = (summary.kl, summary.entropy, summary.overlap)
    assert found == pytest.approx([summary.loss + 5 * place for place in (1, 2, 3)])
    assert (summary.num_rows, summary.num_blocks) == (10, 4)


def test_nothing_counted_gives_zeros() -> None:
    metrics = Metrics(4, "cpu")
    summary = metrics.summary(metrics.sums)
    assert summary.accuracy_by_slot == (0.0, 0.0, 0.0)
    assert summary.tau == 1.0
