"""How well the drafter drafts: sums and counts on the device, divided once, at a log line.

The trap: the accepted length is the *joint* prefix (a wrong slot ends it), never a product of
per-slot accuracies.

Shape letters: R drafted rows that carry loss, A anchors, S slots of a block.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_pipeline.train.loss import RowStats

# weight; loss, ce, kl, entropy, overlap, each times it; rows, accepted slots, blocks
NUM_SUMS = 9


@dataclass(frozen=True, slots=True)
class Summary:
    """What a log line says about the steps since the last one."""

    loss: float
    """Weighted mean of what is minimised, as all of these."""
    ce: float
    """Cross-entropy, in nats."""
    kl: float
    """To the target, at the loss's temperature; 0 where no term needs the target."""
    entropy: float
    """Of the drafter's distribution, in nats."""
    overlap: float
    """Chance that sampling accepts a slot, 1 - TV; 0 where no term needs the target."""
    weight: float
    num_rows: int
    num_blocks: int
    accuracy_by_slot: tuple[float, ...]
    """Share of right tokens of slots 1 .. S-1, whatever stood before."""
    accepted: float
    """Mean length of the right prefix of a block: drafts kept, teacher-forced."""

    @property
    def tau(self) -> float:
        """The same with the target's bonus token."""
        return 1.0 + self.accepted


class Metrics:
    """Sums since the last `clear`. Nothing here waits for the device."""

    def __init__(self, block_size: int, device: torch.device | str) -> None:
        self._block_size = block_size
        num_slots = block_size - 1
        # fp64: a count of rows outgrows fp32's integers within minutes
        self.sums = torch.zeros(NUM_SUMS + 2 * num_slots, dtype=torch.float64, device=device)

    @torch.no_grad()
    def add(
        self,
        loss_R: Tensor,
        stats: RowStats,
        row_R: Tensor,
        slot_R: Tensor,
        weight_R: Tensor,
        num_anchors: int,
        num_blocks: int,
    ) -> None:
        """One batch of `num_blocks` blocks, padded to `num_anchors`."""
        correct_AS = stats.correct_R.new_zeros(num_anchors * self._block_size)
        correct_AS.index_copy_(0, row_R, stats.correct_R)
        prefix_AS = correct_AS.view(num_anchors, self._block_size)[:, 1:].cumprod(1)
        sums = self.sums
        wide = weight_R.double()
        sums[0] += wide.sum()
        means = (loss_R, stats.ce_R, stats.kl_R, stats.entropy_R, stats.overlap_R)
        sums[1:6] += torch.stack(means).double() @ wide
        sums[6] += len(row_R)
        sums[7] += prefix_AS.sum(dtype=torch.float64)
        sums[8] += num_blocks
        correct, count = self._by_slot(sums)
        correct.index_add_(0, slot_R - 1, stats.correct_R.double())
        count.index_add_(0, slot_R - 1, torch.ones_like(wide))

    def clear(self) -> None:
        """Begin the sums anew, on the device."""
        self.sums.zero_()

    def summary(self, sums: Tensor) -> Summary:
        """Divide sums that were already brought to the host (and added up over ranks)."""
        weight, *means, num_rows, accepted, num_blocks = sums[:NUM_SUMS].tolist()
        loss, ce, kl, entropy, overlap = (mean / max(weight, 1e-30) for mean in means)
        correct, count = self._by_slot(sums)
        return Summary(
            loss=loss,
            ce=ce,
            kl=kl,
            entropy=entropy,
            overlap=overlap,
            weight=weight,
            num_rows=int(num_rows),
            num_blocks=int(num_blocks),
            accuracy_by_slot=tuple((correct / count.clamp(min=1)).tolist()),
            accepted=accepted / max(num_blocks, 1),
        )

    def _by_slot(self, sums: Tensor) -> tuple[Tensor, Tensor]:
        num_slots = self._block_size - 1
        return sums[NUM_SUMS : NUM_SUMS + num_slots], sums[NUM_SUMS + num_slots :]
