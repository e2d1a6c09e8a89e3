"""What a stage tells: lines for people, progress, status files, and metrics as JSON lines.

Rates are formed by the reader, from a sum and a count that are divided once.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from dflash_pipeline.configs.counts import Counts
from dflash_pipeline.configs.disk import writing
from dflash_pipeline.configs.place import Place
from dflash_pipeline.configs.screen import PLAIN_EVERY_S, WAITING_EVERY_S, progress_line
from dflash_pipeline.configs.status import log_path, new_status, write_status

# once a second on screen and disk is as often as anyone looks; a step may take a millisecond
PROGRESS_EVERY_S = 1.0
_STAMP = "%Y-%m-%d %H:%M:%S"


class RunLog:
    """The one voice of a process; every method may be called from any thread.

    Under the launcher lines go through a pipe to the parent, which renders them; elsewhere they
    are printed plainly. Lines said are kept in the process's log file as well.
    """

    def __init__(self, place: Place) -> None:
        self._place = place
        self._lock = threading.Lock()
        self._status = new_status(place.stage, place.number, place.device)
        self._told_at = -PROGRESS_EVERY_S
        self._printed_at = -PLAIN_EVERY_S
        self._said = ""
        self._wait_told_at, self._wait_printed_at = -PROGRESS_EVERY_S, -WAITING_EVERY_S
        # set by the launcher for its child, and valid in that process alone
        descriptor = os.environ.get("DFLASH_PROGRESS_FD", "")
        self._pipe = int(descriptor) if descriptor else None
        self._is_alone = False
        Path(place.log_dir).mkdir(parents=True, exist_ok=True)
        write_status(place.log_dir, self._status)

    def say(self, text: str) -> None:
        """One line for the person at the terminal, also kept in the log."""
        with self._lock:
            self._status.text = self._said = text
            write_status(self._place.log_dir, self._status)
            self._keep(f"{time.strftime(_STAMP)} {text}")
            if self._pipe is None:
                self._print(f"[{self._place.rank}] {text}" if self._place.world > 1 else text)
            else:
                self._send({"say": text})

    def say_once(self, text: str) -> None:
        """What every process of the stage would say: said by the first, noted by the others."""
        if self._place.rank == 0:
            self.say(text)
        else:
            self.note(text)

    def note(self, text: str) -> None:
        """One line for the log file alone."""
        with self._lock:
            self._keep(f"{time.strftime(_STAMP)} {text}")

    def state(self, state: str) -> None:
        """`running`, `waiting`, ...: what `dflash status` shows."""
        with self._lock:
            self._status.state = state
            write_status(self._place.log_dir, self._status)

    def waiting(self, text: str) -> None:
        """What the stage waits for, told as often as it is looked at; throttled like progress."""
        with self._lock:
            self._status.state, self._status.text = "waiting", text
            now = time.monotonic()
            if now - self._wait_told_at < PROGRESS_EVERY_S:
                return
            self._wait_told_at = now
            write_status(self._place.log_dir, self._status)
            if self._pipe is not None:
                self._send({"waiting": text})
            elif self._place.rank == 0 and now - self._wait_printed_at >= WAITING_EVERY_S:
                self._wait_printed_at = now
                self._print(f"{self._place.stage}: {text}")

    def progress(self, done: float, total: float, unit: str, **numbers: float) -> None:
        """How far the whole stage is, in `unit`; total 0: unknown. Throttled, but for the last one.

        `numbers` are shown beside it (name=value) and stand in the status file.
        """
        self._progress(done, total, unit, numbers, {}, is_part=False)

    def part(self, done: float, total: float, unit: str, **numbers: float) -> None:
        """As `progress`, of this process's own part alone; the launcher adds up all of them."""
        self._progress(done, total, unit, numbers, {}, is_part=True)

    def counted(self, done: float, total: float, unit: str, counts: Counts) -> None:
        """As `progress`, with what this process has done; the launcher adds up all of them."""
        self._progress(done, total, unit, counts.numbers(), asdict(counts), is_part=False)

    def _progress(
        self,
        done: float,
        total: float,
        unit: str,
        numbers: Mapping[str, float],
        counts: Mapping[str, float],
        *,
        is_part: bool,
    ) -> None:
        with self._lock:
            status, now = self._status, time.time()
            if status.unit != unit or status.begin_time == 0.0 or done < status.begin_done:
                status.begin_done, status.begin_time = done, now
            # what was waited for is over
            status.state, status.text = "running", self._said
            status.done, status.total, status.unit = done, total, unit
            status.numbers, status.counts = dict(numbers), dict(counts)
            is_last = total > 0 and done >= total
            if not is_last and time.monotonic() - self._told_at < PROGRESS_EVERY_S:
                return
            self._told_at = time.monotonic()
            write_status(self._place.log_dir, status)
            message = {
                "done": done,
                "total": total,
                "unit": unit,
                "rate": status.rate,
                "numbers": status.numbers,
                "counts": status.counts,
                "is_part": is_part,
            }
            if self._pipe is not None:
                self._send(message)
            elif self._place.rank == 0 and (
                is_last or self._told_at - self._printed_at >= PLAIN_EVERY_S
            ):
                # the others tell the same
                self._printed_at = self._told_at
                self._print(progress_line(self._place.stage, message))

    def metrics(self, record: Mapping[str, object], path: Path | None = None) -> None:
        """Append one JSON line; without a path to `metrics.jsonl` beside the log directory."""
        if path is None:
            path = Path(self._place.log_dir).parent / "metrics.jsonl"
        with self._lock:
            _append(path, json.dumps(dict(record)))

    def fail(self, text: str) -> None:
        """What went wrong, where the process is about to be ended without an exception."""
        with self._lock:
            self._keep(f"error: {text}")
            self._status.state, self._status.error = "failed", text
            write_status(self._place.log_dir, self._status)
            if self._pipe is None:
                self._print(f"error: {text}")
            else:
                self._send({"error": text})

    def _keep(self, line: str) -> None:
        _append(log_path(self._place.log_dir, self._place.stage, self._place.number), line)

    def _print(self, line: str) -> None:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()

    def _send(self, message: Mapping[str, object]) -> None:
        if self._pipe is None or self._is_alone:
            return
        try:
            os.write(self._pipe, (json.dumps(message) + "\n").encode())
        except OSError:
            # the parent is gone; this process is about to be told so and to end
            self._is_alone = True


def _append(path: Path, line: str) -> None:
    with writing(path), path.open("a") as file:
        file.write(line + "\n")
