"""crc32c, the checksum that Zarr's shard index uses and that commit records hold."""

from __future__ import annotations

from typing import Any

import google_crc32c


def crc32c(data: Any, before: int = 0) -> int:
    """crc32c of bytes or a contiguous uint8 array, going on from that of the bytes before.

    The GIL is released meanwhile: 8 GB/s of one core beside Python code.
    """
    return int(google_crc32c.extend(before, data))
