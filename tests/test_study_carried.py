"""Answers and drafters that travel: taken where they belong, refused where they do not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dflash_pipeline.configs.status import end_status
from studies import carried, parcels, stages
from studies.carried import DRAFTER, Parcel, has_answers, send_answers, send_drafter
from studies.running import Deadline, Job
from studies.sizes import SIZES, answer_jobs
from studies.stages import Study

TINY = SIZES["tiny"]


def _study(folder: Path, answers: Path | None = None) -> Study:
    return Study(folder, "tiny", (0,), "cpu", 2, Deadline(60), answers=answers)


@pytest.fixture
def sent(tmp_path: Path) -> Path:
    """The folder that a tiny study's answers were sent to."""
    study, out = _study(tmp_path / "first"), tmp_path / "out"
    study.prepare(None)
    _answer(study.folder)
    out.mkdir()
    send_answers(study.folder, "tiny", out)
    return out


def _answer(folder: Path) -> None:
    for job in answer_jobs(TINY):
        answers = folder / "answers" / f"{job.name}.jsonl"
        logs = Path(f"{answers}.logs")
        logs.mkdir(parents=True)
        answers.write_text(f'{{"id": "{job.name}"}}\n')
        (logs / "settings.json").write_text("{}")
        # nobody reads it again
        (logs / "generate-0.log").write_text("said\n")


def test_answers_are_taken_with_what_the_product_recorded_and_are_done(
    tmp_path: Path, sent: Path
) -> None:
    study = _study(tmp_path / "second", sent)
    study.prepare(None)
    assert has_answers(TINY, study.folder / "done")
    for job in answer_jobs(TINY):
        answers = study.folder / "answers" / f"{job.name}.jsonl"
        assert answers.read_text() == f'{{"id": "{job.name}"}}\n'
        assert [path.name for path in Path(f"{answers}.logs").iterdir()] == ["settings.json"]
    assert not (study.folder / ".carried").exists()


def test_what_a_call_that_was_killed_left_is_in_nobodys_way(tmp_path: Path, sent: Path) -> None:
    study = _study(tmp_path / "second", sent)
    for folder in (".carried", "answers"):
        (study.folder / folder).mkdir(parents=True)
        (study.folder / folder / "train-greedy.jsonl").write_text("half")
    study.prepare(None)
    assert (study.folder / "answers" / "train-greedy.jsonl").read_text() != "half"
    assert not (study.folder / ".carried").exists()


def test_answers_that_are_there_are_kept_and_no_parcel_is_read(tmp_path: Path, sent: Path) -> None:
    study = _study(tmp_path / "second", sent)
    study.prepare(None)
    (study.folder / "answers" / "train-greedy.jsonl").write_text("own")
    replace(study, answers=tmp_path / "nowhere").prepare(None)
    assert (study.folder / "answers" / "train-greedy.jsonl").read_text() == "own"


def _other_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {**TINY.settings, "generate.max_new_tokens": 32}
    monkeypatch.setitem(SIZES, "tiny", replace(TINY, settings=settings))


def _other_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SIZES, "tiny", replace(TINY, samples=3))


def _other_target(monkeypatch: pytest.MonkeyPatch) -> None:
    own = carried.run_settings
    monkeypatch.setattr(
        carried,
        "run_settings",
        lambda run, files: own(run, files) | {"weights": {"model.safetensors": 7}},
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_other_settings, r"another study: max_new_tokens 64, expected 32$"),
        (
            _other_samples,
            r"another study: answers 'train-sampled-math\*2 .*', expected 'train-sampled-math\*3 ",
        ),
        (_other_target, r"weights \{'model.safetensors': \d+\}, expected \{.*: 7\}$"),
    ],
)
def test_answers_of_another_study_are_refused_and_leave_nothing(
    change: Any, message: str, tmp_path: Path, sent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change(monkeypatch)
    study = _study(tmp_path / "second", sent)
    with pytest.raises(ValueError, match=message):
        study.prepare(None)
    assert not study.folder.exists() or not list(study.folder.iterdir())


def test_answers_to_other_prompts_are_refused(tmp_path: Path, sent: Path) -> None:
    study = _study(tmp_path / "second", sent)
    replace(study, answers=None).prepare(None)
    (study.folder / "settings.json").unlink()
    (study.folder / "prompts" / "train_math.jsonl").write_text('{"id": "x"}\n')
    with pytest.raises(ValueError, match=r"another study: prompts '[0-9a-f]{16}', expected '"):
        study.prepare(None)
    assert not (study.folder / "answers").exists()
    assert not (study.folder / ".carried").exists()


def test_a_size_of_another_target_is_told(tmp_path: Path, sent: Path) -> None:
    parcel = Parcel(sent, tmp_path / "second", "tiny")
    with pytest.raises(ValueError, match="size 'tiny', expected 'full'"):
        parcel._check({"size": "full"})


def test_prompts_come_with_the_answers_where_none_are_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(carried, "answer_facts", lambda size_name, _folder: {"size": size_name})
    prompts, out = tmp_path / "prompts", tmp_path / "out"
    prompts.mkdir()
    out.mkdir()
    for name in carried.PROMPT_FILES:
        (prompts / f"{name}.jsonl").write_text(f'{{"id": "{name}"}}\n')
    first = replace(_study(tmp_path / "first"), size_name="rehearsal")
    first.prepare(prompts)
    _answer(first.folder)
    send_answers(first.folder, "rehearsal", out)
    second = replace(first, folder=tmp_path / "second", answers=out)
    second.prepare(None)
    for name in carried.PROMPT_FILES:
        kept = second.folder / "prompts" / f"{name}.jsonl"
        assert kept.read_text() == f'{{"id": "{name}"}}\n'
    # without either there is nothing to begin with
    with pytest.raises(ValueError, match=r"size rehearsal needs --prompts, .*, or --answers"):
        replace(first, folder=tmp_path / "third").prepare(None)


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of jobs, which end at once."""
    names: list[str] = []

    def run(jobs: Sequence[Job], *_: Any) -> list[str]:
        names.extend(job.name for job in jobs)
        return []

    monkeypatch.setattr(stages, "run_jobs", run)
    return names


def test_answers_are_sent_once_they_are_all_there_unless_they_came_so(
    tmp_path: Path, ran: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    study = _study(tmp_path / "s")
    study.prepare(None)
    study.data()
    assert len(ran) == len(answer_jobs(TINY))
    monkeypatch.setenv("OUT", str(out))
    replace(study, answers=tmp_path).data()
    assert not list(out.iterdir())
    _answer(study.folder)
    study.data()
    assert [path.name[:15] for path in out.iterdir()] == ["answers.1-of-1."]
    assert not study.failures


def test_what_cannot_be_sent_is_told_and_ends_nothing(
    tmp_path: Path, ran: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    study = _study(tmp_path / "s")
    study.prepare(None)
    _answer(study.folder)
    monkeypatch.setenv("OUT", str(tmp_path / "nowhere"))
    study.data()
    assert len(study.failures) == 1
    assert "not sent: " in study.failures[0]


def test_a_drafter_is_sent_without_what_only_training_reads(tmp_path: Path) -> None:
    run, out = tmp_path / "arms" / "long-gamma-s0", tmp_path / "out"
    step = run / "step-00000010"
    (step / "state").mkdir(parents=True)
    out.mkdir()
    for name in ("config.json", "model.safetensors", "state/rank-0.safetensors"):
        (step / name).write_text(name)
    (run / "last").symlink_to(step.name)
    end_status(str(run / "logs"), "train", 0, "done", "")
    send_drafter(run, out)
    parcels.unpack(out, DRAFTER, tmp_path / "into")
    found = tmp_path / "into" / "long-gamma-s0"
    assert sorted(path.name for path in found.iterdir()) == ["config.json", "model.safetensors"]
