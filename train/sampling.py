"""How a token is chosen from logits, and which drafted tokens a target may keep: greedy or sampled.

Sampled verification is lossless: a draft x of chance q(x) is kept with chance min(1, p(x) / q(x)),
and the first that is refused is replaced by a draw from max(p - q, 0). What comes out is a sample
of the target's own distribution p, whatever the drafter's q is (arXiv 2211.17192, theorem 1). Each
slot of a block is drawn on its own, so q of a slot does not depend on the drafts before it.

Shape letters: N and S positions, V vocabulary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dflash_pipeline.train.hashing import hashed


class Draws:
    """Uniform numbers of one prompt, from a seed and its key alone: alike in every batch."""

    def __init__(self, seed: int, key: str) -> None:
        digest = hashlib.sha256(key.encode()).digest()
        self._key = int.from_bytes(digest[:8], "little")
        self._seed, self._num_drawn = seed, 0

    def take(self, count: int) -> list[float]:
        """The next `count` numbers in [0, 1)."""
        places_N = np.arange(self._num_drawn, self._num_drawn + count)
        self._num_drawn += count
        words_N = hashed(self._seed, self._key, places_N)
        uniform_N: list[float] = ((words_N >> np.uint64(11)) * 2.0**-53).tolist()
        return uniform_N


class Proposal(NamedTuple):
    """Drafted tokens of one prompt."""

    tokens: Sequence[int]
    chance_NV: Tensor | None
    """The distributions that they were drawn from; None: they were not drawn, each was certain."""


class Verdict(NamedTuple):
    """What a target makes of a proposal."""

    tokens: list[int]
    """Drafts that stand, then the target's own next token."""
    num_accepted: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """Temperature, then the `top_k` likeliest, then the nucleus `top_p`, as `generate` samples."""

    temperature: float = 0.0
    """0: greedy."""
    top_k: int = 0
    """0: all."""
    top_p: float = 1.0
    """1: whole."""

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    def chances(self, logits_NV: Tensor) -> Tensor:
        """The distribution [N, V] that fp32 logits are sampled from; not for greedy."""
        scaled_NV = logits_NV.float() / self.temperature
        if 0 < self.top_k < scaled_NV.shape[-1]:
            least_N1 = scaled_NV.topk(self.top_k).values[:, -1:]
            scaled_NV = scaled_NV.masked_fill(scaled_NV < least_N1, -torch.inf)
        if self.top_p < 1:
            scaled_NV = _nucleus(scaled_NV, self.top_p)
        return scaled_NV.softmax(-1)

    def choose(self, logits_NV: Tensor, draws: Sequence[Draws]) -> list[int]:
        """One token for each of N prompts."""
        if self.is_greedy:
            greedy: list[int] = logits_NV.argmax(-1).tolist()
            return greedy
        return drawn(self.chances(logits_NV), [one.take(1)[0] for one in draws])

    def propose(self, logits_BNV: Tensor, draws: Sequence[Draws]) -> list[Proposal]:
        """A drafter's tokens of one block of each of B prompts."""
        if self.is_greedy:
            return [Proposal(tokens, None) for tokens in logits_BNV.argmax(-1).tolist()]
        proposals = []
        for logits_NV, own in zip(logits_BNV, draws, strict=True):
            chance_NV = self.chances(logits_NV)
            tokens = drawn(chance_NV, own.take(len(logits_NV)))
            proposals.append(Proposal(tokens, chance_NV))
        return proposals

    def verify(
        self, logits_BSV: Tensor, proposals: Sequence[Proposal], draws: Sequence[Draws]
    ) -> list[Verdict]:
        """The target's logits after each anchor and after its drafts -> what is kept of them."""
        if self.is_greedy:
            verdicts = []
            for chosen, proposal in zip(logits_BSV.argmax(-1).tolist(), proposals, strict=True):
                num_accepted = num_agreed(proposal.tokens, chosen)
                verdicts.append(Verdict(chosen[: num_accepted + 1], num_accepted))
            return verdicts
        return [
            _verified(self.chances(logits_SV[: len(proposal.tokens) + 1]), proposal, own)
            for logits_SV, proposal, own in zip(logits_BSV, proposals, draws, strict=True)
        ]


def num_agreed(drafts: Sequence[int], chosen: Sequence[int]) -> int:
    """Length of the common beginning."""
    num = 0
    for draft, choice in zip(drafts, chosen, strict=False):
        if draft != choice:
            break
        num += 1
    return num


def drawn(chance_NV: Tensor, uniform_N: Sequence[float]) -> list[int]:
    """Token n of distribution n at which the sum of chances passes uniform number n."""
    # fp64: sums of 150,000 small fp32 numbers would lose the rarest tokens
    sum_NV = chance_NV.double().cumsum(-1)
    level_N = torch.tensor(uniform_N, dtype=torch.float64, device=sum_NV.device) * sum_NV[:, -1]
    # right: the first sum above the level, so that a token without a chance is never drawn
    place_N1 = torch.searchsorted(sum_NV, level_N[:, None], right=True)
    tokens: list[int] = place_N1[:, 0].tolist()
    return tokens


def _verified(chance_SV: Tensor, proposal: Proposal, draws: Draws) -> Verdict:
    drafts = list(proposal.tokens)
    # as many numbers whatever is accepted: a prompt's next cycle then begins at the same place
    uniform_S = draws.take(len(drafts) + 1)
    num_accepted = 0
    if drafts:
        place_N = torch.arange(len(drafts), device=chance_SV.device)
        draft_N = torch.tensor(drafts, device=chance_SV.device)
        wanted = chance_SV[place_N, draft_N].tolist()
        drafted = [1.0] * len(drafts)
        if proposal.chance_NV is not None:
            drafted = proposal.chance_NV[place_N, draft_N].tolist()
        for uniform, p, q in zip(uniform_S, wanted, drafted, strict=False):
            if uniform * q >= p:
                break
            num_accepted += 1
    next_V = chance_SV[num_accepted]
    if num_accepted < len(drafts):
        next_V = _left_over(next_V, proposal, num_accepted)
    kept = drafts[:num_accepted]
    return Verdict([*kept, *drawn(next_V[None], uniform_S[-1:])], num_accepted)


def _left_over(chance_V: Tensor, proposal: Proposal, place: int) -> Tensor:
    """max(p - q, 0), not normalised: what the refused draft must be replaced from."""
    if proposal.chance_NV is not None:
        left_V = (chance_V - proposal.chance_NV[place]).clamp(min=0)
    else:
        left_V = chance_V.clone()
        left_V[proposal.tokens[place]] = 0
    # p and q that differ by rounding alone leave nothing: either is the other's sample then
    return left_V if bool(left_V.any()) else chance_V


def _nucleus(scaled_NV: Tensor, top_p: float) -> Tensor:
    """The fewest likeliest tokens whose chances reach `top_p`; the others at -inf."""
    sorted_NV, place_NV = scaled_NV.sort(dim=-1)
    tail_NV = sorted_NV.softmax(-1).cumsum(-1) <= 1 - top_p
    tail_NV[:, -1] = False
    return scaled_NV.masked_fill(tail_NV.scatter(-1, place_NV, tail_NV), -torch.inf)
