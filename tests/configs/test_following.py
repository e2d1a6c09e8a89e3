"""The line that comes next is the one that can be typed."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from dflash_pipeline.configs import following
from dflash_pipeline.configs.launch import Killed
from dflash_pipeline.configs.load import load, to_dict
from dflash_pipeline.configs.options import Commands, configured, option, options, resolve


@click.group(cls=Commands)
def group() -> None:
    """Two commands of one run."""


@group.command(reads=("target", "data.limit", "loss"))
@options(("--target", "target.id"), ("--data", "data.files"), ("--limit", "data.limit"))
@option("--no-follow", "train.follow", turns=False)
@configured
@click.pass_context
def first(context: click.Context) -> None:
    """Says the line of the second."""
    resolve(context)
    click.echo(following.line(context, second, {"train.out": "run", "data.limit": None}))


@group.command(reads=("loss", "data.files", "train"))
@options(("--data", "data.files"), ("--limit", "data.limit"), ("--out", "train.out"))
@option("--no-follow", "train.follow", turns=False)
@configured
def second() -> None:
    """Says nothing."""


def _said(line: str) -> str:
    ended = CliRunner().invoke(group, shlex.split(line), catch_exceptions=False)
    return ended.output.strip()


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("first", "--out run"),
        ("first --target toy --limit 3", "--out run"),
        ("first --data 'a b' --data c", "--data 'a b' --data c --out run"),
        ("first --no-follow", "--out run --no-follow"),
        ("first --config toy", "--out run --config toy"),
        (
            "first --set loss.gamma=4 --set ' data.limit = 3' --set data.files='[\"a b\"]' "
            "--set train.seed=1 --set optim.lr=1",
            "--out run --set loss.gamma=4 --set 'data.files=[\"a b\"]' --set train.seed=1",
        ),
    ],
)
def test_it_says_what_the_other_command_takes_and_reads(
    typed: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert _said(typed) == f"dflash second {said}"


@pytest.mark.parametrize(
    ("code", "out", "err"),
    [
        (0, "next: dflash b\n", ""),
        (1, "", ""),
        (130, "", "stopped; to go on: dflash a\n"),
        # a worker that kill -9 ended: nothing about the line itself was wrong
        (Killed(1), "", "to go on: dflash a\n"),
    ],
)
def test_after_a_stop_the_line_itself_is_said_and_after_a_failure_none(
    code: int, out: str, err: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert following.end(code, lambda: "dflash b", "dflash a") == code
    assert capsys.readouterr() == (out, err)


@pytest.mark.parametrize(
    ("typed", "again"),
    [
        ("dflash train --store 'a b'", "dflash train --store 'a b' --resume --out run"),
        ("dflash train --out run", "dflash train --out run --resume"),
        ("dflash train --out run --resume", "dflash train --out run --resume"),
    ],
)
def test_a_training_run_goes_on_by_its_own_line(
    typed: str, again: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run" / "logs").mkdir(parents=True)
    (tmp_path / "run" / "run.json").touch()
    monkeypatch.setattr(sys, "argv", shlex.split(typed))
    assert following.resuming("run") == again


@pytest.mark.parametrize("left", ["run/logs", "."])
def test_a_run_that_was_stopped_before_it_began_is_begun_anew(
    left: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`--resume` was proposed, and refused: there is no run to resume."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / left).mkdir(parents=True, exist_ok=True)
    monkeypatch.setattr(sys, "argv", shlex.split("dflash train --store a"))
    assert following.resuming("run") == "dflash train --store a --out run"


def test_a_rolling_store_is_trained_on_once_and_by_runs_that_saw_it_all() -> None:
    line = following.training_on_rolling
    assert line("hs", "dflash train", 0, is_sealed=True) == "dflash train"
    assert line("hs", "dflash train", 0, is_sealed=False) == "dflash train --epochs 1"
    assert line("a b,c", "dflash train", 1, is_sealed=False) == "dflash status 'a b'"


@pytest.mark.parametrize(
    ("file", "last_mode", "said"),
    [
        ("", "bf16", ""),
        ("", "none", " --set loss.ce=1 --set loss.kl=0 --set loss.tv=0"),
        ("[loss]\nce = 0.5\nkl = 0", "none", ""),
        ("[loss]\nce = 0.5\nkl = 0.5", "none", " --set loss.ce=1 --set loss.kl=0 --set loss.tv=0"),
        # unreadable, which the command that asks does not mind
        ("[loss]\nce = -1", "none", ""),
    ],
)
def test_a_store_without_last_is_trained_on_with_cross_entropy(
    file: str, last_mode: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DFLASH_CONFIG", raising=False)
    if file:
        Path("dflash.toml").write_text(file)
    captured = {"target": {"id": "unheard"}, "store": {"last_mode": last_mode}}
    assert following.training_line("hs", captured) == f"dflash train --store hs{said}"
    assert following.training_line("hs", {}) == "dflash train --store hs"


def test_a_capture_is_said_again_as_its_store_records_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DFLASH_CONFIG", raising=False)
    run: dict[str, Any] = dict(to_dict(load("toy", ["data.files=['a b']", "data.limit=3"], {})))
    said = following.capturing_again(second, "hs", run)
    assert said == "dflash second --data 'a b' --limit 3 --config toy"
    assert following.capturing_again(second, "hs", {"target": {"unheard": 1}}) == (
        "the dflash capture line that made hs, once more"
    )
