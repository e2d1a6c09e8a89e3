"""The draft and verify loop over a small protocol, a batch of prompts at a time, greedy or sampled.

The target's cache always holds the text up to, not including, the anchor: the last token that was
chosen and not yet seen by the target. Its features do not exist yet when the block is drafted.
A prompt whose answer has ended leaves the batch.

Shape letters: B prompts, T positions, S slots of a block, K captured layers, H hidden,
V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from dflash_pipeline.train.drafting import Drafting
from dflash_pipeline.train.sampling import Draws, Sampling, Verdict, num_agreed
from dflash_pipeline.train.tally import Answer, Cycle

# below this top-2 gap fp32 rounding may choose either token: a differing output is then listed,
# not held against the loop
EXEMPT_GAP = 2e-3
GREEDY = Sampling()


class DecodeTarget(Protocol):
    """A causal language model with a cache that can be cut."""

    def prefill(self, prompts: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Forget everything, read prompts -> fp32 logits_BV after each, a feature_TKH of each."""
        ...

    def verify(self, ids_BS: Tensor) -> tuple[Tensor, Tensor]:
        """Read on -> fp32 logits_BSV after each token, feature_BSKH."""
        ...

    def crop(self, prompts: Sequence[int], num_tokens: Sequence[int]) -> None:
        """Go on with these of the prompts, of each with so many first tokens of its text."""
        ...


@dataclass(kw_only=True, slots=True)
class _Text:
    """One prompt's answer in the making."""

    limit: int
    draws: Draws
    num_read: int
    """Tokens that the target has read for good."""
    tokens: list[int]
    cycles: list[Cycle] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)

    def settle(self, verdict: Verdict, eos_ids: Set[int]) -> None:
        """Put what a cycle kept."""
        kept = cut(verdict.tokens, self.limit - len(self.tokens), eos_ids)
        self.tokens += kept
        self.cycles.append(Cycle(len(kept), min(verdict.num_accepted, len(kept))))
        self.num_read += verdict.num_accepted + 1

    def is_done(self, eos_ids: Set[int]) -> bool:
        return len(self.tokens) >= self.limit or self.tokens[-1] in eos_ids


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """A prompt to be answered."""

    ids_T: Tensor
    max_new_tokens: int
    draws: Draws = field(default_factory=lambda: Draws(0, ""))
    """Not read when greedy."""


@torch.no_grad()
def decode(
    target: DecodeTarget,
    drafting: Drafting,
    tasks: Sequence[Task],
    eos_ids: Set[int],
    sampling: Sampling = GREEDY,
) -> list[Answer]:
    """Answer prompts together: draft a block each, let the target verify, keep what stands."""
    logits_BV, features = target.prefill([task.ids_T for task in tasks])
    texts = _begun(tasks, sampling.choose(logits_BV, [task.draws for task in tasks]))
    settled = [task.ids_T.tolist() for task in tasks]
    drafting.begin(len(tasks))
    going = texts
    while True:
        rows = [row for row, text in enumerate(going) if not text.is_done(eos_ids)]
        going = [going[row] for row in rows]
        if not going:
            return [Answer(tokens=text.tokens, cycles=text.cycles) for text in texts]
        target.crop(rows, [text.num_read for text in going])
        drafting.keep(rows)
        drafting.extend([settled[row] for row in rows], [features[row] for row in rows])
        draws = [text.draws for text in going]
        anchors = [text.tokens[-1] for text in going]
        proposals = drafting.propose(anchors, sampling, draws)
        blocks = [
            [anchor, *proposal.tokens] for anchor, proposal in zip(anchors, proposals, strict=True)
        ]
        logits_BSV, feature_BSKH = target.verify(_padded(blocks, tasks[0].ids_T))
        settled, features = [], []
        verdicts = sampling.verify(logits_BSV, proposals, draws)
        for row, (text, verdict) in enumerate(zip(going, verdicts, strict=True)):
            num_settled = verdict.num_accepted + 1
            text.settle(verdict, eos_ids)
            settled.append(blocks[row][:num_settled])
            features.append(feature_BSKH[row, :num_settled])


@torch.no_grad()
def decode_plainly(
    target: DecodeTarget,
    tasks: Sequence[Task],
    eos_ids: Set[int],
    sampling: Sampling = GREEDY,
) -> list[Answer]:
    """The reference: one token at a time; when greedy with the top-2 gap of each."""
    logits_BV, _ = target.prefill([task.ids_T for task in tasks])
    texts = going = _begun(tasks, [])
    while True:
        if sampling.is_greedy:
            top = logits_BV.topk(2)
            tokens = top.indices[:, 0].tolist()
            gaps = (top.values[:, 0] - top.values[:, 1]).tolist()
        else:
            tokens, gaps = sampling.choose(logits_BV, [text.draws for text in going]), []
        for row, text in enumerate(going):
            text.tokens.append(tokens[row])
            text.gaps += gaps[row : row + 1]
        rows = [row for row, text in enumerate(going) if not text.is_done(eos_ids)]
        going = [going[row] for row in rows]
        if not going:
            return [Answer(tokens=text.tokens, cycles=[], gaps=text.gaps) for text in texts]
        target.crop(rows, [text.num_read for text in going])
        block_BS = tasks[0].ids_T.new_tensor([text.tokens[-1:] for text in going])
        logits_BSV, _ = target.verify(block_BS)
        logits_BV = logits_BSV[:, -1]
        for text in going:
            text.num_read += 1


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


def _begun(tasks: Sequence[Task], first: Sequence[int]) -> list[_Text]:
    """One text a task, with its first token where that is known."""
    return [
        _Text(
            limit=task.max_new_tokens,
            draws=task.draws,
            num_read=len(task.ids_T),
            tokens=list(first[row : row + 1]),
        )
        for row, task in enumerate(tasks)
    ]


def _padded(blocks: Sequence[Sequence[int]], like: Tensor) -> Tensor:
    """Blocks of different lengths as ids_BS; what is put behind a shorter one is never kept."""
    longest = max(map(len, blocks))
    return like.new_tensor([[*block, *[block[0]] * (longest - len(block))] for block in blocks])
