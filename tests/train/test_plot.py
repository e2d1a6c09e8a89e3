"""The figure of an evaluation, which `dflash demo` draws beside its loss as well."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.colors import to_rgba

from dflash_pipeline.configs.figures import COLOURS
from dflash_pipeline.train.plot import draw
from dflash_pipeline.train.report import Arm, Pace, Report, scored
from dflash_pipeline.train.results import LOOKUP, TRAINED, UNTRAINED
from dflash_pipeline.train.tally import Answer, Cycle


def test_each_arm_has_its_own_colour_and_the_legend_covers_nothing(
    tmp_path: Path, figures: list[Any]
) -> None:
    answer = Answer(tokens=[1, 2, 3, 4], cycles=[Cycle(3, 2)])
    prompts = [scored("p", "math", [answer], 3)]
    arm = Arm(prompts=prompts, pace=Pace(tokens={"math": 30}, seconds={"math": 2.0}))
    names = (LOOKUP, UNTRAINED, TRAINED)
    draw(
        tmp_path / "eval.png",
        Report(
            mode="decode",
            settings={"temperature": 0.0},
            arms=dict.fromkeys(names, arm),
            plain=None,
            mismatches=(),
            is_judged=False,
            seed=0,
        ),
    )
    (figure,) = figures
    left, right = figure.axes
    bars = [one for one in left.containers if hasattr(one, "patches")]
    drawn = [one.patches[0].get_facecolor() for one in bars]
    assert drawn == [to_rgba(COLOURS[name]) for name in names]
    lines = {line.get_label(): to_rgba(line.get_color()) for line in right.lines}
    assert lines == {name: to_rgba(COLOURS[name]) for name in names}
    assert not right.get_legend().get_window_extent().overlaps(right.get_window_extent())
