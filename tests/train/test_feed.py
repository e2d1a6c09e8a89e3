"""From disk to the batch: the right rows, in the right place, in buffers that are lent."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from dflash_pipeline.configs.place import Place
from dflash_pipeline.configs.schema import FeedConfig, LossConfig, Run
from dflash_pipeline.configs.shares import parse_stores
from dflash_pipeline.store import paths
from dflash_pipeline.store.access import Access, Bytes, Plain, Range
from dflash_pipeline.store.reader import Store
from dflash_pipeline.train.clock import Clock
from dflash_pipeline.train.feed import Batch, Feed, feed_access
from dflash_pipeline.train.follow import Order
from dflash_pipeline.train.group import Group
from dflash_pipeline.train.order import Catalog, Position, catalog
from dflash_pipeline.train.shape import DrafterShape

CPU = torch.device("cpu")


@pytest.fixture
def feed_of(
    whole_store: Store, place: Place, shape: DrafterShape, tmp_path: Path
) -> Callable[..., object]:
    @contextmanager
    def make(
        run: Run,
        shape: DrafterShape = shape,
        poison: bool = True,
        access: Access | None = None,
    ) -> Iterator[tuple[Feed, Catalog]]:
        shares = parse_stores(run.train.stores)
        samples = catalog([whole_store.table], shares, run.train)
        order = Order(
            samples,
            [whole_store],
            run.train,
            Group(place, 5.0),
            tmp_path / "order",
            Position(0, 0, 0),
            print,
            num_planned=0,
        )
        way = access or feed_access([whole_store], run.feed, print)
        arguments = (run, shape, CPU, torch.float32, poison, way, Clock(CPU))
        with Feed([whole_store], samples, order, *arguments) as feed:
            yield feed, samples

    return make


def _batches(feed: Feed) -> Iterator[Batch]:
    while (draw := feed.step(lambda: False, lambda: None)) is not None:
        yield from feed.batches(draw)


@pytest.mark.parametrize("io", ["auto", "mmap", "read", "direct"])
def test_every_row_is_the_stores_own(
    io: str, feed_of: Callable[..., object], train_run: Callable[..., Run], whole_store: Store
) -> None:
    run = replace(train_run(epochs=2), loss=LossConfig(kl=1.0, position_chunk=5))
    run = replace(run, feed=replace(run.feed, io=io))
    num_seen = 0
    with feed_of(run) as (feed, samples):
        for batch in _batches(feed):
            numbers = samples.sample_C[batch.samples].tolist()
            parts = [whole_store.sample(number) for number in numbers]
            hidden = np.concatenate([part.hidden_TKH for part in parts])
            assert np.array_equal(batch.feature_NKH.numpy(), hidden)
            lengths = [len(part.ids_T) for part in parts]
            places = [np.arange(length) for length in lengths]
            assert np.array_equal(batch.position_N.numpy(), np.concatenate(places))
            # each label's teacher is the stored last state of the position before it
            assert batch.teacher is not None
            ids = np.concatenate([part.ids_T for part in parts])
            anchor_R = batch.anchor_A.long()[batch.row_R // 4]
            assert np.array_equal(ids[(anchor_R + batch.slot_R).numpy()], batch.label_R.numpy())
            states = batch.teacher.state_UH[batch.teacher.index_R]
            for row in range(0, len(batch.row_R), 7):
                document = int(np.searchsorted(np.cumsum(lengths), int(anchor_R[row]), "right"))
                first = int(np.cumsum([0, *lengths])[document])
                label_at = int(anchor_R[row] + batch.slot_R[row]) - first
                kept = np.flatnonzero(parts[document].mask_T[1:])
                last_MH = parts[document].last_MH
                wanted = last_MH[np.searchsorted(kept, label_at - 1)]
                assert np.array_equal(states[row].numpy(), wanted)
            num_seen += len(numbers)
    assert num_seen == 2 * len(samples)


def test_anchors_are_drawn_anew_each_epoch(
    feed_of: Callable[..., object], train_run: Callable[..., Run]
) -> None:
    """Of a sample with more anchors than its share; of the others all are taken each time."""
    run = train_run(epochs=2)
    drawn: list[dict[int, list[int]]] = [{}, {}]
    with feed_of(run) as (feed, samples):
        while (draw := feed.step(lambda: False, lambda: None)) is not None:
            for batch in feed.batches(draw):
                starts = batch.start_A.unique().tolist()
                for place, start in zip(batch.samples.tolist(), starts, strict=True):
                    own = batch.anchor_A[batch.start_A == start] - start
                    drawn[draw.epoch][place] = own.tolist()
    first, second = drawn
    assert first.keys() == second.keys() == set(range(len(samples)))
    num_anchors = {place: len(own) for place, own in first.items()}
    assert num_anchors == {place: len(own) for place, own in second.items()}
    changed = {place for place in first if first[place] != second[place]}
    assert changed
    assert all(num_anchors[place] == run.train.anchors_per_sample for place in changed)


def test_a_subset_of_layers_is_read_in_its_own_order(
    feed_of: Callable[..., object],
    train_run: Callable[..., Run],
    whole_store: Store,
    shape: DrafterShape,
) -> None:
    with feed_of(train_run(epochs=1), replace(shape, layer_ids=(1, 5))) as (feed, samples):
        batch = next(_batches(feed))
        first = whole_store.sample(int(samples.sample_C[batch.samples[0]]))
        found = batch.feature_NKH[: len(first.ids_T)].numpy()
        assert np.array_equal(found, first.hidden_TKH[:, [0, 2]])


def test_a_late_reader_meets_nan(
    feed_of: Callable[..., object], train_run: Callable[..., Run]
) -> None:
    with feed_of(train_run(epochs=1)) as (feed, _samples):
        lent = [(batch.weight_R, bool(batch.weight_R.isfinite().all())) for batch in _batches(feed)]
        assert all(was_finite for _, was_finite in lent)
        # nothing was read into the last one's buffer after it came back
        assert bool(lent[-1][0].isnan().all())


@pytest.mark.parametrize("io", ["mmap", "read", "direct"])
def test_a_readers_error_surfaces_at_the_next_batch_and_nothing_hangs(
    io: str, feed_of: Callable[..., object], train_run: Callable[..., Run], whole_store: Store
) -> None:
    for shard_id in whole_store.layout.shard_ids():
        (whole_store.path / paths.hidden_file(shard_id)).unlink()
    run = train_run(epochs=1)
    run = replace(run, feed=replace(run.feed, io=io))
    begin = time.monotonic()
    with (
        pytest.raises(ValueError, match="missing although it is committed"),
        feed_of(run) as (feed, _samples),
    ):
        next(_batches(feed))
    assert time.monotonic() - begin < 20


def test_checked_reading_names_a_flipped_byte(
    feed_of: Callable[..., object], train_run: Callable[..., Run], whole_store: Store
) -> None:
    for shard_id in whole_store.layout.shard_ids():
        file = whole_store.path / paths.hidden_file(shard_id)
        content = bytearray(file.read_bytes())
        content[3] ^= 0xFF
        file.write_bytes(content)
    run = train_run(epochs=1)
    with feed_of(run, poison=False) as (feed, _samples):
        assert sum(1 for _ in _batches(feed)) > 0
    checked = replace(run, feed=replace(run.feed, check=True))
    with (
        pytest.raises(ValueError, match="chunk 0 does not match"),
        feed_of(checked) as (feed, _samples),
    ):
        list(_batches(feed))


def test_counts_are_sums_since_they_were_taken(
    feed_of: Callable[..., object], train_run: Callable[..., Run], whole_store: Store
) -> None:
    # no rows of `last` beside those of the layers
    run = replace(train_run(epochs=1), loss=LossConfig(ce=1.0, kl=0.0, position_chunk=5))
    with feed_of(run) as (feed, samples):
        for _batch in _batches(feed):
            pass
        counts = feed.take_counts()
        assert counts.num_samples == len(samples)
        assert counts.num_tokens == samples.num_tokens_C.sum()
        assert counts.size_bytes == counts.num_tokens * 3 * 16
        assert counts.wait_s > 0
        assert feed.take_counts().num_samples == 0


class _Slow(Plain):
    """A disk that takes 150 ms for each read."""

    def read(self, place: Range, out: Bytes) -> None:
        time.sleep(0.15)
        super().read(place, out)


def test_300_ms_of_disk_a_batch_are_hidden_behind_steps_of_125(
    feed_of: Callable[..., object], train_run: Callable[..., Run]
) -> None:
    """By the feed's default settings. A batch of one block is two reads: `hidden` and `last`."""
    run = replace(train_run(anchors_per_sample=1, batch_anchors=1), feed=FeedConfig())
    num_steps = 16
    with feed_of(run, access=_Slow(drops_cache=False)) as (feed, _samples):
        batches = _batches(feed)
        for _ in range(4):
            next(batches)
            time.sleep(0.125)
        # nothing was there to hide the first one behind
        assert feed.take_counts().wait_s >= 0.3
        for _ in range(num_steps):
            batch = next(batches)
            assert len(batch.samples) == 1
            time.sleep(0.125)
        assert feed.take_counts().wait_s < 0.1 * num_steps * 0.125


def test_what_is_read_how_is_said_in_one_line(
    train_run: Callable[..., Run], whole_store: Store
) -> None:
    config = train_run().feed
    for io, expected in (("direct", "feed.io = direct; "), ("auto", "feed.io = auto: read, ")):
        said: list[str] = []
        assert feed_access([whole_store], replace(config, io=io), said.append).name in expected
        assert len(said) == 1
        assert said[0].startswith(expected)
        assert re.search(r"page cache kept \([\d.]+ [KM]B of rows, [\d.]+ GiB of memory\)", said[0])


def test_a_store_without_a_committed_row_is_followed_unmeasured(
    train_run: Callable[..., Run], growing_store: Store
) -> None:
    said: list[str] = []
    assert feed_access([growing_store], train_run().feed, said.append).name == "read"
    assert "too few rows are there to measure" in said[0]
