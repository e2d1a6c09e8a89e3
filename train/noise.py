"""Noise on the features that `fc` reads, against a drafter that trusts their last digits.

The trap: the size of a residual stream grows by orders of magnitude with depth, and a few tokens
dwarf the others. Relative noise is therefore relative to each row of each layer, not to a mean.

Shape letters: N packed tokens, K captured layers, H hidden.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dflash_pipeline.configs.schema import TrainConfig
from dflash_pipeline.train.hashing import hashed


class Noise:
    """Draws of a batch follow from (seed, step, rank, number of the batch) and nothing else."""

    def __init__(self, config: TrainConfig, rank: int, device: torch.device) -> None:
        self._config, self._rank = config, rank
        self._generator = torch.Generator(device)

    @torch.no_grad()
    def add(self, feature_NKH: Tensor, step: int, number: int) -> None:
        """Add the noise of batch `number` of `step` in place; train.noise_std 0 adds nothing."""
        config = self._config
        if config.noise_std == 0:
            return
        word = int(hashed(config.seed, step, self._rank, number)[0])
        self._generator.manual_seed(word & (1 << 63) - 1)
        # layer by layer: a draw for all of them would be as large as the batch
        for state_NH in feature_NKH.unbind(1):
            noise_NH = self._drawn(state_NH)
            if config.noise_scale == "rms":
                noise_NH *= state_NH.float().square().mean(-1, keepdim=True).sqrt()
            state_NH += noise_NH.to(state_NH.dtype)

    def _drawn(self, like_NH: Tensor) -> Tensor:
        """fp32, of standard deviation `noise_std` whatever the distribution."""
        config = self._config
        drawn = torch.empty(like_NH.shape, dtype=torch.float32, device=like_NH.device)
        if config.noise == "gaussian":
            return drawn.normal_(0.0, config.noise_std, generator=self._generator)
        # a uniform number in [-w, w] has a standard deviation of w / sqrt(3)
        width = config.noise_std * math.sqrt(3)
        return drawn.uniform_(-width, width, generator=self._generator)
