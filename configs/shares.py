"""The entries of `train.stores`: which store, and how much of it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from dflash_pipeline.configs.errors import UsageError
from dflash_pipeline.configs.inputs import STORE_FILE
from dflash_pipeline.configs.mounts import root_of


@dataclass(frozen=True, slots=True)
class StoreShare:
    """One entry of `train.stores`."""

    path: str
    share: float
    """Part of the store's samples that an epoch draws."""


def parse_stores(stores: Sequence[str]) -> list[StoreShare]:
    """`PATH` or `PATH:SHARE`, the share in (0, 1]. UsageError for another share.

    A colon may belong to the path: it does where something of that name is there, or no store is
    before it.
    """
    parsed = []
    for text in stores:
        path, colon, share_text = text.rpartition(":")
        try:
            share = float(share_text) if colon else 1.0
        except ValueError:
            if _is_share_meant(text, path, share_text):
                raise UsageError(
                    f"--store {text}: {share_text!r} is no number, and there is no store {text}; "
                    f"a share in (0, 1] of the store {path} is meant by {path}:0.5"
                ) from None
            path, share = text, 1.0
        if not 0 < share <= 1:
            raise UsageError(f"--store {text}: the share must be in (0, 1], got {share_text}")
        parsed.append(StoreShare(path if colon and path else text, share))
    return parsed


def _is_share_meant(text: str, path: str, share_text: str) -> bool:
    """Whether text that is no number stands where the share of a store should."""
    if "/" in share_text or os.path.lexists(root_of(text)):
        return False
    return bool(path) and (root_of(path) / STORE_FILE).is_file()
