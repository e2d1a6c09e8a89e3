"""One process of a stage: read the task, call the stage's function, say how it ended.

Nothing heavy is imported before the function's own module.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import importlib
import json
import os
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, NoReturn, TextIO

from dflash_pipeline.configs import disk
from dflash_pipeline.configs.errors import UsageError
from dflash_pipeline.configs.load import from_dict
from dflash_pipeline.configs.place import Place
from dflash_pipeline.configs.schema import Run
from dflash_pipeline.configs.status import end_status, new_status, write_status

# how long a process that was told to stop may take
GRACE_S = 30.0
# as a shell shows a process that SIGPIPE ended
BROKEN_PIPE = 128 + signal.SIGPIPE


def main() -> NoReturn:
    """The task is one JSON line on stdin; stdin's end means that the parent is gone."""
    codes: list[int] = []
    # registered first, called last: after what the stage's modules registered
    atexit.register(_end_at_once, codes)
    job = json.loads(_read_line(0))
    threading.Thread(target=_end_with_parent, name="parent", daemon=True).start()
    codes.append(call(job["entry"], from_dict(job["run"]), Place(**job["place"]), job["extra"]))
    sys.exit(codes[0])


def call(entry: str, run: Run, place: Place, extra: dict[str, Any]) -> int:
    """Call `module:function`; returns 0, 2 for UsageError, 1 for any other, 143 when told to stop.

    141 where nobody reads its output any longer. The full traceback goes to stderr, which the
    launcher has pointed at the process's log.
    """
    faulthandler.enable()
    for kind in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(kind, _stop)
    _log(f"{place.stage} rank {place.rank} of {place.world} on {place.device}: {entry}")
    state, error, code = "failed", "", 1
    try:
        write_status(place.log_dir, new_status(place.stage, place.number, place.device))
        _load(entry)(run, place, extra)
        sys.stdout.flush()
        state, code = "done", 0
    except KeyboardInterrupt:
        _log("stopped")
        state, code = "stopped", 143
    except BaseException as caught:
        # whoever starts several ends the others after the first failure: not in mid-report
        for kind in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(kind, signal.SIG_IGN)
        if isinstance(caught, BrokenPipeError) and is_unread(sys.stdout):
            state, code = "stopped", BROKEN_PIPE
        else:
            error = one_line(caught)
            code = 2 if isinstance(caught, UsageError) else 1
            # first of all: a full disk takes no traceback
            _report(error)
            with contextlib.suppress(OSError):
                traceback.print_exc()
    end_status(place.log_dir, place.stage, place.number, state, error)
    return code


def is_unread(stream: TextIO) -> bool:
    """Whether a stream is a pipe that nobody reads any longer; what is left in it goes nowhere."""
    poll = select.poll()
    poll.register(stream.fileno(), 0)
    if not any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0)):
        return False
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), stream.fileno())
    return True


def _end_at_once(codes: Sequence[int]) -> None:
    """Leave out the interpreter's own end, which looks at all that the imports made.

    It takes seconds with torch, and libraries bound by nanobind list each of their functions that
    is left as leaked: hundreds of lines in the log, below the traceback that somebody looks for.
    """
    if codes:
        with contextlib.suppress(OSError):
            # a full disk takes no log
            sys.stderr.flush()
        os._exit(codes[0])


def _load(entry: str) -> Callable[[Run, Place, dict[str, Any]], None]:
    """The function that `module:function` names.

    What an import makes stays for good: the collector is kept from looking for garbage in it, now
    and when the process ends. With torch and transformers that is 4 of 10 seconds of a start.
    """
    module, _, function = entry.partition(":")
    gc.disable()
    try:
        loaded: Callable[[Run, Place, dict[str, Any]], None] = getattr(
            importlib.import_module(module), function
        )
    finally:
        gc.freeze()
        gc.enable()
    return loaded


def one_line(error: BaseException) -> str:
    """What a person needs: the text of a ValueError or OSError, else with the type before it."""
    text = " ".join(str(error).split())
    if isinstance(error, OSError) and disk.is_full(error):
        return disk.full_text(error)
    if isinstance(error, (ValueError, OSError)) and text:
        return text
    name = type(error).__name__
    return f"{name}: {text}" if text else name


def _stop(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _end_with_parent() -> None:
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_S)
    os._exit(1)


def _read_line(descriptor: int) -> bytes:
    """The one line that the parent writes; ends this process where the parent is gone before."""
    line = b""
    while not line.endswith(b"\n"):
        data = os.read(descriptor, 1 << 16)
        if not data:
            sys.exit(1)
        line += data
    return line


def _report(error: str) -> None:
    descriptor = os.environ.get("DFLASH_PROGRESS_FD", "")
    if descriptor:
        with contextlib.suppress(OSError):
            os.write(int(descriptor), (json.dumps({"error": error}) + "\n").encode())


def _log(text: str) -> None:
    with contextlib.suppress(OSError):
        sys.stderr.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")
        sys.stderr.flush()
