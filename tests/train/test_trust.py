"""The check of a foreign drafter: what agrees passes, what does not is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dflash_pipeline.configs.errors import UsageError
from dflash_pipeline.configs.published import PUBLISHED, published, task_of
from dflash_pipeline.configs.schema import Run, TargetConfig
from dflash_pipeline.train import trust
from places import cpu_place


def results(kept: int, tau: float, judged: bool = True) -> dict[str, Any]:
    numbers = {"tau_per_prompt": tau, "tau_per_prompt_interval": [tau - 0.2, tau + 0.2]}
    return {
        "judged": judged,
        "arms": {"trained": {"all": numbers, "GSM-8K": numbers, "poems": numbers, "seconds": 1.0}},
        "per_prompt": {
            "trained": [
                {"key": "a", "kept": 20, "cycles": 5},
                {"key": "b", "kept": kept, "cycles": 8},
            ]
        },
    }


def judged(folder: Path, target: str, replayed: dict[str, Any], decoded: dict[str, Any]) -> None:
    place = cpu_place(folder / "logs", "check")
    extra: dict[str, object] = {"block_size": 16}
    for name, values in (("replayed", replayed), ("decoded", decoded)):
        extra[name] = str(folder / f"{name}.json")
        (folder / f"{name}.json").write_text(json.dumps(values))
    trust.judge(Run(target=TargetConfig(id=target)), place, extra)


def test_what_agrees_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    judged(tmp_path, "Qwen/Qwen3-8B", results(40, 6.4), results(40, 6.4))
    output = capsys.readouterr().out
    assert "the same cycles on 2 of 2 prompts" in output
    assert "gsm8k: tau 6.40 here (6.20 to 6.60), published 6.54" in output
    assert "arXiv 2602.06036, table 1 (temperature 0, thinking off" in output
    assert "poems" not in output
    assert output.endswith("check passed\n")


def test_a_replay_that_is_not_decoding_fails_in_fp32(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"tau 4.538 by replay and 4.615 by decoding"):
        judged(tmp_path, "other", results(39, 6.4), results(40, 6.4))
    # bf16 rounds differently in batches
    judged(tmp_path, "other", results(39, 6.4), results(40, 6.4, judged=False))
    with pytest.raises(ValueError, match="by replay and"):
        judged(tmp_path, "other", results(20, 6.4), results(40, 6.4, judged=False))
    empty = results(40, 6.4) | {"per_prompt": {"trained": []}}
    with pytest.raises(ValueError, match="no prompt in common"):
        judged(tmp_path, "other", empty, results(40, 6.4))


def test_a_tau_far_below_the_published_one_fails(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"gsm8k: tau 4.00, published 6.54"):
        judged(tmp_path, "Qwen/Qwen3-8B", results(40, 4.0), results(40, 4.0))


def test_nothing_to_compare_with_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    judged(tmp_path, "toy", results(40, 1.0), results(40, 1.0))
    assert "no figure is published here for target toy" in capsys.readouterr().out
    strange = results(40, 1.0)
    del strange["arms"]["trained"]["GSM-8K"]
    judged(tmp_path, "Qwen/Qwen3-8B", strange, strange)
    assert "not compared: no domain of the prompts is called aime25, gsm8k" in (
        capsys.readouterr().out
    )


def test_published_figures_have_sources_and_are_found_by_target_and_block() -> None:
    for one in PUBLISHED:
        assert one.source
        assert one.how
        assert all(1 < tau <= one.block_size for tau in one.taus.values())
        assert all(task_of(task, one.taus) == task for task in one.taus)
        assert published(f"owner/{one.target}", one.block_size) is one
        assert published(f"/models/{one.target}/", one.block_size) is one
        assert published(one.target, one.block_size + 1) is None


def test_a_drafter_is_a_directory_or_a_hub_name(tmp_path: Path) -> None:
    assert trust.local(str(tmp_path)) == tmp_path
    for name in ("nothing", "/no/where", "a/b/c"):
        with pytest.raises(UsageError, match="not a directory, and no hub name"):
            trust.local(name)
