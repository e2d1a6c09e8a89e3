"""One process a device: start them, show what they say, end the rest when the first one fails.

The child is a fresh interpreter that imports its stage only after it sees its own GPU alone; this
process never loads what the stage loads.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from types import FrameType
from typing import BinaryIO

from dflash_pipeline.configs import refusal
from dflash_pipeline.configs.child import BROKEN_PIPE, GRACE_S
from dflash_pipeline.configs.errors import UsageError
from dflash_pipeline.configs.gpus import Devices, device_name
from dflash_pipeline.configs.load import to_dict
from dflash_pipeline.configs.numbers import claimed, forget_ended
from dflash_pipeline.configs.place import Place
from dflash_pipeline.configs.schema import Run
from dflash_pipeline.configs.screen import Lines, Screen
from dflash_pipeline.configs.status import (
    Status,
    log_path,
    new_status,
    read_status,
    status_path,
    write_status,
)

_CHILD = "from dflash_pipeline.configs.child import main; main()"


def launch(
    entry: str,
    run: Run,
    devices: Devices,
    stage: str,
    log_dir: str,
    extra: Mapping[str, object],
    lines: Lines | None = None,
    sees_gpus: bool = False,
    beside: Beside | None = None,
    per_process: int = 1,
    ended: list[Status] | None = None,
    lag_s: float = math.inf,
) -> int:
    """Run `entry` ("module:function") once per device and wait.

    lines: where to show what they say; None: stdout. sees_gpus: a CPU process that itself runs
    commands on GPUs keeps them visible. beside: this is one of several launches in threads.
    per_process: devices that each process sees; all are shared out, or UsageError. ended: takes
    the last status of each process, in the order of their ranks. lag_s: of processes that share
    work which is whole once one of them has ended well, how long the others may take to end then;
    those that hang are killed and named, which is no failure.
    Returns 0, 2 when a process refused its task, 1 when one failed, 128 + n after signal n; 141
    when nobody reads their output any longer. A refused task leaves no trace, but in a sweep.
    The function is called as `function(run, place, extra)`; `extra` is plain data.
    """
    groups = grouped(devices, per_process)
    screen = Screen(lines or sys.stdout, stage, len(groups))
    rendezvous = f"tcp://127.0.0.1:{_free_port()}"
    before = refusal.before(log_dir, stage)
    own = noted_signals() if beside is None else contextlib.nullcontext(beside.signals)
    num_sharing = len(groups) * (1 if beside is None else beside.num_launches)
    with claimed(log_dir, stage, len(groups)) as logs, own as signals:
        forget_ended(log_dir, stage)
        for number in logs:
            # a trainer that is started now must see that a capture is at work
            write_status(log_dir, new_status(stage, number, devices.kind))
        places = [
            place_of(
                devices.kind, len(groups), rank, stage, log_dir, number, rendezvous, num_sharing
            )
            for rank, number in enumerate(logs)
        ]
        children: list[_Child] = []
        with selectors.DefaultSelector() as selector:
            try:
                for group, place in zip(groups, places, strict=True):
                    log = logs[place.number]
                    children.append(_Child(entry, run, group, place, extra, sees_gpus, log))
                    selector.register(children[-1].progress, selectors.EVENT_READ, children[-1])
                failed = _watch(children, selector, screen, signals, lag_s, beside)
            finally:
                for child in children:
                    child.kill()
                screen.close()
        if ended is not None:
            found = (read_status(status_path(log_dir, stage, number)) for number in logs)
            ended += [status for status in found if status is not None]
        code = _exit_code([child.code for child in children], signals)
        if code == 1 and failed is not None and failed.is_ended_from_outside:
            code = Killed(code)
        # a sweep reads there why a variant was refused
        if code == 2 and beside is None:
            before.restore(logs)
    return code


class Killed(int):
    """The exit code of a launch that failed because somebody else, or the kernel, ended one of its
    processes: the same line may well go on."""


def _exit_code(codes: Sequence[int], signals: Sequence[int]) -> int:
    """Of all processes together, as `launch` returns it."""
    if signals:
        return 128 + signals[0]
    if 2 in codes:
        return 2
    return BROKEN_PIPE if BROKEN_PIPE in codes else int(any(codes))


@dataclass(frozen=True, slots=True)
class Beside:
    """What launches share that run beside one another, each in a thread of its own."""

    signals: list[int]
    """Of `noted_signals`, in the main thread."""
    num_launches: int
    """How many share the machine's cores."""
    failed: list[int] | None = None
    """Exit codes of those that failed, where the first failure ends the others; None: it does
    not."""
    told: list[int] = field(default_factory=list)
    """The signal, once one of them has said that they stop."""


def grouped(devices: Devices, per_process: int) -> list[tuple[int, ...]]:
    """The devices of each process, in order."""
    ids = devices.ids
    if len(ids) % per_process:
        raise UsageError(
            f"--gpus-per-target {per_process}: {devices} are {len(ids)}, which is no multiple of it"
        )
    return [ids[begin : begin + per_process] for begin in range(0, len(ids), per_process)]


def place_of(
    kind: str,
    world: int,
    rank: int,
    stage: str,
    log_dir: str,
    number: int,
    rendezvous: str,
    num_sharing: int,
) -> Place:
    """Where the process of this rank runs; its CPU threads: an even share of the machine's cores.

    num_sharing: processes that share them.
    """
    num_cores = len(os.sched_getaffinity(0))
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    even = max(1, num_cores // num_sharing)
    threads = max(1, int(wanted)) if wanted.isdecimal() else even
    return Place(
        rank=rank,
        world=world,
        device="cuda:0" if kind == "cuda" else "cpu",
        kind=kind,
        log_dir=log_dir,
        stage=stage,
        number=number,
        rendezvous=rendezvous,
        threads=threads,
    )


class _Child:
    """One process and the pipe that it reports through."""

    def __init__(
        self,
        entry: str,
        run: Run,
        ids: tuple[int, ...],
        place: Place,
        extra: Mapping[str, object],
        sees_gpus: bool,
        log: BinaryIO,
    ) -> None:
        self.place = place
        self.error = ""
        self.is_left_behind = False
        """It hung when the work of all was done."""
        self._unread = b""
        self.progress, write_end = os.pipe()
        os.set_blocking(self.progress, False)
        environment = dict(os.environ)
        environment["DFLASH_PROGRESS_FD"] = str(write_end)
        environment["OMP_NUM_THREADS"] = str(place.threads)
        # several ranks on one host talk over the loopback, whatever the host's name resolves to
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
        if place.kind == "cuda":
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(device_name, ids))
        elif not sees_gpus:
            environment["CUDA_VISIBLE_DEVICES"] = ""
        self._process = subprocess.Popen(
            # -P: a folder of the working directory must not shadow a package
            [sys.executable, "-P", "-c", _CHILD, f"{place.stage}-{place.number}"],
            stdin=subprocess.PIPE,
            stderr=log,
            env=environment,
            pass_fds=(write_end,),
            # a terminal's Ctrl-C goes to this process, which tells the children once
            start_new_session=True,
        )
        os.close(write_end)
        job = {
            "entry": entry,
            "run": to_dict(run),
            "place": asdict(place),
            "extra": dict(extra),
        }
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            # left open: its end tells the child that this process is gone
            self._process.stdin.write(json.dumps(job).encode() + b"\n")
            self._process.stdin.flush()

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    @property
    def code(self) -> int:
        """Exit code; negative: ended by that signal."""
        return 0 if self.is_left_behind else self._process.wait()

    @property
    def is_ended_from_outside(self) -> bool:
        """Whether a signal ended it that comes from others, and not from its own faults."""
        return not self.error and self.code in (-signal.SIGKILL, 128 + signal.SIGTERM)

    def stop(self) -> None:
        if self.is_running:
            self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it now, with everything it started, and give its pipes back."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        if self.progress >= 0:
            os.close(self.progress)
            self.progress = -1
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()

    def read(self, screen: Screen) -> bool:
        """Show what has arrived; False once the child has closed its end."""
        while True:
            try:
                data = os.read(self.progress, 1 << 16)
            except BlockingIOError:
                return True
            if not data:
                return False
            *whole, self._unread = (self._unread + data).split(b"\n")
            for line in whole:
                message = json.loads(line)
                if "error" in message:
                    self.error = message["error"]
                elif "say" in message:
                    screen.say(self.place.rank, message["say"])
                elif "waiting" in message:
                    screen.waiting(message["waiting"])
                else:
                    screen.progress(self.place.rank, message)


def _watch(
    children: list[_Child],
    selector: selectors.BaseSelector,
    screen: Screen,
    signals: list[int],
    lag_s: float,
    beside: Beside | None,
) -> _Child | None:
    """Until every child has ended; sees to it that they do after a failure or a signal, and `lag_s`
    after the first that ended well. The first that failed, whose error is said; None: none did."""
    # of other launches that are of use only with this one
    elsewhere = [] if beside is None or beside.failed is None else beside.failed
    told = [] if beside is None else beside.told
    failed: _Child | None = None
    deadline = done_at = math.inf
    while any(child.is_running for child in children):
        for key, _ in selector.select(timeout=0.1):
            child: _Child = key.data
            if not child.read(screen):
                selector.unregister(child.progress)
        over = [child for child in children if not child.is_running]
        if failed is None:
            failed = _first_failed(over, signals, elsewhere)
        if over and failed is None:
            done_at = min(done_at, time.monotonic())
        if time.monotonic() > done_at + lag_s and failed is None and not signals:
            _leave_behind(children, lag_s, screen)
        if (failed is not None or signals or elsewhere) and deadline == math.inf:
            deadline = time.monotonic() + GRACE_S
            if signals and not told and any(child.is_running for child in children):
                told.append(signals[0])
                name = signal.Signals(signals[0]).name
                screen.note(f"{name}: stopping, up to {GRACE_S:.0f} s (again: at once)")
            for child in children:
                child.stop()
        if len(signals) > 1 or time.monotonic() > deadline:
            for child in children:
                child.kill()
    for child in children:
        if child.progress >= 0:
            child.read(screen)
    if failed is None:
        failed = _first_failed(children, signals, elsewhere)
    if failed is not None:
        _explain(failed, screen)
    return failed


def _first_failed(
    over: Sequence[_Child], signals: Sequence[int], elsewhere: list[int]
) -> _Child | None:
    """The first that failed, its exit code then told elsewhere; None where there is none, or all
    of them were told to end."""
    if signals or elsewhere:
        return None
    failed = next((one for one in over if one.code), None)
    if failed is not None:
        elsewhere.append(_exit_code([failed.code], signals))
    return failed


def _leave_behind(children: list[_Child], lag_s: float, screen: Screen) -> None:
    for child in children:
        if child.is_running:
            place = child.place
            log = log_path(place.log_dir, place.stage, place.number)
            screen.note(
                f"{place.stage}-{place.number} has not ended {lag_s:g} s after another had found "
                f"all work done: it hangs and was killed; nothing is missing (log: {log})"
            )
            child.is_left_behind = True
            child.kill()


def _explain(child: _Child, screen: Screen) -> None:
    place, text = child.place, child.error
    if child.code == BROKEN_PIPE:
        return
    if not text and child.code < 0:
        name = signal.Signals(-child.code).name
        text = f"the process was ended by {name}"
        if -child.code == signal.SIGKILL:
            text += ", as the kernel does when memory runs out"
    elif not text and child.code > 128:
        text = f"the process was told to stop by {signal.Signals(child.code - 128).name}"
    log = log_path(place.log_dir, place.stage, place.number)
    who = f"rank {place.rank}, " if place.world > 1 else ""
    text = text or f"exit code {child.code}"
    screen.close()
    # a refusal says all there is to know; its log goes
    where = "" if child.code == 2 else f" ({who}log: {log})"
    sys.stderr.write(f"error: {text}{where}\n")
    sys.stderr.flush()


@contextlib.contextmanager
def noted_signals() -> Iterator[list[int]]:
    """Ctrl-C, SIGTERM and SIGHUP are noted in the list instead of ending this process."""
    noted: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield noted
        return

    def note(number: int, _frame: FrameType | None) -> None:
        noted.append(int(number))

    kinds = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {kind: signal.signal(kind, note) for kind in kinds}
    try:
        yield noted
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
