"""The best drafter under `dflash eval`: which one, when, and what is told of it."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dflash_pipeline.configs.gpus import Devices
from dflash_pipeline.configs.status import end_status
from studies import carried, decoding, result, stages
from studies.arms import long_arms, objective_arms
from studies.decoding import GREEDY, SAMPLED
from studies.running import TESTS, Deadline, Job, OutOfTime
from studies.scoring import score_path
from studies.sizes import SIZES
from studies.stages import Study

LONG = ("long-gamma", "long-dpace")


def _scored(study: Study, run: str, kept: int) -> None:
    path = score_path(study.folder, run)
    path.parent.mkdir(exist_ok=True)
    answer = {"domain": "math", "kept": kept, "cycles": 2}
    path.write_text(json.dumps({"answers": {"a": answer}}))


@pytest.fixture
def study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Study:
    """Both long arms are trained and scored, D-PACE is the better one."""
    found = Study(tmp_path / "s", "tiny", (0,), "cpu", 2, Deadline(60), names=LONG)
    found.prepare(None)
    monkeypatch.chdir(found.folder)
    monkeypatch.setattr(Study, "is_known", lambda _study, _name: True)
    monkeypatch.setattr(Study, "facts", lambda _study, _name: SimpleNamespace(data="d"))
    for name, kept in zip(LONG, (4, 5), strict=True):
        _scored(found, f"{name}-s0", kept)
        end_status(str(found.folder / "arms" / f"{name}-s0" / "logs"), "train", 0, "done", "")
    return found


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[Job]:
    jobs_of: list[Job] = []

    def run(jobs: Sequence[Job], _at_once: int, folder: Path, _deadline: Deadline) -> list[str]:
        jobs_of.extend(jobs)
        for job in jobs:
            (folder / "done").mkdir(exist_ok=True)
            (folder / "done" / job.name).touch()
        return []

    monkeypatch.setattr(stages, "run_jobs", run)
    return jobs_of


def test_the_best_of_the_long_arms_is_decoded_whatever_the_others_are(study: Study) -> None:
    assert study.best_run() == "long-dpace-s0"
    _scored(study, "kl-dpace-s0", 9)
    assert replace(study, names=(*LONG, "kl-dpace")).best_run() == "long-dpace-s0"
    assert replace(study, names=("kl-dpace",)).best_run() == "kl-dpace-s0"
    unscored = replace(study, names=("kl-gamma",))
    assert unscored.best_run() == ""
    assert result.decodes(unscored, "line") == {}
    with pytest.raises(ValueError, match="no arm is scored, none can be decoded"):
        unscored.decode()


def test_greedy_answers_to_all_held_out_prompts_come_first(study: Study, ran: list[Job]) -> None:
    study.decode()
    assert [job.name for job in ran] == [
        "decode-long-dpace-s0-greedy",
        "decode-long-dpace-s0-sampled",
    ]
    greedy, sampled = (list(job.arguments[3:]) for job in ran)
    assert greedy[:5] == ["eval", "--drafter", "arms/long-dpace-s0/last", "--set", decoding.FP32]
    prompts = [greedy[place + 1] for place, word in enumerate(greedy) if word == "--prompts"]
    assert prompts == [f"prompts/eval_{domain}.jsonl" for domain in ("math", "code", "chat")]
    assert "--temperature" not in greedy
    assert "--limit" not in greedy
    assert sampled[sampled.index("--temperature") :][:4] == [
        "--temperature",
        "0.7",
        "--limit",
        "30",
    ]
    assert greedy[greedy.index("--gpus") + 1] == "cpu"
    # what is done is not done again
    study.decode()
    assert len(ran) == 2


def test_one_of_several_gpus_decodes(
    study: Study, ran: list[Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stages.gpus, "parse", lambda _text: Devices("cuda", (2, 3)))
    study.decode()
    words = ran[0].arguments
    assert words[words.index("--gpus") + 1] == "2"


def test_what_does_not_fit_into_what_is_left_is_not_begun(
    study: Study, ran: list[Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[str] = []
    monkeypatch.setenv("OUT", str(study.folder))
    monkeypatch.setattr(carried, "send_drafter", lambda run, _out: sent.append(run.name) or [])
    monkeypatch.setitem(SIZES, "tiny", replace(SIZES["full"], preset="toy"))
    study.deadline._end -= 3500
    with pytest.raises(
        OutOfTime, match=r"decode-long-dpace-s0-greedy \(about \d+ s, \d+ are left\)"
    ):
        study.decode()
    assert not ran
    # the drafter is on its way all the same
    assert sent == ["long-dpace-s0"]


def test_what_fits_into_no_call_is_begun_by_a_fresh_one() -> None:
    deadline = Deadline(2)
    deadline.check_fits("x", 1e9)
    deadline._end -= 20
    with pytest.raises(OutOfTime, match=r"x \(about 1000000000 s, 60 are left\)"):
        deadline.check_fits("x", 1e9)
    deadline.check_fits("x", 50)


def _result(taus: dict[str, tuple[int, int]]) -> dict[str, Any]:
    """Of one prompt and ten cycles a domain: tokens kept by the trained drafter and by lookup."""
    arms: dict[str, Any] = {}
    prompts: dict[str, Any] = {}
    for place, name in enumerate(("trained", "lookup")):
        prompts[name] = [
            {"key": f"{domain}-1", "domain": domain, "kept": kept[place], "cycles": 10}
            for domain, kept in taus.items()
        ]
        of = {"tau_interval": [1, 2], "tau_loop_free": 1.25, "gain": 1.5, "prompts": 1}
        arms[name] = {domain: {"tau": kept[place] / 10, **of} for domain, kept in taus.items()}
        total = sum(kept[place] for kept in taus.values()) / 10 / len(taus)
        arms[name] |= {"all": {"tau": total, **of, "prompts": len(taus)}, "seconds": 3.0}
    return {
        "mode": "decode",
        "settings": {},
        "arms": arms,
        "identical": True,
        "per_prompt": prompts,
    }


def test_each_domain_is_told_beside_lookup_and_held_against_the_bound() -> None:
    found = decoding.beside_lookup(_result({"chat": (25, 20), "math": (22, 20)}))
    assert list(found) == ["all", "chat", "math"]
    assert found["chat"]["over_lookup"]["mean"] == pytest.approx(0.25)
    assert found["math"]["over_lookup"]["mean"] == pytest.approx(0.1)
    assert found["all"]["over_lookup"]["mean"] == pytest.approx(0.175)
    assert {name: one["holds"] for name, one in found.items()} == {
        "all": True,
        "chat": True,
        "math": False,
    }


def test_what_is_decoded_by_now_is_in_the_report(
    study: Study,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    monkeypatch.setenv("OUT", str(out))
    monkeypatch.setattr(result, "gathered", lambda _study, _command: {})
    monkeypatch.setattr(result, "markdown", lambda _found: "")
    monkeypatch.setattr(result, "draw", lambda _path, _found: None)
    result.write(study, "line")
    assert not (out / "decode.json").exists()
    path = decoding.result_path(study.folder, "long-dpace-s0", GREEDY)
    path.parent.mkdir()
    path.write_text(json.dumps(_result({"math": (25, 20), "code": (22, 20)})))
    result.write(study, "line")
    found = json.loads((out / "decode.json").read_text())
    assert (found["run"], found["command"]) == ("long-dpace-s0", "line")
    assert found["greedy"]["result"]["arms"]["trained"]["math"]["tau"] == 2.5
    assert SAMPLED.name not in found
    told = capsys.readouterr().out
    assert "greedy, math: tau 2.500" in told
    assert "lookup 2.000 (1.250): +25.0% over lookup" in told
    assert told.count("NOT 15%") == 1
    assert "outputs are plain decoding's own: yes" in told
    assert "long-dpace-s0, sampled: not decoded yet" in told


def test_what_is_left_is_estimated_before_arms_are_begun(
    study: Study, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = ("arms", "score", "decode", "report")
    assert study.foretold(line) == []
    full = replace(study, size_name="full", names=LONG)
    found = full.foretold(line)
    assert [one.name for one in found] == ["arms", "score", "decode greedy", "decode sampled"]
    # both are trained and scored: a start is all that is left of them
    untrained = replace(full, folder=study.folder.parent / "other")
    monkeypatch.chdir(study.folder.parent)
    assert untrained.foretold(line)[0].seconds > 200 > found[0].seconds == 0
    assert untrained.foretold(line)[1].seconds > found[1].seconds
    # without names: what is asked of the best comes after the objectives
    whole = replace(untrained, names=())
    assert [one.name for one in whole.foretold(("arms", "score") * 2)] == ["arms", "score"] * 2
    assert {arm.name for arm in long_arms((0,))} == set(LONG)
    assert "18 runs" not in whole.foretold(line)[0].how
    assert f"{len(objective_arms((0,)))} runs" in whole.foretold(line)[0].how


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--size", "full"], "study.py: size full needs --prompts, "),
        (["--size", "tiny", "--arms", "x"], "study.py: no arm x: expected some of"),
        (["--size", "tiny", "--answers", "nowhere"], "nowhere holds no part of answers"),
    ],
)
def test_a_line_that_asks_for_what_cannot_be_is_refused_in_a_line(
    words: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.syspath_prepend(str(TESTS / "bench"))
    import study as bench

    monkeypatch.setattr(bench, "make_importable", lambda _per_gpu: None)
    line = ["study.py", "data,store", str(tmp_path / "s"), *words, "--gpus", "cpu"]
    monkeypatch.setattr(sys, "argv", line)
    assert bench.main() == 2
    told = capsys.readouterr().err
    assert message in told
    assert len(told.splitlines()) == 1
