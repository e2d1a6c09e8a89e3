"""The next token of each row: the largest score, or a draw from the softmax of the scores.

Sampled tokens take their noise from a hash of (seed, step, token): a draw does not depend on the
batch that its row is in, nor on the machine.
Letters: B sequences, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import LogitsProcessorList, TopKLogitsWarper, TopPLogitsWarper

from dflash_pipeline.configs.schema import GenerateConfig

_MASK_34, _MASK_37, _MASK_33, _MASK_24 = ((1 << bits) - 1 for bits in (34, 37, 33, 24))
# the largest fp32 below 1
_BELOW_ONE = 1 - 2**-24


class Draw:
    """Chooses tokens as `generate` says, for rows with a seed each."""

    def __init__(self, config: GenerateConfig, seeds: Sequence[int]) -> None:
        self._temperature = config.temperature
        self._seed_B = torch.tensor(seeds, dtype=torch.int64)
        self._cuts: Any = LogitsProcessorList()
        if config.temperature > 0 and config.top_k > 0:
            self._cuts.append(TopKLogitsWarper(config.top_k))
        if config.temperature > 0 and config.top_p < 1:
            self._cuts.append(TopPLogitsWarper(config.top_p))

    def choose(self, logits_BV: torch.Tensor, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Each row's token, int64 [B], and whether its logits are numbers, bool [B].

        The largest of NaNs would be token 0, as if chosen.
        """
        # once: a target that is spread gives its logits elsewhere than it takes its ids
        self._seed_B = self._seed_B.to(logits_BV.device)
        if not self._cuts:
            return chosen(logits_BV, self._seed_B, step, self._temperature)
        scores_BV = logits_BV.float()
        is_number_B = are_numbers(scores_BV)
        scores_BV = self._cuts(None, scores_BV / self._temperature)
        return chosen(scores_BV, self._seed_B, step, 1.0)[0], is_number_B

    def keep(self, index_B: torch.Tensor) -> None:
        """Only these rows are left."""
        self._seed_B = self._seed_B[index_B.to(self._seed_B.device)]


def chosen(
    logits_BV: torch.Tensor, seed_B: torch.Tensor, step: int, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`chosen_reference`, on a GPU in one pass over the logits."""
    if logits_BV.is_cuda:
        # triton has no build for each platform that has a CPU
        from dflash_pipeline.capture.draw_kernel import launch_draw

        return launch_draw(logits_BV, seed_B, step, temperature)
    return chosen_reference(logits_BV, seed_B, step, temperature)


def chosen_reference(
    logits_BV: torch.Tensor, seed_B: torch.Tensor, step: int, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest of logits, or of logits / temperature + noise above temperature 0; the first of
    equal ones. And whether the logits are numbers."""
    scores_BV = logits_BV.float()
    is_number_B = are_numbers(scores_BV)
    if temperature > 0:
        noise_BV = gumbel(seed_B, step, scores_BV.shape[1], scores_BV.device)
        scores_BV = scores_BV / temperature + noise_BV
    return scores_BV.argmax(1), is_number_B


def are_numbers(scores_BV: torch.Tensor) -> torch.Tensor:
    """Whether each row can be chosen from, bool [B]; some of it may be -inf."""
    # NaN wins a maximum, and a row of nothing but -inf has no other
    return scores_BV.amax(1).isfinite()


def gumbel(
    seeds: Sequence[int] | torch.Tensor, step: int, vocab_size: int, device: torch.device
) -> torch.Tensor:
    """Standard Gumbel noise, fp32 [B, V]: the same for a seed and step in any batch and machine.

    splitmix64 of (seed, step, token) in wrapping int64; 24 bits of it make the uniform number.
    """
    seed_B = torch.as_tensor(seeds, dtype=torch.int64, device=device)
    token_V = torch.arange(vocab_size, dtype=torch.int64, device=device)
    row_B = _mixed(_mixed(seed_B) + step)
    bits_BV = (_mixed(row_B[:, None] + token_V[None]) >> 40) & _MASK_24
    uniform_BV = (bits_BV.float() + 0.5) / (1 << 24)
    # the highest of the 2**24 numbers rounds to 1, whose noise would be infinite: at any scores the
    # token that has it would be drawn, one draw in 340 at 49,152 tokens
    return -torch.log(-torch.log(uniform_BV.clamp(max=_BELOW_ONE)))


def _mixed(value: torch.Tensor) -> torch.Tensor:
    """The finaliser of splitmix64; shifts of int64 copy the sign, hence the masks."""
    value = value + _signed(0x9E3779B97F4A7C15)
    value = (value ^ ((value >> 30) & _MASK_34)) * _signed(0xBF58476D1CE4E5B9)
    value = (value ^ ((value >> 27) & _MASK_37)) * _signed(0x94D049BB133111EB)
    return value ^ ((value >> 31) & _MASK_33)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value
