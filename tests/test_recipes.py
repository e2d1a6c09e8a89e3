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
from studies.arms import CAP_LAMBDA, FOLLOWED, FOLLOWING, objective_arms
from studies.paired import best_arm
from studies.sizes import SIZES, TEMPERATURE

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
    # teacher rows are projected in the step that was measured, as in the default's
    assert defaults.loss.needs_last
    assert recipes.step_objective() == "KL+CE"
    assert f"with KL + CE; with CE alone one takes {1e3 * recipes.kl_s():.1f} ms less" in FLAT
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


def test_the_tables_of_the_study_are_what_it_found() -> None:
    found = json.loads((ROOT / "tests/bench/study.json").read_text(encoding="utf-8"))
    parts = ("all", "math", "code", "chat", "greedy")
    rows = []
    for name, one in found["arms"].items():
        label, best = _label(name), name == found["decision"]["objective"]
        against = _label(one["against"]) if one["against"] else ""
        taus = _taus(one["tau"], parts)
        rows.append([f"**{label}**" if best else label, *taus, against, _interval(one)])
    for name, label in (("lookup", "prompt lookup"), ("untrained", "untrained")):
        rows.append([label, *_taus(found["beside"][name], parts), "", ""])
    assert _table("arm") == rows
    later, size = found["later"]["arms"], found["later"]["bytes_per_token"]
    kb = {name: f"{value / 1e3:.1f}" for name, value in size.items()}
    labels = {
        found["decision"]["objective"]: "as above",
        "int8": f"store int8 ({kb['int8']} KB a token instead of {kb['bf16']})",
        "int4": f"store int4, `last` int8 ({kb['int4']} KB)",
        "int4-last": f"store int4, `last` int4 ({kb['int4-last']} KB)",
        "cap": f"CAP {CAP_LAMBDA}",
        "bf16-logits": "logits rounded to bf16",
        "block-16": "blocks of 16",
        "layers-1": "one layer",
        "layers-5": "five layers",
    }
    assert _table(f"arm of {_label(found['decision']['objective'])}") == [
        [
            labels[name],
            str(len(one["seeds"])),
            *_taus(one["tau"], ("all",)),
            _interval(one) + ", prompts alone" * (len(one["seeds"]) == 1),
        ]
        for name, one in later.items()
    ]
    against = [one["against"] for one in later.values() if "against" in one]
    assert against == [found["decision"]["objective"]] * (len(later) - 1)


def test_what_is_said_of_the_study_is_what_it_was() -> None:
    found = json.loads((ROOT / "tests/bench/study.json").read_text(encoding="utf-8"))
    store, answers = found["stores"]["bf16"], found["answers"]
    settings = found["settings"]["settings"]["settings"]
    objectives = [one for one in found["arms"].values() if one["question"] == "objective"]
    (steps,) = {each["step"][-1] for one in objectives for each in one["curve"].values()}
    assert (settings["drafter.num_layers"], settings["train.epochs"]) == (3, 2)
    assert found["settings"]["seeds"] == [0, 1, 2]
    whole, scored = sum(answers.values()), sum(found["later"]["answers"].values())
    for text in (
        f"one H200 ({found['date']}, `tests/bench/study.json`)",
        f"{store['num_supervised']:,} tokens of {store['num_samples']:,} answers",
        f"a drafter of three layers and blocks of {settings['drafter.block_size']} for two epochs "
        f"of {settings['train.anchors_per_sample']} blocks a sample ({steps} steps,",
        f"{answers['greedy']:,} greedy answers and {answers['sampled']:,} of T {TEMPERATURE}",
        f"of each run {scored:,} of the {whole:,} answers were scored",
    ):
        assert text in FLAT


def _table(head: str) -> list[list[str]]:
    """Cells of the table whose first column has this head."""
    after = SECTION[SECTION.index(f"| {head} |") :]
    lines = re.match(r"(?:\|.*\n)+", after)[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def _label(arm: str) -> str:
    if arm == FOLLOWING:
        return f"{_label(FOLLOWED)}, following the capture"
    loss, _, weights = arm.rpartition("-")
    return f"{loss.upper().replace('-', ' + ')}, {weights.replace('dpace', 'D-PACE')}"


def _taus(found: dict[str, list[float]], parts: tuple[str, ...]) -> list[str]:
    return [f"{np.mean(found[part]):.3f}" for part in parts]


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
