"""What the drafter got wrong: the plain loss and the chunked one that must equal it.

Both return the loss of each row,

    ce CE + kl T^2 KL + tv TV + cap_lambda [right] H,

without its weight: who calls weighs the rows, adds them up, and divides by the sum of weights over
all ranks and the whole accumulation window, once.

The trap: the head is frozen, so the gradient is formed in the forward pass, chunk by chunk, and
never again; backward only multiplies its rows by what they weigh.

Shape letters: R drafted rows that carry loss, H hidden, V vocabulary, P rows of one position chunk,
C teacher rows whose logits are held, F statistics of a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dflash_pipeline.configs.schema import LossConfig
from dflash_pipeline.train import loss_rows
from dflash_pipeline.train.head import TargetHead, raw_logits
from dflash_pipeline.train.teacher import Teacher, TeacherLogits

# correct, ce, kl, entropy, overlap: the order of RowStats, of `loss_rows` and of the kernel
_NUM_STATS = 5


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
    """sum_v min(target, drafter) = 1 - TV at temperature 1: the chance that sampling accepts the
    slot; zeros without a teacher."""


def reference_loss(
    hidden_RH: Tensor,
    head: TargetHead,
    label_R: Tensor,
    teacher: Teacher | None,
    config: LossConfig,
) -> Tensor:
    """The loss of each row [R] as one reads it in a paper: all logits at once."""
    logits_RV = _reference_logits(hidden_RH, head)
    log_q = logits_RV.log_softmax(-1)
    is_right = (logits_RV.argmax(-1) == label_R).to(log_q.dtype)
    loss_R = config.ce * F.nll_loss(log_q, label_R, reduction="none")
    loss_R = loss_R - config.cap_lambda * is_right * (log_q.exp() * log_q).sum(-1)
    if config.needs_last:
        assert teacher is not None, "a term of the target needs its states"
        target_RV = _reference_logits(teacher.state_UH[teacher.index_R], head)
        heat = config.temperature
        hot_q, hot_p = (logits_RV / heat).log_softmax(-1), (target_RV / heat).log_softmax(-1)
        loss_R = loss_R + config.kl * heat**2 * (hot_p.exp() * (hot_p - hot_q)).sum(-1)
        loss_R = loss_R + config.tv * (target_RV.softmax(-1) - log_q.exp()).abs().sum(-1) / 2
    return loss_R


def _reference_logits(hidden_RH: Tensor, head: TargetHead) -> Tensor:
    wide = torch.promote_types(hidden_RH.dtype, torch.float32)
    logits_RV = hidden_RH.to(wide) @ head.weight_VH.to(wide).t() * head.multiplier
    cap = head.soft_cap
    return cap * torch.tanh(logits_RV / cap) if cap else logits_RV


def chunked_loss(
    hidden_RH: Tensor,
    head: TargetHead,
    label_R: Tensor,
    teacher: Teacher | None,
    config: LossConfig,
) -> tuple[Tensor, RowStats]:
    """`reference_loss` with the logits of `config.position_chunk` rows alive at a time.

    Logits, losses and statistics are fp32 whatever the operands; the gradient of the logits is
    rounded to the operands' type before the second product. On CUDA a Triton kernel does all
    between the two products, elsewhere torch.
    """
    if config.needs_last and teacher is None:
        raise ValueError(
            "loss.kl or loss.tv is above 0 but the batch has no `last` rows: capture with "
            "store.last_mode bf16 or set both to 0"
        )
    parts = _Loss(head, label_R, teacher if config.needs_last else None, config)
    run: Any = _ChunkedLoss.apply
    loss_R, stats_FR = run(hidden_RH, parts)
    return loss_R, RowStats(*stats_FR.unbind())


@dataclass(frozen=True, slots=True)
class _Loss:
    head: TargetHead
    label_R: Tensor
    teacher: Teacher | None
    config: LossConfig

    def chunk(
        self,
        hidden_PH: Tensor,
        at: slice,
        target_CV: Tensor | None,
        stats_FR: Tensor,
        gradient_PH: Tensor,
    ) -> None:
        """Fill the columns `at` of the statistics, and d loss / d hidden of those rows."""
        weight_VH = self.head.weight_VH
        logits_PV = raw_logits(hidden_PH, weight_VH)
        score = self._score_by_kernel if _has_kernel(logits_PV) else self._score_plainly
        slope_PV = score(logits_PV, target_CV, at, stats_FR, hidden_PH.dtype)
        torch.mm(slope_PV, weight_VH, out=gradient_PH)

    def _score_by_kernel(
        self,
        logits_PV: Tensor,
        target_CV: Tensor | None,
        at: slice,
        stats_FR: Tensor,
        dtype: torch.dtype,
    ) -> Tensor:
        """The gradient of the logits has its own memory: in that of the logits its rows would be
        spread, and the product with it slower (H200: 40.0 against 39.3 ms for 7,665 rows)."""
        # triton has no build for each platform that has a CPU
        from dflash_pipeline.train import loss_kernel

        slope_PV = torch.empty_like(logits_PV, dtype=dtype)
        head, teacher = self.head, self.teacher
        loss_kernel.score_rows(
            logits_PV,
            target_CV,
            slope_PV,
            self.label_R,
            None if teacher is None else teacher.index_R,
            stats_FR,
            at.start,
            loss_kernel.score_constants(
                logits_PV.shape[1], self.config, head.multiplier, head.soft_cap
            ),
        )
        return slope_PV

    def _score_plainly(
        self,
        logits_PV: Tensor,
        target_CV: Tensor | None,
        at: slice,
        stats_FR: Tensor,
        dtype: torch.dtype,
    ) -> Tensor:
        wanted = None
        if self.teacher is not None and target_CV is not None:
            index_P = self.teacher.index_R[at]
            first = index_P.min()
            index_U = torch.arange(int(first), int(index_P.max()) + 1, device=index_P.device)
            wanted = loss_rows.Wanted(target_CV[index_U % len(target_CV)], index_P - first)
        return loss_rows.score(
            logits_PV, self.label_R[at], wanted, stats_FR[:, at], self.head, self.config
        ).to(dtype)


def _has_kernel(logits_PV: Tensor) -> bool:
    return logits_PV.is_cuda


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_RH: Tensor, parts: _Loss) -> tuple[Tensor, Tensor]:
        size, num_rows = parts.config.position_chunk, len(hidden_RH)
        gradient_RH = torch.empty_like(hidden_RH)
        stats_FR = hidden_RH.new_zeros((_NUM_STATS, num_rows), dtype=torch.float32)
        target, target_CV = None, None
        if parts.teacher is not None:
            target = TeacherLogits(parts.teacher, parts.head.weight_VH)
        for index, begin in enumerate(range(0, num_rows, size)):
            at = slice(begin, min(begin + size, num_rows))
            if target is not None:
                target_CV = target.hold(index)
            parts.chunk(hidden_RH[at], at, target_CV, stats_FR, gradient_RH[at])
        ctx.save_for_backward(gradient_RH)
        ctx.mark_non_differentiable(stats_FR)
        return _added_up(stats_FR, parts.config), stats_FR

    @staticmethod
    def backward(ctx: Any, grad_R: Tensor, _grad_stats: Tensor) -> tuple[Tensor, None]:
        (gradient_RH,) = ctx.saved_tensors
        # weights stay fp32 until the product: rounded first, they would bias whole slots
        weighed_RH = torch.empty_like(gradient_RH)
        return torch.mul(gradient_RH, grad_R[:, None], out=weighed_RH), None


def _added_up(stats_FR: Tensor, config: LossConfig) -> Tensor:
    """The loss of each row from its statistics."""
    correct_R, ce_R, kl_R, entropy_R, overlap_R = stats_FR.unbind()
    loss_R = config.ce * ce_R + config.kl * config.temperature**2 * kl_R
    if config.tv > 0:
        loss_R = loss_R + config.tv * (1 - overlap_R)
    if config.cap_lambda > 0:
        loss_R = loss_R + config.cap_lambda * correct_R * entropy_R
    return loss_R
