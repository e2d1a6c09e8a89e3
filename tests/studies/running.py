"""Commands of the product under a limit of time: several at once, stopped cleanly, gone on with."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
# what a command is given to end after it was told to: a little more than the launcher gives
GRACE_S = 40.0
# of a call's time: what no call can do in less is begun by one that has so much of it left
_FRESH = 0.9
_POLL_S = 0.2
# prctl(2): the signal that this process gets when the one that started it ends
_PR_SET_PDEATHSIG = 1


class OutOfTime(Exception):
    """The limit came before the work was done; its message says what is left."""


class Deadline:
    """When a stage must have ended."""

    def __init__(self, minutes: float, begin: float | None = None) -> None:
        """begin: since when they count, on the monotonic clock; None: from now."""
        self._whole_s = 60 * minutes - GRACE_S
        self._end = (time.monotonic() if begin is None else begin) + 60 * minutes

    @property
    def left_s(self) -> float:
        """Until the last moment at which commands are told to stop; below 0: too late to begin."""
        return self._end - GRACE_S - time.monotonic()

    def end_now(self) -> None:
        """Let whatever runs beside the caller stop, as it would at the end of the time."""
        self._end = time.monotonic()

    def check(self, left: str) -> None:
        """OutOfTime, saying that `left` is left, when nothing new should begin."""
        if self.left_s <= 0:
            raise OutOfTime(left)

    def check_fits(self, left: str, needed_s: float) -> None:
        """The same of work that cannot be gone on with once it is cut off, and takes so long."""
        self.check(left)
        if self.left_s < min(needed_s, _FRESH * self._whole_s):
            raise OutOfTime(f"{left} (about {needed_s:.0f} s, {self.left_s:.0f} are left)")

    @contextmanager
    def interrupts(self) -> Iterator[None]:
        """This process gets SIGINT at the deadline, for work that notes signals by itself.

        One that comes before that work notes signals is sent again; one that comes after it is
        dropped. Of the main thread.
        """
        is_over, is_due = threading.Event(), threading.Event()
        is_due.set()

        def watch() -> None:
            while not is_over.wait(_POLL_S):
                if self.left_s <= 0 and is_due.is_set():
                    is_due.clear()
                    os.kill(os.getpid(), signal.SIGINT)

        before = signal.signal(signal.SIGINT, lambda *_: is_due.set())
        watcher = threading.Thread(target=watch, name="deadline", daemon=True)
        watcher.start()
        try:
            yield
        finally:
            is_over.set()
            watcher.join()
            signal.signal(signal.SIGINT, before)


def environment() -> dict[str, str]:
    """That of this process, with the study's own modules importable by processes it starts."""
    found = dict(os.environ)
    parts = [str(TESTS), *filter(None, found.get("PYTHONPATH", "").split(os.pathsep))]
    found["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(parts))
    # the study has configurations of its own
    found.pop("DFLASH_CONFIG", None)
    # threads that spin while they wait take the cores from the other processes
    found.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    return found


def end_with_parent() -> None:
    """This process gets SIGINT when the one that started it ends, however that ends: a session of
    its own would go on, and write what the next call of the study writes."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGINT)


@dataclass(frozen=True, slots=True)
class Job:
    """One process: `python ARGUMENTS` in `folder`, its output in a log."""

    name: str
    arguments: tuple[str, ...]
    extra_environment: Mapping[str, str]

    @classmethod
    def dflash(cls, name: str, words: Sequence[str]) -> Job:
        """A command of the product."""
        code = "from studies.running import end_with_parent; end_with_parent(); "
        code += "from dflash_pipeline.cli import main; main()"
        return cls(name, ("-P", "-c", code, *words), {})


class Started:
    """A job that runs."""

    def __init__(self, job: Job, folder: Path) -> None:
        self.job, self._log = job, folder / "logs" / f"{job.name}.log"
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, *job.arguments],
                cwd=folder,
                env=environment() | dict(job.extra_environment),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def code(self) -> int | None:
        """Exit code; None: it runs."""
        return self._process.poll()

    def stop(self) -> None:
        """Tell it to stop, and end it where it does not. A job that has ended is left alone."""
        if self.code is None:
            self._process.send_signal(signal.SIGINT)
            try:
                self._process.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()

    def check(self) -> None:
        """RuntimeError with the end of its log where it failed."""
        if error := self.error:
            raise RuntimeError(error)

    @property
    def error(self) -> str:
        """Why it failed: the end of its log; empty where it did not."""
        if not self.code:
            return ""
        tail = self._log.read_text(encoding="utf-8", errors="replace").splitlines()[-12:]
        return f"{self.job.name} ended with {self.code}:\n" + "\n".join(tail)


def run_jobs(jobs: Sequence[Job], at_once: int, folder: Path, deadline: Deadline) -> list[str]:
    """Run them, `at_once` at a time; the names of those that were not done in time.

    What is done leaves folder/done/NAME and is not run again. RuntimeError for those that fail,
    once all others have ended: they are done, or out of time.
    """
    done = folder / "done"
    done.mkdir(parents=True, exist_ok=True)
    waiting = deque(job for job in jobs if not (done / job.name).exists())
    running, errors = list[Started](), list[str]()
    try:
        while waiting or running:
            while waiting and len(running) < at_once and deadline.left_s > 0:
                running.append(Started(waiting.popleft(), folder))
            if deadline.left_s <= 0:
                break
            for one in [one for one in running if one.code is not None]:
                running.remove(one)
                if error := one.error:
                    errors.append(error)
                    print(f"  {error}", flush=True)
                    continue
                (done / one.job.name).touch()
                print(f"  {one.job.name} done", flush=True)
            time.sleep(_POLL_S)
    finally:
        stop_all(running)
    if errors:
        raise RuntimeError("\n".join(errors))
    return [one.job.name for one in running] + [job.name for job in waiting]


def stop_all(running: Sequence[Started]) -> None:
    """All at the same time: each may take the whole grace."""
    threads = [threading.Thread(target=one.stop) for one in running]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
