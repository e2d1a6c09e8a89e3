"""Logits of the teacher's rows: each row once, in whole groups."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from dflash_pipeline.train import teacher
from dflash_pipeline.train.head import raw_logits
from dflash_pipeline.train.teacher import Teacher, TeacherLogits, teacher_spans

GROUP = 4


@pytest.fixture(autouse=True)
def projected(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Groups of four rows; what was projected, in order."""
    seen: list[Tensor] = []

    def listen(rows: Tensor, weight: Tensor, out: Tensor) -> Tensor:
        seen.append(rows)
        return raw_logits(rows, weight, out)

    monkeypatch.setattr(teacher, "GROUP_ROWS", GROUP)
    monkeypatch.setattr(teacher, "raw_logits", listen)
    return seen


def _teacher(num_rows: int, spans: Sequence[tuple[int, int]]) -> Teacher:
    state_UH = torch.arange(num_rows, dtype=torch.float32)[:, None].expand(-1, 3).contiguous()
    return Teacher(state_UH, torch.zeros(0), spans)


WEIGHT_VH = torch.tensor([[1.0, 0, 0], [0, 2, 0]])


def test_spans_are_the_rows_that_each_chunk_touches() -> None:
    index = np.array([0, 0, 1, 2, 2, 3, 5, 6])
    assert teacher_spans(index, 3) == ((0, 2), (2, 4), (5, 7))


@pytest.mark.parametrize("num_rows", [1, 3, 4, 5, 23, 24, 64])
@pytest.mark.parametrize("position_chunk", [1, 3, 7, 16, 200])
def test_every_chunk_finds_its_rows_and_each_row_is_projected_once(
    num_rows: int, position_chunk: int, projected: list[Tensor]
) -> None:
    random = np.random.default_rng(num_rows)
    # blocks of five slots begin anywhere, in order: neighbours share rows
    begins = np.sort(random.integers(0, max(1, num_rows - 4), 20))
    index_R = np.minimum(begins[:, None] + np.arange(5), num_rows - 1).flatten()
    spans = teacher_spans(index_R, position_chunk)
    logits = TeacherLogits(_teacher(num_rows, spans), WEIGHT_VH)
    # what was never written must not be taken for a logit
    logits._ring_CV.fill_(float("nan"))
    for chunk, (first, end) in enumerate(spans):
        ring_CV = logits.hold(chunk)
        found = ring_CV[torch.arange(first, end) % len(ring_CV)]
        assert found.tolist() == [[row, 2.0 * row] for row in range(first, end)]
    done = torch.cat(projected)[:, 0].tolist()
    assert len(done) == len(set(done))
    longest = max(5, *(end - first for first, end in spans))
    assert len(logits._ring_CV) <= min(num_rows, longest + 2 * GROUP)


def test_groups_are_whole_but_for_the_last_and_gaps_are_left_out(projected: list[Tensor]) -> None:
    spans = ((1, 3), (2, 6), (17, 18), (20, 22))
    logits = TeacherLogits(_teacher(22, spans), WEIGHT_VH)
    for chunk in range(len(spans)):
        logits.hold(chunk)
    rows = [(int(one[0, 0]), len(one)) for one in projected]
    assert rows == [(0, 4), (4, 4), (16, 4), (20, 2)]


def test_rows_in_any_order_are_held_as_long_as_they_are_wanted() -> None:
    spans = ((12, 14), (0, 2), (13, 15), (5, 6))
    logits = TeacherLogits(_teacher(15, spans), WEIGHT_VH)
    for chunk, (first, end) in enumerate(spans):
        ring_CV = logits.hold(chunk)
        found = ring_CV[torch.arange(first, end) % len(ring_CV)]
        assert found[:, 0].tolist() == list(range(first, end))
