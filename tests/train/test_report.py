"""What an evaluation says of arms, and of outputs that differ."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dflash_pipeline.train.report import ALL, Arm, Mismatch, Pace, Report, scored
from dflash_pipeline.train.tally import Answer, Cycle

EXEMPT = Mismatch(arm="trained", key="p", place=1, gap=1e-3, is_exempt=True)
PLAIN = Pace(tokens={"math": 10}, seconds={"math": 2.0})


def _report(*mismatches: Mismatch, is_judged: bool, plain: Pace | None = PLAIN) -> Report:
    answer = Answer(tokens=[1, 2, 3, 4], cycles=[Cycle(3, 2)])
    prompts = [scored("p", "math", [answer], 3)]
    arm = Arm(prompts=prompts, pace=Pace(tokens={"math": 30}, seconds={"math": 2.0}))
    return Report(
        mode="decode",
        settings={"temperature": 0.0},
        arms={"trained": arm},
        plain=plain,
        mismatches=mismatches,
        is_judged=is_judged,
        seed=0,
    )


@pytest.mark.parametrize("domain", ["math", ALL])
def test_the_gain_is_how_much_faster_than_plain_decoding(domain: str) -> None:
    report = _report(is_judged=True)
    assert report.summary("trained", domain).gain == 3.0
    assert _report(is_judged=False, plain=None).summary("trained", domain).gain is None


def test_a_tiny_gap_excuses_a_difference_in_fp32_alone() -> None:
    counted = replace(EXEMPT, gap=0.5, is_exempt=False)
    assert _report(is_judged=True).is_identical is True
    assert _report(EXEMPT, is_judged=True).is_identical is True
    assert _report(EXEMPT, counted, is_judged=True).is_identical is False
    # in bf16 nothing is judged: what differs differs
    assert _report(EXEMPT, is_judged=False).is_identical is False
    assert _report(EXEMPT, is_judged=False, plain=None).is_identical is None
