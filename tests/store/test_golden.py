"""A store written by the first version must open for ever."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest
import zarr

from dflash_pipeline.store.check import verify
from dflash_pipeline.store.reader import open_store

GOLDEN = Path(__file__).parent.parent / "golden"
FIVE = ["sample-2-é", "sample-0-é", "sample-1-é", "sample-3-é", "sample-4-é"]
THREE = ["sample-1-é", "sample-2-é", "sample-0-é"]
# mode -> its keys, and the sha256 of all that its samples decode to
STORES = {
    "bf16": (FIVE, "a3174fe08e26025283e3e0d1da209d358e4d16ec638f48208674ad6ee19a8660"),
    "int8": (THREE, "29ddf87a547f348afc71a38f8ae36da4825144e7e3576d23317e3842f8ddfa16"),
    "int4": (THREE, "ccdf2a86fd8505378cdd1cbc519c447454937a0e7e3175b03c6ec471d93d15fd"),
}


@pytest.mark.parametrize("mode", STORES)
def test_the_golden_store_is_whole_and_small(mode: str) -> None:
    path = GOLDEN / f"store-v1-{mode}"
    report = verify(path, deep=True)
    assert (report.problems, report.notes) == ([], [])
    files = [f for f in path.rglob("*") if f.is_file()]
    assert sum(file.stat().st_size for file in files) < 200_000


@pytest.mark.parametrize("mode", STORES)
def test_the_golden_store_still_says_the_same(mode: str) -> None:
    path = GOLDEN / f"store-v1-{mode}"
    store = open_store(path)
    assert store.is_sealed
    assert store.spec.hidden_mode == mode
    assert store.spec.layer_ids == (1, 3, 5)
    keys, values = STORES[mode]
    assert [store.table.key(i) for i in range(len(store.table))] == keys
    digest = hashlib.sha256()
    for i in range(len(store.table)):
        sample = store.sample(i)
        assert sample.last_MH is not None
        for array in (sample.ids_T, sample.mask_T, sample.hidden_TKH, sample.last_MH):
            digest.update(np.ascontiguousarray(array).tobytes())
    assert digest.hexdigest() == values
    # the group, and an array by its own path
    last, row = len(store.table) - 1, int(store.table.start[-1])
    for hidden in (zarr.open(str(path), mode="r")["b1/hidden"], zarr.open(str(path / "b1/hidden"))):
        assert (hidden[row] == store.sample(last).hidden_TKH[0]).all()
