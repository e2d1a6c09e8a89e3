"""Quantised rows reach the batch as the store itself decodes them, and a run waits for them."""

from __future__ import annotations

import contextlib
import re
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from dflash_pipeline.configs.errors import UsageError
from dflash_pipeline.configs.place import Place
from dflash_pipeline.configs.schema import EvalConfig, LossConfig, Run, StoreConfig
from dflash_pipeline.configs.shares import parse_stores
from dflash_pipeline.store.access import Plain
from dflash_pipeline.store.bf16 import bf16_bits
from dflash_pipeline.store.check import verify
from dflash_pipeline.store.reader import Store, open_store
from dflash_pipeline.train import decoding, setup
from dflash_pipeline.train.clock import Clock
from dflash_pipeline.train.drafting import as_stored
from dflash_pipeline.train.feed import Feed
from dflash_pipeline.train.follow import Order
from dflash_pipeline.train.group import Group
from dflash_pipeline.train.order import Position, catalog
from dflash_pipeline.train.shape import DrafterShape
from dflash_pipeline.train.stored import StoredRows, UnusableRows, unusable

CPU = torch.device("cpu")
CUDA = pytest.param(
    "cuda",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    ],
)
WIDTH = 32


@pytest.fixture(scope="module", params=[("int8", "bf16"), ("int4", "int8"), ("bf16", "int4")])
def store(
    request: pytest.FixtureRequest, tiny: ModuleType, tmp_path_factory: pytest.TempPathFactory
) -> Store:
    hidden_mode, last_mode = request.param
    plan = tiny.make_plan(9, hidden_size=WIDTH, hidden_mode=hidden_mode, last_mode=last_mode)
    path = tmp_path_factory.mktemp("quantised") / "hs"
    whole = tiny.complete(plan, tiny.build(plan, path))
    tiny.capture(plan, whole)
    whole.seal()
    return open_store(path)


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("layer_ids", [(1, 3, 5), (3, 5)])
def test_a_batch_holds_what_the_store_decodes(
    device: str,
    layer_ids: tuple[int, ...],
    store: Store,
    train_run: Callable[..., Run],
    shape: DrafterShape,
    place: Place,
    tmp_path: Path,
) -> None:
    shape = replace(shape, layer_ids=layer_ids, hidden_size=WIDTH)
    run = train_run(epochs=1, stores=(str(store.path),))
    run = replace(run, loss=LossConfig(kl=1.0, position_chunk=5))
    samples = catalog([store.table], parse_stores(run.train.stores), run.train)
    position = Position(0, 0, 0)
    order = Order(
        samples, [store], run.train, Group(place, 5.0), tmp_path / "order", position, print, 0
    )
    columns = [(1, 3, 5).index(layer_id) for layer_id in layer_ids]
    num_seen = 0
    clock = Clock(torch.device(device))
    arguments = (run, shape, torch.device(device), torch.float32, True, Plain(False), clock)
    with Feed([store], samples, order, *arguments) as feed:
        while (draw := feed.step(lambda: False, lambda: None)) is not None:
            for batch in feed.batches(draw):
                parts = [store.sample(int(i)) for i in samples.sample_C[batch.samples]]
                hidden = np.concatenate([part.hidden_TKH[:, columns] for part in parts])
                features = batch.feature_NKH.cpu().numpy()
                assert np.array_equal(features[: len(hidden)], hidden)
                assert not features[len(hidden) :].any()
                assert batch.teacher is not None
                last = np.concatenate([part.last_MH for part in parts])
                found = {row.tobytes() for row in batch.teacher.state_UH.cpu().numpy()}
                assert found <= {row.tobytes() for row in last}
                num_seen += len(parts)
    assert num_seen == len(samples)


def _check(store: Store, index: int, layer_ids: tuple[int, ...], dtype: torch.dtype) -> None:
    rows_TKZ = torch.from_numpy(np.array(store.hidden(index)))
    feature_TKH = StoredRows.hidden(store, layer_ids, CPU).decode(rows_TKZ, dtype)
    for error in unusable(
        store, [index], [len(rows_TKZ)], layer_ids, rows_TKZ, feature_TKH
    ).values():
        raise error


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_as_they_were_captured_are_usable(store: Store, dtype: torch.dtype) -> None:
    for index in range(len(store.table)):
        _check(store, index, (1, 3, 5), dtype)
        _check(store, index, (5, 1), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("value", "text"),
    [
        (np.nan, "NaN or Inf"),
        (-np.inf, "NaN or Inf"),
        (1e30, "a value of .*, where its capture saw"),
        (0.0, "an all-zero row"),
    ],
)
def test_a_damaged_row_is_named_by_sample_token_and_layer(
    value: float, text: str, dtype: torch.dtype, store: Store, tmp_path: Path
) -> None:
    index, position, column = 4, 2, 1
    shutil.copytree(store.path, tmp_path / "hs", symlinks=True)
    damaged = open_store(tmp_path / "hs")
    place = damaged.place_of(index, "hidden")
    row = np.array(damaged.hidden(index)[position, column])
    if value == 0:
        row[:] = 0
    elif not damaged.calibration.hidden:
        row.view("<u2")[3] = bf16_bits(np.array([value], np.float32))[0]
    else:
        scale = damaged.calibration.hidden[column].row_scale_offset
        row[scale : scale + 4].view("<f4")[:] = value
    offset = place.offset + (position * 3 + column) * row.size
    with place.file.open("r+b") as file:
        file.seek(offset)
        file.write(row.tobytes())
    shard_id = damaged.table.shard_id(index)
    where = re.escape(f"sample {index} ({damaged.table.key(index)}, shard {shard_id} of ")
    with pytest.raises(
        UnusableRows, match=rf"{where}.*\) has {text}.* at token 2 of layer 3: .*verify --deep"
    ):
        _check(damaged, index, (1, 3, 5), dtype)
    # verify finds it where this does, and names the shard
    problems = verify(damaged.path, deep=True).problems
    assert any(f"(shard {shard_id})" in problem for problem in problems)
    _check(damaged, index, (5, 1), dtype)
    _check(damaged, index - 1, (1, 3, 5), dtype)


def test_a_bf16_value_is_held_against_the_largest_that_its_capture_saw(whole_store: Store) -> None:
    store, index, column = whole_store, 4, 1
    record = store.commit_of(store.table.shard_id(index))
    assert record is not None
    largest = float(np.asarray(record.amax)[column])
    place = store.place_of(index, "hidden")
    for factor, is_refused in ((1.0, False), (1.02, True)):
        row = np.array(store.hidden(index)[2, column])
        row.view("<u2")[3] = bf16_bits(np.array([-factor * largest], np.float32))[0]
        with place.file.open("r+b") as file:
            file.seek(place.offset + (2 * 3 + column) * row.size)
            file.write(row.tobytes())
        refused = pytest.raises(UnusableRows, match=r"at token 2 of layer 3")
        with refused if is_refused else contextlib.nullcontext():
            _check(open_store(store.path), index, (1, 3, 5), torch.float32)


def test_live_features_can_be_rounded_as_stored(store: Store) -> None:
    stored = StoredRows.hidden(store, (3, 5), CPU)
    hidden = store.calibration.hidden
    calibrations = [hidden[1], hidden[2]] if hidden else []
    feature_TKH = stored.decode(torch.from_numpy(np.array(store.hidden(0))), torch.float32)
    again = as_stored(feature_TKH, store.spec.hidden_mode, calibrations)
    # storing what was stored moves it by rounding alone
    gap_TK = (again - feature_TKH).norm(dim=-1) / feature_TKH.norm(dim=-1)
    assert gap_TK.max() < (0.06 if store.spec.hidden_mode == "int4" else 0.01)


def test_as_stored_takes_the_calibration_of_the_store_or_asks_for_it(
    store: Store, shape: DrafterShape
) -> None:
    shape = replace(shape, layer_ids=(3, 5), hidden_size=WIDTH)
    run = Run(store=StoreConfig(path=str(store.path)), eval=EvalConfig(as_stored=True))
    keywords = decoding._rounding(run, shape).keywords
    assert keywords["mode"] == store.spec.hidden_mode
    assert len(keywords["calibrations"]) == 2 * bool(store.calibration.hidden)
    int4: Any = replace(run, store=StoreConfig(hidden_mode="int4"))
    with pytest.raises(UsageError, match="needs the calibration: give --store"):
        decoding._rounding(int4, shape)
    with pytest.raises(UsageError, match=r"reads layers \[2\], store"):
        decoding._rounding(run, replace(shape, layer_ids=(1, 2)))


def test_a_trainer_waits_for_the_calibration_and_says_so(
    tiny: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = tiny.make_plan(3, hidden_size=WIDTH, hidden_mode="int4", last_mode="none")
    planned = tiny.build(plan, tmp_path / "hs")
    said: list[str] = []
    log: Any = SimpleNamespace(say_once=said.append, state=said.append)
    wish: Any = SimpleNamespace(is_asked=lambda: len(said) > 500)
    monkeypatch.setattr(setup, "IDLE_S", 0.01)

    def calibrate_later() -> None:
        while "waiting" not in said:
            time.sleep(0.01)
        tiny.complete(plan, planned)

    thread = threading.Thread(target=calibrate_later)
    thread.start()
    found = setup._await_calibration(str(planned.path), Run(), log, wish)
    thread.join()
    assert found.spec.is_calibrated
    assert "has calibrated int4" in said[0]
    assert said[1] == "waiting"
