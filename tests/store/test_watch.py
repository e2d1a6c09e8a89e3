"""inspect --follow tells each change of a growing store, and ends at the seal."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from dflash_pipeline.configs.status import new_status, write_status
from dflash_pipeline.store.reader import Store
from dflash_pipeline.store.report import progress_text
from dflash_pipeline.store.rolling import make_rolling
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


def test_a_store_that_is_calibrated_meanwhile_is_no_longer_called_uncalibrated(
    tiny: ModuleType, tmp_path: Path
) -> None:
    plan = tiny.make_plan(3, rows=192, chunk_rows=32, hidden_size=64, hidden_mode="int4")
    planned = tiny.build(plan, tmp_path / "hs")

    def work(_seconds: float) -> None:
        store = tiny.complete(plan, planned)
        tiny.capture(plan, store)
        store.seal()

    found = list(watch(str(planned.path), work))
    assert [one["state"] for one in found] == ["not calibrated yet", "sealed"]


def test_a_capture_that_waits_under_its_quota_is_told_once_with_its_reason(
    empty_store: Store, plan: Any, tiny: ModuleType
) -> None:
    make_rolling(empty_store.path, empty_store.layout, 1)
    logs, waits = f"{empty_store.path}.logs", []
    status = new_status("capture", 0, "cpu")

    def work(_seconds: float) -> None:
        waits.append(1)
        if len(waits) <= 2:
            # its text changes with the time
            status.state, status.text = "waiting", f"the quota is in use, {len(waits)} s"
            write_status(logs, status)
            return
        status.state = "running"
        write_status(logs, status)
        tiny.capture(plan, empty_store)
        empty_store.seal()

    found = list(watch(str(empty_store.path), work))
    assert [one["waiting"] for one in found] == ["", "the quota is in use, 1 s", ""]
    assert progress_text(found[1]).endswith("; the capture waits: the quota is in use, 1 s")
    assert "waits" not in progress_text(found[2])


def test_the_command_prints_lines_or_json(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    main(None, None, {"path": str(store.path), "json": False})
    out = capsys.readouterr().out
    assert out.startswith("sealed: 8 of 8 shards, ")
    main(None, None, {"path": str(store.path), "json": True})
    assert json.loads(capsys.readouterr().out)["progress"]["tokens_left"] == 0
