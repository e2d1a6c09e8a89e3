"""What the drafter got wrong: the plain loss and the chunked one that must equal it.

Both return a *sum* over rows, sum_r w_r (ce CE_r + kl T^2 KL_r); who calls divides by the sum of
weights over all ranks and the whole accumulation window, once.

The trap: the head is frozen and the weights are known beforehand, so the gradient is formed in the
forward pass, chunk by chunk, and never again; backward only multiplies it by `grad_output`.

Shape letters: R drafted rows that carry loss, H hidden, V vocabulary, U distinct teacher rows,
P rows of one position chunk, F statistics of a row.
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

# correct, ce, kl, entropy, overlap: the order of RowStats and of the kernel
_NUM_STATS = 5


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
    """At the loss's temperature; zeros without a teacher."""
    entropy_R: Tensor
    """Of the drafter's distribution, in nats, at temperature 1."""
    overlap_R: Tensor
    """sum_v min(target, drafter) at temperature 1: the chance that sampling accepts the slot;
    zeros without a teacher."""


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
    the operands' type, weights folded in, before the second product. On CUDA a Triton kernel does
    all between the two products, elsewhere torch.
    """
    if config.kl > 0 and teacher is None:
        raise ValueError(
            "loss.kl is above 0 but the batch has no `last` rows: capture with store.last_mode "
            "bf16 or set loss.kl=0"
        )
    parts = _Loss(head, label_R, weight_R, teacher if config.kl > 0 else None, config)
    run: Any = _ChunkedLoss.apply
    total, stats_FR = run(hidden_RH, parts)
    return total, RowStats(*stats_FR.unbind())


@dataclass(frozen=True, slots=True)
class _Loss:
    head: TargetHead
    label_R: Tensor
    weight_R: Tensor
    teacher: Teacher | None
    config: LossConfig

    def chunk(
        self,
        hidden_PH: Tensor,
        at: slice,
        span: tuple[int, int] | None,
        stats_FR: Tensor,
        gradient_PH: Tensor,
    ) -> None:
        """Fill the columns `at` of the statistics, and d loss / d hidden of those rows."""
        weight_VH = self.head.weight_VH
        logits_PV = raw_logits(hidden_PH, weight_VH)
        target_UV, first_teacher = None, 0
        if self.teacher is not None and span is not None:
            first_teacher, end = span
            target_UV = raw_logits(self.teacher.state_UH[first_teacher:end], weight_VH)
        score = self._score_by_kernel if _has_kernel(logits_PV) else self._score_plainly
        slope_PV = score(logits_PV, target_UV, at, first_teacher, stats_FR, hidden_PH.dtype)
        torch.mm(slope_PV, weight_VH, out=gradient_PH)

    def _score_by_kernel(
        self,
        logits_PV: Tensor,
        target_UV: Tensor | None,
        at: slice,
        first_teacher: int,
        stats_FR: Tensor,
        dtype: torch.dtype,
    ) -> Tensor:
        """Nothing of the size of the logits is made: their gradient takes their place."""
        # triton has no build for each platform that has a CPU
        from dflash_pipeline.train import loss_kernel

        slope_PV = loss_kernel.gradient_place(logits_PV, dtype)
        head, teacher = self.head, self.teacher
        loss_kernel.score_rows(
            logits_PV,
            target_UV,
            slope_PV,
            self.label_R,
            self.weight_R,
            None if teacher is None else teacher.index_R,
            stats_FR,
            at.start,
            first_teacher,
            loss_kernel.score_constants(
                logits_PV.shape[1], self.config, head.multiplier, head.soft_cap, teacher is not None
            ),
        )
        return slope_PV

    def _score_plainly(
        self,
        logits_PV: Tensor,
        target_UV: Tensor | None,
        at: slice,
        first_teacher: int,
        stats_FR: Tensor,
        dtype: torch.dtype,
    ) -> Tensor:
        """What the kernel does, written with torch; overwrites the logits too."""
        config, head = self.config, self.head
        logits_PV = finish_logits(logits_PV, head.multiplier, head.soft_cap)
        label_P, weight_P = self.label_R[at], self.weight_R[at]
        correct_P, ce_P, kl_P, entropy_P, overlap_P = stats_FR[:, at].unbind()
        correct_P.copy_(logits_PV.argmax(-1) == label_P)
        # d(soft cap)/d(raw), needed after the logits are overwritten
        cap_slope_PV = None if not head.soft_cap else 1 - (logits_PV / head.soft_cap).square()
        kl_slope_PV = chance_PV = None
        if self.teacher is not None and target_UV is not None:
            target_UV = finish_logits(target_UV, head.multiplier, head.soft_cap)
            index_P = self.teacher.index_R[at] - first_teacher
            chance_PV = target_UV.softmax(-1).index_select(0, index_P)
            kl, kl_slope_PV = _kl(logits_PV, target_UV, index_P, config.temperature)
            kl_P.copy_(kl)
        norm_P = logits_PV.logsumexp(-1)
        ce_P.copy_(norm_P - logits_PV.gather(1, label_P[:, None])[:, 0])
        log_PV = logits_PV.sub_(norm_P[:, None])
        slope_PV = log_PV.exp()
        entropy_P.copy_(-log_PV.mul_(slope_PV).sum(-1))
        if chance_PV is not None:
            overlap_P.copy_(torch.minimum(chance_PV, slope_PV).sum(-1))
        # softmax minus one-hot
        slope_PV.scatter_add_(1, label_P[:, None], slope_PV.new_full((len(label_P), 1), -1.0))
        slope_PV.mul_(config.ce)
        if kl_slope_PV is not None:
            slope_PV.add_(kl_slope_PV, alpha=config.kl * config.temperature)
        if cap_slope_PV is not None:
            slope_PV.mul_(cap_slope_PV)
        slope_PV.mul_(weight_P[:, None] * head.multiplier)
        return slope_PV.to(dtype)


def _has_kernel(logits_PV: Tensor) -> bool:
    return logits_PV.is_cuda


def _kl(
    logits_PV: Tensor, target_UV: Tensor, index_P: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """KL(target || drafter) [P] at the temperature, and T times its gradient [P, V]."""
    wanted_UV = (target_UV / temperature).log_softmax(-1)
    wanted_PV = wanted_UV.index_select(0, index_P)
    drafted_PV = (logits_PV / temperature).log_softmax(-1)
    chance_PV = wanted_PV.exp()
    kl_P = wanted_PV.sub_(drafted_PV).mul_(chance_PV).sum(-1)
    return kl_P, drafted_PV.exp_().sub_(chance_PV)


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_RH: Tensor, parts: _Loss) -> tuple[Tensor, Tensor]:
        size, num_rows = parts.config.position_chunk, len(hidden_RH)
        gradient_RH = torch.empty_like(hidden_RH)
        stats_FR = hidden_RH.new_zeros((_NUM_STATS, num_rows), dtype=torch.float32)
        for index, begin in enumerate(range(0, num_rows, size)):
            at = slice(begin, min(begin + size, num_rows))
            span = None if parts.teacher is None else parts.teacher.spans[index]
            parts.chunk(hidden_RH[at], at, span, stats_FR, gradient_RH[at])
        config = parts.config
        _, ce_R, kl_R, _, _ = stats_FR.unbind()
        loss_R = config.ce * ce_R + config.kl * config.temperature**2 * kl_R
        ctx.save_for_backward(gradient_RH)
        ctx.mark_non_differentiable(stats_FR)
        return (loss_R * parts.weight_R).sum(), stats_FR

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor, _grad_stats: Tensor) -> tuple[Tensor, None]:
        (gradient_RH,) = ctx.saved_tensors
        return gradient_RH * grad_total.to(gradient_RH.dtype), None
