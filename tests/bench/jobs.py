"""Commands of `dflash` that run beside one another, and what they have left behind to be read."""

from __future__ import annotations

import json
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dflash_pipeline.configs import counts
from dflash_pipeline.configs.status import find_statuses
from dflash_pipeline.store import paths

# log lines of a run whose steps still fill buffers and caches
SKIPPED_LINES = 2


class Job:
    """One command in a session of its own; what it prints goes to two files in `folder`."""

    def __init__(self, folder: Path, *words: str) -> None:
        self.line = "dflash " + " ".join(words)
        self._begin = time.perf_counter()
        self._out, self._errors = (
            folder / f"{words[0]}-{time.time_ns()}.{kind}" for kind in ("out", "err")
        )
        with self._out.open("wb") as out, self._errors.open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "dflash_pipeline.cli", *words],
                cwd=folder,
                stdout=out,
                stderr=errors,
                start_new_session=True,
            )
        self.seconds = 0.0
        """From its start to its end, once `wait` has seen that."""

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def wait(self, limit_s: float) -> int:
        """Its exit code; -9 where it was not over after `limit_s` seconds."""
        try:
            self._process.wait(limit_s)
        except subprocess.TimeoutExpired:
            self.kill()
        self.seconds = round(time.perf_counter() - self._begin, 1)
        return self._process.returncode

    def terminate(self) -> None:
        self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """-9 to the command; its processes see that it is gone."""
        self._process.kill()
        self._process.wait()

    def text(self) -> str:
        """What it said, errors last."""
        return "".join(one.read_text(errors="replace") for one in (self._out, self._errors))

    def last_line(self) -> str:
        """Its error where it has one, else what it said last."""
        lines = self.text().splitlines()
        errors = [line for line in lines if line.startswith("error")]
        return (errors or lines or [""])[-1]

    def printed_json(self) -> Any:
        """What a command with --json has printed."""
        return json.loads(self._out.read_text())


def wait_until(is_over: Callable[[], bool], limit_s: float) -> bool:
    """Looks ten times a second; False where it was not over in time."""
    end = time.monotonic() + limit_s
    while not is_over():
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True


def sealed(store: Path) -> bool:
    """Whether every shard of the store is committed."""
    return (store / paths.SEALED_FILE).exists()


def pids(directory: Path, stage: str, rank: int | None) -> list[int]:
    """Living processes of a stage by their status files; of one rank, or of all."""
    return [
        one.pid
        for one in find_statuses(directory)
        if one.stage == stage and rank in (None, one.number) and one.is_alive
    ]


def capture_figures(store: Path) -> dict[str, Any]:
    """What the workers of a capture have counted, added up."""
    statuses = [one for one in find_statuses(store) if one.stage == "capture" and one.counts]
    together = counts.total(counts.of(one.counts) for one in statuses)
    return {"workers": len(statuses), "tokens_per_s": together.tokens_per_s} | together.numbers()


def train_figures(run: Path, since_step: int = 0) -> dict[str, Any]:
    """Medians over a run's log lines after the first ones; all losses."""
    told = [
        record
        for line in (run / "metrics.jsonl").read_text().splitlines()
        if "loss" in (record := json.loads(line)) and record["step"] > since_step
    ]
    steady = told[SKIPPED_LINES:] or told

    def median(name: str) -> float:
        return statistics.median(record[name] for record in steady) if steady else 0.0

    return {
        "steps": told[-1]["step"] if told else since_step,
        "draft_rows_per_s": median("draft_rows_per_s"),
        "tokens_per_s": median("tokens_per_s"),
        "wait_share": median("wait_share"),
        "memory_gib": median("memory_gib"),
        "losses": [record["loss"] for record in told],
    }
