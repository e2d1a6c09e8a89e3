"""Entries of `train.stores`."""

from __future__ import annotations

from pathlib import Path

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


@pytest.mark.parametrize("share", ["abc", "0,5", "50%", ""])
def test_text_after_the_colon_of_a_store_that_is_there_must_be_a_number(
    share: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("A").mkdir()
    text = f"A:{share}"
    # a directory that holds no store has no share: a capture may be about to make `A:abc`
    assert parse_stores((text,)) == [StoreShare(text, 1.0)]
    Path("A/zarr.json").touch()
    with pytest.raises(UsageError, match=r"is no number, .* there is no store A:.* by A:0\.5"):
        parse_stores((text,))
    # a path inside of a directory that has a colon in its name
    assert parse_stores(("A:b/hs",)) == [StoreShare("A:b/hs", 1.0)]
    Path(text).mkdir()
    assert parse_stores((text,)) == [StoreShare(text, 1.0)]
