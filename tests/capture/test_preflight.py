"""A tiny twin of each family goes through the whole capture, and what would break breaks there."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_pipeline.capture import preflight, twin
from dflash_pipeline.capture.model import resolve
from dflash_pipeline.capture.samples import Conversation
from dflash_pipeline.capture.target import Target
from dflash_pipeline.configs.schema import DataConfig, Run, StoreConfig, TargetConfig


@pytest.fixture(autouse=True)
def _in_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The trial store is many small synced files: a disk would take most of the time."""
    parent = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=parent) as directory:
        monkeypatch.setattr("tempfile.tempdir", directory)
        yield


def _run(directory: Path, **store: Any) -> Run:
    return Run(
        target=TargetConfig(id=str(directory), layer_ids=(1, 3)),
        data=DataConfig(files=("data.jsonl",)),
        store=StoreConfig(path="unused", **store),
    )


def _conversations() -> list[Conversation]:
    return [
        Conversation(
            key=str(row),
            source=0,
            row=row,
            domain="chat",
            messages=(
                {"role": "user", "content": "What comes after " + "one " * row},
                {"role": "assistant", "content": "Two " * (3 * row + 1)},
            ),
            text="",
            token_ids=(),
            loss_spans=(),
        )
        for row in range(5)
    ]


@pytest.mark.parametrize(
    "family",
    ["llama", "qwen3_moe", "gemma3", "gpt_oss", "qwen3_5"],
)
def test_each_family_has_a_twin_that_passes(
    family: str, make_target_dir: Callable[..., Path]
) -> None:
    run = _run(make_target_dir(family))
    preflight.check(run, resolve(run.target), _conversations(), print)


def test_a_twin_is_small_and_has_each_kind_of_layer(
    make_target_dir: Callable[..., Path], tmp_path: Path
) -> None:
    directory = make_target_dir(
        "qwen3_5", hidden_size=64, intermediate_size=256, num_attention_heads=8, head_dim=16
    )
    num_layers = twin.write_twin(resolve(TargetConfig(id=str(directory))), tmp_path)
    target = Target.load(resolve(TargetConfig(id=str(tmp_path))), (0,), "cpu", torch.float32)
    config = target.model.config
    assert num_layers == 2
    assert config.layer_types == ["linear_attention", "full_attention"]
    assert (config.hidden_size, config.num_attention_heads, config.head_dim) == (32, 2, 16)
    assert config.vocab_size == 272


@pytest.mark.parametrize(
    "modes", [{"last_mode": "none"}, {"hidden_mode": "int4", "last_mode": "int8"}]
)
def test_a_capture_in_another_mode_passes(modes: dict[str, str], target_dir: Path) -> None:
    run = _run(target_dir, **modes)
    preflight.check(run, resolve(run.target), _conversations(), print)


def test_rows_that_cannot_be_used_do_not_stop_it(target_dir: Path) -> None:
    broken = [replace(item, messages=()) for item in _conversations()]
    run = _run(target_dir)
    preflight.check(run, resolve(run.target), broken, print)


def test_rows_cut_before_their_answer_do_not_stop_it(target_dir: Path) -> None:
    # whether later rows are short enough is the plan's to find out, and to count
    run = _run(target_dir)
    run = replace(run, data=replace(run.data, max_len=4))
    preflight.check(run, resolve(run.target), _conversations(), print)


def test_a_template_that_fails_stops_it(
    make_target_dir: Callable[..., Path], tmp_path: Path
) -> None:
    directory = make_target_dir("qwen3")
    copy = tmp_path / "target"
    copy.mkdir()
    for file in directory.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    (copy / "chat_template.jinja").write_text("{{ raise_exception('no such role') }}")
    run = _run(copy)
    with pytest.raises(ValueError, match=r"neither the first \d+ rows nor .*: .*no such role"):
        preflight.check(run, resolve(run.target), _conversations(), print)


def test_a_model_with_its_own_code_is_tried_too_or_a_line_says_that_it_is_not(
    make_target_dir: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "own"
    copy.mkdir()
    for file in make_target_dir("qwen3").iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    (copy / "own.py").write_text(
        "from transformers import Qwen3Config, Qwen3ForCausalLM\n"
        "class OwnConfig(Qwen3Config):\n    model_type = 'own'\n"
        "class Own(Qwen3ForCausalLM):\n    config_class = OwnConfig\n"
    )
    config = json.loads((copy / "config.json").read_text())
    classes = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.Own"}
    (copy / "config.json").write_text(
        json.dumps(config | {"model_type": "own", "auto_map": classes})
    )
    run = _run(copy)
    run = replace(run, target=replace(run.target, trust_remote_code=True))
    preflight.check(run, resolve(run.target), _conversations(), print)
    assert capsys.readouterr().out == ""
    with twin.made(run, resolve(run.target), print) as small:
        assert small is not None
        assert small.files.config.model_type == "own"
    # what their code cannot make small is no reason to refuse it
    (copy / "own.py").write_text(
        (copy / "own.py").read_text()
        + "    def forward(self, *_args, **_others):\n        raise IndexError('too small')\n"
    )
    preflight.check(run, resolve(run.target), _conversations(), print)
    assert "nothing is tried beforehand: " in capsys.readouterr().out


def test_a_family_without_a_twin_is_refused_by_name(target_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((target_dir / "tokenizer.json").read_bytes())
    config = json.loads((target_dir / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "hidden_act": "nonesuch"}))
    with pytest.raises(ValueError, match=r"no small twin of model type 'qwen3' .*nonesuch"):
        twin.write_twin(resolve(TargetConfig(id=str(tmp_path))), tmp_path / "twin")


def test_nothing_is_left_behind_and_the_random_state_is_untouched(
    target_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    torch.manual_seed(5)
    before = torch.get_rng_state()
    run = _run(target_dir)
    preflight.check(run, resolve(run.target), _conversations(), print)
    assert torch.equal(torch.get_rng_state(), before)
    assert list(tmp_path.iterdir()) == []
