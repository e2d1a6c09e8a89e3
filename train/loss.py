"""What the drafter got wrong: the plain loss and the chunked one that must equal it.

Both return a *sum* over rows, sum_r w_r (ce CE_r + kl T^2 KL_r); who calls divides by the sum of
weights over all ranks and the whole accumulation window, once.

The trap: the head is frozen and the weights are known beforehand, so the gradient is formed in the
forward pass, chunk by chunk, and never again; backward only multiplies it by `grad_output`.

Shape letters: R drafted rows that carry loss, H hidden, V vocabulary, U distinct teacher rows,
P rows of one position chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from dflash_pipeline.configs.schema import LossConfig
from dflash_pipeline.train.head import TargetHead, finish_logits, raw_logits


@dataclass(frozen=True, slots=True)
class Teacher:
    """The target's own post-norm states, each row once: neighbouring blocks share most of them."""

    state_UH: Tensor
    index_R: Tensor
    """Which of them predicts the label of each drafted row."""
    spans: Sequence[tuple[int, int]]
    """First and one past the last of them that each position chunk touches."""


@dataclass(frozen=True, slots=True)
class RowStats:
    """By-products of the loss, without gradient."""

    correct_R: Tensor
    """1 where the likeliest token is the label, fp32."""
    ce_R: Tensor
    kl_R: Tensor
    """Zeros without a teacher."""


def teacher_spans(
    index_R: npt.NDArray[np.int64], position_chunk: int
) -> tuple[tuple[int, int], ...]:
    """The teacher rows that each position chunk touches; rows are sorted, so ranges are short."""
    chunks = (index_R[at : at + position_chunk] for at in range(0, len(index_R), position_chunk))
    return tuple((int(chunk.min()), int(chunk.max()) + 1) for chunk in chunks)


def reference_loss(
    hidden_RH: Tensor,
    head: TargetHead,
    label_R: Tensor,
    weight_R: Tensor,
    teacher: Teacher | None,
    config: LossConfig,
) -> Tensor:
    """The loss as one reads it in a paper: all logits at once."""
    logits_RV = _reference_logits(hidden_RH, head)
    loss_R = config.ce * F.cross_entropy(logits_RV, label_R, reduction="none")
    if config.kl > 0 and teacher is not None:
        target_RV = _reference_logits(teacher.state_UH[teacher.index_R], head)
        heat = config.temperature
        drafted, wanted = (logits / heat for logits in (logits_RV, target_RV))
        wanted_log, drafted_log = wanted.log_softmax(-1), drafted.log_softmax(-1)
        kl_R = (wanted_log.exp() * (wanted_log - drafted_log)).sum(-1)
        loss_R = loss_R + config.kl * heat**2 * kl_R
    return (loss_R * weight_R).sum()


def _reference_logits(hidden_RH: Tensor, head: TargetHead) -> Tensor:
    wide = torch.promote_types(hidden_RH.dtype, torch.float32)
    logits_RV = hidden_RH.to(wide) @ head.weight_VH.to(wide).t() * head.multiplier
    cap = head.soft_cap
    return cap * torch.tanh(logits_RV / cap) if cap else logits_RV


def chunked_loss(
    hidden_RH: Tensor,
    head: TargetHead,
    label_R: Tensor,
    weight_R: Tensor,
    teacher: Teacher | None,
    config: LossConfig,
) -> tuple[Tensor, RowStats]:
    """`reference_loss` with the logits of `config.position_chunk` rows alive at a time.

    Logits and statistics are fp32 whatever the operands; the gradient of the logits is rounded to
    the operands' type, weights folded in, before the second product.
    """
    if config.kl > 0 and teacher is None:
        raise ValueError(
            "loss.kl is above 0 but the batch has no `last` rows: capture with store.last_mode "
            "bf16 or set loss.kl=0"
        )
    parts = _Loss(head, label_R, weight_R, teacher if config.kl > 0 else None, config)
    run: Any = _ChunkedLoss.apply
    total, correct_R, ce_R, kl_R = run(hidden_RH, parts)
    return total, RowStats(correct_R, ce_R, kl_R)


@dataclass(frozen=True, slots=True)
class _Loss:
    head: TargetHead
    label_R: Tensor
    weight_R: Tensor
    teacher: Teacher | None
    config: LossConfig

    def chunk(
        self, hidden_PH: Tensor, at: slice, span: tuple[int, int] | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Rows `at`: (correct, ce, kl, d loss / d hidden), each of P rows."""
        config, head = self.config, self.head
        logits_PV = finish_logits(
            raw_logits(hidden_PH, head.weight_VH), head.multiplier, head.soft_cap
        )
        label_P, weight_P = self.label_R[at], self.weight_R[at]
        correct_P = (logits_PV.argmax(-1) == label_P).to(torch.float32)
        # d(soft cap)/d(raw), needed after the logits are overwritten
        slope_PV = None if not head.soft_cap else 1 - (logits_PV / head.soft_cap).square()
        kl_P, kl_grad_PV = torch.zeros_like(correct_P), None
        if self.teacher is not None and span is not None:
            kl_P, kl_grad_PV = self._kl(logits_PV, self.teacher, at, span)
        norm_P = logits_PV.logsumexp(-1)
        ce_P = norm_P - logits_PV.gather(1, label_P[:, None])[:, 0]
        # softmax minus one-hot, in place: logits_PV is not needed again
        grad_PV = logits_PV.sub_(norm_P[:, None]).exp_()
        grad_PV.scatter_add_(1, label_P[:, None], grad_PV.new_full((len(label_P), 1), -1.0))
        grad_PV.mul_(config.ce)
        if kl_grad_PV is not None:
            grad_PV.add_(kl_grad_PV, alpha=config.kl * config.temperature)
        if slope_PV is not None:
            grad_PV.mul_(slope_PV)
        grad_PV.mul_(weight_P[:, None] * head.multiplier)
        return correct_P, ce_P, kl_P, grad_PV.to(hidden_PH.dtype) @ head.weight_VH

    def _kl(
        self, logits_PV: Tensor, teacher: Teacher, at: slice, span: tuple[int, int]
    ) -> tuple[Tensor, Tensor]:
        """KL(target || drafter) [P] at the temperature, and T times its gradient [P, V]."""
        first, end = span
        heat = self.config.temperature
        head = self.head
        wanted_UV = raw_logits(teacher.state_UH[first:end], head.weight_VH)
        wanted_UV = finish_logits(wanted_UV, head.multiplier, head.soft_cap).div_(heat)
        wanted_UV.sub_(wanted_UV.logsumexp(-1, keepdim=True))
        wanted_PV = wanted_UV.index_select(0, teacher.index_R[at] - first)
        drafted_PV = (logits_PV / heat).log_softmax(-1)
        chance_PV = wanted_PV.exp()
        kl_P = wanted_PV.sub_(drafted_PV).mul_(chance_PV).sum(-1)
        return kl_P, drafted_PV.exp_().sub_(chance_PV)


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_RH: Tensor, parts: _Loss) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        size, num_rows = parts.config.position_chunk, len(hidden_RH)
        grad_RH = torch.empty_like(hidden_RH)
        stats = hidden_RH.new_zeros((3, num_rows), dtype=torch.float32)
        for index, begin in enumerate(range(0, num_rows, size)):
            at = slice(begin, min(begin + size, num_rows))
            span = None if parts.teacher is None else parts.teacher.spans[index]
            correct_P, ce_P, kl_P, grad_PH = parts.chunk(hidden_RH[at], at, span)
            stats[0, at], stats[1, at], stats[2, at] = correct_P, ce_P, kl_P
            grad_RH[at] = grad_PH
        correct_R, ce_R, kl_R = stats.unbind()
        config = parts.config
        loss_R = config.ce * ce_R + config.kl * config.temperature**2 * kl_R
        ctx.save_for_backward(grad_RH)
        ctx.mark_non_differentiable(correct_R, ce_R, kl_R)
        return (loss_R * parts.weight_R).sum(), correct_R, ce_R, kl_R

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor, *_others: Tensor) -> tuple[Tensor, None]:
        (grad_RH,) = ctx.saved_tensors
        return grad_RH * grad_total.to(grad_RH.dtype), None
