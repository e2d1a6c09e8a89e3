"""Under torchrun a process is its rank: no launching, same logs, same exit codes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dflash_pipeline.configs.gpus import Devices, reserved


def _rank(
    stages: str, function: str, logs: Path, gpus: str = "cpu", **more: str
) -> subprocess.CompletedProcess[str]:
    code = (
        "import sys\n"
        "from dflash_pipeline.configs.torchrun import run_rank\n"
        "from dflash_pipeline.configs.schema import Run\n"
        f"sys.exit(run_rank('{stages}:{function}', Run(), '{gpus}', {'share' in more}, 'train', "
        f"{str(logs)!r}, {{}}))"
    )
    environment = {**os.environ, "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", **more}
    environment.setdefault("CUDA_VISIBLE_DEVICES", "")
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(("function", "code"), [("work", 0), ("refuse", 2)])
def test_a_rank_runs_here_and_keeps_its_log(
    function: str, code: int, stages: str, tmp_path: Path
) -> None:
    logs = tmp_path / "run" / "logs"
    ended = _rank(stages, function, logs)
    assert ended.returncode == code
    log = logs / "train-1.log"
    if code:
        assert ended.stderr == "error: no such model (rank 1)\n"
        assert not logs.parent.exists()
    else:
        assert ended.stderr == ""
        assert ended.stdout.startswith("[1] cpu")
        assert "printed by the stage" in log.read_text()


def test_a_rank_takes_its_own_gpu_alone_and_none_that_is_in_use(
    stages: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DFLASH_GPUS_AS_CPU", "1")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    logs = tmp_path / "run" / "logs"
    # what another rank holds is not in its way
    with reserved(Devices("cpu", (0,)), "capture", share=False):
        assert _rank(stages, "work", logs, "0-1").returncode == 0
    with reserved(Devices("cpu", (1,)), "capture", share=False):
        ended = _rank(stages, "work", logs, "0-1")
        assert ended.returncode != 0
        assert "UsageError: GPU 1 is in use by dflash capture" in ended.stderr
        assert _rank(stages, "work", logs, "0-1", share="1").returncode == 0
    ended = _rank(stages, "work", logs, "0")
    assert "started local rank 1, but there are only CPU worker 0: lower" in ended.stderr
