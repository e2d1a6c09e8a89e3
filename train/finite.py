"""Where numbers first cease to be finite, found out on the device."""

from __future__ import annotations

import torch
from torch import Tensor

# by the number that `first_not_finite` gives; the gradient's is what is left
PLACES = ("", "the stored features", "the drafter's output", "the loss", "the gradient")
GRADIENT = len(PLACES) - 1


@torch.no_grad()
def first_not_finite(*tensors: Tensor) -> Tensor:
    """fp64 scalar: 1 + the place of the first tensor that holds NaN or Inf; 0: none does.

    Of each only a sum is formed, in fp32: one read, and nothing of its size is made.
    """
    is_fine = torch.stack([tensor.sum(dtype=torch.float32).isfinite() for tensor in tensors])
    num_before = is_fine.double().cumprod(0).sum()
    return torch.where(num_before == len(tensors), 0.0, num_before + 1)
