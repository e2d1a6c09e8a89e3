"""Entries of `train.stores`."""

from __future__ import annotations

import pytest

from dflash_pipeline.configs.errors import UsageError
from dflash_pipeline.configs.shares import StoreShare, parse_stores


def test_stores_are_parsed_with_their_share() -> None:
    assert parse_stores(("a/b", "c:0.5", "d:5e-1", "x:y")) == [
        StoreShare("a/b", 1.0),
        StoreShare("c", 0.5),
        StoreShare("d", 0.5),
        StoreShare("x:y", 1.0),
    ]
    with pytest.raises(UsageError, match=r"--store c:1\.5: the share must be in \(0, 1\]"):
        parse_stores(("c:1.5",))
