"""What the slots of a block weigh by how far the drafter itself gets (D-PACE, arXiv 2605.18810).

The trap: a weight is a number, not a term: no gradient passes through it, and the loss is divided
by the sum of these weights, which grows from 2 to 120 a block of 16 as the drafter learns.

Shape letters: R drafted rows that carry loss, A anchors, S slots of a block.
"""

from __future__ import annotations

import torch
from torch import Tensor


@torch.no_grad()
def dpace_weights(
    ce_R: Tensor, row_R: Tensor, num_anchors: int, block_size: int, alpha: float
) -> Tensor:
    """w_j = sum over m >= j of the chance of slots 1 .. m, fp32 [R].

    The chance of slots 1 .. m is the product of (1 - alpha) exp(-CE) + alpha over them; alpha keeps
    a slot that is hopeless now from silencing all that follow. Slots beyond the last with loss
    add nothing.
    """
    chance_AS = ce_R.new_zeros(num_anchors * block_size)
    chance_AS.index_copy_(0, row_R, (1 - alpha) * torch.exp(-ce_R) + alpha)
    # slot 0 is given; rows without loss end a block, so their zeros end the products
    reached_AS = chance_AS.view(num_anchors, block_size)[:, 1:].cumprod(1)
    weight_AS = ce_R.new_zeros(num_anchors, block_size)
    weight_AS[:, 1:] = reached_AS.flip(1).cumsum(1).flip(1)
    return weight_AS.flatten().index_select(0, row_R)
