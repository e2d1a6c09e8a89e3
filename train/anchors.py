"""Where blocks start, and what each of their slots must say.

The trap: slot k predicts the token at anchor + k, without a shift, and only while every token from
anchor + 1 on is supervised: a block never predicts across a user turn or a document's end.

Shape letters: T positions of one sample, N packed tokens, A anchors, S slots of a block,
R drafted rows that carry loss (a subset of the Q = A x S rows of all blocks).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dflash_pipeline.store.table import teacher_positions, valid_anchors
from dflash_pipeline.train.hashing import hashed

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Tokens:
    """One sample as it stands in the store, without its hidden states."""

    sample_id: int
    ids_T: npt.NDArray[np.integer]
    mask_T: npt.NDArray[np.integer]


@dataclass(frozen=True, slots=True)
class Blocks:
    """The blocks of a packed batch; rows are packed rows, sorted by anchor."""

    position_N: Ints
    """Position of each packed token in its own document."""
    anchor_A: Ints
    """Packed row of each anchor, ascending."""
    start_A: Ints
    """Packed row at which the anchor's document begins."""
    token_A: Ints
    """The anchor's own token: slot 0."""
    row_R: Ints
    """Which of the A x S rows carry loss."""
    slot_R: Ints
    label_R: Ints
    weight_R: Floats
    teacher_R: Ints
    """Row of the packed `last` whose logits predict the label."""
    num_last: int
    """Rows of the packed `last`."""


def choose_anchors(
    mask_T: npt.NDArray[np.integer], quota: int, seed: int, epoch: int, sample_id: int
) -> Ints:
    """At most `quota` valid anchors of a sample, ascending, without replacement.

    A position is valid if it and its successor are supervised. Redrawn each epoch.
    """
    valid_A = valid_anchors(mask_T).astype(np.int64)
    if len(valid_A) <= quota:
        return valid_A
    lot_A = hashed(seed, epoch, sample_id, valid_A)
    return np.sort(valid_A[np.argsort(lot_A, kind="stable")[:quota]])


def slot_weights(block_size: int, gamma: float) -> Floats:
    """w_k = exp(-(k - 1) / gamma) of slots k = 1 .. S-1 (arXiv 2602.06036); slot 0 carries none."""
    slot = np.arange(block_size - 1, dtype=np.float64)
    return np.exp(-slot / gamma).astype(np.float32)


def supervised_run(mask_T: npt.NDArray[np.integer]) -> Ints:
    """How many supervised tokens follow one another from each position on [T]."""
    position_T = np.arange(len(mask_T), dtype=np.int64)
    gap_T = np.where(mask_T != 0, len(mask_T), position_T)
    next_gap_T = np.minimum.accumulate(gap_T[::-1])[::-1]
    return next_gap_T - position_T


def pack_blocks(
    samples: Sequence[Tokens],
    *,
    quota: int,
    seed: int,
    epoch: int,
    block_size: int,
    weight_S: Floats,
    last_rows: str,
) -> Blocks:
    """Blocks of the samples of one batch, laid end to end."""
    parts = [_sample_blocks(sample, quota, seed, epoch, block_size) for sample in samples]
    teachers = [teacher_positions(sample.mask_T, last_rows) for sample in samples]
    first_row = np.cumsum([0, *(len(sample.ids_T) for sample in samples)])
    first_anchor = np.cumsum([0, *(len(anchor_A) for anchor_A, _, _ in parts)])
    first_last = np.cumsum([0, *(len(teacher) for teacher in teachers)])
    anchors, starts, tokens, rows, slots, labels, teacher_rows = [], [], [], [], [], [], []
    for index, (sample, (anchor_A, block_R, slot_R)) in enumerate(zip(samples, parts, strict=True)):
        target_R = anchor_A[block_R] + slot_R
        anchors.append(anchor_A + first_row[index])
        starts.append(np.full(len(anchor_A), first_row[index], np.int64))
        tokens.append(sample.ids_T[anchor_A].astype(np.int64))
        rows.append((block_R + first_anchor[index]) * block_size + slot_R)
        slots.append(slot_R)
        labels.append(sample.ids_T[target_R].astype(np.int64))
        # the state at t gives the logits of token t + 1
        teacher_rows.append(np.searchsorted(teachers[index], target_R - 1) + first_last[index])
    slot_R = np.concatenate(slots)
    return Blocks(
        position_N=np.concatenate([np.arange(len(sample.ids_T)) for sample in samples]),
        anchor_A=np.concatenate(anchors),
        start_A=np.concatenate(starts),
        token_A=np.concatenate(tokens),
        row_R=np.concatenate(rows),
        slot_R=slot_R,
        label_R=np.concatenate(labels),
        weight_R=weight_S[slot_R - 1],
        teacher_R=np.concatenate(teacher_rows).astype(np.int64),
        num_last=int(first_last[-1]),
    )


def _sample_blocks(
    sample: Tokens, quota: int, seed: int, epoch: int, block_size: int
) -> tuple[Ints, Ints, Ints]:
    """Anchors of a sample; block and slot (from 1) of each row that carries loss."""
    anchor_A = choose_anchors(sample.mask_T, quota, seed, epoch, sample.sample_id)
    num_supervised_A = supervised_run(sample.mask_T)[anchor_A + 1]
    slot = np.arange(1, block_size, dtype=np.int64)
    block_R, slot_index_R = np.nonzero(slot <= num_supervised_A[:, None])
    return anchor_A, block_R.astype(np.int64), slot[slot_index_R]
