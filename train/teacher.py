"""The target's own states at the positions that drafted rows predict, and their logits.

Shape letters: R drafted rows that carry loss, H hidden, V vocabulary, U distinct teacher rows,
C teacher rows whose logits are held at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dflash_pipeline.train.head import raw_logits

# A GPU multiplies matrices by tiles of 128 or 256 rows: a whole multiple leaves none part empty.
GROUP_ROWS = 512


@dataclass(frozen=True, slots=True)
class Teacher:
    """The target's own post-norm states, each row once: neighbouring blocks share most of them."""

    state_UH: Tensor
    index_R: Tensor
    """Which of them predicts the label of each drafted row."""
    spans: Sequence[tuple[int, int]]
    """First and one past the last of them that each position chunk touches."""


def teacher_spans(
    index_R: npt.NDArray[np.int64], position_chunk: int
) -> tuple[tuple[int, int], ...]:
    """The teacher rows that each position chunk touches; rows are sorted, so ranges are short."""
    chunks = (index_R[at : at + position_chunk] for at in range(0, len(index_R), position_chunk))
    return tuple((int(chunk.min()), int(chunk.max()) + 1) for chunk in chunks)


class TeacherLogits:
    """fp32 logits of the teacher's rows, in a ring: row u is at place u modulo C.

    Position chunks touch spans of any length that overlap by a block. Projected span by span, the
    last tile of each would be part empty and the rows of an overlap done twice; here each row is
    projected once, whole groups at a time, and kept until no later chunk touches it.
    """

    def __init__(self, teacher: Teacher, weight_VH: Tensor) -> None:
        self._state_UH, self._weight_VH = teacher.state_UH, weight_VH
        num_rows = len(self._state_UH)
        # of each chunk: the first row that it or a later one touches, and what is projected by then
        lows = list(accumulate((first for first, _ in reversed(teacher.spans)), min))
        self._firsts = [_downward(low) for low in reversed(lows)]
        self._ends = [
            min(_upward(high), num_rows)
            for high in accumulate((end for _, end in teacher.spans), max)
        ]
        pairs = zip(self._firsts, self._ends, strict=True)
        capacity = max((end - first for first, end in pairs), default=0)
        shape = (capacity, len(weight_VH))
        self._ring_CV = torch.empty(shape, dtype=torch.float32, device=weight_VH.device)
        self._end = 0

    def hold(self, chunk: int) -> Tensor:
        """The ring, fp32 [C, V], once it holds the rows of that chunk; chunks come in order, and
        rows that only earlier ones touch may be lost."""
        self._end = max(self._end, self._firsts[chunk])
        while self._end < self._ends[chunk]:
            place = self._end % len(self._ring_CV)
            count = min(self._ends[chunk] - self._end, len(self._ring_CV) - place)
            state_NH = self._state_UH[self._end : self._end + count]
            raw_logits(state_NH, self._weight_VH, self._ring_CV[place : place + count])
            self._end += count
        return self._ring_CV


def _downward(rows: int) -> int:
    return rows // GROUP_ROWS * GROUP_ROWS


def _upward(rows: int) -> int:
    return _downward(rows + GROUP_ROWS - 1)
