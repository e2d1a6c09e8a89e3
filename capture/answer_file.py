"""The file of answers, which several processes append to.

A line is written whole or not at all: with one write under a lock, after a torn tail of a writer
that died has been cut off. What stands in the file is never generated again.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_BLOCK_BYTES = 1 << 20


class AnswerFile:
    """The JSONL file of answers, open for appending; shared with other processes."""

    def __init__(self, path: str) -> None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)

    def ids(self) -> set[str]:
        """Ids of all answers in the file, a torn last line cut off first."""
        self._locked_append([])
        found = set()
        with Path(self._path).open("rb") as file:
            for number, line in enumerate(file, 1):
                # another process may be in the middle of its write
                if not line.endswith(b"\n"):
                    break
                found.add(self._id(number, line))
        return found

    def _id(self, number: int, line: bytes) -> str:
        try:
            values = json.loads(line.decode())
        except (ValueError, RecursionError) as error:
            why, values = str(error), None
        else:
            why = "no object with id and messages"
        if not isinstance(values, dict) or not {"id", "messages"} <= values.keys():
            raise ValueError(
                f"{self._path}:{number} is no answer of generate ({why}): use another --out or "
                "remove the line"
            )
        return str(values["id"])

    def append(self, lines: Sequence[dict[str, Any]]) -> None:
        """Add whole lines and wait until they are on the disk."""
        self._locked_append([json.dumps(line, ensure_ascii=False) for line in lines])

    def _locked_append(self, lines: Sequence[str]) -> None:
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        try:
            end = self._cut_torn_line()
            data = "".join(f"{line}\n" for line in lines).encode()
            try:
                whole = not data or os.write(self._descriptor, data) == len(data)
                os.fsync(self._descriptor)
            except OSError as error:
                os.ftruncate(self._descriptor, end)
                raise ValueError(
                    f"cannot append {len(data)} bytes to {self._path}: {error.strerror}; free some "
                    "space and run the same command again, whole answers are kept"
                ) from error
            if not whole:
                os.ftruncate(self._descriptor, end)
                raise ValueError(
                    f"no space to append {len(data)} bytes to {self._path}: free some and run the "
                    "same command again, whole answers are kept"
                )
        finally:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def _cut_torn_line(self) -> int:
        """Size of the file after what follows the last newline, if anything, is cut off."""
        size = end = os.fstat(self._descriptor).st_size
        while end:
            begin = max(0, end - _BLOCK_BYTES)
            newline = os.pread(self._descriptor, end - begin, begin).rfind(b"\n")
            if newline >= 0:
                end = begin + newline + 1
                break
            end = begin
        if end < size:
            os.ftruncate(self._descriptor, end)
        return end
