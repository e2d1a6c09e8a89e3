"""Results of an evaluation, and what may be compared with them."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash_pipeline.configs.schema import EvalConfig, Run
from dflash_pipeline.train.results import DECODE, REPLAY, check_comparable, settings

FILE = Path("found.json")
DECODED, REPLAYED = Run(eval=EvalConfig(prompts=("p.jsonl",))), Run()


def test_replay_is_compared_with_replay_and_decoding_with_decoding() -> None:
    for run, mode, other in ((DECODED, DECODE, REPLAY), (REPLAYED, REPLAY, DECODE)):
        found = {"settings": settings(run), "mode": mode}
        check_comparable(run, FILE, found)
        with pytest.raises(ValueError, match=f"measured with mode '{other}', here '{mode}'"):
            check_comparable(run, FILE, found | {"mode": other})


def test_each_setting_that_differs_is_named() -> None:
    found = {"settings": settings(DECODED) | {"temperature": 0.7, "top_k": 5}, "mode": DECODE}
    with pytest.raises(ValueError, match=r"temperature 0\.7, here 0\.0; top_k 5, here 0"):
        check_comparable(DECODED, FILE, found)
