"""The lines people type: what each launches, what it refuses, and what it says at the end."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from dflash_pipeline.cli import dflash, main
from dflash_pipeline.configs.docs import field_docs
from dflash_pipeline.configs.gpus import parse, reserved
from dflash_pipeline.configs.load import all_keys, load, to_dict
from dflash_pipeline.configs.options import Argument, Command, SchemaOption, does_read, given
from dflash_pipeline.configs.schema import PACKAGED, Run
from dflash_pipeline.configs.status import new_status, write_status
from dflash_pipeline.store import glance
from dflash_pipeline.store.documents import canonical
from dflash_pipeline.store.metadata import read_root, root_document
from dflash_pipeline.store.rolling import awaited_text, make_rolling

GOLDEN = Path(__file__).parent / "golden" / "help.txt"

ROW = '{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}\n'

# child processes import this before anything else: each stage notes its call and does nothing
STAND_INS = """
import json, os, sys, types
from dataclasses import asdict

def stage(name):
    def note(run, place, extra, **more):
        from dflash_pipeline.configs.load import to_dict
        line = {"entry": name, "run": to_dict(run), "place": asdict(place), "extra": extra}
        line["more"] = sorted(more)
        line["gpus"] = os.environ.get("CUDA_VISIBLE_DEVICES")
        descriptor = os.open(os.environ["CALLS"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(descriptor, (json.dumps(line) + "\\n").encode())
        if os.environ.get("FAILS") == name:
            raise ValueError("it did not work")
        if os.environ.get("KILLED") == name:
            os.kill(os.getpid(), 9)
        if os.environ.get("REFUSES") == name:
            from dflash_pipeline.configs.errors import UsageError
            raise UsageError("not so")
        if extra.get("json"):
            print('{"clean": true}')
    return note

STAGES = {
    "capture": (
        "planning", "worker", "generate", "demo", "decoder", "recheck", "measure", "served"
    ),
    "train": ("worker", "evaluate", "export", "measure", "compare"),
    "store": ("describe", "check", "merge", "repair", "watch", "drop"),
}

class Finder:
    def find_spec(self, name, path=None, target=None):
        parts = name.split(".")
        if parts[0] != "dflash_pipeline" or len(parts) != 3:
            return None
        if parts[2] not in STAGES.get(parts[1], ()):
            return None
        from importlib.machinery import ModuleSpec
        return ModuleSpec(name, self)

    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        module.main = stage(spec.name.removeprefix("dflash_pipeline."))
        module.plan_and_capture = module.main
        module.open_target = None
        return module

    def exec_module(self, module):
        pass

sys.meta_path.insert(0, Finder())
"""


@dataclass
class Ended:
    code: int
    out: str
    err: str
    calls: list[dict[str, Any]]

    @property
    def last_line(self) -> str:
        return self.out.strip().splitlines()[-1]


@pytest.fixture
def type_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., Ended]:
    """Type one line in an empty folder, with stand-ins for the stages."""
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "sitecustomize.py").write_text(STAND_INS)
    (tmp_path / "home").mkdir()
    # before what is there, which may name the tree under test
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "modules"), prepend=os.pathsep)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("dflash_pipeline.configs.arrival.APPEAR_S", 0.0)
    monkeypatch.chdir(tmp_path / "home")
    for name in ("hs", "x"):
        Path(name).mkdir()
        # a store as far as it is looked at before its stage
        Path(name, "zarr.json").touch()
    # `x` may be named as a drafter as well
    _make_drafter("x")
    for name in ("a", "b", "c"):
        Path(f"{name}.jsonl").write_text(ROW)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "CUDA_VISIBLE_DEVICES", "DFLASH_GPUS_AS_CPU"):
        monkeypatch.delenv(name, raising=False)
    calls = tmp_path / "calls"

    def run(line: str) -> Ended:
        calls.unlink(missing_ok=True)
        monkeypatch.setenv("CALLS", str(calls))
        words = shlex.split(line)
        monkeypatch.setattr(sys, "argv", words)
        with pytest.raises(SystemExit) as end:
            main(words[1:])
        captured = capfd.readouterr()
        noted = calls.read_text().splitlines() if calls.exists() else []
        code = end.value.code
        assert isinstance(code, int)
        return Ended(code, captured.out, captured.err, [json.loads(one) for one in noted])

    return run


def _make_drafter(folder: str) -> None:
    """A drafter as far as it is looked at before its stage."""
    Path(folder, "config.json").write_text('{"architectures": ["DFlashDraftModel"]}')


def _ready_file() -> None:
    Path("dflash.toml").write_text(
        '[target]\nid = "toy"\n[data]\nfiles = ["a.jsonl"]\n[store]\npath = "hs"\n'
    )


def test_an_empty_argument_is_refused_by_every_command(type_line: Callable[..., Ended]) -> None:
    """As of a shell variable that is not set: as a path it would be the working directory."""
    num_tried = 0
    for name, command in dflash.commands.items():
        needed = [one for one in command.params if isinstance(one, Argument) and one.required]
        for empty in needed:
            words = ["''" if one is empty else "hs" for one in needed]
            ended = type_line(f"dflash {name} {' '.join(words)}")
            assert (ended.code, ended.calls) == (2, []), name
            assert f"error: {empty.record[0]} is empty; it is: " in ended.err
            num_tried += 1
    assert num_tried >= 6


def test_the_two_lines_run_to_the_letter(
    type_line: Callable[..., Ended], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DFLASH_GPUS_AS_CPU", "1")
    _ready_file()
    ended = type_line("dflash capture --gpus 0-4")
    assert ended.code == 0, ended.err
    assert ended.last_line == "next: dflash train --store hs"
    assert [one["entry"] for one in ended.calls] == ["capture.planning"] + 5 * ["capture.worker"]
    assert ended.calls[0]["extra"] == {"kind": "cpu", "num_workers": 5, "only_count": False}
    assert sorted(one["place"]["rank"] for one in ended.calls[1:]) == [0, 1, 2, 3, 4]
    assert {one["place"]["world"] for one in ended.calls[1:]} == {5}
    assert {one["place"]["log_dir"] for one in ended.calls} == {"hs.logs"}

    ended = type_line("dflash train --gpus 5-7 --store hs")
    assert ended.code == 0, ended.err
    assert [one["entry"] for one in ended.calls] == 3 * ["train.worker"]
    (rendezvous,) = {one["place"]["rendezvous"] for one in ended.calls}
    assert rendezvous.startswith("tcp://127.0.0.1:")
    (out,) = {one["run"]["train"]["out"] for one in ended.calls}
    assert out.startswith("runs/hs-20")
    assert ended.calls[0]["run"]["train"]["stores"] == ["hs"]
    assert ended.last_line == f"next: dflash eval --drafter {out}"


def _make_store(name: str) -> None:
    """As a capture's plan does, in one rename."""
    Path("aside").mkdir()
    Path("aside", "zarr.json").touch()
    Path("aside").rename(name)


def test_a_trainer_waits_for_the_plan_of_a_capture_that_lives(
    type_line: Callable[..., Ended],
) -> None:
    status = new_status("plan", 0, "cpu")
    write_status("new.logs", status)
    ended = type_line("dflash train --gpus cpu --store new --no-follow")
    assert (ended.code, "its capture is still planning" in ended.err) == (2, True)
    threading.Timer(0.5, _make_store, ("new",)).start()
    ended = type_line("dflash train --gpus cpu --store new")
    assert ended.code == 0, ended.err
    assert "waiting until the capture into new has made its plan" in ended.out


def test_inspect_follow_waits_as_well_and_keeps_json_apart(type_line: Callable[..., Ended]) -> None:
    ended = type_line("dflash inspect new --follow")
    assert ended.code == 2
    assert "there is no store new: write it with dflash capture; inspect follows it" in ended.err
    write_status("new.logs", new_status("plan", 0, "cpu"))
    # in whose place a capture may put it
    Path("new").mkdir()
    threading.Timer(0.5, _make_store, ("new",)).start()
    ended = type_line("dflash inspect new --follow --json")
    assert ended.code == 0, ended.err
    assert "inspect: waiting until the capture into new has made its plan" in ended.err
    assert "waiting" not in ended.out
    assert [one["entry"] for one in ended.calls] == ["store.watch"]


def test_a_trainer_waits_a_moment_for_a_capture_that_was_started_with_it(
    type_line: Callable[..., Ended], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dflash_pipeline.configs.arrival.APPEAR_S", 60.0)
    planning = new_status("plan", 0, "cpu")
    threading.Timer(0.3, write_status, ("new.logs", planning)).start()
    threading.Timer(1.0, _make_store, ("new",)).start()
    ended = type_line("dflash train --gpus cpu --store new")
    assert ended.code == 0, ended.err
    nothing, found = ended.out.splitlines()[:2]
    assert nothing == "train: there is no store new, waiting 60 s for its capture"
    assert found == "train: waiting until the capture into new has made its plan"


def test_a_trainer_says_why_the_capture_that_it_would_follow_failed(
    type_line: Callable[..., Ended],
) -> None:
    status = new_status("plan", 0, "cpu")
    status.state, status.error = "failed", "no space"
    write_status("new.logs", status)
    ended = type_line("dflash train --gpus cpu --store new")
    assert ended.code == 2
    assert "there is no store new, its capture failed: no space; start dflash" in ended.err


def test_both_stages_meet_on_one_gpu_only_by_share_gpu(
    type_line: Callable[..., Ended], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DFLASH_GPUS_AS_CPU", "1")
    _ready_file()
    with reserved(parse("0-1"), "capture", share=False):
        ended = type_line("dflash train --gpus 1")
        assert ended.code == 2
        assert ended.err.startswith("error: GPU 1 is in use by dflash capture (process")
        assert ended.calls == []
        assert type_line("dflash train --gpus 1 --share-gpu").code == 0


def test_on_one_device_one_process_plans_and_captures(type_line: Callable[..., Ended]) -> None:
    _ready_file()
    (call,) = type_line("dflash capture --gpus cpu").calls
    assert call["entry"] == "capture.planning"
    assert call["place"]["stage"] == "capture"
    assert call["extra"] == {"kind": "cpu", "num_workers": 1, "only_count": False}


def test_capture_plan_counts_and_leaves_nothing_behind(type_line: Callable[..., Ended]) -> None:
    _ready_file()
    ended = type_line("dflash capture --plan --gpus cpu")
    assert ended.code == 0
    assert [one["entry"] for one in ended.calls] == ["capture.planning"]
    assert ended.calls[0]["extra"]["only_count"] is True
    assert ended.last_line == "next: dflash capture --gpus cpu"
    assert sorted(os.listdir()) == ["a.jsonl", "b.jsonl", "c.jsonl", "dflash.toml", "hs", "x"]


def test_after_a_capture_without_last_the_line_that_is_said_can_be_trained_with(
    type_line: Callable[..., Ended],
) -> None:
    _ready_file()
    ended = type_line("dflash capture --last-mode none --gpus cpu")
    line = ended.last_line.removeprefix("next: ")
    assert line.endswith("--set loss.ce=1 --set loss.kl=0 --set loss.tv=0")
    trained = type_line(line)
    assert trained.code == 0, trained.err
    assert (
        trained.calls[0]["run"]["loss"] | {"ce": 1.0, "kl": 0.0, "tv": 0.0}
        == (trained.calls[0]["run"]["loss"])
    )


def test_options_reach_the_run_and_win_over_set_and_file(type_line: Callable[..., Ended]) -> None:
    _ready_file()
    ended = type_line(
        "dflash generate --gpus cpu --data b.jsonl --data c.jsonl --out 'my answers.jsonl' "
        "--samples 2 --temperature 0.7 --thinking off --template-arg a=b --limit 9 "
        "--set generate.samples=5 --set generate.top_p=0.9"
    )
    assert ended.code == 0, ended.err
    run = ended.calls[0]["run"]
    assert run["data"]["files"] == ["b.jsonl", "c.jsonl"]
    assert run["data"]["limit"] == 9
    assert run["generate"]["samples"] == 2
    assert run["generate"]["top_p"] == 0.9
    assert run["target"]["thinking"] == "off"
    assert run["target"]["template_args"] == ["a=b"]
    assert ended.last_line == (
        "next: dflash capture --data 'my answers.jsonl' --thinking off --template-arg a=b "
        "--set target.layer_ids=0,1,2,3"
    )


def test_flags_turn_fields_on_and_off(type_line: Callable[..., Ended]) -> None:
    _ready_file()
    assert type_line("dflash train --gpus cpu").calls[0]["run"]["train"]["follow"] is True
    run = type_line("dflash train --gpus cpu --no-follow --out a").calls[0]["run"]
    assert run["train"]["follow"] is False
    run = type_line(
        "dflash eval --gpus cpu --drafter x --prompts b.jsonl --as-stored --store hs"
    ).calls[0]["run"]
    assert run["eval"]["as_stored"] is True


def test_eval_joins_the_targets_side_with_the_drafters(type_line: Callable[..., Ended]) -> None:
    ended = type_line(
        "dflash eval --gpus cpu --drafter x --target toy --prompts b.jsonl --json r.json"
    )
    assert ended.code == 0, ended.err
    (call,) = ended.calls
    assert call["entry"] == "train.evaluate"
    assert call["more"] == ["open_target"]
    assert call["run"]["eval"]["json"] == "r.json"
    # the export's serving lines name the target
    assert ended.last_line == "next: dflash export x --out drafter --target toy"
    (call,) = type_line("dflash export x --out drafter --target toy").calls
    assert call["run"]["target"]["id"] == "toy"
    assert type_line("dflash eval --gpus cpu:2 --drafter x").code == 2


def test_eval_asks_a_server_without_a_drafter(type_line: Callable[..., Ended]) -> None:
    (call,) = type_line("dflash eval --endpoint http://h/v1 --prompts b.jsonl --limit 3").calls
    assert call["entry"] == "capture.served"
    assert call["run"]["eval"]["endpoint"] == "http://h/v1"
    ended = type_line("dflash eval --endpoint http://h/v1")
    assert ended.code == 2
    assert "no --prompts FILE: give it, or set eval.prompts" in ended.err


def test_eval_compares_results_and_drafters(type_line: Callable[..., Ended]) -> None:
    results = '{"per_prompt": {"trained": []}, "settings": {}, "mode": "decode"}'
    Path("r.json").write_text(results)
    first, second = type_line(
        "dflash eval --gpus cpu --compare x r.json --target toy --prompts b.jsonl --json out.json"
    ).calls
    assert (first["entry"], second["entry"]) == ("train.evaluate", "train.compare")
    assert first["run"]["eval"]["drafter"] == "x"
    made, given = second["extra"]["files"]
    assert made == first["run"]["eval"]["json"] != "out.json"
    assert given == "r.json"
    assert second["extra"]["names"] == ["x", "r.json"]
    assert second["run"]["eval"]["json"] == "out.json"
    (call,) = type_line("dflash eval --compare r.json r.json").calls
    assert call["entry"] == "train.compare"
    ended = type_line("dflash eval --gpus cpu --compare x no --store hs")
    assert ended.code == 2
    assert ended.calls == []


EVAL = "dflash eval --drafter x"
DECODING = f"{EVAL} --target toy --prompts b.jsonl"
SERVER = "dflash eval --prompts b.jsonl --endpoint http://h/v1"
ANSWERS = "dflash generate --data a.jsonl --out o --endpoint http://h/v1"


@pytest.mark.parametrize(
    ("line", "options", "why"),
    [
        (
            "dflash verify hs",
            "--target toy, --gpus cpu, --share-gpu, --gpus-per-target 2",
            "nothing is computed without --sample N",
        ),
        ("dflash verify hs --deep", "--gpus cpu", "nothing is computed without --sample N"),
        ("dflash inspect hs --follow", "--sample 3", "--follow the whole store: one at a time"),
        ("dflash export x --out o", "--store hs", "the zlab layout holds nothing of the target"),
        (
            ANSWERS,
            "--gpus cpu, --share-gpu, --gpus-per-target 2, --max-len 9, --overlong drop",
            "servers (--endpoint",
        ),
        (
            f"{EVAL} --store hs",
            "--target toy, --batch-size 2, --as-stored, --max-len 9, --overlong drop, "
            "--thinking on, --template-arg a=1, --system-prompt S, --gpus-per-target 2",
            "a replay takes samples and target from the store",
        ),
        (DECODING, "--store hs", "prompts (--prompts, eval.prompts) are decoded without a store"),
        (
            SERVER,
            "--store hs, --as-stored, --batch-size 2, --max-len 9, --overlong drop, --plot p.png, "
            "--gpus cpu, --share-gpu, --gpus-per-target 2",
            "the server (--endpoint, eval.endpoint) runs target and drafter",
        ),
        (
            f"{DECODING} --check",
            "--store hs, --as-stored, --temperature 0, --plot p.png",
            "--check makes a store of its own",
        ),
        (
            "dflash eval --target toy --prompts b.jsonl --compare x x",
            "--drafter x, --endpoint http://h/v1, --plot p.png",
            "--compare measures both drafters alike",
        ),
        (
            "dflash eval --compare r.json r.json",
            "--prompts b.jsonl, --store hs, --limit 3, --max-new-tokens 9, --temperature 1, "
            "--batch-size 2, --gpus cpu",
            "--compare of two files measures nothing",
        ),
    ],
)
def test_an_option_that_would_change_nothing_is_refused(
    line: str, options: str, why: str, type_line: Callable[..., Ended]
) -> None:
    Path("r.json").write_text('{"per_prompt": {"trained": []}, "settings": {}}')
    assert type_line(line).code != 2
    for option in options.split(", "):
        ended = type_line(f"{line} {option}")
        assert (ended.code, ended.calls) == (2, []), option
        assert option.partition(" ")[0] in ended.err
        assert why in ended.err


def test_export_demo_inspect_and_verify_pass_what_was_asked(
    type_line: Callable[..., Ended],
) -> None:
    (call,) = type_line("dflash export x --out served --layout speculators --store hs").calls
    assert call["extra"] == {
        "checkpoint": "x",
        "out": "served",
        "layout": "speculators",
        "store": "hs",
    }
    (call,) = type_line("dflash demo --out d --gpus cpu").calls
    assert call["extra"] == {"target": "toy", "out": "d", "gpus": "cpu", "share_gpu": False}
    assert call["run"]["target"]["id"] == "toy"
    (call,) = type_line("dflash inspect hs").calls
    assert call["entry"] == "store.describe"
    assert call["extra"] == {"path": "hs", "json": False, "sample": ""}
    (call,) = type_line("dflash inspect hs --sample k7").calls
    assert call["extra"]["sample"] == "k7"
    (call,) = type_line("dflash inspect hs --follow").calls
    assert (call["entry"], call["extra"]) == ("store.watch", {"path": "hs", "json": False})
    (call,) = type_line("dflash verify hs --deep --repair").calls
    assert call["entry"] == "store.repair"
    assert call["extra"] == {"path": "hs", "deep": True, "json": False}
    (call,) = type_line("dflash verify hs --sample 3 --target toy --gpus cpu").calls
    assert (call["entry"], call["run"]["target"]["id"]) == ("capture.recheck", "toy")
    assert call["extra"] == {"path": "hs", "sample": 3, "json": False}
    ended = type_line("dflash verify hs --deep")
    assert ended.calls[0]["entry"] == "store.check"
    assert ended.calls[0]["extra"] == {"path": "hs", "deep": True, "json": False}
    assert ended.last_line == "next: dflash train --store hs"


def test_a_store_may_lie_on_several_mounts(type_line: Callable[..., Ended]) -> None:
    ended = type_line(f"{CAPTURE} --store new,x/further")
    assert ended.code == 0, ended.err
    assert ended.calls[0]["run"]["store"]["path"] == "new,x/further"
    # logs and leases stand beside the first
    assert ended.calls[0]["place"]["log_dir"] == "new.logs"
    assert ended.last_line == "next: dflash train --store new,x/further"
    (call,) = type_line("dflash train --gpus cpu --store hs,x:0.5 --out run").calls
    assert call["run"]["train"]["stores"] == ["hs,x:0.5"]
    (call,) = type_line("dflash verify hs,x").calls
    assert call["extra"]["path"] == "hs,x"


def test_two_stores_are_refused_by_every_command_that_takes_one(
    type_line: Callable[..., Ended],
) -> None:
    tried = []
    for name, command in _commands().items():
        keys = [one.schema_key for one in command.params if isinstance(one, SchemaOption)]
        if "store.path" not in keys:
            continue
        needed = "x --out o" if name == "export" else ""
        ended = type_line(f"dflash {name} {needed} --store hs --store x")
        assert ended.code == 2, name
        assert ended.err == (
            f"error: --store hs --store x: {name} takes one store, name it once; one that lies on "
            "several mounts is written --store A,B\n"
        )
        tried.append(name)
    assert {"capture", "plan", "eval", "export"} <= set(tried)


def test_merge_names_its_stores_and_reads_them_unless_told_otherwise(
    type_line: Callable[..., Ended],
) -> None:
    ended = type_line("dflash merge out hs x")
    (call,) = ended.calls
    assert call["entry"] == "store.merge"
    assert call["extra"] == {"out": "out", "stores": ["hs", "x"], "deep": True}
    assert ended.last_line == "next: dflash train --store out"
    (call,) = type_line("dflash merge out hs x --fast").calls
    assert call["extra"]["deep"] is False


@pytest.mark.parametrize("line", ["dflash inspect hs --json", "dflash verify hs --json"])
def test_json_is_alone_on_stdout(line: str, type_line: Callable[..., Ended]) -> None:
    assert json.loads(type_line(line).out) == {"clean": True}


def test_a_stage_that_fails_is_exit_code_1_and_the_next_one_does_not_start(
    type_line: Callable[..., Ended], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAILS", "capture.planning")
    _ready_file()
    ended = type_line("dflash capture --gpus cpu:2")
    assert ended.code == 1
    assert ended.err == "error: it did not work (log: hs.logs/plan-0.log)\n"
    assert [one["entry"] for one in ended.calls] == ["capture.planning"]
    assert "next:" not in ended.out
    ended = type_line("dflash status hs")
    assert "plan-0  failed" in ended.out
    assert "it did not work" in ended.out
    # how it ended is history once a capture on one device has planned by itself
    monkeypatch.delenv("FAILS")
    assert type_line("dflash capture --gpus cpu").code == 0
    assert "plan-0" not in type_line("dflash status hs").out


@pytest.mark.parametrize(
    ("line", "stage"),
    [
        ("capture --gpus cpu", "capture.planning"),
        ("capture --gpus cpu:2", "capture.worker"),
        ("train --gpus cpu --store hs --out new", "train.worker"),
    ],
)
def test_after_a_worker_that_was_killed_the_line_that_goes_on_is_said(
    type_line: Callable[..., Ended], monkeypatch: pytest.MonkeyPatch, line: str, stage: str
) -> None:
    """Ctrl-C alone said it."""
    monkeypatch.setenv("KILLED", stage)
    _ready_file()
    ended = type_line(f"dflash {line}")
    assert ended.code == 1
    error, again = ended.err.strip().splitlines()
    assert "ended by SIGKILL, as the kernel does when memory runs out" in error
    assert again == f"to go on: dflash {line}"


TOY = "--gpus cpu --target toy"
CAPTURE = f"dflash capture {TOY} --data a.jsonl"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        # what is not there, or is something else
        (f"dflash capture {TOY} --store s --data no.jsonl", "data file no.jsonl does not exist"),
        (
            f"dflash generate {TOY} --out o --data no.jsonl",
            "name one that is there, .jsonl, .jsonl.gz",
        ),
        (f"dflash generate {TOY} --out o --data x", "data file x does not exist or is not a file"),
        (f"dflash generate {TOY} --out o --data full/run.json", "expected .jsonl, .jsonl.gz or"),
        (
            "dflash eval --gpus cpu --drafter x --target toy --prompts no.jsonl",
            "data file no.jsonl does not",
        ),
        (
            "dflash eval --gpus cpu --drafter x --prompts b.jsonl",
            "no --target MODEL: give it, or set target.id",
        ),
        ("dflash eval --gpus cpu --drafter x", "eval needs --prompts to decode, or --store"),
        (
            "dflash export x --out o --layout speculators",
            "a store holds: name one of this target with --store DIR",
        ),
        ("dflash eval --gpus cpu --drafter no", "--drafter no: there is no such run, step or"),
        ("dflash eval --gpus cpu --drafter x --store no", "there is no store no"),
        ("dflash capture --gpus cpu --target ./no --data a.jsonl --store s", "no such directory"),
        (
            "dflash capture --gpus cpu --target ./hs --data a.jsonl --store s",
            "holds no config.json",
        ),
        ("dflash generate --gpus cpu --target no.gguf --data a.jsonl --out o", "no such file"),
        (
            "dflash export no --out o",
            "directory; name a run, one of its steps, or a checkpoint with",
        ),
        ("dflash export no --out o", "no: there is no such run, step or checkpoint directory"),
        (
            "dflash eval --gpus cpu --drafter hs --store x",
            "hs is a store, not a drafter: name a run",
        ),
        ("dflash export hs --out o", "hs is a store, not a drafter: name a run, one of its steps"),
        ("dflash train --store x --init-from hs --out o", "hs is a store, not a drafter: name a"),
        ("dflash inspect no", "there is no store no: name the directory that dflash capture wrote"),
        ("dflash verify no --json", "there is no store no"),
        ("dflash verify hs --sample 3 --repair", "--sample computes, --deep and --repair check"),
        ("dflash verify hs --sample 3 --target ./no", "there is no such directory"),
        ("dflash merge out hs no", "there is no store no"),
        ("dflash merge out hs", "hs alone: name two stores at least that become out"),
        ("dflash merge out hs x/../hs", "a store is named twice"),
        ("dflash merge x hs x", "OUT x exists: choose another OUT or remove it"),
        (
            "dflash capture --gpus cpu --target toy --data a.jsonl --store s --calibration-from no",
            "there is no store no",
        ),
        ("dflash train --store x --drop-sample @no", "--drop-sample @no: the file cannot be read"),
        # where nothing can be written
        (f"{CAPTURE} --store a.jsonl", "--store a.jsonl is not a directory: name a new one"),
        (f"{CAPTURE} --store full", "--store full is not empty and holds no store (no zarr.json)"),
        (f"{CAPTURE} --store a.jsonl/s/t", "a.jsonl is not a directory; choose another place"),
        (f"{CAPTURE} --store /", "the store needs a directory of its own"),
        (f"{CAPTURE} --store s,", "--store s,: expected different directories, separated by"),
        (f"{CAPTURE} --store s,a.jsonl", "--store ...,a.jsonl is not a directory: name another"),
        (f"{CAPTURE} --store .", "the store needs a directory of its own"),
        (f"{CAPTURE} --store x/..", "the store needs a directory of its own"),
        (f"{CAPTURE} --store link", "--store link is a symbolic link: name the directory that it"),
        (f"{CAPTURE} --store /proc", "--store /proc is a mount point: name a directory inside it"),
        (f"dflash generate {TOY} --data a.jsonl --out x", "--out x is a directory: name a file"),
        (f"dflash generate {TOY} --data a.jsonl --out b.jsonl/o", "b.jsonl is not a directory"),
        ("dflash export x --out full", "--out full exists: choose another --out or remove it"),
        (
            "dflash eval --gpus cpu --drafter x --store hs --json hs",
            "--json hs is a directory: name a file",
        ),
        (
            "dflash eval --gpus cpu --drafter x --target toy --prompts b.jsonl --json b.jsonl",
            "--json b.jsonl holds something else than results of dflash eval, which would be lost",
        ),
        (
            "dflash eval --endpoint http://h/v1 --prompts b.jsonl --json a.jsonl",
            "--json a.jsonl holds something else than results of dflash eval, which would be lost",
        ),
        (
            "dflash eval --gpus cpu --drafter x --target toy --prompts b.jsonl --plot b.jsonl",
            "--plot b.jsonl holds something else than a PNG figure, which would be lost",
        ),
        (
            "dflash eval --gpus cpu --drafter x --store hs --json new --plot ./new",
            "--plot ./new is the file of --json: name another one",
        ),
        (
            "dflash capture --gpus cpu --store x --data a",
            "no --target MODEL: give it, or set target.id",
        ),
        (
            "dflash capture --gpus cpu --target toy --data a",
            "no --store DIR: give it, or set store.path",
        ),
        ("dflash capture --target toy --store x", "no --data FILE: give it, or set data.files"),
        ("dflash train --gpus cpu", "no --store DIR: give it, or set store.path in dflash.toml"),
        ("dflash train --store nowhere", "there is no store nowhere: write it with dflash capture"),
        ("dflash train --store nowhere:0.5", "there is no store nowhere: write it"),
        ("dflash train --store x:abc", "--store x:abc: 'abc' is no number, and there is no store"),
        (
            "dflash train --store full",
            "no store at full (no zarr.json in it, but run.json): expected a directory that dflash",
        ),
        ("dflash train --store b.jsonl", "no store at b.jsonl: it is not a directory; expected a"),
        (f"{CAPTURE} --store /proc/new", "--store /proc/new: nothing can be made in /proc (No"),
        ("dflash train --store x --out /proc/new", "--out /proc/new: nothing can be made in /proc"),
        ("dflash train --store x:1.5", "--store x:1.5: the share must be in (0, 1], got 1.5"),
        ("dflash train --store x --resume", "--resume: name the run directory with --out DIR"),
        ("dflash train --store x --out no --resume", "there is no run directory no"),
        ("dflash train --store x --out b.jsonl", "--out b.jsonl is not a directory: name another"),
        ("dflash train --store x --out b.jsonl/o", "b.jsonl is not a directory; choose another"),
        ("dflash train --store x --out full", "full is not empty: go on with it by --resume"),
        ("dflash train --store x --gpus 0,0", "names a GPU twice"),
        (
            "dflash train --store x --set optim.lrr=1",
            "unknown key optim.lrr; did you mean optim.lr",
        ),
        ("dflash train --store x --set optim.lr=-1", "optim.lr must be above 0, got -1.0"),
        ("dflash train --config nowhere.toml", "no file and no preset nowhere.toml"),
        (
            "dflash train --config qwen9-8b",
            "no preset qwen9-8b; did you mean qwen3-8b? Presets: gpt",
        ),
        ("dflash train --config nowhere.toml", "no preset nowhere.toml; presets: gpt-oss-120b, "),
        ("dflash train --stor x", "No such option '--stor'"),
        ("dflash trian", "No such command 'trian'"),
        ("dflash capture --overlong cut", "'cut' is not one of 'truncate', 'drop'"),
        ("dflash train --epochs many", "'many' is not a valid integer"),
        ("dflash train --store x --per-gpu 2", "--per-gpu shares a device out among the variants"),
        ("dflash status nowhere", "nowhere: no run has left its status; looked in"),
        ("dflash status hs --drop runs/a --json", "--drop says in a line what it has done"),
        ("dflash demo --out a.jsonl", "--out a.jsonl is not a directory: name another one"),
        ("dflash demo --out a.jsonl/d", "a.jsonl is not a directory; choose another place"),
        ("dflash demo --gpus 1000", "--gpus 1000: there is no such GPU"),
        ("dflash eval --drafter x --check --compare x x", "--check tries the whole path here"),
        (
            "dflash eval --drafter x --check --endpoint http://h/v1",
            "leave --compare and --endpoint",
        ),
        ("dflash eval", "no --drafter CHECKPOINT: give it, or set eval.drafter"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(
    line: str, message: str, type_line: Callable[..., Ended]
) -> None:
    Path("full").mkdir()
    Path("full/run.json").touch()
    Path("link").symlink_to("x")
    before = sorted(os.listdir())
    ended = type_line(line)
    assert ended.code == 2
    assert ended.err.startswith("error: ")
    assert message in ended.err
    assert ended.err.count("\n") == 1
    assert ended.calls == []
    # not even a folder of logs
    assert sorted(os.listdir()) == before


@pytest.mark.parametrize(
    ("key", "typed", "told"),
    [
        ("json", "--compare r.json s.json", "r.json is read by this line: name another file with"),
        ("json", "--drafter x --store hs", "b.jsonl holds something else than results of dflash"),
        ("plot", "--drafter x --store hs", "b.jsonl holds something else than a PNG figure, which"),
        ("json", "--drafter x --store hs", "hs is a directory: name a file"),
    ],
)
def test_an_output_of_eval_that_is_refused_is_named_by_what_set_it(
    key: str, typed: str, told: str, type_line: Callable[..., Ended]
) -> None:
    for name in ("r", "s"):
        Path(f"{name}.json").write_text('{"per_prompt": {"trained": []}, "settings": {}}')
    file, _, _ = told.partition(" ")
    ended = type_line(f"dflash eval {typed} --{key} {file}")
    assert ended.err.startswith(f"error: --{key} {told}")
    Path("dflash.toml").write_text(f"[eval]\n{key} = '{file}'\n")
    ended = type_line(f"dflash eval {typed}")
    assert (ended.code, ended.calls) == (2, [])
    assert ended.err.startswith(f"error: eval.{key} = {told}")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_is_read_only_is_refused_before_anything_loads(
    type_line: Callable[..., Ended],
) -> None:
    Path("x").chmod(0o555)
    for line in (f"{CAPTURE} --store x/s", f"dflash generate {TOY} --data a.jsonl --out x/o"):
        ended = type_line(line)
        assert ended.code == 2
        assert "x cannot be written to; choose another place" in ended.err


def test_a_store_is_one_place_however_it_is_written(type_line: Callable[..., Ended]) -> None:
    ended = type_line(f"{CAPTURE} --store ./hs//./")
    assert ended.code == 0, ended.err
    assert {one["place"]["log_dir"] for one in ended.calls} == {"hs.logs"}


def test_answers_to_no_prompt_at_all_are_a_failure(type_line: Callable[..., Ended]) -> None:
    Path("none.jsonl").touch()
    line = f"dflash generate {TOY} --data a.jsonl --out"
    ended = type_line(f"{line} none.jsonl")
    assert ended.code == 1
    assert "no prompt of a.jsonl was answered, none.jsonl is empty" in ended.err
    assert "next:" not in ended.out
    assert type_line(f"{line} some.jsonl").code == 0


def test_what_a_demo_or_a_sweep_refuses_leaves_nothing(
    type_line: Callable[..., Ended], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DFLASH_GPUS_AS_CPU", "1")
    monkeypatch.setenv("REFUSES", "capture.demo")
    Path("sweep.toml").write_text("[one]\ndrafter.num_layers = 3\n")
    before = sorted(os.listdir())
    assert type_line("dflash demo --out new/d").code == 2
    with reserved(parse("1"), "capture", share=False):
        ended = type_line("dflash train --gpus 1 --store x --out swept --sweep sweep.toml")
    assert (ended.code, "GPU 1 is in use by dflash capture" in ended.err) == (2, True)
    assert sorted(os.listdir()) == before


def test_a_start_that_only_left_logs_may_be_tried_again(type_line: Callable[..., Ended]) -> None:
    Path("run/logs").mkdir(parents=True)
    assert type_line("dflash train --gpus cpu --store x --out run").code == 0


def test_under_torchrun_the_process_is_its_rank(
    type_line: Callable[..., Ended], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    def call(entry: str, run: Run, place: Any, extra: dict[str, object]) -> int:
        seen.append((entry, place, extra))
        return 0

    monkeypatch.setattr("dflash_pipeline.configs.child.call", call)
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert type_line("dflash train --gpus cpu --store x").code == 2  # ranks share no clock
    assert type_line("dflash train --gpus cpu --store x --out run").code == 0
    ((entry, place, extra),) = seen
    assert entry == "dflash_pipeline.train.worker:main"
    assert (place.rank, place.world, place.device) == (2, 4, "cpu")
    assert place.rendezvous == "env://"
    # the other three run on other machines
    assert place.threads == len(os.sched_getaffinity(0))
    assert extra == {"resume": False}


def test_a_training_run_is_dropped_by_status(type_line: Callable[..., Ended]) -> None:
    ended = type_line("dflash status hs --drop runs/a")
    assert ended.code == 0, ended.err
    (call,) = ended.calls
    assert call["entry"] == "store.drop"
    assert call["extra"] == {"path": "hs", "drop": "runs/a", "json": False}
    assert ended.last_line == "next: dflash status hs"
    # of a store over several mounts its own directory
    assert type_line("dflash status hs,x --drop runs/a").calls[0]["extra"]["path"] == "hs"
    ended = type_line("dflash status nowhere --drop runs/a")
    assert (ended.code, "there is no store nowhere" in ended.err) == (2, True)


def test_status_tells_a_dead_process_from_a_living_one(type_line: Callable[..., Ended]) -> None:
    alive, dead = new_status("train", 0, "cpu"), new_status("train", 1, "cpu")
    alive.state = dead.state = "running"
    alive.done, alive.total, alive.unit = 5, 10, "steps"
    dead.start_ticks -= 1
    for status in (alive, dead):
        write_status("run/logs", status)
    out = type_line("dflash status run").out
    assert "train-0  running" in out
    assert "train: 5 of 10 steps (50 %)" in out
    assert "train-1  dead, was running" in out
    listed = json.loads(type_line("dflash status run --json").out)
    assert [one["alive"] for one in listed] == [True, False]
    assert out.splitlines()[-1].startswith("once the others have ended, run the same command again")
    dead.state = "done"
    write_status("run/logs", dead)
    assert type_line("dflash status run").last_line == "1 of 2 at work: nothing to do"
    alive.state, dead.state = "done", "stopped"
    for status in (alive, dead):
        write_status("run/logs", status)
    assert type_line("dflash status run").last_line.startswith("to go on, run the same command")
    for status in (alive, dead):
        status.state = "done"
        write_status("run/logs", status)
    assert type_line("dflash status run").last_line == "all of them are done"


def test_status_of_a_store_that_lost_shards_since_says_so(type_line: Callable[..., Ended]) -> None:
    status = new_status("capture", 0, "cpu")
    status.state = "done"
    write_status("hs.logs", status)
    Path("hs/zarr.json").touch()
    ended = type_line("dflash status hs")
    assert ended.last_line.startswith("hs lacks shards, as after a repair: to go on, run its")
    assert type_line("dflash status hs,elsewhere").last_line == ended.last_line
    Path("hs/commit_sealed/c").mkdir(parents=True)
    Path("hs/commit_sealed/c/0").touch()
    assert type_line("dflash status hs").last_line == "all of them are done"


def test_status_of_a_store_that_awaits_training_runs_says_once_that_they_are_to_be_started(
    type_line: Callable[..., Ended], recorded_store: str
) -> None:
    path = Path(recorded_store)
    Path(recorded_store, "commit_sealed/c/0").unlink()
    layout = read_root(path)[2]
    make_rolling(path, layout, 2)
    awaited = awaited_text(path, layout)
    assert awaited
    status = new_status("capture", 0, "cpu")
    status.state = "running"
    write_status(f"{recorded_store}.logs", status)
    told = type_line(f"dflash status {recorded_store}").out
    assert told.count(awaited) == 1
    status.state, status.text = "waiting", f"the quota is in use; {awaited}. Start dflash train"
    write_status(f"{recorded_store}.logs", status)
    ended = type_line(f"dflash status {recorded_store}")
    assert ended.out.count(awaited) == 1
    assert ended.last_line == (
        f"1 of 1 at work: 2 training runs to start, by dflash train --store {recorded_store} "
        "--config toy --epochs 1"
    )


def test_status_tells_of_processes_though_their_store_cannot_be_read(
    type_line: Callable[..., Ended],
) -> None:
    status = new_status("capture", 0, "cpu")
    status.state = "done"
    write_status("hs.logs", status)
    Path("hs/consumers").mkdir()
    for name in ("hs/zarr.json", "hs/consumers/zarr.json"):
        Path(name).write_text("{")
    ended = type_line("dflash status hs")
    assert ended.code == 0, ended.err
    assert ended.out.startswith("capture-0  done")
    assert "hs/zarr.json" in ended.out


def test_status_names_the_places_where_it_looked(
    type_line: Callable[..., Ended], tmp_path: Path
) -> None:
    error = type_line("dflash status .").err
    assert error.rstrip().endswith(f"{tmp_path}/home, {tmp_path}/home/logs, {tmp_path}/home.logs")


def test_a_refused_capture_on_one_device_leaves_the_status_of_the_plan_before(
    type_line: Callable[..., Ended], monkeypatch: pytest.MonkeyPatch
) -> None:
    _ready_file()
    assert type_line("dflash capture --gpus cpu:2").code == 0
    monkeypatch.setenv("REFUSES", "capture.planning")
    for gpus in ("cpu", "cpu:2"):
        assert type_line(f"dflash capture --gpus {gpus}").code == 2
        said = type_line("dflash status hs").out
        assert [line.split()[:2] for line in said.splitlines()[:3]] == [
            ["capture-0", "done"],
            ["capture-1", "done"],
            ["plan-0", "done"],
        ]


@pytest.mark.parametrize("line", ["dflash inspect hs", "dflash config toy", "dflash --help"])
def test_a_pipe_that_nobody_reads_any_longer_ends_a_line_silently(
    line: str, type_line: Callable[..., Ended], tmp_path: Path
) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    code = "import sys; from dflash_pipeline.cli import main; main(sys.argv[1:])"
    ended = subprocess.run(
        [sys.executable, "-c", code, *line.split()[1:]],
        stdout=write_end,
        stderr=subprocess.PIPE,
        env=os.environ | {"CALLS": str(tmp_path / "calls")},
        check=False,
    )
    os.close(write_end)
    assert (ended.returncode, ended.stderr) == (141, b"")


def test_config_prints_a_file_that_it_reads_back_to_itself(type_line: Callable[..., Ended]) -> None:
    first = type_line("dflash config qwen3-8b --set optim.lr=0.5").out
    Path("dflash.toml").write_text(first)
    assert "lr = 0.5" in first
    assert type_line("dflash config").out == first


# --- help


def _commands() -> dict[str, click.Command]:
    return dict(dflash.commands)


def _options() -> list[tuple[str, click.Option]]:
    return [
        (f"{name} {one.opts[0]}", one)
        for name, command in _commands().items()
        for one in command.params
        if isinstance(one, click.Option)
    ]


def test_an_options_help_and_default_are_the_schemas() -> None:
    from_schema = [(where, one) for where, one in _options() if isinstance(one, SchemaOption)]
    assert len(from_schema) > 40
    for where, one in from_schema:
        doc = field_docs()[one.schema_key]
        assert one.help is not None, where
        # a flag that turns a field off says what off means
        is_off = one.flag_value is True and doc.default is True
        wanted = doc.text.partition("; off: ")[2].capitalize() if is_off else doc.text
        assert wanted
        assert wanted in one.help, where
        if not one.is_flag and doc.default not in ("", ()):
            assert one.help.endswith(f"[default: {doc.default}]"), where


def test_an_option_that_is_not_typed_sets_nothing() -> None:
    for name, command in _commands().items():
        words = ["x" for one in command.params if isinstance(one, click.Argument)]
        words += ["--out", "x"] if name == "export" else []
        group = click.Context(dflash, **dflash.context_settings)
        context = command.make_context(name, words, parent=group)
        assert load("tiny", (), given(context)) == load("tiny", (), {}), name


def test_help_is_the_one_that_was_agreed_on() -> None:
    pages = []
    for words in ([], *([name] for name in sorted(_commands()))):
        page = CliRunner().invoke(dflash, [*words, "--help"], prog_name="dflash", terminal_width=98)
        pages.append(page.output)
    text = ("\n" + "-" * 98 + "\n").join(pages)
    if os.environ.get("DFLASH_WRITE_GOLDEN"):
        GOLDEN.write_text(text)
    assert text == GOLDEN.read_text(), "DFLASH_WRITE_GOLDEN=1 writes it anew, if that is meant"


def test_every_option_says_what_it_does() -> None:
    assert [where for where, one in _options() if not one.help] == []


def test_every_argument_says_what_it_may_be() -> None:
    found = 0
    for name, command in _commands().items():
        page = CliRunner().invoke(dflash, [name, "--help"], prog_name="dflash", terminal_width=98)
        usage, _, told = page.output.partition("Arguments:\n")
        for one in command.params:
            if isinstance(one, click.Argument):
                assert isinstance(one, Argument), f"{name} {one.name} is not described"
                metavar, about = one.record
                assert f" {metavar}" in usage, name
                assert about.endswith("."), f"{name} {metavar}"
                assert re.search(rf"^  {re.escape(metavar)}  +{about.split()[0]}", told, re.M), name
                found += 1
        assert bool(told) == any(isinstance(one, click.Argument) for one in command.params), name
    assert found >= 7


def test_a_command_reads_what_its_options_set() -> None:
    known = {*all_keys(), *(key.partition(".")[0] for key in all_keys())}
    for name, command in _commands().items():
        assert isinstance(command, Command)
        assert set(command.reads) <= known, name
        is_configured = any(one.name == "config" for one in command.params)
        assert bool(command.reads) == (is_configured and name != "config"), name
        for one in command.params:
            if isinstance(one, SchemaOption) and command.reads and one.schema_key != "train.stores":
                assert does_read(command, one.schema_key), f"{name} {one.opts[0]}"


READERS = {"capture": ("generate", "capture", "plan", "eval"), "train": ("train", "eval", "export")}


@pytest.mark.parametrize("folder", READERS)
def test_what_a_stage_reads_one_of_its_commands_does(folder: str) -> None:
    sections = "|".join(Run.__dataclass_fields__)
    commands = [_commands()[name] for name in READERS[folder]]
    for path in (Path(__file__).parents[1] / folder).glob("*.py"):
        found = re.findall(rf"\brun\.((?:{sections})\.[a-z_]+)\b(?!\()", path.read_text())
        for key in set(found) & set(all_keys()):
            assert any(does_read(one, key) for one in commands), f"{path.name} reads {key}"


def test_the_next_line_says_of_set_what_the_next_command_reads(
    type_line: Callable[..., Ended],
) -> None:
    sets = [f"--set {one}" for one in ("data.heldout=0.5", "capture.seed=3", "generate.top_k=9")]
    sets += ["--set train.seed=4", "--set eval.seed=5", "--set 'loss.gamma = 4'"]
    typed = " ".join(sets)
    for line, told in (
        (f"dflash generate {TOY} --data a.jsonl --out o.jsonl", (sets[0], sets[1])),
        (f"{CAPTURE} --store new", (sets[3], sets[5])),
        ("dflash train --gpus cpu --store x --out run", (sets[4],)),
        ("dflash eval --gpus cpu --drafter x --store hs", ()),
        ("dflash config toy --set store.path=new --set 'data.files=[\"a.jsonl\"]'", sets[:2]),
    ):
        ended = type_line(f"{line} {typed}")
        assert ended.code == 0, ended.err
        said = (ended.out + ended.err).strip().splitlines()[-1]
        for one in sets:
            assert (one in said) == (one in told), (one, said)


def test_every_command_is_there() -> None:
    wanted = {"generate", "capture", "train", "eval", "export", "inspect", "verify", "status"}
    assert set(_commands()) >= wanted | {"config", "demo"}


SAID = "--target toy --thinking on --template-arg a=b --max-len 99 --set data.heldout=0.5"


@pytest.mark.parametrize("line", [
    f"dflash generate {SAID} --data a.jsonl --out 'b c.jsonl' --limit 3",
    f"dflash capture {SAID} --data a.jsonl --store new --hidden-mode int8",
    f"dflash capture {SAID} --data a.jsonl --store new --plan",
    "dflash train --store x --out 'my run' --set loss.gamma=4",
    "dflash eval --drafter x --store hs",
    "dflash inspect x",
    "dflash verify x",
    "dflash verify x --deep",
    "dflash merge new x hs",
    "dflash config toy --set store.path=new --set 'data.files=[\"a.jsonl\"]'",
    "dflash demo --out new",
])  # fmt: skip
def test_the_line_that_is_to_come_next_can_be_typed_and_says_what_this_one_did(
    line: str, type_line: Callable[..., Ended]
) -> None:
    ended = type_line(f"{line} --gpus cpu" if "--data" in line else line)
    assert ended.code == 0, ended.err
    said = (ended.out + ended.err).strip().splitlines()[-1]
    assert said.startswith("next: dflash ")
    # what the real stage would have written
    Path("b c.jsonl").write_text(ROW)
    for made in ("new/store", "my run"):
        Path(made).mkdir(parents=True, exist_ok=True)
    _make_drafter("my run")
    for store in ("new", "new/store"):
        Path(store, "zarr.json").touch()
    following = type_line(said.removeprefix("next: "))
    assert following.code == 0, following.err
    if "--data" in line and "capture" in said:
        before, after = (one.calls[-1]["run"] for one in (ended, following))
        for section, name in (("target", "thinking"), ("target", "template_args")):
            assert after[section][name] == before[section][name]
        assert after["data"]["heldout"] == before["data"]["heldout"]
        assert (after["data"]["limit"], after["target"]["id"]) == (0, "toy")


@pytest.fixture
def recorded_store() -> str:
    """A store in the working directory, captured on the toy target."""
    shutil.copytree(Path(__file__).parent / "golden" / "store-v1-bf16", "made", symlinks=True)
    root, _, _, attributes = read_root(Path("made"))
    run = to_dict(load("toy", ['data.files=["b c.jsonl"]', "store.path=elsewhere/made"], {}))
    again = replace(root, attributes=replace(attributes, run=dict(run)).to_dict())
    Path("made/zarr.json").write_bytes(canonical(root_document(again)))
    return "made"


def test_what_comes_after_a_store_takes_the_preset_that_it_was_captured_with(
    type_line: Callable[..., Ended], recorded_store: str
) -> None:
    training = f"next: dflash train --store {recorded_store} --config toy"
    assert type_line(f"dflash verify --deep {recorded_store}").last_line == training
    assert type_line(f"dflash verify --repair --deep {recorded_store}").last_line == training
    # it has read no row
    checking = f"next: dflash verify --deep {recorded_store}"
    assert type_line(f"dflash verify --repair {recorded_store}").last_line == checking
    merged = type_line(f"dflash merge new {recorded_store} x").last_line
    assert merged == "next: dflash train --store new --config toy"
    # a repair took the seal, or the capture was stopped: the capture comes first
    Path(recorded_store, "commit_sealed/c/0").unlink()
    capturing = f"next: dflash capture --data 'b c.jsonl' --store {recorded_store} --config toy"
    assert type_line(f"dflash verify --repair {recorded_store}").last_line == capturing
    assert type_line(f"dflash inspect {recorded_store}").last_line == capturing
    for flag in ("", "--deep ", "--json ", "--sample 2 --target toy --gpus cpu "):
        ended = type_line(f"dflash verify {flag}{recorded_store}")
        # `verify && train` must not go on with a part
        assert ended.code == 1
        assert ended.err == (
            f"error: {recorded_store} lacks shards or its seal, and no capture is at work; "
            f"to go on: {capturing.removeprefix('next: ')}\n"
        )
        assert "next:" not in ended.out
    # one that is at work is followed
    status = new_status("capture", 0, "cpu")
    status.state = "running"
    write_status(f"{recorded_store}.logs", status)
    ended = type_line(f"dflash verify --deep {recorded_store}")
    assert (ended.code, ended.last_line) == (0, training)
    looking = type_line(f"dflash inspect {recorded_store}").last_line
    assert looking == f"next: dflash verify {recorded_store}"


def test_without_held_out_samples_nothing_is_proposed_to_be_replayed(
    type_line: Callable[..., Ended], recorded_store: str
) -> None:
    shutil.copytree(recorded_store, "other", symlinks=True)
    column = Path(recorded_store, "samples/split/c/0")
    assert 1 in column.read_bytes()
    line = f"dflash train --gpus cpu --store {recorded_store} --out"
    assert type_line(f"{line} a").last_line == "next: dflash eval --drafter a --store made"
    column.write_bytes(bytes(len(column.read_bytes())))
    ended = type_line(f"{line} run")
    assert ended.code == 0, ended.err
    said, last = ended.out.splitlines()[-2:]
    assert said == (
        "no held-out sample in made to replay; with a FILE of prompts that were not trained on: "
        "dflash eval --drafter run --target toy --prompts FILE"
    )
    assert last == "next: dflash export run --out drafter"
    # what was said can be typed as well, once the stage has written its drafter
    _make_drafter("run")
    decoding = said.partition("trained on: ")[2].replace("FILE", "a.jsonl")
    assert type_line(decoding).code == 0
    assert type_line(last.removeprefix("next: ")).code == 0
    # another store of the run has some
    typed = f"dflash train --gpus cpu --store {recorded_store} --store other:0.5 --out both"
    assert type_line(typed).last_line == "next: dflash eval --drafter both --store other"


@pytest.mark.parametrize(
    "line",
    [
        "dflash capture --gpus cpu --target toy --data a.jsonl --store new",
        "dflash verify --deep made",
        "dflash verify --repair --deep made",
        "dflash merge new made x",
    ],
)
def test_a_store_whose_samples_are_all_held_out_is_proposed_to_nobody_who_trains(
    line: str, type_line: Callable[..., Ended], recorded_store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    column = Path(recorded_store, "samples/split/c/0")
    column.write_bytes(b"\1" * len(column.read_bytes()))
    store = "new" if "new" in line else recorded_store
    # what the stages of capture and merge would have made
    opened = glance.opened
    monkeypatch.setattr(glance, "opened", lambda _path: opened(recorded_store))
    ended = type_line(line)
    assert ended.code == 0, ended.err
    said, last = ended.out.splitlines()[-2:]
    assert said == (
        f"every sample of {store} is held out, none is trained on; with a DRAFTER: "
        f"dflash eval --drafter DRAFTER --store {store}"
    )
    assert last == f"next: dflash inspect {store}"


def test_a_failed_check_of_the_whole_path_names_a_log_that_is_there(
    type_line: Callable[..., Ended],
) -> None:
    ended = type_line("dflash eval --check --gpus cpu --drafter x --target toy --prompts a.jsonl")
    assert ended.code == 1
    found = re.search(r"^error: .* \(log: (\S+)\)$", ended.err, re.M)
    assert found is not None, ended.err
    assert "Traceback" in Path(found[1]).read_text()
    assert sorted(os.listdir()) == ["a.jsonl", "b.jsonl", "c.jsonl", "hs", "x"]


@pytest.mark.parametrize(
    ("drafter", "told"),
    [("x", "/check-0.log)"), ("someone/drafter-of-toy", "cannot be fetched from the hub")],
)
def test_the_check_of_the_readme_starts_with_what_its_help_says_it_needs(
    drafter: str, told: str, type_line: Callable[..., Ended]
) -> None:
    text = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    (line,) = re.findall(r"`(dflash eval --[^`]*--check)`", text)
    assert " T " in line
    assert " D " in line
    Path("prompts.jsonl").write_text(ROW)
    ended = type_line(line.replace(" T ", " toy ").replace(" D ", f" {drafter} ") + " --gpus cpu")
    # the first stage, which has no stand-in, looks for the drafter's weights
    assert told in ended.err
    needed = re.search(r"Needs (.*?)\.", " ".join(type_line("dflash eval --help").out.split()))
    assert needed is not None
    options = re.findall(r"--\w+", needed[1])
    assert set(options) == set(re.findall(r"--\w+", line)) - {"--check"}
    for option in options:
        ended = type_line(re.sub(rf"{option} \S+", "", line) + " --gpus cpu")
        assert (ended.code, f"no {option} " in ended.err) == (2, True), ended.err


def test_a_name_that_is_taken_is_not_proposed(type_line: Callable[..., Ended]) -> None:
    Path("drafter").mkdir()
    Path("d.store").mkdir()
    ended = type_line("dflash eval --drafter x --store hs")
    assert ended.last_line == "next: dflash export x --out drafter-2"
    ended = type_line("dflash generate --gpus cpu --target toy --data a.jsonl --out d.jsonl")
    assert ended.last_line == "next: dflash capture --data d.jsonl --store d.store-2 --config toy"
    Path("answers.jsonl").touch()
    assert "--out answers-2.jsonl" in type_line("dflash config toy").err


@pytest.mark.parametrize(
    "line",
    [
        f"dflash capture {TOY} --data a.jsonl --store new",
        f"dflash capture {TOY} --data a.jsonl --store new --set train.out=runs/mine/",
        "dflash verify --deep hs",
        "dflash merge new hs x",
    ],
)
def test_a_training_run_is_proposed_into_a_directory_that_is_free(
    line: str, type_line: Callable[..., Ended]
) -> None:
    is_set = "train.out" in line
    if not is_set:
        Path("dflash.toml").write_text("[train]\nout = 'runs/mine'\n")
    free = type_line(line)
    assert free.code == 0, free.err
    assert "--out" not in free.last_line
    # the logs of a start that failed are no run
    Path("runs/mine/logs").mkdir(parents=True)
    assert type_line(line).last_line == free.last_line
    Path("runs/mine/run.json").touch()
    Path("runs/mine-2").mkdir()
    ended = type_line(line)
    assert " --out runs/mine-3" in ended.last_line
    Path("new").mkdir()
    Path("new/zarr.json").touch()
    following = type_line(f"{ended.last_line.removeprefix('next: ')} --gpus cpu")
    assert following.code == 0, following.err
    assert following.calls[0]["run"]["train"]["out"] == "runs/mine-3"


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("toy", "generate --data PROMPTS.jsonl --out answers.jsonl --config toy"),
        ("", "generate --target MODEL --data PROMPTS.jsonl --out answers.jsonl"),
        (
            "toy --set 'data.files=[\"a.jsonl\"]'",
            "capture --store hs-2 --config toy --set 'data.files=[\"a.jsonl\"]' --plan",
        ),
    ],
)
def test_a_configuration_that_lacks_something_is_followed_by_a_line_that_says_it(
    typed: str, said: str, type_line: Callable[..., Ended]
) -> None:
    last = type_line(f"dflash config {typed}").err.splitlines()[-1]
    assert last == f"next: dflash {said}"
    Path("MODEL").mkdir()
    Path("PROMPTS.jsonl").write_text(ROW)
    ended = type_line(f"{last.removeprefix('next: ')} --gpus cpu")
    assert ended.code == 0, ended.err


@pytest.mark.parametrize("target", PACKAGED)
@pytest.mark.parametrize("is_file_there", [False, True])
def test_the_capture_of_a_packaged_targets_answers_says_what_that_target_needs(
    target: str, is_file_there: bool, type_line: Callable[..., Ended]
) -> None:
    if is_file_there:
        Path("dflash.toml").write_text("[store]\nhidden_mode = 'int8'\n")
    ended = type_line(f"dflash generate --gpus cpu --target {target} --data a.jsonl --out d.jsonl")
    assert ended.code == 0, ended.err
    Path("d.jsonl").write_text(ROW)
    captured = type_line(f"{ended.last_line.removeprefix('next: ')} --gpus cpu")
    assert captured.code == 0, captured.err
    before, after = ended.calls[-1]["run"], captured.calls[-1]["run"]
    wanted = to_dict(load(target, (), {}))["target"]
    assert after["target"] == before["target"] | {
        key: wanted[key] for key in ("layer_ids", "mask_token_id")
    }
    assert after["store"]["hidden_mode"] == before["store"]["hidden_mode"]


def test_answers_are_not_captured_into_the_configured_store_of_other_data(
    type_line: Callable[..., Ended], recorded_store: str
) -> None:
    Path("dflash.toml").write_text(f'preset = "toy"\n[store]\npath = "{recorded_store}"\n')
    line = "dflash generate --gpus cpu --data a.jsonl --out"
    other = type_line(f"{line} more.jsonl")
    assert other.last_line == "next: dflash capture --data more.jsonl --store more.store"
    same = type_line(f"{line} 'b c.jsonl'")
    assert same.last_line == "next: dflash capture --data 'b c.jsonl'"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ("--gpus 0-3 --capture-gpus 0-1 --train-gpus 2-3", "without --gpus"),
        ("--capture-gpus 0-1", "go together"),
        ("--capture-gpus 0-2 --train-gpus 2-3", "name different GPUs"),
        ("--measurement a.jsonl", "is no measurement of dflash plan"),
        (
            "--measurement a.jsonl --share-gpu",
            "--share-gpu: --measurement a.jsonl is there",
        ),
        ("--measurement a.jsonl/m", "--measurement a.jsonl/m: "),
        ("--measurement x", "is no measurement of dflash plan"),
        ("--price -1", "capture.price must be at least 0"),
        # the capture was measured, minutes for a real target, and then the training refused
        ("--last-mode none", "loss.kl is 1 and loss.tv 0, but store.last_mode = none"),
    ],
)
def test_a_plan_that_makes_no_sense_is_refused_before_anything_is_measured(
    type_line: Callable[..., Ended], monkeypatch: pytest.MonkeyPatch, options: str, reason: str
) -> None:
    monkeypatch.setenv("DFLASH_GPUS_AS_CPU", "1")
    _ready_file()
    ended = type_line(f"dflash plan --store new {options}")
    assert ended.code == 2
    assert reason in ended.err
    assert ended.calls == []


def test_a_measurement_that_fails_ends_the_plan_with_its_reason(
    type_line: Callable[..., Ended], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAILS", "capture.measure")
    _ready_file()
    ended = type_line("dflash plan --store new --gpus cpu")
    assert ended.code == 1
    assert "it did not work" in ended.err
    assert not list(Path().glob("dflash-plan-*"))


def test_a_plan_of_a_whole_store_takes_its_data_and_measures_no_answers(
    type_line: Callable[..., Ended], recorded_store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It asked for --data, and generated answers that the training has no use for."""
    monkeypatch.setenv("FAILS", "capture.measure")
    Path("b c.jsonl").write_text(ROW)
    (call,) = type_line(f"dflash plan --store {recorded_store} --gpus cpu").calls
    assert call["run"]["data"]["files"] == ["b c.jsonl"]
    assert call["run"]["target"]["id"] == load("toy", (), {}).target.id
    assert call["run"]["store"]["path"] == recorded_store
    assert call["extra"]["with_answers"] is False
    # one that is kept is used for other data as well
    line = f"dflash plan --store {recorded_store} --gpus cpu --measurement kept.json"
    assert type_line(line).calls[0]["extra"]["with_answers"] is True
    _ready_file()
    (call,) = type_line("dflash plan --store new --gpus cpu").calls
    assert call["extra"]["with_answers"] is True


def test_a_target_over_several_gpus_has_one_process_for_so_many(
    type_line: Callable[..., Ended], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DFLASH_GPUS_AS_CPU", "1")
    _ready_file()
    ended = type_line("dflash capture --gpus 0-3 --gpus-per-target 2")
    assert ended.code == 0, ended.err
    assert [one["place"]["world"] for one in ended.calls] == [1, 2, 2]
    assert [one["run"]["target"]["num_gpus"] for one in ended.calls] == [2, 2, 2]
    assert ended.calls[0]["extra"]["num_workers"] == 2
    ended = type_line("dflash capture --gpus 0-2 --gpus-per-target 2")
    assert ended.code == 2
    assert "CPU workers 0,1,2 are 3, which is no multiple" in ended.err
    assert ended.calls == []
