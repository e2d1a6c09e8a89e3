"""What a store records of its capture can be said again, and comes to the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dflash_pipeline.configs.errors import UsageError
from dflash_pipeline.configs.load import load, to_dict
from dflash_pipeline.configs.recorded import CAPTURE_SECTIONS, as_captured, config_of, retold

OPTIONS = {"target.id", "data.files", "store.path", "target.thinking", "capture.force"}


@pytest.fixture(autouse=True)
def _nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DFLASH_CONFIG", raising=False)


@pytest.mark.parametrize(
    ("config", "sets"),
    [
        ("toy", ['data.files=["a.jsonl", "b c.jsonl"]', "store.path=hs"]),
        ("toy", ["target.thinking=on", "data.heldout=0.5", "capture.force=true"]),
        # off or empty where the preset says something: no option says so
        ("qwen3-8b", ["target.thinking=default", "target.layer_ids=[1, 3]"]),
        ("", ["target.id=./mine", "data.max_len=99", 'target.system_prompt=It\'s "me"']),
    ],
)
def test_a_recorded_capture_said_again_is_the_same(config: str, sets: list[str]) -> None:
    run = load(config, sets, {})
    again = retold(to_dict(run), OPTIONS)
    assert set(again.told) <= OPTIONS
    found = load(again.config, again.sets, dict(again.told))
    for section in CAPTURE_SECTIONS:
        assert getattr(found, section) == getattr(run, section)


def test_a_preset_is_named_unless_the_working_directory_says_it() -> None:
    recorded = to_dict(load("toy", (), {}))
    assert config_of(recorded) == "toy"
    assert config_of(to_dict(load("", ["target.id=./mine"], {}))) == ""
    assert config_of({}) == ""
    Path("dflash.toml").write_text('preset = "toy"\n')
    assert config_of(recorded) == ""
    Path("dflash.toml").write_text("not toml")
    assert config_of(recorded) == "toy"


def test_a_record_of_another_version_is_refused() -> None:
    with pytest.raises(UsageError):
        retold({"target": {"id": "toy", "unheard": 1}}, OPTIONS)


def test_a_line_without_data_has_those_of_the_capture_and_its_own_training() -> None:
    before = load("toy", ['data.files=["a.jsonl"]', "data.max_len=99", "store.path=there/hs"], {})
    run = load("", ["store.path=hs", "train.epochs=2", "capture.price=3"], {})
    found = as_captured(run, to_dict(before), {"store.path", "train.epochs", "capture.price"})
    assert (found.target, found.data, found.train) == (before.target, before.data, run.train)
    assert (found.store.path, found.capture.price) == ("hs", 3)
    # of a merged store no one capture is known
    assert as_captured(run, {}, ()) == run
    named = load("", ["store.path=hs", 'data.files=["b.jsonl"]'], {})
    assert as_captured(named, to_dict(before), ("data.files",)) == named


def test_what_a_line_says_of_a_capture_that_is_over_is_not_left_aside() -> None:
    before = load("toy", ['data.files=["a.jsonl"]', "store.hidden_mode=bf16"], {})
    run = load("toy", ["target.id=other", "store.hidden_mode=int8"], {})
    with pytest.raises(UsageError, match=r"whole, with other settings: target.id: 'toy', now 'o"):
        as_captured(run, to_dict(before), ("target.id",))
    with pytest.raises(UsageError, match=r"store.hidden_mode: 'bf16', now 'int8'. Leave these out"):
        as_captured(run, to_dict(before), ("store.hidden_mode",))
    # as it was: nothing is left aside
    as_captured(replace(run, target=before.target), to_dict(before), ("target.id",))
