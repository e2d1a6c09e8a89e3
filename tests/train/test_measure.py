"""What `dflash plan` counts of training."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dflash_pipeline.configs.place import Place
from dflash_pipeline.configs.schema import Run
from dflash_pipeline.configs.shares import StoreShare
from dflash_pipeline.store.reader import Store
from dflash_pipeline.store.runlog import RunLog
from dflash_pipeline.store.table import HELD_OUT
from dflash_pipeline.train import measure
from dflash_pipeline.train.measure import amounts, count, trial_batches
from dflash_pipeline.train.order import Catalog, catalog


@pytest.fixture
def samples() -> Catalog:
    """Four, whose tokens and blocks are told apart by every sum."""
    zeros = np.zeros(4, np.int64)
    return Catalog(
        store_C=zeros,
        sample_C=np.arange(4),
        sample_id_C=zeros.astype(np.uint64),
        num_tokens_C=np.array([10, 200, 3000, 5]),
        num_anchors_C=np.array([1, 20, 4, 3]),
        shard_C=zeros,
        shares=(1.0,),
    )


def test_a_batch_costs_by_its_tokens_its_blocks_and_what_each_block_may_see(
    samples: Catalog,
) -> None:
    # a block sees the context of its own sample alone
    assert amounts(samples, np.array([2, 0])) == [1.0, 3010.0, 5.0, 3000 * 4 + 10 * 1]
    assert amounts(samples, np.array([1])) == [1.0, 200.0, 20.0, 200 * 20]


def test_an_epoch_is_counted_batch_by_batch_and_a_validation_by_what_it_replays(
    whole_store: Store, train_run: Callable[..., Run]
) -> None:
    run, table = train_run(validate_samples=2), whole_store.table
    found = count(run, table)
    taken = catalog([table], [StoreShare("hs", 1.0)], run.train)
    tokens, blocks = taken.num_tokens_C, taken.num_anchors_C
    num_batches, *sums = found.batches
    assert sums == [tokens.sum(), blocks.sum(), (tokens * blocks).sum()]
    least = max(tokens.sum() / run.train.batch_tokens, blocks.sum() / run.train.batch_anchors)
    assert least <= num_batches < len(taken)
    held_out = np.flatnonzero(table.split == HELD_OUT)
    chosen = sorted(held_out.tolist(), key=lambda i: int(table.sample_id[i]))[:2]
    assert found.validated == [2.0, float(table.num_anchors[chosen].sum())]
    dropped = replace(run, train=replace(run.train, drop_domains=("chat",)))
    assert count(dropped, table).batches[1] < sums[0]


def test_batches_that_are_timed_differ_in_length(samples: Catalog, train_run: Any) -> None:
    config = train_run(batch_tokens=4000, batch_anchors=40).train
    mixed, short, long = trial_batches(samples, config)
    assert sorted(np.concatenate(mixed).tolist()) == [0, 1, 2, 3]
    assert (np.concatenate(short).tolist(), np.concatenate(long).tolist()) == ([3], [2])


@pytest.mark.parametrize("awaited", ["the store's rows", "the target's end"])
def test_a_signal_ends_it_at_once_while_it_waits_for_the_captures_part(
    awaited: str,
    whole_store: Store,
    train_run: Callable[..., Run],
    place: Place,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As after a failure there: nobody is to wait until the launcher kills it."""
    folder = tmp_path / "plan"
    folder.mkdir()
    (folder / "store").symlink_to(tmp_path / "hs")
    monkeypatch.setattr(measure, "is_whole", lambda _path: awaited == "the target's end")
    looked = list[float]()

    def looks(seconds: float) -> None:
        assert not looked, "it went on after the signal"
        looked.append(seconds)
        signal.raise_signal(signal.SIGTERM)

    def interrupt(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(measure, "time", SimpleNamespace(**vars(measure.time) | {"sleep": looks}))
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            measure.measure(train_run(), place, 0.0, folder, RunLog(place))
    finally:
        signal.signal(signal.SIGTERM, before)
    assert looked
