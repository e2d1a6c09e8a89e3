"""Acceptance from a store, without the target: the walk that greedy decoding would have taken.

Every anchor stands where decoding would have put it (the last anchor + accepted + 1), drafts see
stored features strictly before it, and the stored tokens play the target. When the stored answers
are the target's own greedy ones this is decoding itself, cycle by cycle.

Shape letters: T positions of a sample, N context rows, K captured layers, H hidden, A anchors,
S slots of a block, Q = A x S.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dflash_pipeline.store.reader import Store
from dflash_pipeline.store.table import HELD_OUT
from dflash_pipeline.train.drafter import Drafter
from dflash_pipeline.train.head import TargetHead
from dflash_pipeline.train.lookup import PromptLookup
from dflash_pipeline.train.mask import Visibility, grouped_attend
from dflash_pipeline.train.sampling import num_agreed
from dflash_pipeline.train.shape import DrafterShape
from dflash_pipeline.train.stored import StoredRows, check_usable
from dflash_pipeline.train.tally import Answer, Cycle, Tally

Propose = Callable[[int], Sequence[int]]
Runs = Sequence[tuple[int, int]]

# anchors drafted in one pass: a walk uses one in tau of them, and one pass costs less than so many
# small ones
_PASS_ANCHORS = 128


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
    shape: DrafterShape,
    max_new_tokens: int | None,
) -> Tally:
    """Acceptance of `drafter` on `samples` (numbers of the plan); each answer counts as a prompt.

    `max_new_tokens` cuts answers as decoding does; None: they end where they were stored to end.
    UnusableRows names a sample whose rows are damaged.
    """
    tally = Tally(num_drafts=shape.block_size - 1)
    for index in samples:
        for answer in replayed(store, index, drafter, head, shape, max_new_tokens):
            tally.add(answer.cycles)
    return tally


def replayed(
    store: Store,
    index: int,
    drafter: Drafter,
    head: TargetHead,
    shape: DrafterShape,
    max_new_tokens: int | None,
) -> list[Answer]:
    """The answers of one sample, with the cycles that `drafter` takes for each.

    UnusableRows names the sample if its rows are damaged.
    """
    weight = drafter.norm.weight
    stored = StoredRows.hidden(store, shape.layer_ids, weight.device)
    ids_T, mask_T = store.tokens(index)
    # a copy: a view of the file cannot be written to, and torch would warn of it
    rows_TKZ = torch.from_numpy(np.array(store.hidden(index))).to(weight.device)
    feature_TKH = stored.decode(rows_TKZ, weight.dtype)
    check_usable(store, index, shape.layer_ids, rows_TKZ, feature_TKH)
    runs = answer_runs(mask_T, max_new_tokens)
    cycles = walk_model(ids_T.astype(np.int64), runs, feature_TKH, drafter, head, shape)
    return _answers(ids_T.tolist(), runs, cycles)


def replayed_lookup(
    store: Store, index: int, num_drafts: int, ngram: int, max_new_tokens: int | None
) -> list[Answer]:
    """The same walk for prompt lookup."""
    ids_T, mask_T = store.tokens(index)
    ids, runs = ids_T.tolist(), answer_runs(mask_T, max_new_tokens)
    cycles = [
        walk(ids, start, end, _lookup_proposals(ids, num_drafts, ngram)) for start, end in runs
    ]
    return _answers(ids, runs, cycles)


def _answers(ids: Sequence[int], runs: Runs, cycles: Sequence[list[Cycle]]) -> list[Answer]:
    return [
        Answer(tokens=list(ids[start:end]), cycles=own)
        for (start, end), own in zip(runs, cycles, strict=True)
    ]


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


@torch.no_grad()
def walk_model(
    ids_T: npt.NDArray[np.int64],
    runs: Runs,
    feature_TKH: Tensor,
    drafter: Drafter,
    head: TargetHead,
    shape: DrafterShape,
) -> list[list[Cycle]]:
    """The cycles of each answer of one sample."""
    weight = drafter.norm.weight
    context_TH = drafter.context(feature_TKH.to(weight.device, weight.dtype))
    ids = ids_T.tolist()
    drafts: dict[int, list[int]] = {}

    def propose(anchor: int) -> list[int]:
        if anchor not in drafts:
            drafts.clear()
            # beyond the answer's end nothing is asked for
            end = min(anchor + _PASS_ANCHORS, next(end for _, end in runs if end > anchor) - 1)
            found = _draft(ids_T, anchor, end, context_TH, drafter, head, shape)
            drafts.update(enumerate(found, start=anchor))
        return drafts[anchor]

    return [walk(ids, start, end, propose) for start, end in runs]


def _draft(
    ids_T: npt.NDArray[np.int64],
    first: int,
    end: int,
    context_TH: Tensor,
    drafter: Drafter,
    head: TargetHead,
    shape: DrafterShape,
) -> list[list[int]]:
    """Drafts of a block at each of the positions first..end-1, in one pass."""
    device, size = context_TH.device, shape.block_size
    num_anchors, num_context = end - first, end - 1
    context_NH = context_TH[:num_context]
    anchor_A = torch.arange(first, end, dtype=torch.int32, device=device)
    ids_AS = torch.full((num_anchors, size), shape.mask_token_id, device=device)
    ids_AS[:, 0] = torch.from_numpy(ids_T[first:end]).to(device)
    position_AS = anchor_A[:, None].long() + torch.arange(size, device=device)
    visibility = Visibility(
        anchor_A=anchor_A,
        start_A=torch.zeros_like(anchor_A),
        num_context=num_context,
        block_size=size,
        window=shape.sliding_window,
    )
    hidden_QH = drafter(
        context_NH,
        torch.arange(num_context, device=device),
        head.embed(ids_AS.flatten()).to(context_NH.dtype),
        position_AS.flatten(),
        grouped_attend(visibility, shape.layer_types),
    )
    hidden_ASH = hidden_QH.unflatten(0, (num_anchors, size))[:, 1:]
    # block by block: all logits of a pass at once would be gigabytes of a large vocabulary
    chosen = [head.logits(part_SH).argmax(-1) for part_SH in hidden_ASH.flatten(0, 1).split(256)]
    drafts: list[list[int]] = torch.cat(chosen).view(num_anchors, size - 1).tolist()
    return drafts


def _lookup_proposals(ids: Sequence[int], num_drafts: int, ngram: int) -> Propose:
    lookup = PromptLookup(num_drafts, ngram)
    num_added = 0

    def propose(anchor: int) -> list[int]:
        nonlocal num_added
        lookup.add(ids[num_added:anchor])
        num_added = anchor
        return lookup.drafts(ids[anchor])

    return propose
