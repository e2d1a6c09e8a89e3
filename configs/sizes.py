"""Sizes as people write and read them: `4TB`, `500 GB`, `1.5TiB`.

Told are powers of 1000 of what lies on disks and comes from them; the memory of a machine or a
device is told in GiB or MiB (`memory.py`), as its own tools do.
"""

from __future__ import annotations

import re

_UNITS = {"": 1, "B": 1}
_UNITS |= {f"{letter}B": 1000**power for power, letter in enumerate("KMGTP", start=1)}
_UNITS |= {f"{letter}IB": 1024**power for power, letter in enumerate("KMGTP", start=1)}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")


def parse_size(text: str) -> int:
    """Bytes of a text like `4TB` (powers of 1000), `4TiB` (of 1024) or `4000`; empty: 0."""
    if not text:
        return 0
    found = _SIZE.fullmatch(text.strip())
    if found is None or found[2].upper() not in _UNITS:
        raise ValueError(f"{text!r} is no size: write 4TB, 500GB, 1.5TiB or a number of bytes")
    return int(float(found[1]) * _UNITS[found[2].upper()])


def size_text(num_bytes: float) -> str:
    """Three digits and a unit of powers of 1000: `4.21 TB`."""
    for unit in ("B", "KB", "MB", "GB", "TB"):
        if num_bytes < 999.5:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.3g} PB"
