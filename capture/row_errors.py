"""Relative errors of stored rows, and how large they may be by computing and by storing alone.

Letters: N rows, H hidden.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import torch

ROUNDING = 2.0**-7
"""Twice the largest relative error of rounding to bf16."""
SLACK = 1.2
"""A median, or the worst, of other samples may be so much larger."""


def noise_bound(dtype: torch.dtype, depth: int) -> float:
    """Largest relative error of a state `depth` layers deep that batching may cause.

    In fp32 what is left is the store's rounding. In bf16 each layer rounds the residual stream
    once more, and rounding errors of n layers add up as the root of n.
    """
    if dtype == torch.float32:
        return ROUNDING
    return ROUNDING * (1 + math.sqrt(depth))


@dataclass
class RowErrors:
    """Relative errors of rows, collected over the samples."""

    parts: list[torch.Tensor] = field(default_factory=list)
    rounding: list[torch.Tensor] = field(default_factory=list)
    """What the same would be for true rows with no other error than that of their mode; bf16:
    nothing, it is in ROUNDING."""
    is_noop: bool = True
    """Whether the fault left the truth as it is, but for rounding, in every row seen."""

    def add(self, found_NH: torch.Tensor, truth_NH: torch.Tensor) -> None:
        if len(found_NH):
            self.parts.append(relative(found_NH, truth_NH))

    def add_rounding(self, stored_NH: torch.Tensor, truth_NH: torch.Tensor) -> None:
        """The same rows with no other error than that of being stored."""
        if len(stored_NH):
            self.rounding.append(relative(stored_NH, truth_NH))

    @property
    def typical(self) -> float:
        """Their median; NaN counts as infinite."""
        return _median(self.parts)

    @property
    def typical_rounding(self) -> float:
        """The median of the rounding."""
        return _median(self.rounding)

    def worst(self, dtype: torch.dtype) -> float:
        """The largest in fp32; in bf16 one in twenty may differ, as experts are chosen anew."""
        errors_N = concatenated(self.parts)
        if dtype == torch.float32:
            return float(errors_N.max())
        # torch's own takes 16 million numbers at most
        return float(np.quantile(errors_N.numpy(), 0.95, method="higher"))

    @property
    def worst_rounding(self) -> float:
        """The largest of the rounding."""
        return float(concatenated(self.rounding).max()) if self.rounding else 0.0


def relative(found_NH: torch.Tensor, truth_NH: torch.Tensor) -> torch.Tensor:
    """Relative error of each row."""
    norm_N = truth_NH.norm(dim=-1).clamp_min(1e-30)
    error_N: torch.Tensor = (found_NH - truth_NH).norm(dim=-1) / norm_N
    return error_N


def _median(parts: list[torch.Tensor]) -> float:
    return float(concatenated(parts).median()) if parts else 0.0


def concatenated(parts: list[torch.Tensor]) -> torch.Tensor:
    """One vector on the CPU; NaN counts as infinite."""
    return torch.cat(parts).nan_to_num(nan=torch.inf, posinf=torch.inf).cpu()


def threshold(bound: float, rounding: float, excess: float) -> float:
    """Relative error above which a fault stands out of rounding and of what else was measured."""
    return min(bound, math.hypot(SLACK * rounding, max(3 * excess, ROUNDING)))
