"""Prompt lookup proposes what followed the longest known suffix."""

from __future__ import annotations

from dflash_pipeline.train.lookup import PromptLookup


def lookup(ids: list[int], num_drafts: int = 3, ngram: int = 3) -> PromptLookup:
    made = PromptLookup(num_drafts, ngram)
    made.add(ids)
    return made


def test_nothing_seen_before_proposes_nothing() -> None:
    assert lookup([1, 2, 3]).drafts(4) == []
    assert lookup([]).drafts(4) == []


def test_the_longest_suffix_wins_over_a_later_shorter_one() -> None:
    # (1 2 3) was followed by 4 5 6; 3 alone was later followed by 9
    text = [1, 2, 3, 4, 5, 6, 7, 3, 9, 8, 1, 2]
    assert lookup(text).drafts(3) == [4, 5, 6]
    assert lookup(text, ngram=1).drafts(3) == [9, 8, 1]


def test_of_equal_suffixes_the_latest_wins() -> None:
    assert lookup([5, 1, 6, 5, 2, 7]).drafts(5) == [2, 7, 5]


def test_a_loop_is_followed_for_a_whole_block() -> None:
    assert lookup([8, 1, 2, 1], num_drafts=5).drafts(2) == [1, 2, 1, 2, 1]
    assert lookup([4], num_drafts=3).drafts(4) == [4, 4, 4]


def test_adding_piece_by_piece_is_adding_at_once() -> None:
    pieces = PromptLookup(2, 3)
    for part in ([1, 2], [3], [], [1, 2]):
        pieces.add(part)
    assert pieces.drafts(3) == lookup([1, 2, 3, 1, 2], 2).drafts(3) == [1, 2]
