"""inspect --follow tells each change of a growing store, and ends at the seal."""

from __future__ import annotations

import json
from types import ModuleType
from typing import Any

import pytest

from dflash_pipeline.store.reader import Store
from dflash_pipeline.store.watch import main, watch


def test_each_change_is_told_until_the_seal(
    empty_store: Store, plan: Any, tiny: ModuleType
) -> None:
    waits = []

    def work(_seconds: float) -> None:
        """While it waits: nothing, then all shards, then the seal."""
        waits.append(1)
        if len(waits) == 2:
            tiny.capture(plan, empty_store)
        if len(waits) == 4:
            empty_store.seal()

    found = list(watch(str(empty_store.path), work))
    assert [one["state"] for one in found] == ["growing", "complete, not sealed", "sealed"]
    assert [one["total"]["committed_shards"] for one in found] == [0, 8, 8]
    # a look without a change says nothing
    assert len(waits) == 4


def test_the_command_prints_lines_or_json(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    main(None, None, {"path": str(store.path), "json": False})
    out = capsys.readouterr().out
    assert out.startswith("sealed: 8 of 8 shards, ")
    main(None, None, {"path": str(store.path), "json": True})
    assert json.loads(capsys.readouterr().out)["progress"]["tokens_left"] == 0
