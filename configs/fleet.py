"""The variants of a sweep, one or more on each device at a time; one that fails stops no other."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from dflash_pipeline.configs import following, gpus, sweep, torchrun, training
from dflash_pipeline.configs.disk import write_whole
from dflash_pipeline.configs.errors import UsageError
from dflash_pipeline.configs.gpus import Devices
from dflash_pipeline.configs.launch import Beside, launch, noted_signals
from dflash_pipeline.configs.load import RUN_FILE
from dflash_pipeline.configs.screen import duration
from dflash_pipeline.configs.status import Status, read_status, status_path
from dflash_pipeline.configs.sweep import Variant

RESULT_FILE = "sweep.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How a variant ended; what it never told is None."""

    name: str
    state: str
    """`done`, `done before`, `failed`, `stopped`, or `not begun`."""
    device: str
    seconds: float
    steps: int | None
    loss: float | None
    """Of the last log line."""
    best_tau: float | None
    best_step: int | None
    error: str


class _NamedLines:
    """A variant's lines on the terminal that it shares with the others."""

    def __init__(self, name: str) -> None:
        self._name = name

    def isatty(self) -> bool:
        return False

    def write(self, text: str) -> int:
        return sys.stdout.write(f"[{self._name}] {text}")

    def flush(self) -> None:
        sys.stdout.flush()


def train_variants(
    variants: Sequence[Variant],
    out: str,
    devices: Devices,
    share: bool,
    resume: bool,
    per_device: int,
) -> tuple[str, int]:
    """Train every variant, `per_device` at a time on each device, and say how they ended.

    Returns the best one's folder, and a signal or 0.

    UsageError under torchrun or where another stage holds a device, ValueError names those that
    failed.
    """
    if torchrun.is_rank():
        raise UsageError("--sweep under torchrun: run the line itself, it starts a process each")
    with gpus.reserved(devices, "train", share):
        Path(out).mkdir(parents=True, exist_ok=True)
        click.echo(f"train: {len(variants)} variants -> {out} on {devices}")
        outcomes, signal = run_variants(
            training.ENTRY, variants, devices, Path(out), resume, per_device
        )
    for text in table(outcomes):
        click.echo(text)
    failed = [one.name for one in outcomes if one.state == "failed"]
    if failed and not signal:
        raise ValueError(
            f"{len(failed)} of {len(outcomes)} variants failed: {', '.join(failed)}; the errors "
            f"are above and in {out}/{RESULT_FILE}; to go on with them: {following.resuming(out)}"
        )
    best = max(outcomes, key=lambda one: one.best_tau or 0.0)
    return f"{out}/{best.name}", signal


def run_variants(
    entry: str,
    variants: Sequence[Variant],
    devices: Devices,
    out: Path,
    resume: bool,
    per_device: int = 1,
) -> tuple[list[Outcome], int]:
    """Run each variant on one of the devices, `per_device` of them on each, and write
    OUT/sweep.json.

    Returns their outcomes, in the file's order, and the number of the signal that ended it, or 0.
    """
    waiting, outcomes = deque(variants), dict[str, Outcome]()
    # the first of each device before the second of any
    places = devices.ids * per_device
    with noted_signals() as signals:
        beside = Beside(signals, min(len(places), len(variants)))

        def work(device_id: int) -> None:
            device = Devices(devices.kind, (device_id,))
            while not signals:
                try:
                    variant = waiting.popleft()
                except IndexError:
                    return
                try:
                    outcome = _run(entry, variant, device, resume, beside)
                except (OSError, ValueError) as error:
                    outcome = _outcome(variant, "failed", str(device), 0.0, str(error))
                outcomes[variant.name] = outcome

        with ThreadPoolExecutor(len(places)) as pool:
            for one in [pool.submit(work, device_id) for device_id in places]:
                one.result()
    ordered = [
        outcomes.get(one.name) or _outcome(one, "not begun", "", 0.0, "") for one in variants
    ]
    results = json.dumps([asdict(one) for one in ordered], indent=1) + "\n"
    write_whole(out / RESULT_FILE, results.encode())
    return ordered, signals[0] if signals else 0


def _run(entry: str, variant: Variant, device: Devices, resume: bool, beside: Beside) -> Outcome:
    out = Path(variant.run.train.out)
    logs = str(out / "logs")
    if resume and _state(logs) == "done":
        return _outcome(variant, "done before", str(device), 0.0, "")
    # one that was not begun when the sweep stopped, or failed before its first step
    extra = {"resume": resume and (out / RUN_FILE).is_file()}
    begin = time.monotonic()
    lines = _NamedLines(variant.name)
    lines.write(f"on {device} -> {out}\n")
    ended = list[Status]()
    code = launch(
        entry, variant.run, device, "train", logs, extra, lines, beside=beside, ended=ended
    )
    error = next((one.error for one in ended if one.error), f"exit code {code}")
    state = "done" if code == 0 else "stopped" if code >= 128 else "failed"
    seconds = time.monotonic() - begin
    return _outcome(variant, state, str(device), seconds, error if state == "failed" else "")


def check_done(variants: Sequence[Variant]) -> None:
    """Before a sweep goes on: what is done must be what is asked for now."""
    for variant in variants:
        if _state(f"{variant.run.train.out}/logs") == "done":
            sweep.check_same(variant)


def _state(logs: str) -> str:
    status = read_status(status_path(logs, "train", 0))
    return status.state if status else ""


def _outcome(variant: Variant, state: str, device: str, seconds: float, error: str) -> Outcome:
    lines = _metrics(Path(variant.run.train.out) / "metrics.jsonl")
    losses = [line for line in lines if "loss" in line]
    taus = [line for line in lines if "tau" in line]
    best: dict[str, Any] = max(taus, key=lambda line: line["tau"], default={})
    return Outcome(
        name=variant.name,
        state=state,
        device=device,
        seconds=seconds,
        steps=losses[-1]["step"] if losses else None,
        loss=losses[-1]["loss"] if losses else None,
        best_tau=best.get("tau"),
        best_step=best.get("step"),
        error=error,
    )


def _metrics(path: Path) -> list[dict[str, Any]]:
    found = []
    if path.is_file():
        for line in path.read_bytes().splitlines():
            # a killed process may have torn its last line
            with contextlib.suppress(ValueError):
                found.append(json.loads(line))
    return [line for line in found if isinstance(line, dict) and "step" in line]


def table(outcomes: Sequence[Outcome]) -> list[str]:
    """Columns of text, a line for each variant."""
    lines: list[tuple[str, ...]] = [
        ("variant", "state", "device", "time", "steps", "loss", "best tau", "at step")
    ]
    lines += [
        (
            one.name,
            one.state,
            one.device,
            duration(one.seconds),
            _shown(one.steps),
            _shown(one.loss),
            _shown(one.best_tau),
            _shown(one.best_step),
        )
        for one in outcomes
    ]
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]


def _shown(number: float | None) -> str:
    if number is None:
        return "-"
    return f"{number}" if isinstance(number, int) else f"{number:.3f}"
