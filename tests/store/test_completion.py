"""The calibration enters a store once and whole, whatever happens to whoever brings it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import zarr

from dflash_pipeline.store import completion, durable, paths
from dflash_pipeline.store.check import verify
from dflash_pipeline.store.completion import publish_calibration
from dflash_pipeline.store.describe import describe
from dflash_pipeline.store.lease import LeaseLost, Leases
from dflash_pipeline.store.reader import Store, open_store

Flip = Callable[[Path, int], None]


@pytest.fixture(scope="module")
def plan(tiny: ModuleType) -> Any:
    return tiny.make_plan(
        3, rows=192, chunk_rows=32, hidden_size=64, hidden_mode="int4", last_mode="int8"
    )


@pytest.fixture
def planned(tiny: ModuleType, plan: Any, tmp_path: Path) -> Store:
    """Nothing captured, and not calibrated."""
    store = tiny.build(plan, tmp_path / "hs")
    assert isinstance(store, Store)
    return store


def _leases(store: Store, hung_s: float = 60.0) -> Leases:
    return Leases(store.path, store.layout, heartbeat_s=0.01, hung_s=hung_s)


def test_before_its_calibration_a_store_is_whole_and_shows_no_array_that_cannot_be_read(
    planned: Store,
) -> None:
    assert not planned.spec.is_calibrated
    report = verify(planned.path, deep=True)
    assert (report.problems, report.notes) == ([], [])
    assert describe(planned.path)["state"] == "not calibrated yet"
    members = dict(zarr.open_group(str(planned.path), mode="r").members(max_depth=None))
    assert "raw/b1/hidden" in members
    assert "b1/hidden" not in members


def test_the_calibration_becomes_part_of_the_identity(
    tiny: ModuleType, plan: Any, planned: Store
) -> None:
    store = tiny.complete(plan, planned)
    assert store.spec.is_calibrated
    assert [entry.mode for entry in store.calibration.hidden] == ["int4"] * 3
    assert [entry.mode for entry in store.calibration.last] == ["int8"]
    assert planned.spec.differences(store.spec)[0].startswith("calibration_hash: ''")
    assert verify(store.path, deep=True).problems == []
    members = dict(zarr.open_group(str(store.path), mode="r").members(max_depth=None))
    assert members["calibration/centre"].shape == (4, 64)
    # what a second one brings is not taken
    before = tiny.digest(store.path)
    other = tiny.calibration_of(plan)
    other[0].centre_H[:] = 0
    with _leases(store) as leases:
        lease = leases.claim(store.is_open, max_failures=1)
        found = publish_calibration(planned, other, {}, lease)
    assert found.spec == store.spec
    assert tiny.digest(store.path) == before


@pytest.mark.parametrize("num_written", [0, 5, 9])
def test_killed_at_any_file_it_is_not_calibrated_and_the_next_one_gives_the_same_store(
    tiny: ModuleType,
    plan: Any,
    planned: Store,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    num_written: int,
) -> None:
    whole = tiny.complete(plan, tiny.build(plan, tmp_path / "whole"))
    num_calls = 0

    def killed(path: Path, data: Any) -> None:
        nonlocal num_calls
        num_calls += 1
        if num_calls > num_written:
            # as `kill -9` would: a temporary file that nobody removes
            durable.temporary_name(path).write_bytes(b"half")
            raise KeyboardInterrupt
        durable.rename(durable.write_aside(path, data), path)

    with monkeypatch.context() as patch:
        patch.setattr(completion.durable, "write_durably", killed)
        with pytest.raises(KeyboardInterrupt):
            tiny.complete(plan, planned)
    assert not open_store(planned.path).spec.is_calibrated
    report = verify(planned.path, deep=True)
    assert report.problems == []
    assert report.notes
    tiny.complete(plan, planned)
    assert tiny.digest(planned.path) == tiny.digest(whole.path)
    assert verify(planned.path, deep=True).notes == []


def test_a_hung_calibrator_that_wakes_up_is_refused(
    tiny: ModuleType, plan: Any, planned: Store
) -> None:
    with _leases(planned) as hung, _leases(planned, hung_s=0.0) as others:
        lost = hung.claim(planned.is_open, max_failures=1)
        assert lost is not None

        def only(shard_id: Any) -> bool:
            return bool(shard_id == lost.shard_id)

        assert others.claim(only, max_failures=1) is None
        assert others.claim(only, max_failures=1) is not None
        with pytest.raises(LeaseLost):
            publish_calibration(planned, tiny.calibration_of(plan), {}, lost)
    assert not open_store(planned.path).spec.is_calibrated


@pytest.mark.parametrize("mode", ["int8", "int4"])
def test_each_flipped_byte_of_a_quantised_store_is_found(
    mode: str, tmp_path: Path, flip: Flip, tiny: ModuleType
) -> None:
    golden = Path(__file__).parent.parent / "golden" / f"store-v1-{mode}"
    path = Path(shutil.copytree(golden, tmp_path / "hs", symlinks=True))
    random = np.random.default_rng(0)
    files = [f for f in sorted(path.rglob("*")) if f.is_file() and f.stat().st_size]
    added = [f for f in files if "calibration" in f.parts or f.parent.name in ("hidden", "last")]
    rows = [f for f in files if {"hidden", "last"} & set(f.parts) and f.name != "zarr.json"]
    assert len(added) >= 8
    for file in (*added, *rows):
        if "raw" in file.parts:
            continue
        place = int(random.integers(file.stat().st_size))
        flip(file, place)
        problems = verify(path, deep=True).problems
        folder = str(file.parent.parent) if file.name != "zarr.json" else str(file)
        assert any(folder in problem or str(file) in problem for problem in problems) or (
            "calibration" in file.parts and any("calibration" in one for one in problems)
        ), (file, problems)
        flip(file, place)
    assert verify(path, deep=True).problems == []


def test_a_missing_calibration_is_named(tiny: ModuleType, plan: Any, planned: Store) -> None:
    tiny.complete(plan, planned)
    (planned.path / paths.CENTRE_FILE).unlink()
    with pytest.raises(ValueError, match=r"calibration/zarr\.json: .*centre.* is missing"):
        open_store(planned.path)
    assert "centre" in verify(planned.path, deep=False).problems[0]
    assert describe(planned.path)["problems"]
