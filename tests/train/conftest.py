"""A tiny target's store to train from, and runs over it. The rows are tests/tiny_store.py's."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from dflash_pipeline.configs.place import Place
from dflash_pipeline.configs.schema import (
    DrafterConfig,
    FeedConfig,
    LossConfig,
    OptimConfig,
    Run,
    TrainConfig,
)
from dflash_pipeline.store.bf16 import bf16_bits
from dflash_pipeline.store.build import StoreBuilder, plan_lock
from dflash_pipeline.store.reader import Store, open_store
from dflash_pipeline.train.shape import DrafterShape
from places import cpu_place
from shapes import small_shape

TARGET_CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "vocab_size": 97,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
}


@pytest.fixture(scope="session")
def train_plan(tiny: ModuleType) -> Any:
    """24 samples of 4 to 200 tokens in a few shards; three layers of width 8."""
    return tiny.make_plan(24)


@pytest.fixture(scope="session")
def _train_originals(tiny: ModuleType, train_plan: Any, tmp_path_factory: Any) -> Path:
    folder: Path = tmp_path_factory.mktemp("train-stores")
    for name in ("empty", "whole"):
        store = _build(train_plan, folder / name)
        if name == "whole":
            tiny.capture(train_plan, store)
            store.seal()
    return folder


def _build(plan: Any, path: Path) -> Store:
    random = np.random.default_rng(0)
    embed_VH, head_VH = (
        bf16_bits(random.standard_normal((97, 8), np.float32) * scale) for scale in (0.5, 1.0)
    )
    with (
        plan_lock(path, wait_s=10),
        StoreBuilder(path, plan.spec, plan.layout, plan.table, plan.attributes, 0) as builder,
    ):
        builder.write_target(embed_VH, head_VH, {"config.json": json.dumps(TARGET_CONFIG).encode()})
        for shard_id in plan.layout.shard_ids():
            samples = range(len(plan.table))[plan.table.of_shard(shard_id)]
            parts = [plan.tokens_of(i) for i in samples]
            ids_N, mask_N = (np.concatenate(list(part)) for part in zip(*parts, strict=True))
            builder.write_tokens(shard_id, ids_N, mask_N)
        return builder.publish()


@pytest.fixture
def whole_store(_train_originals: Path, tmp_path: Path) -> Store:
    """A sealed store at tmp_path / hs."""
    shutil.copytree(_train_originals / "whole", tmp_path / "hs", symlinks=True)
    return open_store(tmp_path / "hs")


@pytest.fixture
def store_without_last(tiny: ModuleType, tmp_path: Path) -> Store:
    """A sealed store at tmp_path / hs, of --last-mode none."""
    plan = tiny.make_plan(24, last_mode="none")
    store = _build(plan, tmp_path / "hs")
    tiny.capture(plan, store)
    store.seal()
    return store


@pytest.fixture
def growing_store(_train_originals: Path, tmp_path: Path) -> Store:
    """A planned store at tmp_path / hs with nothing captured yet."""
    shutil.copytree(_train_originals / "empty", tmp_path / "hs", symlinks=True)
    return open_store(tmp_path / "hs")


@pytest.fixture
def place(tmp_path: Path) -> Place:
    """One rank on the CPU, its logs in tmp_path / out / logs."""
    return cpu_place(tmp_path / "out" / "logs", "train")


@pytest.fixture
def train_run(tmp_path: Path) -> Callable[..., Run]:
    """A small run over tmp_path / hs into tmp_path / out; changes go to the train section."""

    def make(**changes: Any) -> Run:
        train = TrainConfig(
            out=str(tmp_path / "out"),
            stores=(str(tmp_path / "hs"),),
            epochs=4,
            anchors_per_sample=6,
            batch_anchors=16,
            batch_tokens=256,
            log_every=2,
            save_every=1000,
            validate_every=0,
            validate_samples=4,
        )
        return Run(
            drafter=DrafterConfig(num_layers=2, block_size=4),
            loss=LossConfig(gamma=4.0, position_chunk=13),
            optim=OptimConfig(lr=2e-3),
            feed=FeedConfig(threads=2, depth=2),
            train=replace(train, **changes),
        )

    return make


@pytest.fixture
def shape() -> DrafterShape:
    """Two layers, three features of width 8, blocks of 4."""
    return small_shape()
