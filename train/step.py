"""One batch through the drafter: embed blocks, attend, score, backward. The same for every caller.

Shape letters: N packed tokens, A anchors, S slots, Q = A x S, R drafted rows that carry loss, H.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_pipeline.configs.schema import LossConfig
from dflash_pipeline.train.clock import Clock
from dflash_pipeline.train.dpace import dpace_weights
from dflash_pipeline.train.feed import Batch
from dflash_pipeline.train.finite import first_not_finite
from dflash_pipeline.train.forward import BlockBatch, Forward
from dflash_pipeline.train.head import TargetHead
from dflash_pipeline.train.loss import RowStats, chunked_loss
from dflash_pipeline.train.mask import Visibility
from dflash_pipeline.train.metrics import Metrics
from dflash_pipeline.train.optim import Optimizer


def learn(
    batch: Batch,
    forward: Forward,
    head: TargetHead,
    config: LossConfig,
    optimizer: Optimizer,
    metrics: Metrics,
    clock: Clock,
) -> None:
    """Add a batch's gradient, sums and metrics; nothing waits for the device."""
    with clock.stage("forward"):
        scored = score(batch, forward, head, config)
        loss_sum = (scored.loss_R * scored.weight_R).sum()
    with clock.stage("backward"):
        loss_sum.backward()
    where = first_not_finite(batch.feature_NKH, scored.hidden_RH.detach(), loss_sum.detach())
    optimizer.add(loss_sum.detach(), scored.weight_R.sum(), where)
    metrics.add(
        scored.loss_R.detach(),
        scored.stats,
        batch.row_R,
        batch.slot_R,
        scored.weight_R,
        len(batch.anchor_A),
        batch.num_blocks,
    )


@dataclass(frozen=True, slots=True)
class Scored:
    """The rows of a batch that carry loss."""

    hidden_RH: Tensor
    loss_R: Tensor
    """fp32, not weighed."""
    weight_R: Tensor
    stats: RowStats


def score(batch: Batch, forward: Forward, head: TargetHead, config: LossConfig) -> Scored:
    """The loss of each row of a batch, what it weighs, and what it was right about."""
    hidden_QH = draft_blocks(batch, forward, head)
    hidden_RH = hidden_QH.index_select(0, batch.row_R)
    loss_R, stats = chunked_loss(hidden_RH, head, batch.label_R, batch.teacher, config)
    weight_R = batch.weight_R
    if config.slot_weights == "dpace":
        weight_R = dpace_weights(
            stats.ce_R,
            batch.row_R,
            len(batch.anchor_A),
            forward.shape.block_size,
            config.dpace_alpha,
        )
    return Scored(hidden_RH, loss_R, weight_R, stats)


def draft_blocks(batch: Batch, forward: Forward, head: TargetHead) -> Tensor:
    """All blocks of a batch, [anchor, MASK x (S - 1)] each -> hidden_QH."""
    shape = forward.shape
    num_anchors, block_size = len(batch.anchor_A), shape.block_size
    device = batch.token_A.device
    id_AS = torch.full((num_anchors, block_size), shape.mask_token_id, device=device)
    id_AS[:, 0] = batch.token_A
    slot_S = torch.arange(block_size, device=device)
    position_AS = (batch.anchor_A - batch.start_A)[:, None] + slot_S
    visibility = Visibility(
        anchor_A=batch.anchor_A,
        start_A=batch.start_A,
        num_context=len(batch.position_N),
        block_size=block_size,
        window=shape.sliding_window,
    )
    block_QH = head.embed(id_AS.flatten())
    return forward(
        BlockBatch(batch.feature_NKH, batch.position_N, block_QH, position_AS.flatten(), visibility)
    )
