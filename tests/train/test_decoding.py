"""How answers of an arm are held against plain decoding's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from dflash_pipeline.train.decoding import _mismatches, batched
from dflash_pipeline.train.tally import Answer

PLAIN = Answer(tokens=[7, 8, 9], cycles=[], gaps=[5.0, 1e-3, 4.0])


@pytest.mark.parametrize(
    ("tokens", "place", "gap", "is_exempt"),
    [
        ([7, 1, 9], 1, 1e-3, True),
        ([7, 8, 1], 2, 4.0, False),
        # it ended earlier, or went on where plain decoding ended
        ([7], 1, 1e-3, True),
        ([7, 8, 9, 1], 3, 4.0, False),
    ],
)
def test_a_difference_has_the_gap_of_plain_decoding_at_its_place(
    tokens: list[int], place: int, gap: float, is_exempt: bool
) -> None:
    (found,) = _mismatches("trained", "p", PLAIN, Answer(tokens=tokens, cycles=[]))
    assert (found.place, found.gap, found.is_exempt) == (place, gap, is_exempt)
    assert _mismatches("trained", "p", PLAIN, Answer(tokens=[7, 8, 9], cycles=[])) == []


def test_prompts_of_a_domain_are_batched_by_length_and_those_of_two_never_together() -> None:
    prompts: list[Any] = [
        SimpleNamespace(key=f"{domain}-{size}", domain=domain, ids=range(size))
        for size, domain in ((9, "b"), (2, "a"), (7, "a"), (1, "b"), (3, "a"), (4, "b"), (8, "a"))
    ]
    found = [[prompt.key for prompt in batch] for batch in batched(prompts, 3)]
    assert found == [["a-2", "a-3", "a-7"], ["a-8"], ["b-1", "b-4", "b-9"]]
