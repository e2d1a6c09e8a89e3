"""The chunked loss against the plain one."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from dflash_pipeline.configs.schema import LossConfig
from dflash_pipeline.train.head import TargetHead
from dflash_pipeline.train.loss import chunked_loss, reference_loss
from dflash_pipeline.train.shape import DrafterShape
from dflash_pipeline.train.teacher import Teacher, teacher_spans

NUM_ROWS = 23


def _case(
    dtype: torch.dtype, position_chunk: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Teacher]:
    random = torch.Generator().manual_seed(0)

    def drawn(*size: int) -> Tensor:
        return torch.randn(size, generator=random)

    hidden_RH = (drawn(NUM_ROWS, 8) * 2).to(dtype)
    head_VH = drawn(97, 8).to(dtype)
    label_R = torch.randint(0, 97, (NUM_ROWS,), generator=random)
    weight_R = torch.rand(NUM_ROWS, generator=random) + 0.1
    index_R = np.sort(np.random.default_rng(0).integers(0, 7, NUM_ROWS))
    teacher = Teacher(
        (drawn(7, 8) * 2).to(dtype),
        torch.from_numpy(index_R),
        teacher_spans(index_R, position_chunk),
    )
    return hidden_RH, head_VH, label_R, weight_R, teacher


CONFIGS = {
    "ce": LossConfig(ce=1.0, kl=0.0),
    "kl": LossConfig(ce=0.0, kl=1.0),
    "both": LossConfig(ce=0.3, kl=0.7, temperature=2.0),
    "tv": LossConfig(ce=0.0, kl=0.0, tv=1.0),
    "cap": LossConfig(ce=0.5, kl=0.0, cap_lambda=2.0),
    "all": LossConfig(ce=0.3, kl=0.7, temperature=2.0, tv=0.6, cap_lambda=0.4),
}


@pytest.mark.parametrize("soft_cap", [0.0, 5.0])
@pytest.mark.parametrize("name", CONFIGS)
def test_value_and_gradient_equal_the_reference(
    name: str, soft_cap: float, shape: DrafterShape
) -> None:
    config = replace(CONFIGS[name], position_chunk=10)
    shape = replace(shape, final_logit_softcapping=soft_cap, output_multiplier=1.5)
    hidden_RH, head_VH, label_R, weight_R, teacher = _case(torch.float32, 10)
    results = []
    for loss in (reference_loss, chunked_loss):
        wide = torch.float64 if loss is reference_loss else torch.float32
        rows = hidden_RH.to(wide).requires_grad_()
        states = replace(teacher, state_UH=teacher.state_UH.to(wide))
        found = loss(rows, TargetHead(head_VH.to(wide), None, shape), label_R, states, config)
        loss_R = found if isinstance(found, Tensor) else found[0]
        # the caller's weights and division must reach the gradient
        ((loss_R * weight_R).sum() / 3).backward()
        results.append((loss_R.detach().double(), rows.grad.double()))
    (wanted_R, wanted_grad), (loss_R, grad) = results
    torch.testing.assert_close(loss_R, wanted_R, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(grad, wanted_grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", CONFIGS)
def test_bf16_operands_cost_no_more_than_their_own_rounding(name: str, shape: DrafterShape) -> None:
    config = replace(CONFIGS[name], position_chunk=10)
    hidden_RH, head_VH, label_R, weight_R, teacher = _case(torch.bfloat16, 10)
    rows = hidden_RH.requires_grad_()
    loss_R, _ = chunked_loss(rows, TargetHead(head_VH, None, shape), label_R, teacher, config)
    total = (loss_R * weight_R).sum()
    total.backward()
    exact = hidden_RH.detach().double().requires_grad_()
    states = replace(teacher, state_UH=teacher.state_UH.double())
    head = TargetHead(head_VH.double(), None, shape)
    wanted = (reference_loss(exact, head, label_R, states, config) * weight_R).sum()
    wanted.backward()
    assert float(total.detach()) == pytest.approx(float(wanted.detach()), rel=1e-4)
    error = (rows.grad.double() - exact.grad).norm() / exact.grad.norm()
    # one rounding of the logits' gradient, one of the product and one of the weighed product
    assert float(error) < 2**-8


def test_the_chunk_size_changes_nothing_but_memory(shape: DrafterShape) -> None:
    totals = []
    for position_chunk in (1, 7, 23, 100):
        config = replace(CONFIGS["both"], position_chunk=position_chunk)
        hidden_RH, head_VH, label_R, _, teacher = _case(torch.float32, position_chunk)
        loss_R, stats = chunked_loss(
            hidden_RH, TargetHead(head_VH, None, shape), label_R, teacher, config
        )
        totals.append(float(loss_R.sum()))
    assert totals == pytest.approx([totals[0]] * 4, rel=1e-6)
    right = (hidden_RH @ head_VH.T).argmax(-1) == label_R
    assert stats.correct_R.tolist() == right.float().tolist()


@pytest.mark.parametrize("name", ["kl", "tv"])
def test_a_term_of_the_target_without_last_states_is_refused(
    name: str, shape: DrafterShape
) -> None:
    hidden_RH, head_VH, label_R, _, _ = _case(torch.float32, 10)
    head = TargetHead(head_VH, None, shape)
    with pytest.raises(ValueError, match=r"loss\.kl or loss\.tv.*last"):
        chunked_loss(hidden_RH, head, label_R, None, CONFIGS[name])


def test_the_terms_are_those_of_their_definitions_on_a_case_by_hand(shape: DrafterShape) -> None:
    # two tokens count: the drafter says 3 to 1, the target 1 to 1
    shape = replace(shape, hidden_size=2, vocab_size=2, mask_token_id=1)
    hidden_RH = torch.tensor([[3.0, 1.0], [3.0, 1.0]]).log()
    head = TargetHead(torch.eye(2), None, shape)
    teacher = Teacher(torch.zeros(1, 2), torch.tensor([0, 0]), ((0, 1),))
    # right in the first row, wrong in the second
    label_R = torch.tensor([0, 1])
    entropy = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    kl = 0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25)
    ce = [-math.log(0.75), -math.log(0.25)]
    config = LossConfig(ce=1.0, kl=10.0, tv=100.0, cap_lambda=1000.0)
    loss_R, stats = chunked_loss(hidden_RH, head, label_R, teacher, config)
    wanted = [ce[0] + 10 * kl + 25 + 1000 * entropy, ce[1] + 10 * kl + 25]
    assert loss_R.tolist() == pytest.approx(wanted, rel=1e-5)
    assert stats.overlap_R.tolist() == pytest.approx([0.75, 0.75])
    assert stats.entropy_R.tolist() == pytest.approx([entropy, entropy])
