"""The segments of a first epoch that follows stores, and the record of them, OUT/order."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Shard = tuple[int, int]
"""Store and shard number."""
Shards = tuple[Shard, ...]

ORDER_FILE = "order"
"""In a run directory: the shards of each segment that was drawn."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of an epoch."""

    shards: Shards | None
    """(store, shard number) of each shard; None: all of them."""
    is_last: bool
    is_stop: bool = False
    """Not a segment: a rank was told to stop while all waited for shards."""


def recorded(path: Path) -> str:
    """The whole lines of OUT/order; one that a kill tore is cut off."""
    if not path.exists():
        return ""
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if whole != content:
        os.truncate(path, len(whole))
    # bytes that are no text make a line that is none, which is named
    return whole.decode(errors="replace")


def segment_line(segment: Segment) -> str:
    """Its line in OUT/order."""
    return json.dumps({"shards": segment.shards, "last": segment.is_last, "stop": segment.is_stop})


def parsed(text: str, path: Path) -> list[Segment]:
    """The segments that OUT/order names; ValueError for a line that is none."""
    segments = []
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            segments.append(parse_line(line))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path}: line {number} is damaged ({error}), so which samples this run has drawn "
                "is not known; begin a new run with another --out, from its weights by "
                f"--init-from {path.parent}"
            ) from None
    return segments


def parse_line(line: str) -> Segment:
    """The segment of a line; ValueError, KeyError or TypeError where it is none."""
    entry: dict[str, Any] = json.loads(line)
    shards = tuple((int(store), int(shard)) for store, shard in entry["shards"])
    return Segment(shards, bool(entry["last"]), bool(entry["stop"]))
