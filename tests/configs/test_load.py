"""One run from a file, a preset, --set and options; or one error that names the key."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from dflash_pipeline.configs.errors import UsageError
from dflash_pipeline.configs.load import differences, from_dict, load, to_dict, to_toml


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def _file(text: str, name: str = "dflash.toml") -> str:
    Path(name).write_text(text)
    return name


def test_the_nearer_to_the_line_wins() -> None:
    _file('preset = "llama-3.1-8b"\n[drafter]\nnum_layers = 7\n[optim]\nlr = 1e-3\nclip = 2')
    run = load("", ["optim.lr=2e-3", "optim.clip=3"], {"optim.clip": 4.0, "optim.eps": None})
    assert run.drafter.block_size == 10  # preset
    assert run.drafter.num_layers == 7  # file over preset
    assert run.optim.lr == 2e-3  # --set over file
    assert run.optim.clip == 4.0  # option over --set
    assert run.optim.beta1 == load("tiny", [], {}).optim.beta1  # schema


def test_the_file_comes_from_the_environment_before_the_folder(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _file("[optim]\nlr = 1.0")
    monkeypatch.setenv("DFLASH_CONFIG", _file("[optim]\nlr = 2.0", "other.toml"))
    assert load("", [], {}).optim.lr == 2.0
    monkeypatch.delenv("DFLASH_CONFIG")
    assert load("", [], {}).optim.lr == 1.0


def test_without_any_file_the_schema_holds() -> None:
    assert load("", [], {}) == from_dict({})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[drafter]\nblok_size = 8", "unknown key drafter.blok_size; did you mean drafter.block"),
        ("[draftr]\nblock_size = 8", r"unknown section \[draftr\]; did you mean drafter\?"),
        ("[train]\nlr = 1.0", "unknown key train.lr; did you mean optim.lr"),
        ("[drafter]\nblock_size = 8.5", "drafter.block_size must be int, got 8.5"),
        ("[drafter]\nblock_size = true", "drafter.block_size must be int, got True"),
        ("[data]\noverlong = 'cut'", "must be one of 'truncate', 'drop', got 'cut'"),
        ("[target]\nlayer_ids = [1, 'a']", r"target.layer_ids\[1\] must be int, got 'a'"),
        ("[drafter]\nblock_size = 1", "drafter.block_size must be at least 2, got 1"),
        ("[capture]\ncompile = true", "compile must be one of 'auto', 'on', 'off', got True"),
        ("[loss]\nkl = 0", "loss.ce, loss.kl and loss.tv are all 0: nothing to learn"),
        ("[loss]\ndpace_alpha = 1", r"loss.dpace_alpha must be in \[0, 1\), got 1"),
        ("[loss]\ncap_lambda = -1", "loss.cap_lambda must be at least 0, got -1"),
        ("[train]\nnoise_std = -0.1", "train.noise_std must be at least 0, got -0.1"),
        ("[train]\nprofile = '25-20'", "train.profile must be FIRST-LAST, .* got '25-20'"),
        ("[train]\nprofile = '20'", "train.profile must be FIRST-LAST, .* got '20'"),
        ("[train]\nprofile = '0-2'", "train.profile must be FIRST-LAST, steps from 1 on, .* '0-2'"),
        ("drafter = 3", r"drafter is a section, write \[drafter\]"),
        (
            "preset = 'qwen3-8'",
            r"no preset 'qwen3-8'; did you mean qwen3-8b\? Presets: gpt-oss-120b, ",
        ),
        ("[drafter", "dflash.toml is not TOML"),
    ],
)
def test_a_wrong_file_is_refused_in_one_line(text: str, message: str) -> None:
    _file(text)
    with pytest.raises(UsageError, match=message) as caught:
        load("", [], {})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("drafter.block_size", "write section.key=value"),
        ("block_size=8", "unknown key block_size; did you mean drafter.block_size"),
        ("drafter.block_size=eight", "--set drafter.block_size must be int, got 'eight'"),
        ("capture.hung_s=inf", "--set capture.hung_s must be a finite number, got inf"),
        ("data.heldout=nan", "--set data.heldout must be a finite number, got nan"),
        ("capture.seed=1000000000000000000000", "--set capture.seed is too large a number"),
        ("optim.lr=1000000000000000000000", "--set optim.lr is too large a number"),
        (f"train.seed=1{'0' * 400}", "train.seed is too large a number: it has 401 digits"),
        ("capture.compile=true", "compile must be one of 'auto', 'on', 'off', got 'true'"),
        ("train.compile=off", "--set train.compile must be true or false, got 'off'"),
        ("data.max_len=4294967296", "data.max_len must be at most 2147483648, got 4294967296"),
        ("capture.quota=4XB", "capture.quota: '4XB' is no size: write 4TB"),
        ("capture.quota=0", "capture.quota 0 holds no shard: leave it out"),
        ("target.layer_ids=[1,1000000000000000000000]", r"layer_ids\[1\] is too large a number"),
    ],
)
def test_a_wrong_set_is_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load("", [text], {})


# numbers below zero that mean something
_BELOW_ZERO = {"target.mask_token_id"} | {
    f"{section}.seed" for section in ("generate", "capture", "train", "eval")
}


def test_no_number_may_be_negative_but_those_that_mean_something_and_it_is_said() -> None:
    run = load("", [], {})
    numbers = [
        f"{section}.{name}"
        for section, values in to_dict(run).items()
        for name, value in values.items()
        if type(value) in (int, float) and f"{section}.{name}" not in _BELOW_ZERO
    ]
    assert len(numbers) > 50
    for key in numbers:
        with pytest.raises(UsageError, match=rf"{re.escape(key)} must .*got -2"):
            load("", [f"{key}=-2"], {})


def test_a_set_reads_text_numbers_and_lists() -> None:
    sets = [
        "target.id=a/b",
        "target.layer_ids=1,9, 17",
        "data.files=['a.jsonl', 'b.jsonl']",
        "eval.prompts=c.jsonl",
        "train.follow=false",
        "optim.lr=1",
    ]
    run = load("", sets, {})
    assert run.target.id == "a/b"
    assert run.target.layer_ids == (1, 9, 17)
    assert run.data.files == ("a.jsonl", "b.jsonl")
    assert run.eval.prompts == ("c.jsonl",)
    assert run.train.follow is False
    assert isinstance(run.optim.lr, float)


def test_a_missing_file_is_named_beside_the_presets() -> None:
    with pytest.raises(UsageError, match=r"no file and no preset qwen3-4; did you mean qwen3-4b"):
        load("qwen3-4", [], {})
    with pytest.raises(UsageError, match="is a directory"):
        load(".", [], {})


def test_a_run_survives_toml_and_json() -> None:
    run = load("qwen3.5-35b-a3b", ["data.files=['é \"quoted\".jsonl']", "optim.eps=1e-12"], {})
    assert load(_file(to_toml(run)), [], {}) == run
    assert from_dict(json.loads(json.dumps(to_dict(run)))) == run


def test_differences_name_each_value_of_the_sections_asked_for() -> None:
    first = load("", [], {})
    second = load("", ["drafter.block_size=8", "optim.lr=1.0", "train.seed=3"], {})
    assert differences(first, second, ["drafter", "train"]) == [
        f"drafter.block_size: {first.drafter.block_size}, now 8",
        f"train.seed: {first.train.seed}, now 3",
    ]
    assert differences(first, first, ["drafter", "optim"]) == []


def test_only_wsd_has_a_decay_that_warm_up_may_meet() -> None:
    sets = ["optim.warmup=0.5", "optim.decay=0.6"]
    assert load("", sets, {}).optim.warmup == 0.5
    with pytest.raises(UsageError, match=r"must not exceed 1 with optim\.schedule = wsd"):
        load("", [*sets, "optim.schedule=wsd"], {})
