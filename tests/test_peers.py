"""The benchmark of speculators' step: what it does without the package, and around its process."""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from studies.theirs import THEIR_VERSION, installed_version
from timing import median_ms, peak_gib

# stands for their_step.py: what it was told and where it ran, and a result
STEP = """
import json, os, sys
task = json.load(open(sys.argv[1]))
found = {key: os.environ.get(key) for key in ("TORCHDYNAMO_DISABLE", "PYTHONPATH")}
found |= {key: "x" for key in ("device", "torch", "transformers", "attention", "loss")}
found |= {"task": task, "trained_parameters": NUM}
found["figures"] = {"both": {"ms": 512.0, "peak_gib": 1.5}}
json.dump(found, open(task["result"], "w"))
"""


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "bench"))
    import peers

    return peers


def _words(monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    told = ["peers.py", "--their-python", sys.executable, "--tiny", *words]
    monkeypatch.setattr(sys, "argv", told)


@pytest.mark.parametrize(("version", "told"), [("", "is not"), ("0.8.0", "0.8.0 is")])
def test_without_the_package_it_says_so_and_ends_well(
    version: str,
    told: str,
    peers: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    _words(monkeypatch)
    monkeypatch.setenv("OUT", str(tmp_path))
    monkeypatch.setattr(peers, "installed_version", lambda _python: version)
    assert peers.main() == 0
    said = capsys.readouterr().out
    assert said.startswith(f"skipped: speculators {told} installed in {sys.executable};")
    assert f"pip install speculators=={THEIR_VERSION}" in said
    assert not list(tmp_path.iterdir())


def test_the_version_is_the_other_interpreters(tmp_path: Path) -> None:
    other = tmp_path / "python"
    other.write_text("#!/bin/sh\necho 0.1.2\n")
    assert installed_version(str(other)) == ""
    other.chmod(0o755)
    assert installed_version(str(other)) == "0.1.2"
    assert installed_version(str(tmp_path / "nowhere")) == ""


def test_each_way_has_its_own_environment_and_the_sizes_of_step(
    peers: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    num = peers.num_parameters(peers.TINY_SIZES.drafter)
    script = tmp_path / "step.py"
    script.write_text(STEP.replace("NUM", str(num)))
    monkeypatch.setattr(peers, "THEIR_STEP", script)
    monkeypatch.setattr(peers, "installed_version", lambda _python: THEIR_VERSION)
    monkeypatch.setenv("OUT", str(tmp_path))
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    _words(monkeypatch, "--compiled")
    assert peers.main() == 0
    ways = json.loads((tmp_path / "peers.json").read_text())["ways"]
    assert {name: found["TORCHDYNAMO_DISABLE"] for name, found in ways.items()} == {
        "dynamo off": "1",
        "compiled": None,
    }
    for name, found in ways.items():
        assert found["PYTHONPATH"] is None
        assert found["task"]["compiled"] == (name == "compiled")
        assert found["task"]["num_anchors"] == 16
        assert found["task"]["shape"]["block_size"] == 16
        # 16 blocks of 16 rows in 512 ms
        assert found["figures"]["both"]["ms_per_1000_rows"] == 2000.0
    assert "ms 512, ms_per_1000_rows 2000, peak_gib 1.5" in capsys.readouterr().out


def test_a_drafter_of_another_size_is_not_compared(
    peers: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "step.py"
    sizes = peers.TINY_SIZES
    num = peers.num_parameters(sizes.drafter)
    script.write_text(STEP.replace("NUM", str(num)))
    monkeypatch.setattr(peers, "THEIR_STEP", script)
    wider = replace(sizes, drafter=replace(sizes.drafter, intermediate_size=128))
    found = peers.timed(sys.executable, wider, False, 60.0)
    assert found["error"].startswith(f"it trains {num:,} parameters, ours ")
    assert "figures" not in found


def test_a_failure_is_told_with_its_last_line_and_ends_in_1(
    peers: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    script = tmp_path / "step.py"
    script.write_text("raise RuntimeError('no such operator')")
    monkeypatch.setattr(peers, "THEIR_STEP", script)
    monkeypatch.setattr(peers, "installed_version", lambda _python: THEIR_VERSION)
    _words(monkeypatch)
    assert peers.main() == 1
    said = capsys.readouterr()
    assert "error ended with 1: RuntimeError: no such operator" in said.out
    assert "Traceback" in said.err


def test_what_takes_too_long_is_ended_with_all_that_it_started(
    peers: ModuleType, tmp_path: Path
) -> None:
    mark = tmp_path / "child"
    command = ["sh", "-c", f"sleep 300 & echo $! > {mark}; wait"]
    assert peers.run_within(command, dict(os.environ), 1.0) == "did not finish within 1 s"
    child = int(mark.read_text())
    limit = time.monotonic() + 20.0
    while _is_running(child):
        assert time.monotonic() < limit, "what it started runs on"
        time.sleep(0.01)


def _is_running(process_id: int) -> bool:
    try:
        # a killed process that nobody has waited for is a zombie
        text = Path(f"/proc/{process_id}/stat").read_text()
    except FileNotFoundError:
        return False
    return text.rpartition(")")[2].split()[0] != "Z"


def test_the_clock_counts_what_comes_after_three_calls_and_rotates() -> None:
    turns: list[int] = []
    assert median_ms(turns.append, 4, is_cuda=False) < 1000.0
    assert turns == [0, 1, 2, 0, 1, 2, 3]
    assert peak_gib(turns.append, is_cuda=False) == 0.0


def test_the_readme_says_whether_it_was_run() -> None:
    root = Path(__file__).parents[1]
    text = " ".join((root / "README.md").read_text(encoding="utf-8").split())
    assert "`python tests/bench/peers.py --their-python PYTHON`" in text
    # once there are results, their figures must stand there instead
    assert (root / "tests/bench/peers.json").exists() != ("not yet run on a GPU" in text)
