"""Acceptance from a store, without the target: the walk that greedy decoding would have taken.

Every anchor stands where decoding would have put it (the last anchor + accepted + 1), drafts see
stored features strictly before it, and the stored tokens play the target. When the stored answers
are the target's own greedy ones this is decoding itself, cycle by cycle. Answers of many samples
are walked side by side: a pass drafts the next few blocks of each.

Shape letters: T positions of a sample, N rows of all samples of a batch, K captured layers,
H hidden, B samples walked together, X positions of the longest, A blocks a pass drafts of each,
S slots of a block, P places of all their answers where a block may begin, G key/value heads,
D width of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from dflash_pipeline.store.reader import Store
from dflash_pipeline.store.table import HELD_OUT
from dflash_pipeline.train.drafter import Drafter, KeyValue
from dflash_pipeline.train.head import TargetHead
from dflash_pipeline.train.lookup import PromptLookup
from dflash_pipeline.train.sampling import num_agreed
from dflash_pipeline.train.stored import StoredRows, UnusableRows, unusable
from dflash_pipeline.train.tally import Answer, Cycle, Tally

Propose = Callable[[int], Sequence[int]]
Runs = Sequence[tuple[int, int]]
Replayed = Iterator[tuple[int, list[Answer]]]
"""Samples in the order that they were asked for, each with its answers."""

# blocks of a pass. A GPU is to be kept busy (how many do is assumed, not measured); on a CPU each
# costs time, and a walk uses one in tau of neighbours: 64 to 128 cost the least there
_GPU_BLOCKS, _CPU_BLOCKS = 512, 128
# of one sample: all blocks of a pass are keys to each other, though hidden ones
_MOST_NEIGHBOURS = 16
# that features of a batch, scores of a layer's attention and logits may take: of each one sample,
# one block of each and one row at least
_MOST_BYTES = 1 << 29


def held_out(store: Store) -> list[int]:
    """Held-out samples that can be read, in an order that no length or domain is first in."""
    table = store.table
    chosen = np.flatnonzero((table.split == HELD_OUT) & store.readable_N)
    order: list[int] = chosen[np.argsort(table.sample_id[chosen], kind="stable")].tolist()
    return order


def replay(
    store: Store,
    samples: Iterable[int],
    drafter: Drafter,
    head: TargetHead,
    max_new_tokens: int | None,
) -> Tally:
    """Acceptance of `drafter` on `samples`; each answer counts as a prompt. See `replayed`."""
    tally = Tally(num_drafts=drafter.shape.block_size - 1)
    for _, answers in replayed(store, samples, drafter, head, max_new_tokens):
        for answer in answers:
            tally.add(answer.cycles)
    return tally


def _refuse(error: UnusableRows) -> None:
    raise error


def replayed(
    store: Store,
    samples: Iterable[int],
    drafter: Drafter,
    head: TargetHead,
    max_new_tokens: int | None,
    left_out: Callable[[UnusableRows], None] = _refuse,
) -> Replayed:
    """The answers of samples (numbers of the plan), with the cycles that `drafter` takes for each.

    `max_new_tokens` cuts answers as decoding does; None: they end where they were stored to end.
    `left_out` is told of a sample whose rows are damaged, by an error that names it.
    """
    weight, shape = drafter.norm.weight, drafter.shape
    num_blocks = _GPU_BLOCKS if weight.is_cuda else _CPU_BLOCKS
    texts = (_text(store, index, max_new_tokens) for index in samples)
    row_bytes = len(shape.layer_ids) * shape.hidden_size * weight.itemsize
    for batch in _batches(texts, num_blocks, _MOST_BYTES // row_bytes):
        damaged = _walk_together(store, batch, drafter, head, num_blocks)
        for text in batch:
            if text.index in damaged:
                left_out(damaged[text.index])
            else:
                yield text.index, text.answers()


def replayed_lookup(
    store: Store,
    samples: Iterable[int],
    num_drafts: int,
    ngram: int,
    max_new_tokens: int | None,
) -> Replayed:
    """The same walks for prompt lookup."""
    for index in samples:
        ids_T, mask_T = store.tokens(index)
        ids, runs = ids_T.tolist(), answer_runs(mask_T, max_new_tokens)
        answers = []
        for start, end in runs:
            cycles = walk(ids, start, end, _lookup_proposals(ids, num_drafts, ngram))
            answers.append(Answer(tokens=ids[start:end], cycles=cycles))
        yield index, answers


def answer_runs(mask_T: npt.NDArray[np.integer], max_new_tokens: int | None) -> Runs:
    """[start, end) of each run of supervised tokens; an answer needs one token before it."""
    padded = np.concatenate(([0], np.asarray(mask_T) != 0, [0])).astype(np.int8)
    edges = np.flatnonzero(np.diff(padded))
    runs = list[tuple[int, int]]()
    for start, end in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
        begin = max(start, 1)
        runs.append((begin, end if max_new_tokens is None else min(end, begin + max_new_tokens)))
    return runs


def walk(ids: Sequence[int], start: int, end: int, propose: Propose) -> list[Cycle]:
    """Cycles of the answer ids[start:end]; `propose(anchor)` drafts what follows that position."""
    cycles = list[Cycle]()
    anchor = start
    while anchor < end - 1:
        accepted = num_agreed(propose(anchor), ids[anchor + 1 : end])
        cycles.append(Cycle(min(accepted + 1, end - 1 - anchor), accepted))
        anchor += accepted + 1
    return cycles


@dataclass(slots=True)
class _Text:
    """A sample, and how far the walk through its answers has come."""

    index: int
    ids_T: npt.NDArray[np.int64]
    runs: Runs
    anchor_P: npt.NDArray[np.int64]
    """Positions at which a block may begin, answer after answer."""
    left_P: list[int]
    """Tokens of the answer behind each of them."""
    at: int = 0
    """The place whose block is asked for next."""
    cycles: list[Cycle] = field(default_factory=list)

    @property
    def is_done(self) -> bool:
        return self.at >= len(self.left_P)

    def blocks_PS(self, block_size: int) -> npt.NDArray[np.int64]:
        """Tokens of the block at each place; -1 behind the answer's end."""
        slot_S = np.arange(block_size)
        position_PS = np.minimum(self.anchor_P[:, None] + slot_S, len(self.ids_T) - 1)
        return np.where(slot_S <= np.array(self.left_P)[:, None], self.ids_T[position_PS], -1)

    def take(self, accepted: Sequence[int]) -> None:
        """Go on with how many drafts were right at each of the next places."""
        first, end = self.at, min(self.at + len(accepted), len(self.left_P))
        while self.at < end:
            own, left = accepted[self.at - first], self.left_P[self.at]
            self.cycles.append(Cycle(min(own + 1, left), own))
            # behind an answer's last place is the next answer's first
            self.at += self.cycles[-1].kept

    def answers(self) -> list[Answer]:
        """With the cycles of each, whose kept tokens are all but its first."""
        found, cycles = list[Answer](), iter(self.cycles)
        for start, end in self.runs:
            own, left = list[Cycle](), end - 1 - start
            while left > 0:
                own.append(next(cycles))
                left -= own[-1].kept
            found.append(Answer(tokens=self.ids_T[start:end].tolist(), cycles=own))
        return found


def _text(store: Store, index: int, max_new_tokens: int | None) -> _Text:
    ids_T, mask_T = store.tokens(index)
    runs = answer_runs(mask_T, max_new_tokens)
    pairs = [(anchor, end - 1 - anchor) for start, end in runs for anchor in range(start, end - 1)]
    return _Text(
        index=index,
        ids_T=ids_T.astype(np.int64),
        runs=runs,
        anchor_P=np.array([anchor for anchor, _ in pairs], np.int64),
        left_P=[left for _, left in pairs],
    )


def _batches(texts: Iterable[_Text], most: int, most_rows: int) -> Iterator[list[_Text]]:
    """Neighbours, at most so many, and so many rows where each is as long as the longest."""
    batch, longest = list[_Text](), 0
    for text in texts:
        longest = max(longest, len(text.ids_T))
        if batch and (len(batch) == most or (len(batch) + 1) * longest > most_rows):
            yield batch
            batch, longest = [], len(text.ids_T)
        batch.append(text)
    if batch:
        yield batch


@torch.no_grad()
def _read(
    store: Store, batch: Sequence[_Text], drafter: Drafter
) -> tuple[dict[int, UnusableRows], list[_Text], list[KeyValue]]:
    """Which samples are damaged, the others that have an answer to walk through, and each layer's
    keys and values of these, [B, X, G, D]: the context, as far as a block sees it."""
    weight, layer_ids = drafter.norm.weight, drafter.shape.layer_ids
    # a copy: a view of the file cannot be written to, and torch would warn of it
    rows_NKZ = torch.from_numpy(np.concatenate([store.hidden(text.index) for text in batch]))
    rows_NKZ = rows_NKZ.to(weight.device)
    feature_NKH = StoredRows.hidden(store, layer_ids, weight.device).decode(rows_NKZ, weight.dtype)
    lengths = [len(text.ids_T) for text in batch]
    samples = [text.index for text in batch]
    damaged = unusable(store, samples, lengths, layer_ids, rows_NKZ, feature_NKH)
    position_N = np.concatenate([np.arange(length) for length in lengths])
    packed = drafter.context_keys_values(
        drafter.context(feature_NKH), torch.from_numpy(position_N).to(weight.device)
    )
    walked, rows = list[_Text](), list[npt.NDArray[np.int64]]()
    for text, end in zip(batch, np.cumsum(lengths).tolist(), strict=True):
        if text.index not in damaged and not text.is_done:
            walked.append(text)
            rows.append(np.arange(end - len(text.ids_T), end))
    if not walked:
        return damaged, [], []
    room = max(int(text.anchor_P[-1]) for text in walked)
    # behind a shorter one stands its last row, which nobody sees
    row_BX = np.stack([own[np.minimum(np.arange(room), len(own) - 1)] for own in rows])
    chosen_BX = torch.from_numpy(row_BX).to(weight.device)
    return damaged, walked, [(key[chosen_BX], value[chosen_BX]) for key, value in packed]


@torch.no_grad()
def _walk_together(
    store: Store, batch: Sequence[_Text], drafter: Drafter, head: TargetHead, num_blocks: int
) -> dict[int, UnusableRows]:
    """Walk to the end of every text, by passes of so many blocks; those that are damaged stay."""
    damaged, texts, keys_values = _read(store, batch, drafter)
    if not texts:
        return damaged
    shape = drafter.shape
    anchor_P = np.concatenate([text.anchor_P for text in texts])
    token_PS = np.concatenate([text.blocks_PS(shape.block_size) for text in texts])
    last_B = np.cumsum([len(text.left_P) for text in texts]) - 1
    while alive := [number for number, text in enumerate(texts) if not text.is_done]:
        # a text that is done keeps its place for a while: to move the others costs time too
        if len(alive) <= 0.75 * len(texts):
            texts, last_B = [texts[number] for number in alive], last_B[alive]
            chosen = torch.tensor(alive, device=drafter.norm.weight.device)
            keys_values = [(key[chosen], value[chosen]) for key, value in keys_values]
        score_bytes = 4 * shape.num_heads * shape.block_size * keys_values[0][0].shape[1]
        most = min(num_blocks, _MOST_BYTES // score_bytes) // len(texts)
        place_A = np.arange(max(1, min(most, _MOST_NEIGHBOURS)))
        next_B = last_B + 1 - [len(text.left_P) - text.at for text in texts]
        # what is drafted again at the last place is not asked for
        place_BA = np.minimum(next_B[:, None] + place_A, last_B[:, None])
        accepted = _accepted(anchor_P[place_BA], token_PS[place_BA], keys_values, drafter, head)
        for text, own in zip(texts, accepted, strict=True):
            text.take(own)
    return damaged


def _accepted(
    anchor_BA: npt.NDArray[np.int64],
    token_BAS: npt.NDArray[np.int64],
    keys_values: Sequence[KeyValue],
    drafter: Drafter,
    head: TargetHead,
) -> list[list[int]]:
    """How many drafts of a block at each anchor are the tokens that stand there, in one pass."""
    weight, longest = drafter.norm.weight, int(anchor_BA.max())
    true_BAS = torch.from_numpy(token_BAS).to(weight.device)
    ids_BAS = torch.full_like(true_BAS, drafter.shape.mask_token_id)
    ids_BAS[..., 0] = true_BAS[..., 0]
    hidden_BASH = drafter.draft_blocks(
        [(key[:, :longest], value[:, :longest]) for key, value in keys_values],
        anchor_BA.tolist(),
        head.embed(ids_BAS).to(weight.dtype),
    )
    # part by part: all logits of a pass at once would be gigabytes of a large vocabulary
    most = max(1, _MOST_BYTES // (4 * len(head.weight_VH)))
    parts = hidden_BASH[:, :, 1:].flatten(0, 2).split(most)
    draft_Q = torch.cat([head.logits(part_QH).argmax(-1) for part_QH in parts])
    is_right_BAS = draft_Q.view_as(true_BAS[..., 1:]) == true_BAS[..., 1:]
    accepted: list[list[int]] = is_right_BAS.int().cumprod(-1).sum(-1).tolist()
    return accepted


def _lookup_proposals(ids: Sequence[int], num_drafts: int, ngram: int) -> Propose:
    lookup = PromptLookup(num_drafts, ngram)
    num_added = 0

    def propose(anchor: int) -> list[int]:
        nonlocal num_added
        lookup.add(ids[num_added:anchor])
        num_added = anchor
        return lookup.drafts(ids[anchor])

    return propose
