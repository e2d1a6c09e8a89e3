"""Planning a store: all or nothing, once, and only where it fits."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from dflash_pipeline.store import durable, paths
from dflash_pipeline.store.build import (
    StoreBuilder,
    estimate_bytes,
    existing,
    plan_lock,
    remaining_bytes,
)
from dflash_pipeline.store.spec import ShardId


def builder_of(plan: Any, path: Path) -> StoreBuilder:
    return StoreBuilder(path, plan.spec, plan.layout, plan.table, plan.attributes, 0)


def test_the_same_plan_gives_the_same_bytes(tiny: ModuleType, plan: Any, tmp_path: Path) -> None:
    one, two = tiny.build(plan, tmp_path / "one"), tiny.build(plan, tmp_path / "two")
    assert tiny.digest(one.path) == tiny.digest(two.path)
    assert one.plan_hash == two.plan_hash
    assert one.plan_hash != tiny.build(tiny.make_plan(23), tmp_path / "three").plan_hash


def test_a_store_that_is_not_whole_is_not_published(plan: Any, tmp_path: Path) -> None:
    with builder_of(plan, tmp_path / "hs") as builder:
        with pytest.raises(ValueError, match="tokens of 8 shards were not written"):
            builder.publish()
        planning = paths.beside(tmp_path / "hs", ".planning")
        assert planning.exists()
    assert not planning.exists()
    assert existing(tmp_path / "hs") is None


def test_wrong_tokens_and_matrices_are_refused(tiny: ModuleType, plan: Any, tmp_path: Path) -> None:
    rows, _ = plan.table.rows_of(ShardId(0, 0))
    ids_N, mask_N = np.zeros(rows, np.uint32), np.zeros(rows, np.uint8)
    with builder_of(plan, tmp_path / "hs") as builder:
        with pytest.raises(ValueError, match="outside the vocabulary"):
            builder.write_tokens(ShardId(0, 0), ids_N + tiny.VOCAB, mask_N)
        with pytest.raises(ValueError, match="rows"):
            builder.write_tokens(ShardId(0, 0), ids_N[1:], mask_N)
        builder.write_tokens(ShardId(0, 0), ids_N, mask_N)
        with pytest.raises(ValueError, match="before"):
            builder.write_tokens(ShardId(0, 0), ids_N, mask_N)
        with pytest.raises(ValueError, match="expected uint16"):
            builder.write_target(np.zeros((tiny.VOCAB, 8), np.float32), None, {})
        embed_VH = np.zeros((tiny.VOCAB, 8), np.uint16)
        with pytest.raises(ValueError, match="file name"):
            builder.write_target(embed_VH, None, {"../evil": b"x"})


def test_a_tied_head_is_stored_once(tiny: ModuleType, plan: Any, tmp_path: Path) -> None:
    embed_VH = np.arange(tiny.VOCAB * 8, dtype=np.uint16).reshape(-1, 8)
    with builder_of(plan, tmp_path / "hs") as builder:
        builder.write_target(embed_VH, None, {})
        for shard_id in plan.layout.shard_ids():
            rows, _ = plan.table.rows_of(shard_id)
            builder.write_tokens(shard_id, np.zeros(rows), np.ones(rows))
        store = builder.publish()
    assert store.is_tied
    assert (store.head() == embed_VH).all()
    assert not (store.path / "target" / "head").exists()


def test_a_plan_that_does_not_fit_says_what_it_needs(
    plan: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(durable, "free_bytes", lambda _: 100_000)
    with pytest.raises(ValueError, match=r"[\d.]+ KB are needed, 100 KB are free"):
        builder_of(plan, tmp_path / "hs")
    assert not paths.beside(tmp_path / "hs", ".planning").exists()


def test_the_estimate_covers_the_store_and_is_near(store: Any, plan: Any) -> None:
    data = sum(
        (store.path / name(shard_id)).stat().st_size
        for shard_id in plan.layout.shard_ids()
        for name in (paths.hidden_file, paths.last_file, paths.commit_file)
    )
    estimate = estimate_bytes(plan.spec, plan.layout, plan.table)
    assert data < estimate < 1.2 * data
    assert remaining_bytes(store) == 0


def test_two_plans_at_once_give_one_store(tiny: ModuleType, plan: Any, tmp_path: Path) -> None:
    path, made = tmp_path / "hs", []

    def work() -> None:
        with plan_lock(path, wait_s=30):
            if existing(path) is None:
                made.append(tiny_publish(tiny, plan, path))

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1
    assert existing(path) is not None


def tiny_publish(tiny: ModuleType, plan: Any, path: Path) -> Any:
    with builder_of(plan, path) as builder:
        embed_VH = np.zeros((tiny.VOCAB, 8), np.uint16)
        builder.write_target(embed_VH, None, {})
        for shard_id in plan.layout.shard_ids():
            rows, _ = plan.table.rows_of(shard_id)
            builder.write_tokens(shard_id, np.zeros(rows), np.ones(rows))
        return builder.publish()


def test_a_second_planner_is_told_of_the_first(plan: Any, tmp_path: Path) -> None:
    path = tmp_path / "hs"
    with plan_lock(path, wait_s=0):
        second = plan_lock(path, wait_s=0)
        with pytest.raises(ValueError, match="another process has been planning"):
            second.__enter__()
        with builder_of(plan, path), pytest.raises(ValueError, match="is building"):
            builder_of(plan, path)


def test_what_a_killed_planner_left_is_replaced(
    tiny: ModuleType, plan: Any, tmp_path: Path
) -> None:
    planning = tmp_path / "hs.planning"
    (planning / "b0").mkdir(parents=True)
    (planning / "b0" / "junk").write_text("x")
    store = tiny.build(plan, tmp_path / "hs")
    assert not (store.path / "b0" / "junk").exists()
    assert not planning.exists()


def test_something_else_in_the_place_of_the_store_is_refused(plan: Any, tmp_path: Path) -> None:
    (tmp_path / "hs").mkdir()
    assert existing(tmp_path / "hs") is None
    (tmp_path / "hs" / "thesis.doc").write_text("x")
    with pytest.raises(ValueError, match="no store at"):
        existing(tmp_path / "hs")


def test_a_relative_path_works(tiny: ModuleType, tmp_path: Path) -> None:
    code = f"""
import sys
sys.path.insert(0, {str(Path(tiny.__file__).parent)!r})
import tiny_store as tiny
from pathlib import Path
plan = tiny.make_plan(6)
store = tiny.build(plan, Path("hs"))
assert tiny.capture(plan, store) == sum(plan.layout.num_shards)
"""
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["hs", "hs.logs"]
