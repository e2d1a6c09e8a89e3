"""Logits of drafted rows -> their statistics and the gradient of their logits, in torch.

What `loss_kernel` does in one pass of a GPU, written so that it can be read; the CPU runs this.

Shape letters: P rows of one position chunk, U teacher rows it touches, V vocabulary, F statistics.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_pipeline.configs.schema import LossConfig
from dflash_pipeline.train.head import TargetHead, finish_logits


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the target would have said."""

    logits_UV: Tensor
    """Raw, as of `raw_logits`; overwritten."""
    index_P: Tensor
    """The row of each drafted row."""


def score(
    logits_PV: Tensor,
    label_P: Tensor,
    wanted: Wanted | None,
    stats_FP: Tensor,
    head: TargetHead,
    config: LossConfig,
) -> Tensor:
    """d loss / d logits [P, V] of raw logits, which are lost; fills correct, ce, kl, entropy,
    overlap of `stats_FP` [F, P]. `wanted` None: no term needs the target."""
    logits_PV = finish_logits(logits_PV, head.multiplier, head.soft_cap)
    correct_P, ce_P, kl_P, entropy_P, overlap_P = stats_FP.unbind()
    correct_P.copy_(logits_PV.argmax(-1) == label_P)
    log_q_PV = logits_PV.log_softmax(-1)
    q_PV = log_q_PV.exp()
    ce_P.copy_(-log_q_PV.gather(1, label_P[:, None])[:, 0])
    entropy_P.copy_(-(q_PV * log_q_PV).sum(-1))
    # softmax minus one-hot
    slope_PV = q_PV.scatter_add(1, label_P[:, None], q_PV.new_full((len(label_P), 1), -1.0))
    slope_PV.mul_(config.ce)
    if config.cap_lambda > 0:
        # d entropy / d z = -q (log q + entropy)
        scale_P = -config.cap_lambda * correct_P
        slope_PV.addcmul_(q_PV, (log_q_PV + entropy_P[:, None]) * scale_P[:, None])
    if wanted is not None:
        target_UV = finish_logits(wanted.logits_UV, head.multiplier, head.soft_cap)
        p_PV = target_UV.softmax(-1).index_select(0, wanted.index_P)
        overlap_P.copy_(torch.minimum(p_PV, q_PV).sum(-1))
        if config.tv > 0:
            # TV = 1 - sum min(p, q): only tokens below the target's chance want more
            is_below_PV = (q_PV <= p_PV).to(q_PV.dtype)
            slope_PV.addcmul_(
                q_PV, (q_PV * is_below_PV).sum(-1, keepdim=True) - is_below_PV, value=config.tv
            )
        kl_found_P, kl_slope_PV = _kl(logits_PV, target_UV, wanted.index_P, config.temperature)
        kl_P.copy_(kl_found_P)
        slope_PV.add_(kl_slope_PV, alpha=config.kl * config.temperature)
    if head.soft_cap:
        slope_PV.mul_(1 - (logits_PV / head.soft_cap).square())
    return slope_PV.mul_(head.multiplier)


def _kl(
    logits_PV: Tensor, target_UV: Tensor, index_P: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """KL(target || drafter) [P] at the temperature, and T times its gradient [P, V]."""
    hot_p_PV = (target_UV / temperature).log_softmax(-1).index_select(0, index_P)
    hot_q_PV = (logits_PV / temperature).log_softmax(-1)
    chance_PV = hot_p_PV.exp()
    return (chance_PV * (hot_p_PV - hot_q_PV)).sum(-1), hot_q_PV.exp() - chance_PV
