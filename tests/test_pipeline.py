"""The whole chain with its real stages: the user's two lines to the letter, then what follows."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dflash_pipeline.capture.toytext import conversations
from dflash_pipeline.store import open_store

# GPU numbers are mapped to CPU workers: the lines stay as a user types them
ENVIRONMENT = {**os.environ, "DFLASH_GPUS_AS_CPU": "1"}
CONFIG = """
preset = "toy"

[data]
files = ["conversations.jsonl"]
heldout = 0.1

[store]
path = "hs"
shard_bytes = 250000

[train]
max_steps = 4
epochs = 1
"""
NUM_SAMPLES = 60


def _start(folder: Path, line: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "dflash_pipeline.cli", *line.split()[1:]]
    return subprocess.Popen(
        command,
        cwd=folder,
        env=ENVIRONMENT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def _end(process: subprocess.Popen[str]) -> str:
    output, _ = process.communicate(timeout=110)
    assert process.returncode == 0, output
    return output


def _run(folder: Path, line: str) -> str:
    return _end(_start(folder, line))


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    """(directory, what capture printed, what train printed) of the two lines, side by side."""
    folder = tmp_path_factory.mktemp("pipeline")
    texts = conversations("math", "train", 0)
    rows = [{"id": f"row-{i}", "messages": next(texts)} for i in range(NUM_SAMPLES)]
    (folder / "conversations.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "dflash.toml").write_text(CONFIG)
    capture = _start(folder, "dflash capture --gpus 0-4")
    # the second line is typed once the first is under way
    while not (folder / "hs.logs").exists():
        assert capture.poll() is None
        time.sleep(0.1)
    train = _start(folder, "dflash train --gpus 5-7 --store hs")
    return folder, _end(capture), _end(train)


def test_the_two_lines_capture_every_sample_and_train_on_them(
    both: tuple[Path, str, str],
) -> None:
    folder, captured, trained = both
    store = open_store(folder / "hs")
    assert store.is_sealed
    assert int(store.readable_N.sum()) == NUM_SAMPLES
    assert "next: dflash train --store hs" in captured
    assert "following it" in trained
    assert re.search(r"next: dflash eval --drafter runs/hs-", trained)


def test_what_they_made_is_whole_and_goes_on_to_be_scored_and_exported(
    both: tuple[Path, str, str],
) -> None:
    folder, _, _ = both
    assert re.search(r"(\d+) of \1 shards committed", _run(folder, "dflash verify --deep hs"))
    (run_directory,) = (folder / "runs").iterdir()
    _run(folder, f"dflash eval --drafter {run_directory} --store hs --gpus cpu --json scores.json")
    scores = json.loads((folder / "scores.json").read_text())
    assert scores["mode"] == "replay"
    assert scores["arms"]["trained"]["all"]["tau"] >= 1
    _run(folder, f"dflash export {run_directory} --out served --layout zlab")
    config = json.loads((folder / "served" / "config.json").read_text())
    assert config["architectures"] == ["DFlashDraftModel"]
    assert config["dflash_config"]["target_layer_ids"] == [0, 1, 2, 3]


def test_each_command_s_last_line_is_the_next_command(tmp_path: Path) -> None:
    prompts = conversations("math", "train", 1)
    rows = [{"id": f"row-{i}", "messages": next(prompts)[:1]} for i in range(24)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    line = (
        "dflash generate --config toy --data prompts.jsonl --out answers.jsonl --max-new-tokens 12 "
        "--set data.heldout=0.3 --set train.max_steps=2"
    )
    typed = []
    while line.startswith("dflash "):
        typed.append(line.split()[1])
        *_, last = _run(tmp_path, line).strip().splitlines()
        line = last.removeprefix("next: ")
    assert typed == ["generate", "capture", "train", "eval", "export"]
    assert line.strip().startswith("python -m sglang.launch_server --model-path TARGET")
