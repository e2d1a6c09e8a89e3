"""The README's plans are what is computed from what was measured, and say which is which."""

from __future__ import annotations

import importlib
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_pipeline.configs.load import load
from dflash_pipeline.configs.schema import Run
from studies import cost, recipes
from studies.arms import objective_arms
from studies.paired import best_arm
from studies.sizes import SIZES

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
SECTION = TEXT[TEXT.index("## Recipes") : TEXT.index("## Measured")]
FLAT = " ".join(SECTION.split())
TARGETS = (recipes.QWEN3_8B, recipes.QWEN36_27B)


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.preset)
def test_each_table_is_the_one_that_is_computed(target: recipes.Target) -> None:
    after = SECTION.split(f"<!-- recipe {target.preset} -->\n")[1]
    assert re.match(r"(?:\|.*\n)+", after)[0].splitlines()[2:] == recipes.table(target)


def test_what_the_text_assumes_is_what_is_computed_with() -> None:
    assert f"samples of {recipes.SAMPLE_TOKENS:,} tokens, six epochs, 512 blocks of 16" in FLAT
    assert (recipes.EPOCHS, recipes.ANCHORS, recipes.BLOCK) == (6, 512, 16)
    defaults = Run()
    assert (defaults.train.epochs, defaults.train.anchors_per_sample) == (6, 512)
    shown = f"{1e3 * recipes.measured_step_s():.1f} ms for 8,192 draft rows at 3,072 tokens"
    assert shown in FLAT
    assert recipes.ANCHORS * recipes.BLOCK == 8192


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.preset)
def test_the_drafter_is_that_of_the_preset(target: recipes.Target) -> None:
    run = load(target.preset, (), {})
    assert (run.drafter.num_layers, run.drafter.block_size) == (target.num_layers, recipes.BLOCK)
    assert len(run.target.layer_ids) or run.target.num_capture_layers == len(target.layer_ids)
    for name in ("num_heads", "num_kv_heads", "head_dim", "intermediate_size"):
        # 0: the target's own
        assert getattr(run.drafter, name) in (0, getattr(target, name))


def test_hours_and_bytes_follow_from_the_measured_step() -> None:
    eight, larger = TARGETS
    assert recipes.train_hours(eight, 1000) == pytest.approx(
        1000 * 6 * recipes.measured_step_s() / 3600
    )
    # docs of others give 57.5 ms of floor for 3,072 tokens of this target with attention
    assert recipes.capture_hours(eight, 3) * 3600 == pytest.approx(0.0528, rel=0.01)
    assert recipes.step_s(larger) / recipes.step_s(eight) == pytest.approx(
        recipes.floor_s(larger) / recipes.floor_s(eight)
    )
    assert recipes.bytes_per_token(eight, "bf16") == 6 * 4096 * 2
    assert recipes.bytes_per_token(eight, "int4") == 5 * 2320 + 4112
    twice = replace(eight, num_parameters=2 * eight.num_parameters)
    assert recipes.capture_hours(twice, 10) == 2 * recipes.capture_hours(eight, 10)


def test_the_real_targets_figures_are_those_that_were_measured() -> None:
    found = json.loads((ROOT / "tests/bench/real_target.json").read_text())["one_gpu"]
    for shown in (
        f"{found['generate']['answers']:,} prompts become {found['generate']['tokens']:,} tokens",
        f"in {found['generate']['whole_command_s']} s",
        f"{found['store']['gb']:.1f} GB in {found['capture']['whole_command_s']} s",
        f"in {found['train']['whole_command_s']} s a drafter with tau "
        f"{found['replay_at_the_end']['tau']:.2f}",
    ):
        assert shown in FLAT


def test_the_trained_documents_are_as_long_as_the_table_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "bench"))
    training = importlib.import_module("training")
    mixed = training.lengths_of(training.FULL, "mixed")
    assert f"| lognormal, mean {mixed.mean():.0f}, packed |" in TEXT
    told = f"{len(mixed)} of lognormal lengths (sigma 0.8, at most {mixed.max():,}, on average "
    assert f"{told}{mixed.mean():.0f})" in training.__doc__


def test_the_estimate_of_the_study_is_the_one_that_is_told() -> None:
    seconds = sum(part.seconds for part in cost.costs(SIZES["full"], 3, 1))
    most = cost.most_bytes(SIZES["full"], 3, has_memory=True)
    alone = cost.most_bytes(SIZES["full"], 3, has_memory=False)
    told = (
        f"{seconds / 60:.0f} minutes on one H200, and at most {most.disk / 1e9:.0f} GB of disk and "
        f"{most.memory / 1e9:.0f} of memory (with all of it on one disk {alone.disk / 1e9:.0f})"
    )
    assert told in FLAT
    assert f"{cost.num_runs(3)} runs" in FLAT
    assert "five answers a prompt" in FLAT
    assert SIZES["full"].samples + 1 == 5


@pytest.mark.parametrize("name", ["study", "head_to_head"])
def test_the_lines_of_benches_use_options_that_they_have(name: str) -> None:
    lines = [
        line for line in SECTION.replace("\\\n", "").splitlines() if f"bench/{name}.py" in line
    ]
    given = {word for line in lines for word in line.split() if word.startswith("--")}
    source = (ROOT / "tests" / "bench" / f"{name}.py").read_text(encoding="utf-8")
    assert given
    assert given <= set(re.findall(r'add_argument\(\s*"(--[a-z-]+)"', source))


def test_nothing_that_was_not_run_is_told_without_saying_so() -> None:
    for name in ("Qwen3-8B", "Qwen3.6-27B"):
        assert f"**{name}.** Not run;" in FLAT
    # once there are results, their figures must stand here instead
    assert (ROOT / "tests/bench/head_to_head.json").exists() != ("not run on a GPU" in FLAT)


def test_the_table_of_the_study_is_what_it_found() -> None:
    found = json.loads((ROOT / "tests/bench/study.json").read_text(encoding="utf-8"))
    rows = [
        [cell.strip(" *") for cell in line.strip("|").split("|")]
        for line in SECTION.splitlines()
        if line.startswith("|")
    ]
    parts = ("all", "math", "code", "chat", "greedy")
    for name, one in found["arms"].items():
        taus = [f"{np.mean(one['tau'][part]):.3f}" for part in parts]
        (row,) = (row for row in rows if row[1:6] == taus)
        assert row[7] == _interval(one), name
    later = found["later"]["arms"]
    told = [
        (row[2], row[3].removesuffix(", prompts alone")) for row in rows if row[1] in ("1", "3")
    ]
    assert told == [(f"{np.mean(one['tau']['all']):.3f}", _interval(one)) for one in later.values()]
    assert f"{found['stores']['bf16']['num_supervised']:,} tokens" in FLAT


def _interval(arm: dict[str, Any]) -> str:
    if "difference" not in arm:
        return ""
    mean, low, high = (arm["difference"]["all"][name] * 100 for name in ("mean", "low", "high"))
    return f"{mean:+.1f} % ({low:+.1f} to {high:+.1f})"


def test_the_objective_of_the_preset_is_the_best_of_the_study() -> None:
    found = json.loads((ROOT / "tests/bench/study.json").read_text(encoding="utf-8"))
    chosen = load("smollm2", (), {}).loss
    given = {"ce": chosen.ce, "kl": chosen.kl, "slot_weights": chosen.slot_weights}
    (arm,) = (
        one
        for one in objective_arms((0,))
        if one.settings == {f"loss.{key}": value for key, value in given.items()}
    )
    taus = {
        name: float(np.mean(one["tau"]["all"]))
        for name, one in found["arms"].items()
        if one["question"] == "objective"
    }
    assert arm.name == best_arm(taus) == found["decision"]["objective"]
