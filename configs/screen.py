"""How a running stage looks: one line with an ETA on a terminal, plain lines elsewhere."""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from dflash_pipeline.configs import counts

# a log file that somebody reads later wants few lines
PLAIN_EVERY_S = 10.0
WAITING_EVERY_S = 60.0


class Lines(Protocol):
    """Where a stage's lines are shown; a file open for text is one."""

    def isatty(self) -> bool: ...

    def write(self, text: str, /) -> int: ...

    def flush(self) -> None: ...


class Screen:
    """Renders what the processes of one stage report. Belongs to one thread.

    Progress is of the whole stage as each process knows it, and the furthest one is shown; or of
    each process's own part, and they are added up.
    """

    def __init__(self, lines: Lines, stage: str, world: int) -> None:
        self._lines, self._stage, self._world = lines, stage, world
        self._is_terminal = lines.isatty()
        self._is_line_open = False
        self._shown_at = -PLAIN_EVERY_S
        self._waited_at = -WAITING_EVERY_S
        self._latest: Mapping[str, Any] = {}
        self._counts: dict[int, counts.Counts] = {}
        self._parts: dict[int, Mapping[str, Any]] = {}

    def say(self, rank: int, text: str) -> None:
        """A line of one rank, above the progress."""
        self._clear()
        self._lines.write(f"[{rank}] {text}\n" if self._world > 1 else f"{text}\n")
        self._lines.flush()

    def note(self, text: str) -> None:
        """A line of the launcher itself."""
        self._clear()
        self._lines.write(text + "\n")
        self._lines.flush()

    def progress(self, rank: int, message: Mapping[str, Any]) -> None:
        """Show how far the stage is; counts are added up over the ranks."""
        if message.get("counts"):
            self._counts[rank] = counts.of(message["counts"])
            message = {**message, "numbers": counts.total(self._counts.values()).numbers()}
        if message.get("is_part"):
            self._parts[rank] = message
            message = _together(list(self._parts.values()), self._world)
            if not message["done"] and not message["total"]:
                # the others are about to say how much theirs is
                return
        if self._latest.get("unit") == message["unit"] and self._latest["total"]:
            # another rank knows less, or tells the end again
            is_behind = message["done"] < self._latest["done"]
            if is_behind or (_is_over(self._latest) and _is_over(message)):
                return
        self._latest = message
        shown = progress_line(self._stage, message)
        if self._is_terminal:
            self._rewrite(shown)
        elif time.monotonic() - self._shown_at >= PLAIN_EVERY_S or _is_over(message):
            self._shown_at = time.monotonic()
            self._lines.write(shown + "\n")
            self._lines.flush()

    def waiting(self, text: str) -> None:
        """What the stage waits for: in full now and then, a terminal shows its beginning."""
        text = f"{self._stage}: {text}"
        if time.monotonic() - self._waited_at >= WAITING_EVERY_S:
            self._waited_at = time.monotonic()
            self.note(text)
        if self._is_terminal:
            self._rewrite(text)

    def _rewrite(self, text: str) -> None:
        width = shutil.get_terminal_size().columns - 1
        self._lines.write(f"\r\x1b[K{text[:width]}")
        self._lines.flush()
        self._is_line_open = True

    def close(self) -> None:
        """Leave the last state of the line above whatever comes next."""
        if self._is_line_open:
            self._lines.write("\n")
            self._lines.flush()
            self._is_line_open = False

    def _clear(self) -> None:
        if self._is_line_open:
            self._lines.write("\r\x1b[K")
            self._is_line_open = False


def _together(parts: Sequence[Mapping[str, Any]], world: int) -> dict[str, Any]:
    """The parts of several processes as one; in all nobody knows before each has told its own."""
    names = dict.fromkeys(name for part in parts for name in part["numbers"])
    # who is done does not help the others
    at_work = [part for part in parts if not _is_over(part)] or parts
    return {
        "done": sum(part["done"] for part in parts),
        "total": sum(part["total"] for part in parts) if len(parts) == world else 0,
        "unit": parts[-1]["unit"],
        "rate": sum(part["rate"] for part in at_work),
        "numbers": {name: sum(part["numbers"].get(name, 0) for part in parts) for name in names},
    }


def progress_line(stage: str, message: Mapping[str, Any], *, is_at_work: bool = True) -> str:
    """`capture: 1,200 of 9,000 samples (13 %), 41 samples/s, 0:03:10 left, loss 2.31`.

    Of a process that has ended, its part of the work perhaps taken by others, no time is left.
    """
    done, total, rate = message["done"], message["total"], message["rate"]
    parts = [f"{stage}: {_number(done)}"]
    if total:
        parts[0] += f" of {_number(total)} {message['unit']} ({100 * done / total:.0f} %)"
    else:
        parts[0] += f" {message['unit']}"
    if rate > 0:
        parts.append(f"{_number(rate)} {message['unit']}/s")
        if total and is_at_work and not _is_over(message):
            parts.append(f"{duration((total - done) / rate)} left")
    parts += [f"{name} {_number(value)}" for name, value in message["numbers"].items()]
    return ", ".join(parts)


def duration(seconds: float) -> str:
    """Hours, minutes, seconds: `1:02:03`."""
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) or abs(value) >= 1000 else f"{value:.4g}"


def _is_over(message: Mapping[str, Any]) -> bool:
    return bool(message["total"]) and message["done"] >= message["total"]
