"""The floor's formulas against what torch counts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from dflash_pipeline.configs.schema import LossConfig
from dflash_pipeline.train.drafter import Drafter, KeyValue
from dflash_pipeline.train.floor import H200_FLOP_PER_S, StepSize, loss_flop, step_flop
from dflash_pipeline.train.head import TargetHead
from dflash_pipeline.train.loss import chunked_loss
from dflash_pipeline.train.shape import DrafterShape
from dflash_pipeline.train.teacher import Teacher
from shapes import HEADLINE

NUM_CONTEXT, NUM_ROWS = 24, 12


def _wide(shape: DrafterShape) -> DrafterShape:
    return replace(
        shape, hidden_size=16, intermediate_size=40, num_heads=4, num_kv_heads=2, head_dim=8
    )


def _attend(
    _layer_type: str, query_QED: Tensor, context_NGD: KeyValue, block_QGD: KeyValue
) -> Tensor:
    """Plain attention by two products over all keys, so that torch can count them."""
    group = query_QED.shape[1] // context_NGD[0].shape[1]
    key_XED, value_XED = (
        torch.cat(pair).repeat_interleave(group, dim=1)
        for pair in zip(block_QGD, context_NGD, strict=True)
    )
    score_EQX = query_QED.transpose(0, 1) @ key_XED.permute(1, 2, 0)
    return (score_EQX.softmax(-1) @ value_XED.transpose(0, 1)).transpose(0, 1)


def test_a_step_costs_what_torch_counts(shape: DrafterShape) -> None:
    shape = _wide(shape)
    drafter = Drafter(shape)
    drafter.initialise(0)
    num_keys = NUM_CONTEXT + NUM_ROWS
    size = StepSize(
        num_context=NUM_CONTEXT,
        num_rows=NUM_ROWS,
        num_visible=NUM_ROWS * num_keys,
        num_scored=0,
        num_teachers=0,
    )
    flop = step_flop(shape, size)
    with FlopCounterMode(display=False) as forward:
        hidden_QH = drafter(
            drafter.context(torch.randn(NUM_CONTEXT, len(shape.layer_ids), 16)),
            torch.arange(NUM_CONTEXT),
            torch.randn(NUM_ROWS, 16),
            torch.arange(NUM_ROWS),
            _attend,
        )
    assert forward.get_total_flops() == flop.linear_forward + flop.attention_forward
    with FlopCounterMode(display=False) as backward:
        hidden_QH.sum().backward()
    heads, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    first_norm = 2 * NUM_ROWS * 16 * (heads + 2 * keys)
    # kept scores: four products instead of five
    attention = flop.attention_backward * 4 // 5
    assert backward.get_total_flops() == flop.linear_backward + first_norm + attention


@pytest.mark.parametrize("kl", [0.0, 1.0])
def test_the_loss_costs_what_torch_counts(kl: float, shape: DrafterShape) -> None:
    random = torch.Generator().manual_seed(0)
    head = TargetHead(torch.randn(97, 8, generator=random), None, shape)
    hidden_RH = torch.randn(10, 8, generator=random).requires_grad_()
    teacher = Teacher(
        torch.randn(6, 8, generator=random), torch.arange(10) * 6 // 10, ((0, 3), (3, 6))
    )
    config = LossConfig(ce=1.0, kl=kl, position_chunk=5)
    with FlopCounterMode(display=False) as counter:
        label_R = torch.arange(10)
        loss_R, _ = chunked_loss(hidden_RH, head, label_R, teacher, config)
        loss_R.sum().backward()
    assert counter.get_total_flops() == loss_flop(shape, 10, 6 if kl else 0)


@pytest.mark.parametrize(("kl", "expected_ms"), [(False, 90.6), (True, 95.4)])
def test_the_floor_of_the_headline_figure(kl: bool, expected_ms: float) -> None:
    size = StepSize(
        num_context=3072,
        num_rows=512 * 16,
        num_visible=512 * 16 * (3072 // 2 + 16),
        num_scored=512 * 15,
        num_teachers=3071 if kl else 0,
    )
    # 71.57 and 75.39 TFLOP
    assert step_flop(HEADLINE, size).total / H200_FLOP_PER_S * 1e3 == pytest.approx(
        expected_ms, abs=0.05
    )
