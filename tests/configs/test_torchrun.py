"""Under torchrun a process is its rank: no launching, same logs, same exit codes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


def _rank(stages: str, function: str, logs: Path) -> subprocess.CompletedProcess[str]:
    code = (
        "import sys\n"
        "from dflash_pipeline.configs.torchrun import run_rank\n"
        "from dflash_pipeline.configs.schema import Run\n"
        f"sys.exit(run_rank('{stages}:{function}', Run(), 'cpu', 'train', {str(logs)!r}, {{}}))"
    )
    environment = {**os.environ, "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}
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
