"""The draft and verify loop, greedy, over a small protocol; any target that keeps it will do.

The target's cache always holds the text up to, not including, the anchor: the last token that was
chosen and not yet seen by the target. Its features do not exist yet when the block is drafted.

Shape letters: T positions, S slots of a block, K captured layers, H hidden, N tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from dflash_pipeline.store import rows
from dflash_pipeline.store.quantise import Calibration
from dflash_pipeline.train.drafter import Drafter
from dflash_pipeline.train.head import TargetHead
from dflash_pipeline.train.lookup import PromptLookup

# below this top-2 gap fp32 rounding may choose either token: a differing output is then listed,
# not held against the loop
EXEMPT_GAP = 2e-3


class DecodeTarget(Protocol):
    """A causal language model with a cache that can be cut."""

    def prefill(self, ids_T: Tensor) -> tuple[Tensor, Tensor]:
        """Forget everything, read a prompt -> fp32 logits_V after it, feature_TKH."""
        ...

    def verify(self, ids_S: Tensor) -> tuple[Tensor, Tensor]:
        """Read on -> fp32 logits_SV after each token, feature_SKH."""
        ...

    def crop(self, num_tokens: int) -> None:
        """Keep the first `num_tokens` tokens of the cache."""
        ...


class Drafting(Protocol):
    """Something that proposes what follows; it is told each token that was settled."""

    def begin(self) -> None:
        """A new text."""
        ...

    def extend(self, ids: Sequence[int], feature_NKH: Tensor) -> None:
        """Tokens that the target has read for good, with their features."""
        ...

    def propose(self, anchor_id: int) -> Sequence[int]:
        """Tokens that may follow the text and the anchor; fewer or none are allowed."""
        ...


class Cycle(NamedTuple):
    """One verification. `kept` counts the bonus; `accepted` counts kept drafts."""

    kept: int
    accepted: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """New tokens of one prompt, the prefill's own first."""

    tokens: list[int]
    cycles: list[Cycle]
    gaps: list[float] = field(default_factory=list)
    """Plain decoding alone: top-2 logit gap at each token."""


@dataclass(kw_only=True, slots=True)
class Tally:
    """Sums over verify cycles, divided once when read. tau counts the bonus, not the prefill."""

    num_drafts: int
    """Slots that may be accepted: the block size less one."""
    num_prompts: int = 0
    """Answers with at least one cycle."""
    num_cycles: int = 0
    num_kept: int = 0
    sum_prompt_tau: float = 0.0
    num_accepted_S: list[int] = field(default_factory=list)
    """Cycles in which slots 1..k were all accepted, at place k - 1."""

    def __post_init__(self) -> None:
        self.num_accepted_S = self.num_accepted_S or [0] * self.num_drafts

    def add(self, cycles: Sequence[Cycle]) -> None:
        """Count one answer."""
        if not cycles:
            return
        kept = sum(cycle.kept for cycle in cycles)
        self.num_prompts += 1
        self.num_cycles += len(cycles)
        self.num_kept += kept
        self.sum_prompt_tau += kept / len(cycles)
        for cycle in cycles:
            for slot in range(cycle.accepted):
                self.num_accepted_S[slot] += 1

    def merge(self, other: Tally) -> None:
        """Add another tally's sums to this one."""
        self.num_prompts += other.num_prompts
        self.num_cycles += other.num_cycles
        self.num_kept += other.num_kept
        self.sum_prompt_tau += other.sum_prompt_tau
        pairs = zip(self.num_accepted_S, other.num_accepted_S, strict=True)
        self.num_accepted_S = [one + two for one, two in pairs]

    @property
    def tau(self) -> float:
        """Kept tokens a cycle, pooled over cycles: the headline. 0 when there was no cycle."""
        return self.num_kept / max(self.num_cycles, 1)

    @property
    def tau_per_prompt(self) -> float:
        """Mean over answers of each answer's own tau."""
        return self.sum_prompt_tau / max(self.num_prompts, 1)

    @property
    def accepted_by_slot(self) -> list[float]:
        """Share of cycles whose first k drafts were all accepted, k = 1.."""
        return [
            count / self.num_cycles if self.num_cycles else 0.0 for count in self.num_accepted_S
        ]


class ModelDrafting:
    """A drafter that keeps its context's keys and values from one block to the next."""

    def __init__(
        self,
        drafter: Drafter,
        head: TargetHead,
        rounding: Callable[[Tensor], Tensor] | None,
    ) -> None:
        """`rounding`: what the store would do to a feature; None: features stay as they are."""
        self._drafter = drafter
        self._head = head
        self._rounding = rounding
        self._keys_values: list[tuple[Tensor, Tensor]] = []
        self._num_context = 0

    def begin(self) -> None:
        self._keys_values, self._num_context = [], 0

    @torch.no_grad()
    def extend(self, ids: Sequence[int], feature_NKH: Tensor) -> None:
        if self._rounding is not None:
            feature_NKH = self._rounding(feature_NKH)
        weight = self._drafter.norm.weight
        feature_NKH = feature_NKH.to(weight.device, weight.dtype)
        end = self._num_context + len(ids)
        position_N = torch.arange(self._num_context, end, device=weight.device)
        new = self._drafter.context_keys_values(self._drafter.context(feature_NKH), position_N)
        if self._keys_values:
            new = [
                (torch.cat((key, more_key)), torch.cat((value, more_value)))
                for (key, value), (more_key, more_value) in zip(self._keys_values, new, strict=True)
            ]
        self._keys_values, self._num_context = new, end

    @torch.no_grad()
    def propose(self, anchor_id: int) -> list[int]:
        shape, weight = self._drafter.shape, self._drafter.norm.weight
        ids_S = torch.full((shape.block_size,), shape.mask_token_id, device=weight.device)
        ids_S[0] = anchor_id
        position_S = torch.arange(shape.block_size, device=weight.device) + self._num_context
        block_SH = self._head.embed(ids_S).to(weight.dtype)
        hidden_SH = self._drafter.draft(self._keys_values, block_SH, position_S)
        drafts: list[int] = self._head.logits(hidden_SH[1:]).argmax(-1).tolist()
        return drafts


class LookupDrafting:
    """Prompt lookup in the same loop; it needs no features."""

    def __init__(self, lookup: PromptLookup) -> None:
        self._lookup = lookup

    def begin(self) -> None:
        self._lookup.begin()

    def extend(self, ids: Sequence[int], feature_NKH: Tensor) -> None:
        self._lookup.add(ids)

    def propose(self, anchor_id: int) -> list[int]:
        return self._lookup.drafts(anchor_id)


@torch.no_grad()
def decode(
    target: DecodeTarget,
    drafting: Drafting,
    prompt_T: Tensor,
    max_new_tokens: int,
    eos_ids: Set[int],
) -> Answer:
    """Answer one prompt: draft a block, let the target verify it, keep what it agrees with."""
    logits_V, feature_TKH = target.prefill(prompt_T)
    anchor_id = int(logits_V.argmax())
    tokens, cycles = [anchor_id], list[Cycle]()
    drafting.begin()
    drafting.extend(prompt_T.tolist(), feature_TKH)
    num_read = len(prompt_T)
    while len(tokens) < max_new_tokens and anchor_id not in eos_ids:
        drafts = list(drafting.propose(anchor_id))
        block_S = prompt_T.new_tensor([anchor_id, *drafts])
        logits_SV, feature_SKH = target.verify(block_S)
        chosen = logits_SV.argmax(-1).tolist()
        agreed = num_agreed(drafts, chosen)
        kept = cut(chosen[: agreed + 1], max_new_tokens - len(tokens), eos_ids)
        tokens += kept
        cycles.append(Cycle(len(kept), min(agreed, len(kept))))
        num_read += agreed + 1
        target.crop(num_read)
        drafting.extend([anchor_id, *drafts[:agreed]], feature_SKH[: agreed + 1])
        anchor_id = tokens[-1]
    return Answer(tokens=tokens, cycles=cycles)


@torch.no_grad()
def decode_plainly(
    target: DecodeTarget, prompt_T: Tensor, max_new_tokens: int, eos_ids: Set[int]
) -> Answer:
    """The reference: one token at a time, with the top-2 gap of each."""
    logits_V, _ = target.prefill(prompt_T)
    tokens, gaps = list[int](), list[float]()
    while True:
        top = logits_V.topk(2)
        first, second = top.values.tolist()
        tokens.append(int(top.indices[0]))
        gaps.append(first - second)
        if len(tokens) >= max_new_tokens or tokens[-1] in eos_ids:
            return Answer(tokens=tokens, cycles=[], gaps=gaps)
        logits_SV, _ = target.verify(prompt_T.new_tensor(tokens[-1:]))
        logits_V = logits_SV[-1]


def num_agreed(drafts: Sequence[int], chosen: Sequence[int]) -> int:
    """Length of the common beginning."""
    num = 0
    for draft, choice in zip(drafts, chosen, strict=False):
        if draft != choice:
            break
        num += 1
    return num


def cut(tokens: Sequence[int], max_tokens: int, eos_ids: Set[int]) -> list[int]:
    """`tokens` up to the length limit and up to the first end token, which is kept."""
    kept = list[int]()
    for token in tokens[:max_tokens]:
        kept.append(token)
        if token in eos_ids:
            break
    return kept


def first_difference(plain: Answer, answer: Answer) -> int | None:
    """Place of the first token that is not plain decoding's; None: the outputs are identical."""
    if plain.tokens == answer.tokens:
        return None
    return num_agreed(plain.tokens, answer.tokens)


def as_stored(feature_NKH: Tensor, mode: str, calibrations: Sequence[Calibration]) -> Tensor:
    """Live features after a trip through the store's rows: what the drafter was trained on.

    `calibrations`: one for each of the K layers; none for bf16.
    """
    plain = np.ascontiguousarray(feature_NKH.to("cpu", torch.float32).numpy())
    stored = rows.decode(rows.encode(plain, mode, calibrations), mode, calibrations)
    return torch.from_numpy(np.array(stored).reshape(plain.shape)).to(feature_NKH.device)
