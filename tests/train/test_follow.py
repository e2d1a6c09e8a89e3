"""The order of a run, also over stores that grow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dflash_pipeline.configs.schema import Run
from dflash_pipeline.configs.shares import parse_stores
from dflash_pipeline.store.reader import Store, open_store
from dflash_pipeline.train import follow
from dflash_pipeline.train.follow import Draw, Order
from dflash_pipeline.train.order import Position, catalog, planned_steps

START = Position(0, 0, 0)


@pytest.fixture(autouse=True)
def _looks_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "_LOOK_EVERY_S", 0.0)


class Board:
    """What the ranks of one run tell each other."""

    def __init__(self) -> None:
        self.facts: dict[str, str] = {}

    def group(self, rank: int, world: int) -> Any:
        def agree(key: str, text: str) -> str:
            return self.facts.setdefault(key, text)

        return SimpleNamespace(
            rank=rank, world=world, agree=agree, tell=self.facts.__setitem__, told=self.facts.get
        )


@pytest.fixture
def order_of(train_run: Callable[..., Run], tmp_path: Path) -> Callable[..., Order]:
    def make(
        store: Store,
        rank: int = 0,
        world: int = 1,
        board: Board | None = None,
        position: Position = START,
        **changes: Any,
    ) -> Order:
        config = replace(train_run().train, **changes)
        samples = catalog([store.table], parse_stores(config.stores), config)
        group = (board or Board()).group(rank, world)
        num_planned = planned_steps(samples, config, world)
        path = tmp_path / "order"
        return Order(samples, [store], config, group, path, position, print, num_planned)

    return make


def _all(order: Order) -> list[Draw]:
    draws = []
    while (draw := order.draw(False)) is not None:
        draws.append(draw)
    return draws


def _drawn(draws: list[Draw], epoch: int) -> list[int]:
    batches = [batch for draw in draws if draw.epoch == epoch for batch in draw.batches]
    return np.concatenate(batches).tolist() if batches else []


def test_a_whole_store_needs_no_record(
    whole_store: Store, order_of: Callable[..., Order], tmp_path: Path
) -> None:
    order = order_of(whole_store, epochs=2)
    draws = _all(order)
    assert order.is_finished
    assert not order.is_following
    assert {draw.share for draw in draws} == {None}
    assert not (tmp_path / "order").exists()
    assert sorted(_drawn(draws, 0)) == sorted(_drawn(draws, 1))
    assert _drawn(draws, 0) != _drawn(draws, 1)


def test_each_step_tells_how_many_come_and_an_epoch_is_packed_anew(
    whole_store: Store, order_of: Callable[..., Order]
) -> None:
    changes = {"epochs": 3, "batch_anchors": 8}
    draws = _all(order_of(whole_store, world=2, **changes))
    epochs = np.array([draw.epoch for draw in draws])
    sizes = np.bincount(epochs)
    for number, draw in enumerate(draws):
        in_epoch = number - sizes[: draw.epoch].sum()
        left_of_epoch = sizes[draw.epoch] - in_epoch - 1
        assert draw.num_left == left_of_epoch + (2 - draw.epoch) * sizes[draw.epoch]
    assert draws[-1].num_left == 0
    rest = _all(order_of(whole_store, world=2, position=draws[4].after, **changes))
    assert [draw.num_left for draw in rest] == [draw.num_left for draw in draws[5:]]


def test_any_position_is_where_the_rest_begins(
    whole_store: Store, order_of: Callable[..., Order]
) -> None:
    draws = _all(order_of(whole_store, epochs=2))
    for begin in (1, len(draws) // 2, len(draws) - 1):
        rest = _all(order_of(whole_store, epochs=2, position=draws[begin - 1].after))
        assert [draw.after for draw in rest] == [draw.after for draw in draws[begin:]]
        assert _drawn(rest, 1) == _drawn(draws[begin:], 1)


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 1)])
def test_another_number_of_ranks_still_draws_each_sample_once_an_epoch(
    before: int, after: int, whole_store: Store, order_of: Callable[..., Order]
) -> None:
    orders = [order_of(whole_store, rank, before, epochs=2) for rank in range(before)]
    first = [order.draw(False) for order in orders for _ in range(2)]
    position = first[-1].after
    draws = [draw for draw in first if draw is not None]
    for rank in range(after):
        draws += _all(order_of(whole_store, rank, after, epochs=2, position=position))
    everyone = _drawn(_all(order_of(whole_store, epochs=1)), 0)
    assert sorted(_drawn(draws, 0)) == sorted(_drawn(draws, 1)) == sorted(everyone)


def test_ranks_have_the_same_number_of_steps_and_the_last_may_be_empty(
    whole_store: Store, order_of: Callable[..., Order]
) -> None:
    draws = [_all(order_of(whole_store, rank, 5, epochs=1)) for rank in range(5)]
    assert len({len(own) for own in draws}) == 1
    assert {own[-1].after for own in draws} == {draws[0][-1].after}


def test_a_growing_store_gives_committed_samples_alone_each_once(
    tiny: Any,
    train_plan: Any,
    growing_store: Store,
    order_of: Callable[..., Order],
    tmp_path: Path,
) -> None:
    board = Board()
    orders = [
        order_of(open_store(growing_store.path), rank, 2, board, epochs=2) for rank in range(2)
    ]
    assert all(order.is_following for order in orders)
    assert [order.draw(False) for order in orders] == [None, None]
    num_shards = sum(train_plan.layout.num_shards)
    draws: list[list[Draw]] = [[], []]
    for part in (2, num_shards - 2):
        tiny.capture(train_plan, growing_store, most=part)
        growing_store.refresh()
        for own, order in zip(draws, orders, strict=True):
            own += _all(order)
        for place in _drawn(draws[0] + draws[1], 0):
            sample = int(orders[0]._samples.sample_C[place])
            assert growing_store.readable_N[sample]
    # everything is committed, but only a sealed store says so
    assert not orders[0].is_finished
    growing_store.seal()
    for own, order in zip(draws, orders, strict=True):
        own += _all(order)
    everyone = list(range(len(orders[0]._samples)))
    assert all(order.is_finished for order in orders)
    assert sorted(_drawn(draws[0] + draws[1], 0)) == everyone
    assert sorted(_drawn(draws[0] + draws[1], 1)) == everyone
    assert len((tmp_path / "order").read_text().splitlines()) >= 2

    # resumed from the record: the same draws, although the store is whole by now
    board = Board()
    again = [order_of(growing_store, rank, 2, board, epochs=2) for rank in range(2)]
    for own, order in zip(draws, again, strict=True):
        repeated = _all(order)
        assert [draw.after for draw in repeated] == [draw.after for draw in own]
        assert [draw.share for draw in repeated] == [draw.share for draw in own]
        assert _drawn(repeated, 0) == _drawn(own, 0)


def test_each_step_of_a_followed_store_tells_the_share_of_the_plan_before_it(
    tiny: Any, train_plan: Any, growing_store: Store, order_of: Callable[..., Order]
) -> None:
    """Shard by shard on two ranks: more steps than one packing of all would take."""
    board, changes = Board(), {"epochs": 2, "batch_anchors": 8}
    stores = [open_store(growing_store.path) for _ in range(2)]
    orders = [order_of(store, rank, 2, board, **changes) for rank, store in enumerate(stores)]
    draws: list[list[Draw]] = [[], []]
    for _ in train_plan.layout.shard_ids():
        tiny.capture(train_plan, growing_store, most=1)
        for own, order in zip(draws, orders, strict=True):
            own += _all(order)
    growing_store.seal()
    for own, order in zip(draws, orders, strict=True):
        own += _all(order)
    samples, config = orders[0]._samples, orders[0]._config
    first, second = ([draw.share for draw in draws[0] if draw.epoch == epoch] for epoch in (0, 1))
    assert 2 * len(first) > planned_steps(samples, config, 2)
    shares = [share for share in first + second if share is not None]
    assert shares == [draw.share for draw in draws[0]] == [draw.share for draw in draws[1]]
    assert shares[0] == 0.0
    assert np.all(np.diff(shares) > 0)
    # the second epoch is one packing of all
    assert second[0] == 0.5
    assert np.diff(shares[len(first) :]) == pytest.approx(shares[-1] - shares[-2])
    # how many steps come is the plan's to say until the last segment is known
    num_planned = planned_steps(samples, config, 2)
    told = [number + draw.num_left for number, draw in enumerate(draws[0], start=1)]
    assert told == [number + draw.num_left for number, draw in enumerate(draws[1], start=1)]
    assert abs(told[0] - num_planned) <= 2
    # what each shard came to more than the plan adds up
    assert np.all(np.diff(told[: len(first)]) >= 0)
    second_planned = num_planned // 2
    assert told[len(first) - 1] == len(first) + second_planned
    assert set(told[len(first) :]) == {len(draws[0])}
    # what a step trains is what the schedule goes on by
    filled_C = np.maximum(
        samples.num_tokens_C / config.batch_tokens, samples.num_anchors_C / config.batch_anchors
    )
    trained = 0.0
    for share, draw, other in zip(first, draws[0], draws[1], strict=False):
        assert share == pytest.approx(trained / filled_C.sum() / 2, abs=0.08)
        trained += sum(filled_C[batch].sum() for batch in (*draw.batches, *other.batches))
    assert trained == pytest.approx(filled_C.sum())
    # from any place on, as from the beginning
    rest = _all(order_of(growing_store, 0, 2, position=draws[0][2].after, **changes))
    assert [draw.share for draw in rest] == shares[3:]


def test_a_torn_line_of_the_record_is_cut_off(
    tiny: Any, train_plan: Any, growing_store: Store, order_of: Callable[..., Order], tmp_path: Path
) -> None:
    tiny.capture(train_plan, growing_store, most=2)
    first = _all(order_of(growing_store))
    record = tmp_path / "order"
    whole = record.read_text()
    record.write_text(whole + '{"shards": [[0,')
    assert _drawn(_all(order_of(growing_store)), 0) == _drawn(first, 0)
    assert record.read_text() == whole


@pytest.mark.parametrize("line", [b"not json", b"[]", b'{"shards": 3}', b"\xff", b""])
def test_a_damaged_line_of_the_record_is_named(
    line: bytes, order_of: Callable[..., Order], growing_store: Store, tmp_path: Path
) -> None:
    whole = b'{"shards": [[0, 0]], "last": false, "stop": false}\n'
    (tmp_path / "order").write_bytes(whole + line + b"\n")
    with pytest.raises(ValueError, match=r"order: line 2 is damaged .*--init-from"):
        order_of(growing_store)


def test_a_wish_to_stop_on_any_rank_ends_the_wait_of_all(
    growing_store: Store, order_of: Callable[..., Order]
) -> None:
    board = Board()
    orders = [order_of(growing_store, rank, 2, board) for rank in range(2)]
    assert orders[1].draw(True) is None
    assert not orders[1].is_stopped
    for order in orders:
        assert order.draw(False) is None
        assert order.is_stopped
