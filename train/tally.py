"""What verify cycles kept: sums that give tau, and the part of an answer before it repeats itself.

tau counts the bonus and not the prefill's own token; a cycle is cut after the end token and at the
length limit. Text in a loop is easy to predict, so tau is also taken of what stands before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

# tokens whose second occurrence in one answer is where it begins to repeat itself
LOOP_NGRAM = 4


class Cycle(NamedTuple):
    """One verification. `kept` counts the bonus; `accepted` counts kept drafts."""

    kept: int
    accepted: int


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """New tokens of one prompt, the prefill's own first."""

    tokens: list[int]
    cycles: list[Cycle]
    gaps: list[float] = field(default_factory=list)
    """Plain greedy decoding alone: top-2 logit gap at each token."""

    @property
    def loop_free_cycles(self) -> list[Cycle]:
        """The cycles of the part before its first repeated 4-gram."""
        return cycles_within(self.cycles, loop_free_length(self.tokens) - 1)


def loop_free_length(tokens: Sequence[int]) -> int:
    """Tokens before the first 4-gram that has stood in the answer before; all if none has.

    Two occurrences may overlap: five equal tokens in a row are a loop from the second on.
    """
    seen = set[tuple[int, ...]]()
    for start in range(len(tokens) - LOOP_NGRAM + 1):
        ngram = tuple(tokens[start : start + LOOP_NGRAM])
        if ngram in seen:
            return start
        seen.add(ngram)
    return len(tokens)


def cycles_within(cycles: Sequence[Cycle], num_tokens: int) -> list[Cycle]:
    """The cycles that made the first `num_tokens`, the last one cut as by a length limit."""
    within, num_left = list[Cycle](), num_tokens
    for cycle in cycles:
        if num_left <= 0:
            break
        kept = min(cycle.kept, num_left)
        within.append(Cycle(kept, min(cycle.accepted, kept)))
        num_left -= kept
    return within
