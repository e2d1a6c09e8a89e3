"""Where blocks start and what their slots must say."""

from __future__ import annotations

import numpy as np
import pytest

from dflash_pipeline.train.anchors import (
    Tokens,
    choose_anchors,
    pack_blocks,
    slot_weights,
    supervised_run,
)

#          0  1  2  3  4  5  6  7  8  9
MASK = np.array([0, 0, 1, 1, 1, 0, 1, 0, 1, 1])


def _pack(samples: list[Tokens], quota: int = 9, last_rows: str = "teacher"):
    return pack_blocks(
        samples,
        quota=quota,
        seed=0,
        epoch=0,
        block_size=4,
        weight_S=slot_weights(4, 4.0),
        last_rows=last_rows,
    )


def test_an_anchor_is_supervised_and_so_is_its_successor() -> None:
    assert choose_anchors(MASK, 9, 0, 0, 0).tolist() == [2, 3, 8]


def test_a_quota_is_drawn_without_replacement_and_anew_each_epoch() -> None:
    mask = np.ones(40, np.uint8)
    draws = {tuple(choose_anchors(mask, 5, 0, epoch, 7).tolist()) for epoch in range(8)}
    assert len(draws) == 8
    for draw in draws:
        assert len(set(draw)) == 5
        assert list(draw) == sorted(draw)
        assert max(draw) <= 38
    assert choose_anchors(mask, 5, 0, 0, 7).tolist() == choose_anchors(mask, 5, 0, 0, 7).tolist()
    assert choose_anchors(mask, 5, 0, 0, 7).tolist() != choose_anchors(mask, 5, 0, 0, 8).tolist()


def test_every_valid_position_is_drawn_about_equally_often() -> None:
    mask = np.ones(11, np.uint8)
    drawn = [choose_anchors(mask, 2, 0, epoch, 1) for epoch in range(2000)]
    counts = np.bincount(np.concatenate(drawn), minlength=11)
    assert counts[10] == 0
    assert counts[:10].min() > 330
    assert counts[:10].max() < 470


def test_a_run_ends_at_the_first_gap_or_the_end() -> None:
    assert supervised_run(MASK).tolist() == [0, 0, 3, 2, 1, 0, 1, 0, 2, 1]


def test_slot_k_predicts_token_a_plus_k_until_the_first_gap() -> None:
    blocks = _pack([Tokens(1, np.arange(100, 110), MASK)])
    assert blocks.anchor_A.tolist() == [2, 3, 8]
    assert blocks.token_A.tolist() == [102, 103, 108]
    # block 0: slots 1, 2 (token 105 is not supervised); block 1: slot 1; block 2: slot 1, then end
    assert blocks.row_R.tolist() == [1, 2, 5, 9]
    assert blocks.slot_R.tolist() == [1, 2, 1, 1]
    assert blocks.label_R.tolist() == [103, 104, 104, 109]
    assert blocks.weight_R.tolist() == pytest.approx([1, np.exp(-0.25), 1, 1])


def test_packed_samples_keep_their_own_positions_and_starts() -> None:
    second = Tokens(2, np.arange(200, 204), np.array([0, 1, 1, 1]))
    blocks = _pack([Tokens(1, np.arange(100, 110), MASK), second])
    assert blocks.position_N.tolist() == [*range(10), *range(4)]
    assert blocks.anchor_A.tolist() == [2, 3, 8, 11, 12]
    assert blocks.start_A.tolist() == [0, 0, 0, 10, 10]
    assert blocks.label_R.tolist() == [103, 104, 104, 109, 202, 203, 203]
    assert blocks.row_R.tolist() == [1, 2, 5, 9, 13, 14, 17]


@pytest.mark.parametrize("last_rows", ["teacher", "all"])
def test_the_teacher_of_a_label_is_the_position_before_it(last_rows: str) -> None:
    ids = [np.arange(100, 110), np.arange(200, 204)]
    masks = [MASK, np.array([0, 1, 1, 1])]
    blocks = _pack(
        [Tokens(i, *pair) for i, pair in enumerate(zip(ids, masks, strict=True))],
        last_rows=last_rows,
    )
    packed = []
    for sample_ids, mask in zip(ids, masks, strict=True):
        kept = range(len(mask)) if last_rows == "all" else np.flatnonzero(mask[1:])
        # a row of `last` is named here by the token that it predicts
        packed += [int(sample_ids[t]) + 1 for t in kept]
    assert blocks.num_last == len(packed)
    assert [packed[row] for row in blocks.teacher_R] == blocks.label_R.tolist()


def test_slot_weights_are_the_papers() -> None:
    weight = slot_weights(16, 7.0)
    assert weight[:3].tolist() == pytest.approx([1, 0.867, 0.751], abs=1e-3)
    assert float(weight.sum()) == pytest.approx(6.63, abs=0.01)
