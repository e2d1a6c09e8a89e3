"""Two evaluations are compared prompt by prompt, and only if they differ by the drafter alone."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_pipeline.configs.errors import UsageError
from dflash_pipeline.configs.evaluation import is_result
from dflash_pipeline.configs.schema import EvalConfig, Run
from dflash_pipeline.train import compare
from places import cpu_place

SETTINGS = {"max_new_tokens": 64, "temperature": 0.0, "rendering": {"template_hash": "c1"}}


def results(kept_a_cycle: float, seed: int = 0) -> dict[str, Any]:
    """Prompts that differ among themselves far more than two drafters do on one of them."""
    random = np.random.default_rng(seed)
    prompts = []
    for number in range(40):
        cycles = int(random.integers(10, 20))
        kept = int(cycles * (random.uniform(1, 3) + kept_a_cycle))
        prompts.append(
            {
                "key": f"p{number}",
                "domain": "math" if number % 4 else "chat",
                "kept": kept,
                "cycles": cycles,
                "loop_free_kept": cycles // 2 * 2,
                "loop_free_cycles": cycles // 2 if number else 0,
            }
        )
    return {"mode": "decode", "settings": SETTINGS, "per_prompt": {"trained": prompts}}


def written(folder: Path, **named: dict[str, Any]) -> list[str]:
    for name, values in named.items():
        (folder / f"{name}.json").write_text(json.dumps(values))
    return [str(folder / f"{name}.json") for name in named]


def run(folder: Path, files: list[str]) -> dict[str, Any]:
    place = cpu_place(folder / "logs", "compare")
    out = folder / "out.json"
    extra = {"files": files, "names": ["one", "two"]}
    compare.main(Run(eval=EvalConfig(json=str(out))), place, extra)
    # which the same line may replace
    assert is_result(out)
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def test_a_small_gain_on_every_prompt_is_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = run(tmp_path, written(tmp_path, a=results(0.2), b=results(0.0)))
    pooled = found["domains"]["all"]
    assert pooled["prompts"] == 40
    assert pooled["difference"] == pytest.approx(pooled["tau_a"] - pooled["tau_b"])
    low, high = pooled["interval"]
    assert 0.1 < low < pooled["difference"] < high < 0.25
    assert pooled["ratio"] == pytest.approx(pooled["tau_a"] / pooled["tau_b"])
    assert set(found["domains"]) == {"all", "chat", "math"}
    assert found["domains"]["chat"]["prompts"] == 10
    # one prompt has no cycle before its loop
    assert pooled["loop_free"]["prompts"] == 39
    assert pooled["loop_free"]["interval"] == [0.0, 0.0]
    output = capsys.readouterr().out
    assert "A: one; B: two" in output
    assert "at 95 %: A accepts more" in output


def test_the_order_of_prompts_and_of_the_two_does_not_matter(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shuffled = copy.deepcopy(results(0.0))
    shuffled["per_prompt"]["trained"].reverse()
    found = run(tmp_path, written(tmp_path, a=shuffled, b=results(0.2)))
    assert found["domains"]["all"]["interval"][1] < 0
    assert "at 95 %: B accepts more" in capsys.readouterr().out
    same = run(tmp_path, written(tmp_path, a=shuffled, b=results(0.0)))
    assert same["domains"]["all"]["interval"] == [0.0, 0.0]
    # which is not to say that they are alike
    assert "at 95 %: 40 prompts do not tell them apart" in capsys.readouterr().out


@pytest.mark.parametrize("who", [0, 1])
def test_a_prompt_without_a_cycle_in_either_counts_in_neither(who: int, tmp_path: Path) -> None:
    pair = [results(0.2), results(0.0)]
    pair[who]["per_prompt"]["trained"][5].update(kept=0, cycles=0)
    found = run(tmp_path, written(tmp_path, a=pair[0], b=pair[1]))["domains"]["all"]
    kept, cycles = (
        sum(one[name] for place, one in enumerate(pair[0]["per_prompt"]["trained"]) if place != 5)
        for name in ("kept", "cycles")
    )
    assert found["prompts"] == 39
    assert found["tau_a"] == pytest.approx(kept / cycles)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda one: one["settings"].update(temperature=0.7), "temperature 0.0 and 0.7"),
        (lambda one: one["settings"].update(new=1), "new None and 1"),
        (lambda one: one.update(mode="replay"), "mode 'decode' and 'replay'; evaluate both in"),
        (
            lambda one: one["per_prompt"]["trained"].pop(3),
            "1 are in A alone, 0 in B alone, p3 for one",
        ),
    ],
)
def test_what_differs_by_more_than_the_drafter_is_refused(
    change: Any, words: str, tmp_path: Path
) -> None:
    other = copy.deepcopy(results(0.1))
    change(other)
    with pytest.raises(UsageError, match=words):
        run(tmp_path, written(tmp_path, a=results(0.0), b=other))


@pytest.mark.parametrize(
    "damage",
    [
        lambda one: one.pop("per_prompt"),
        lambda one: one.pop("settings"),
        lambda one: one["per_prompt"]["trained"].append(one["per_prompt"]["trained"][0]),
        lambda one: one["per_prompt"].update(trained=[{}]),
    ],
)
def test_a_file_that_holds_no_results_is_named(damage: Any, tmp_path: Path) -> None:
    other = copy.deepcopy(results(0.1))
    damage(other)
    files = written(tmp_path, a=results(0.0), b=other)
    with pytest.raises(ValueError, match=r"b.json is no result .* dflash eval --json FILE"):
        run(tmp_path, files)
    Path(files[1]).write_text("{")
    with pytest.raises(ValueError, match=r"b.json is no result"):
        run(tmp_path, files)
