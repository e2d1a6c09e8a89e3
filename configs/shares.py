"""The entries of `train.stores`: which store, and how much of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dflash_pipeline.configs.errors import UsageError


@dataclass(frozen=True, slots=True)
class StoreShare:
    """One entry of `train.stores`."""

    path: str
    share: float
    """Part of the store's samples that an epoch draws."""


def parse_stores(stores: Sequence[str]) -> list[StoreShare]:
    """`PATH` or `PATH:SHARE`, the share in (0, 1]. UsageError for another share."""
    parsed = []
    for text in stores:
        path, colon, share_text = text.rpartition(":")
        try:
            share = float(share_text) if colon else 1.0
        except ValueError:
            # a colon that belongs to the path
            path, share = text, 1.0
        if not 0 < share <= 1:
            raise UsageError(f"--store {text}: the share must be in (0, 1], got {share_text}")
        parsed.append(StoreShare(path if colon and path else text, share))
    return parsed
