"""What is counted of verify cycles: tau pooled and per prompt, by slot, and before a loop."""

from __future__ import annotations

import pytest

from dflash_pipeline.train.tally import Answer, Cycle, Tally, cycles_within, loop_free_length


def test_tau_is_pooled_over_cycles_and_also_averaged_over_prompts() -> None:
    tally = Tally(num_drafts=3)
    tally.add([Cycle(4, 3), Cycle(1, 0), Cycle(1, 0)])
    tally.add([Cycle(3, 2)])
    tally.add([])
    assert (tally.num_prompts, tally.num_cycles, tally.num_kept) == (2, 4, 9)
    assert tally.tau == pytest.approx(9 / 4)
    assert tally.tau_per_prompt == pytest.approx((2 + 3) / 2)
    assert tally.accepted_by_slot == pytest.approx([0.5, 0.5, 0.25])
    both = Tally(num_drafts=3)
    both.merge(tally)
    both.merge(tally)
    assert (both.tau, both.tau_per_prompt) == (tally.tau, tally.tau_per_prompt)
    assert both.accepted_by_slot == tally.accepted_by_slot
    assert Tally(num_drafts=3).tau == 0.0


def test_the_part_before_the_first_repeated_4_gram_is_free_of_loops() -> None:
    assert loop_free_length([]) == 0
    assert loop_free_length([1, 2, 3, 4, 5]) == 5
    # three tokens come again, not four
    assert loop_free_length([1, 2, 3, 9, 1, 2, 3, 8]) == 8
    assert loop_free_length([7, 1, 2, 3, 4, 9, 1, 2, 3, 4, 5]) == 6
    # overlapping: the second run of four begins one token later
    assert loop_free_length([6, 5, 5, 5, 5, 5, 5]) == 2
    # a cycle of two: 1 2 1 2 again after two tokens
    assert loop_free_length([1, 2, 1, 2, 1, 2]) == 2


def test_cycles_are_cut_to_a_part_as_the_length_limit_cuts_them() -> None:
    cycles = [Cycle(4, 3), Cycle(1, 0), Cycle(3, 2)]
    assert cycles_within(cycles, 8) == cycles_within(cycles, 99) == cycles
    assert cycles_within(cycles, 7) == [Cycle(4, 3), Cycle(1, 0), Cycle(2, 2)]
    assert cycles_within(cycles, 5) == cycles[:2]
    assert cycles_within(cycles, 2) == [Cycle(2, 2)]
    assert cycles_within(cycles, 0) == cycles_within(cycles, -1) == []


def test_an_answers_loop_flatters_its_tau_and_not_the_part_before_it() -> None:
    tokens = [1, 2, 3, 4, 5, 5, 5, 5, 5, 5, 5, 5, 5]
    # the first token is the prefill's own: 12 are kept in cycles, 4 of them before the loop
    answer = Answer(tokens=tokens, cycles=[Cycle(1, 0)] * 4 + [Cycle(4, 3)] * 2)
    assert answer.loop_free_cycles == [Cycle(1, 0)] * 4
    assert Answer(tokens=[5, 5, 5, 5, 5], cycles=[Cycle(4, 3)]).loop_free_cycles == []
