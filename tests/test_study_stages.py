"""The study under a limit of time, on a machine that may go away: what fails ends nothing else,
what is known is reported at once, and nothing outlives the call that began it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dflash_pipeline.configs.gpus import Devices
from dflash_pipeline.configs.load import load
from dflash_pipeline.configs.status import end_status
from dflash_pipeline.configs.sweep import Variant
from dflash_pipeline.train.replay import Replayed
from dflash_pipeline.train.tally import Answer, Cycle
from studies import result, scoring, stages
from studies.arms import (
    BASE_STORE,
    FOLLOWED,
    MODES,
    RATE,
    RATES,
    Arm,
    StoreFacts,
    following_arm,
    long_arms,
    objective_arms,
    rate_arms,
)
from studies.running import (
    TESTS,
    Deadline,
    Job,
    OutOfTime,
    environment,
    run_jobs,
)
from studies.scoring import LOOKUP, UNTRAINED, part_path, score_path
from studies.stages import Study

SEEDS = (0, 1)


def _study(folder: Path, minutes: float = 60.0) -> Study:
    return Study(folder, "tiny", SEEDS, "cpu", 3, Deadline(minutes))


def _ended(study: Study, run: str, state: str = "done") -> None:
    end_status(str(study.folder / "arms" / run / "logs"), "train", 0, state, "")


def _runs(arms: Sequence[Arm]) -> list[str]:
    return [arm.run_name(seed) for arm in arms for seed in arm.seeds]


def _scored(study: Study, run: str, kept: int = 4) -> None:
    path = score_path(study.folder, run)
    path.parent.mkdir(exist_ok=True)
    answer = {"domain": "math", "kept": kept, "cycles": 2}
    path.write_text(json.dumps({"answers": {"a": answer, "a#0": answer, "b": answer}}))


def test_the_time_counts_from_when_it_is_told_to() -> None:
    now = time.monotonic()
    assert Deadline(2, now - 60).left_s == pytest.approx(Deadline(1, now).left_s, abs=1)


def test_a_job_that_fails_ends_no_other(tmp_path: Path) -> None:
    good = [
        Job(name, ("-c", "import sys; open(sys.argv[1], 'w')", name), {}) for name in ("one", "two")
    ]
    bad = Job("bad", ("-c", "print('no such thing'); raise SystemExit(3)"), {})
    with pytest.raises(RuntimeError, match=r"^bad ended with 3:\nno such thing$"):
        run_jobs([bad, *good], 1, tmp_path, Deadline(2))
    assert sorted(path.name for path in (tmp_path / "done").iterdir()) == ["one", "two"]
    assert (tmp_path / "two").exists()


def test_a_job_does_not_outlive_the_study_that_began_it(tmp_path: Path) -> None:
    """A call that is killed at its limit leaves nothing that writes what the next call writes."""
    waits = "import time; print('begun', flush=True); time.sleep(60)"
    job = f"from studies.running import end_with_parent; end_with_parent(); {waits}"
    code = (
        "import pathlib; from studies.running import Job, Started; import time;"
        f"Started(Job('job', ('-c', {job!r}), {{}}), pathlib.Path({str(tmp_path)!r}));"
        "time.sleep(60)"
    )
    log = tmp_path / "logs" / "job.log"
    with subprocess.Popen([sys.executable, "-c", code], env=environment()) as study:
        try:
            _until(lambda: log.exists() and "begun" in log.read_text())
        finally:
            study.kill()
    _until(lambda: "KeyboardInterrupt" in log.read_text())
    # the product's commands are begun the same way
    assert "end_with_parent()" in Job.dflash("x", ("train",)).arguments[2]


def _until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_the_end_of_the_time_reaches_the_work_whenever_it_comes() -> None:
    noted: list[int] = []
    deadline = Deadline(60)
    with deadline.interrupts():
        deadline.end_now()
        # before it notes signals: sent again
        time.sleep(0.5)
        before = signal.signal(signal.SIGINT, lambda *_: noted.append(1))
        _until(lambda: bool(noted))
        # once: a second one would end the runs without their checkpoints
        time.sleep(0.5)
        signal.signal(signal.SIGINT, before)
        # after it: nobody is interrupted
        os.kill(os.getpid(), signal.SIGINT)
    assert noted == [1]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


class _Fleet:
    """Runs that end as they are told to, a call at a time."""

    def __init__(self, study: Study, failing: dict[str, int]) -> None:
        self.study, self.failing = study, failing
        self.calls: list[list[str]] = []

    def check_done(self, _variants: Sequence[Variant]) -> None:
        pass

    def run_variants(
        self, _entry: str, variants: Sequence[Variant], *_: Any, **__: Any
    ) -> tuple[list[Any], int]:
        begun = [one.name for one in variants if not self.study.is_trained(one.name)]
        self.calls.append(begun)
        outcomes = []
        for name in begun:
            state = "failed" if self.failing.get(name, 0) >= len(self.calls) else "done"
            _ended(self.study, name, state)
            outcomes.append(SimpleNamespace(name=name, state=state, error="out of memory"))
        return outcomes, 0


def test_a_run_that_fails_is_begun_once_more_then_told_and_ends_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = _study(tmp_path)
    study.prepare(None)
    monkeypatch.chdir(study.folder)
    fleet = _Fleet(study, {"kl-gamma-s0": 1, "kl-gamma-s1": 2})
    monkeypatch.setattr(stages, "fleet", fleet)
    study._train(objective_arms(SEEDS))
    assert len(fleet.calls[0]) == 12
    assert fleet.calls[1:] == [["kl-gamma-s0", "kl-gamma-s1"]]
    assert study.failures == ["kl-gamma-s1: out of memory"]
    assert study.is_trained("kl-gamma-s0")


def test_a_store_that_cannot_be_captured_leaves_out_its_arms_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study, trained = _study(tmp_path), list[str]()
    study.prepare(None)
    monkeypatch.chdir(study.folder)
    (study.folder / "decision.json").write_text(json.dumps({"objective": FOLLOWED}))
    (study.folder / "done").mkdir()
    (study.folder / "done" / "capture-bf16").touch()
    (study.folder / "done" / "capture-int4").touch()

    def fails(*_: Any) -> None:
        raise RuntimeError("capture-int8 ended with 1")

    monkeypatch.setattr(Study, "_run", fails)
    monkeypatch.setattr(Study, "clear", lambda _study: None)
    monkeypatch.setattr(Study, "check_data", lambda _study, _arms: None)
    monkeypatch.setattr(Study, "_train", lambda _study, arms: trained.extend(_runs(arms)))
    study.arms()
    assert study.failures == ["capture-int8 ended with 1"]
    assert "int4-s0" in trained
    assert "cap-s1" in trained
    assert "int8-s0" not in trained


def test_followers_do_not_wait_for_a_capture_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = _study(tmp_path)
    monkeypatch.chdir(tmp_path)

    def waits(_study: Study, _arms: Sequence[Arm]) -> None:
        _until(lambda: study.deadline.left_s <= 0)
        raise OutOfTime("training of following-s0")

    def fails(*_: Any) -> list[str]:
        raise RuntimeError("capture-bf16 ended with 1")

    monkeypatch.setattr(Study, "_plan", lambda _study, _job: None)
    monkeypatch.setattr(Study, "_state", lambda _study, _run: "waiting")
    monkeypatch.setattr(Study, "_train", waits)
    monkeypatch.setattr(stages, "run_jobs", fails)
    with pytest.raises(RuntimeError, match="capture-bf16 ended with 1"):
        study._followed(study._capture_job("bf16"), following_arm(SEEDS))


@pytest.fixture
def scored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Study:
    """A study whose objectives are trained and scored, two of them but for a run."""
    study = _study(tmp_path)
    study.prepare(None)
    monkeypatch.chdir(study.folder)
    monkeypatch.setattr(Study, "facts", lambda _study, _name: SimpleNamespace(data="d"))
    for run in _runs(objective_arms(SEEDS)):
        if run not in ("ce-dpace-s1", "kl-dpace-s0"):
            _ended(study, run)
            _scored(study, run, kept=9 if run.startswith("kl-") else 4)
    for run in (LOOKUP, UNTRAINED):
        _scored(study, run)
    return study


def test_the_best_objective_is_chosen_without_one_that_cannot_be_trained(scored: Study) -> None:
    _ended(scored, "kl-dpace-s0", "failed")
    # the other one is not trained yet
    scored.score()
    assert not scored.decision()
    _ended(scored, "ce-dpace-s1")
    _scored(scored, "ce-dpace-s1")
    scored.score()
    found = json.loads((scored.folder / "decision.json").read_text())
    assert found["objective"] == "kl-gamma"
    assert found["without"] == ["kl-dpace"]
    assert len(found["taus"]) == 5


def test_an_untrained_drafter_is_scored_once_its_shape_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study, asked = _study(tmp_path), list[str]()
    monkeypatch.chdir(tmp_path)

    def ran(jobs: Sequence[Job], *_: Any) -> list[str]:
        runs = [run for job in jobs for run in job.arguments[4:]]
        asked.extend(runs)
        for run in runs:
            _scored(study, run)
        return []

    monkeypatch.setattr(stages, "run_jobs", ran)
    study.score()
    assert asked == [LOOKUP]
    _ended(study, "kl-gamma-s0")
    study.score()
    assert asked == [LOOKUP, UNTRAINED, "kl-gamma-s0"]


def test_scorers_share_the_devices_and_the_driver_is_asked_once_of_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def name(number: int) -> str:
        asked.append(number)
        return f"GPU-{number}"

    monkeypatch.setattr(stages, "device_name", name)
    monkeypatch.setattr(stages.gpus, "parse", lambda _text: Devices("cuda", (2, 3)))
    jobs = _study(tmp_path)._score_jobs([["a", "b"], ["c"], ["d"]])
    assert asked == [2, 3]
    assert [job.name for job in jobs] == ["score-0", "score-1", "score-2"]
    seen = [job.extra_environment["CUDA_VISIBLE_DEVICES"] for job in jobs]
    assert seen == ["GPU-2", "GPU-3", "GPU-2"]
    assert jobs[0].arguments[-3:] == ("cuda:0", "a", "b")


class _EvalStore:
    """Four answers."""

    def __init__(self) -> None:
        self.table = SimpleNamespace(
            domains=["math"], domain=[0] * 4, key=lambda index: f"k{index}"
        )


def _replay_until(stops: int | None, seen: list[int]) -> Callable[..., scoring.Replay]:
    def replay(samples: Sequence[int]) -> Replayed:
        for index in samples:
            if index == stops:
                raise KeyboardInterrupt
            seen.append(index)
            yield index, [Answer(tokens=[1, 2], cycles=[Cycle(index + 1, index)])]

    return lambda *_: replay


def test_what_was_counted_when_the_time_was_up_is_not_counted_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "scores").mkdir()
    store, seen = _EvalStore(), list[int]()
    monkeypatch.setattr(scoring, "held_out", lambda _store: range(4))
    monkeypatch.setattr(scoring, "_replay_of", _replay_until(2, seen))
    with pytest.raises(KeyboardInterrupt):
        scoring.score(store, tmp_path, "x-s0", "cpu")
    # it is no score yet
    assert not score_path(tmp_path, "x-s0").exists()
    assert not list((tmp_path / "scores").glob("*.json"))
    monkeypatch.setattr(scoring, "_replay_of", _replay_until(None, seen))
    scoring.score(store, tmp_path, "x-s0", "cpu")
    assert seen == [0, 1, 2, 3]
    found = scoring.read_answers(tmp_path, "x-s0")["answers"]
    assert [found[f"k{index}"]["kept"] for index in range(4)] == [1, 2, 3, 4]
    assert not part_path(tmp_path, "x-s0").exists()


def test_a_run_that_cannot_be_scored_ends_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    done: list[str] = []

    def score(_store: Any, _folder: Path, run: str, _device: str) -> None:
        if run == "bad":
            raise ValueError("no checkpoint")
        done.append(run)

    monkeypatch.setattr(scoring, "score", score)
    monkeypatch.setattr(scoring, "open_store", lambda _path: None)
    monkeypatch.setattr(scoring, "end_with_parent", lambda: None)
    monkeypatch.setattr(sys, "argv", ["x", str(tmp_path), "cpu", "one", "bad", "two"])
    assert scoring.main() == 1
    assert done == ["one", "two"]
    told = capsys.readouterr()
    assert "not scored: bad" in told.out
    assert "no checkpoint" in told.err


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(TESTS / "bench"))
    import study

    return study


class _Stages:
    """Stages that end as they are told to; how often a report was written."""

    failures: tuple[str, ...] = ()
    has_scores, can_go_on = True, True
    size_name = "tiny"

    def __init__(self, **ends: BaseException) -> None:
        self.deadline, self.done = Deadline(60), list[str]()
        for name in ("data", "store", "arms", "score"):
            setattr(self, name, lambda name=name: self._end(name, ends.get(name)))

    def foretold(self, _stages: Sequence[str]) -> list[Any]:
        return []

    def _end(self, name: str, error: BaseException | None) -> None:
        self.done.append(name)
        if error is not None:
            raise error


def _run_stages(bench: Any, monkeypatch: pytest.MonkeyPatch, study: _Stages) -> tuple[int, int]:
    """Its exit code, and the reports by then."""
    written: list[str] = []
    monkeypatch.setattr(bench.result, "write", lambda _study, _command: written.append("x"))
    try:
        code = bench.run_stages(study, ("data", "store", "arms", "score"), "line")
    except KeyboardInterrupt:
        code = 130
    return code, len(written)


def test_whatever_ends_a_line_what_is_scored_is_reported(
    bench: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run_stages(bench, monkeypatch, _Stages()) == (0, 1)
    assert _run_stages(bench, monkeypatch, _Stages(arms=OutOfTime("y"))) == (3, 1)
    assert _run_stages(bench, monkeypatch, _Stages(store=KeyboardInterrupt())) == (130, 1)
    # what is broken ends its own stage
    study = _Stages(arms=RuntimeError("no memory"))
    assert _run_stages(bench, monkeypatch, study) == (1, 1)
    assert study.done == ["data", "store", "arms", "score"]
    assert "failed:\narms: no memory" in capsys.readouterr().out
    # but for those that all others need
    study = _Stages(data=RuntimeError("no answers"))
    study.can_go_on = False
    assert _run_stages(bench, monkeypatch, study) == (1, 1)
    assert study.done == ["data"]
    # a run that failed is no done study
    study = _Stages()
    study.failures = ("cap-s0: no memory",)
    assert _run_stages(bench, monkeypatch, study) == (1, 1)
    study = _Stages(arms=OutOfTime("y"))
    study.has_scores = False
    assert _run_stages(bench, monkeypatch, study) == (3, 0)


def test_imports_count_as_time(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "process_age_s", lambda: 20.0)
    assert time.monotonic() - bench._begin() == pytest.approx(20, abs=1)
    # where the system tells nonsense the study goes on
    monkeypatch.setattr(bench, "process_age_s", lambda: 1e9)
    assert time.monotonic() - bench._begin() == pytest.approx(60, abs=1)


def test_a_report_reaches_the_place_that_outlives_the_machine(
    scored: Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Partial as it is, and where the study's own folder takes no file any more."""
    out = tmp_path / "out"
    out.mkdir()
    monkeypatch.setenv("OUT", str(out))
    monkeypatch.setattr(Study, "is_known", lambda _study, name: False)
    (scored.folder / "report").write_text("in the way")
    with pytest.raises(FileExistsError):
        result.write(scored, "line")
    assert sorted(path.name for path in out.iterdir()) == ["study.json", "study.md"]
    (scored.folder / "report").unlink()
    result.write(scored, "line")
    assert sorted(path.name for path in out.iterdir()) == ["study.json", "study.md", "study.png"]
    found = json.loads((out / "study.json").read_text(encoding="utf-8"))
    assert found["beside"]["lookup"]["all"] == [2.0]


def test_named_arms_are_wanted_alone_with_the_stores_that_they_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    study = replace(_study(tmp_path), names=("long-dpace", "int8"), objective="kl-gamma")
    assert [arm.name for arm in study.all_wanted()] == ["long-dpace", "int8"]
    assert [mode for mode in MODES if mode != BASE_STORE and study._is_wanted(mode)] == ["int8"]
    int8 = study.wanted()[1]
    assert (int8.against, int8.settings["loss.slot_weights"]) == ("kl-gamma", "gamma")
    for run in _runs([int8]):
        _ended(study, run)
    assert not study._is_wanted("int8")


def test_a_call_that_names_arms_removes_no_store_that_the_others_need(
    scored: Study, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Study, "is_captured", lambda _study, _name: False)
    stores = {name: scored._folder_of(name) for name in MODES}
    for folder in stores.values():
        folder.mkdir(parents=True)
    replace(scored, names=("long-gamma",)).clear()
    assert all(folder.exists() for folder in stores.values())
    # all that read it are trained
    named = replace(scored, names=("int8",), objective="kl-gamma")
    for run in _runs(named.wanted()):
        _ended(named, run)
    named.clear()
    assert [name for name, folder in stores.items() if not folder.exists()] == ["int8"]


def test_an_arm_is_paired_with_one_that_was_scored_before_and_told_alone(
    scored: Study, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Study, "is_known", lambda _study, _name: True)
    facts = StoreFacts("d", 2, 2, 9, 4, 1.0, None)
    monkeypatch.setattr(Study, "facts", lambda _study, _name: facts)
    monkeypatch.setattr(result, "curve", lambda _run: {})
    study = replace(scored, names=("kl-gamma", "kl-gamma"))
    found = result.gathered(study, "line")
    assert list(found["arms"]) == ["kl-gamma"]
    assert found["arms"]["kl-gamma"]["difference"]["all"]["mean"] == pytest.approx(9 / 4 - 1)
    assert found["not_run"] == []


def test_an_arm_that_is_not_known_yet_is_refused(tmp_path: Path) -> None:
    study = replace(_study(tmp_path), names=("int8",))
    with pytest.raises(ValueError, match=r"no arm int8: .*once an objective is chosen or given"):
        study.all_wanted()
    assert [arm.name for arm in replace(study, names=("following",)).all_wanted()] == ["following"]


def test_long_arms_are_trained_only_where_they_are_named(tmp_path: Path) -> None:
    names = {arm.name for arm in replace(_study(tmp_path), objective="kl-dpace").all_wanted()}
    assert "following" in names
    assert not names & {arm.name for arm in (*long_arms(SEEDS), *rate_arms(SEEDS))}


def test_an_epoch_at_other_rates_tells_which_one_the_long_arms_take(tmp_path: Path) -> None:
    study = replace(_study(tmp_path), names=(*RATES, "long-dpace"), rate=2e-3)
    *rates, long = study.all_wanted()
    assert {arm.name: arm.settings["optim.lr"] for arm in rates} == dict(RATES)
    for arm in rates:
        # one epoch of the long arm, by one seed, and nothing else
        changed = {"train.epochs": 1, "optim.lr": RATES[arm.name]}
        assert arm.settings == {**long.settings, **changed}
        assert arm.seeds == SEEDS[:1]
        assert arm.against == ("" if arm.name == RATE else RATE)
    assert RATES[RATE] == load("smollm2", [], {}).optim.lr
    assert long.settings["optim.lr"] == 2e-3
    assert (
        "optim.lr" not in replace(study, names=("long-dpace",), rate=0.0).all_wanted()[0].settings
    )
