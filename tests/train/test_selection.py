"""Samples that are left out are trained on by nobody, counted, and named rightly or refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from dflash_pipeline.configs.errors import UsageError
from dflash_pipeline.configs.place import Place
from dflash_pipeline.configs.schema import Run, TrainConfig
from dflash_pipeline.configs.shares import StoreShare
from dflash_pipeline.store.reader import Store
from dflash_pipeline.store.table import HELD_OUT
from dflash_pipeline.train import worker
from dflash_pipeline.train.journal import Journal
from dflash_pipeline.train.order import catalog
from dflash_pipeline.train.selection import doubled_lines, dropped_lines, kept_samples


@pytest.fixture
def tables(tiny: ModuleType, train_plan: Any) -> list[Any]:
    """Of two stores whose keys overlap; domains chat and code."""
    return [train_plan.table, tiny.make_plan(12).table]


def _left(tables: list[Any], **changes: Any) -> list[list[str]]:
    kept = kept_samples(tables, TrainConfig(**changes))
    return [
        [table.key(int(i)) for i in np.flatnonzero(kept_N)]
        for table, kept_N in zip(tables, kept, strict=True)
    ]


def test_a_dropped_domain_and_dropped_samples_are_gone_from_every_store(tables: list[Any]) -> None:
    # odd numbers are code, see tiny_store.py
    even = {f"sample-{n}-é" for n in range(0, 24, 2)}
    left = _left(tables, drop_domains=("code",))
    assert [set(keys) for keys in left] == [even, {f"sample-{n}-é" for n in range(0, 12, 2)}]
    left = _left(tables, drop_domains=("code",), drop_samples=("sample-4-é", "sample-20-é"))
    assert set(left[0]) == even - {"sample-4-é", "sample-20-é"}
    # the second store has no sample 20, which is no fault
    assert "sample-4-é" not in left[1]
    assert len(left[1]) == 5


def test_what_is_left_out_is_counted(tables: list[Any]) -> None:
    config = TrainConfig(drop_samples=("sample-5-é", "sample-13-é"))
    kept = kept_samples(tables, config)
    # every fifth sample is held out, see tiny_store.py
    assert dropped_lines(["a", "b"], tables, kept) == [
        "dropped 2 of 24 samples of a (1 of them held out)",
        "dropped 1 of 12 samples of b (1 of them held out)",
    ]
    shares = [StoreShare("a", 1.0), StoreShare("b", 1.0)]
    config = replace(config, anchors_per_sample=6, batch_anchors=16, batch_tokens=256)
    nothing = replace(config, drop_samples=())
    # one of the two in `a` was held out and never drawn
    assert len(catalog(tables, shares, nothing)) - len(catalog(tables, shares, config)) == 1


def test_a_run_without_validation_is_told_so(tables: list[Any]) -> None:
    held_out = [t.key(int(i)) for t in tables for i in np.flatnonzero(t.split == HELD_OUT)]
    *some, last = dict.fromkeys(held_out)
    for dropped, is_told in (((*some, last), True), (tuple(some), False)):
        kept = kept_samples(tables, TrainConfig(drop_samples=dropped))
        told = dropped_lines(["a", "b"], tables, kept)[-1]
        assert told.startswith("all held-out samples were dropped: no validation") is is_told


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"drop_domains": ("cod",)}, "no store has a domain 'cod'; did you mean 'code'"),
        ({"drop_domains": ("§",)}, "no store has a domain '§'; there are '\\w+'(, '\\w+')*$"),
        ({"drop_samples": ("sample-1l-é",)}, "no store has a sample 'sample-1l-é'; did you mean"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest_one(
    tables: list[Any], changes: dict[str, Any], text: str
) -> None:
    with pytest.raises(UsageError, match=text):
        kept_samples(tables, TrainConfig(**changes))


def test_a_run_trains_on_what_is_left_and_says_so(
    whole_store: Store,
    train_run: Callable[..., Run],
    place: Place,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    drawn: set[str] = set()
    before = Journal.note

    def note(self: Journal, step: int, draw: Any) -> None:
        drawn.update(self._key(int(place)) for batch in draw.batches for place in batch)
        before(self, step, draw)

    monkeypatch.setattr(Journal, "note", note)
    run = train_run(epochs=1, drop_domains=("code",), validate_every=2)
    worker.main(run, place, {"resume": False})
    table = whole_store.table
    wanted = (table.split == 0) & (table.domain == 0) & (table.num_anchors > 0)
    assert drawn == {table.key(int(i)) for i in np.flatnonzero(wanted)}
    assert "dropped 12 of 24 samples of" in capsys.readouterr().out
    recorded = json.loads((tmp_path / "out" / "run.json").read_text())
    assert recorded["run"]["train"]["drop_domains"] == ["code"]
    # a run that goes on must drop the same
    with pytest.raises(UsageError, match=r"train\.drop_domains: \['code'\], now \[\]"):
        worker.main(train_run(epochs=1), place, {"resume": True})
    with pytest.raises(UsageError, match="no training sample that is not dropped"):
        worker.main(train_run(drop_domains=("code", "chat")), place, {"resume": False})


def test_samples_that_two_stores_share_are_counted(tiny: ModuleType, train_plan: Any) -> None:
    """By their tokens: keys may be the same by chance."""
    apart = tiny.make_plan(12, offset=100).table
    assert doubled_lines(["a", "b"], [train_plan.table, apart]) == []
    twice = [train_plan.table, apart, train_plan.table]
    assert doubled_lines(["a", "b", "c"], twice) == [
        "24 of 24 samples of c stand in a as well: an epoch draws them from both"
    ]


class _Hashes:
    """All that is asked of a table here."""

    def __init__(self, *hashes: int) -> None:
        self.token_hash = np.array(hashes, np.uint64)

    def __len__(self) -> int:
        return len(self.token_hash)


def test_what_is_counted_are_samples_of_the_later_store() -> None:
    pair: list[Any] = [_Hashes(1, 2, 3), _Hashes(3, 3, 4)]
    assert doubled_lines(["a", "b"], pair) == [
        "2 of 3 samples of b stand in a as well: an epoch draws them from both"
    ]
