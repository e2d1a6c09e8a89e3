"""A store written by the first version must open for ever."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import zarr

from dflash_pipeline.store.check import verify
from dflash_pipeline.store.reader import open_store

GOLDEN = Path(__file__).parent.parent / "golden" / "store-v1-bf16"
KEYS = ["sample-2-é", "sample-0-é", "sample-1-é", "sample-3-é", "sample-4-é"]
VALUES = "a3174fe08e26025283e3e0d1da209d358e4d16ec638f48208674ad6ee19a8660"


def test_the_golden_store_is_whole_and_small() -> None:
    report = verify(GOLDEN, deep=True)
    assert (report.problems, report.notes) == ([], [])
    files = [f for f in GOLDEN.rglob("*") if f.is_file()]
    assert sum(file.stat().st_size for file in files) < 200_000


def test_the_golden_store_still_says_the_same() -> None:
    store = open_store(GOLDEN)
    assert store.is_sealed
    assert store.spec.layer_ids == (1, 3, 5)
    assert [store.table.key(i) for i in range(len(store.table))] == KEYS
    digest = hashlib.sha256()
    for i in range(len(store.table)):
        sample = store.sample(i)
        assert sample.last_MH is not None
        for array in (sample.ids_T, sample.mask_T, sample.hidden_TKH, sample.last_MH):
            digest.update(np.ascontiguousarray(array).tobytes())
    assert digest.hexdigest() == VALUES
    row = zarr.open(str(GOLDEN), mode="r")["b1/hidden"][int(store.table.start[-1])]
    assert (row == store.sample(len(store.table) - 1).hidden_TKH[0]).all()
