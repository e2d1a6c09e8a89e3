"""Training on a rolling store: what a run tells to be used, when, and whom it refuses."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_pipeline import cli
from dflash_pipeline.configs.errors import UsageError
from dflash_pipeline.configs.place import Place
from dflash_pipeline.configs.schema import EvalConfig, Run, StoreConfig
from dflash_pipeline.configs.shares import parse_stores
from dflash_pipeline.configs.status import new_status, write_status
from dflash_pipeline.store import consumers, drop, paths, rolling
from dflash_pipeline.store.reader import Store, open_store
from dflash_pipeline.store.release import Releases
from dflash_pipeline.store.table import claim_order
from dflash_pipeline.train import consumption, evaluate, follow, worker
from dflash_pipeline.train.consumption import Consumption
from dflash_pipeline.train.drafter import Drafter
from dflash_pipeline.train.export import write_zlab
from dflash_pipeline.train.follow import Draw, Order
from dflash_pipeline.train.group import Group
from dflash_pipeline.train.journal import Journal, awaited
from dflash_pipeline.train.order import Position, catalog, planned_steps, shard_number
from dflash_pipeline.train.segments import Shard
from dflash_pipeline.train.shape import DrafterShape

START = Position(0, 0, 0)
NEW: dict[str, object] = {"resume": False}
AGAIN: dict[str, object] = {"resume": True}


@pytest.fixture(autouse=True)
def _looks_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (follow, consumption):
        monkeypatch.setattr(module, "_LOOK_EVERY_S", 0.0)


@pytest.fixture
def rolling_store(growing_store: Store) -> Store:
    """At tmp_path / hs, planned and rolling."""
    rolling.make_rolling(growing_store.path, growing_store.layout, 1)
    return growing_store


@pytest.fixture
def order_of(
    train_run: Callable[..., Run], place: Place, tmp_path: Path
) -> Callable[..., tuple[Order, list[str]]]:
    """(order, what it said) of a run in tmp_path / out at a position."""

    def make(store: Store, position: Position = START, **changes: Any) -> tuple[Order, list[str]]:
        run, said = train_run(epochs=1, **changes), list[str]()
        samples = catalog([store.table], parse_stores(run.train.stores), run.train)
        (tmp_path / "out").mkdir(exist_ok=True)
        path, group = tmp_path / "out" / "order", Group(place, 5.0)
        planned = planned_steps(samples, run.train, 1)
        order = Order(samples, [store], run.train, group, path, position, said.append, planned)
        return order, said

    return make


@pytest.fixture
def joined() -> Iterator[Callable[[Store, Order, Position], Consumption]]:
    """A run that takes part, closed in the end."""
    made: list[Consumption] = []

    def join(store: Store, order: Order, position: Position) -> Consumption:
        made.append(Consumption([store], order, order_directory(order), position, 0))
        return made[-1]

    yield join
    for one in made:
        one.close()


@dataclass(frozen=True)
class Begun:
    """A run that has drawn all that is there, and takes part."""

    store: Store
    order: Order
    draws: list[Draw]
    part: Consumption


@pytest.fixture
def begun(
    tiny: Any,
    train_plan: Any,
    rolling_store: Store,
    order_of: Callable[..., Any],
    joined: Callable[..., Consumption],
) -> Begun:
    """Three shards are there."""
    tiny.capture(train_plan, rolling_store, most=3)
    order, _ = order_of(rolling_store)
    return Begun(rolling_store, order, _all(order), joined(rolling_store, order, START))


def _write_other(store: Store, has_used: bool) -> consumers.Consumer:
    """Another run takes part, which has used all shards or none."""
    used = np.full(len(_claimed(store)), has_used)
    other = consumers.Consumer(7, "other", "/other", used)
    consumers.write_row(store.path, other)
    return other


def order_directory(order: Order) -> Path:
    assert order._following is not None
    return order._following._path.parent


def _claimed(store: Store) -> list[Shard]:
    return [(0, shard_number(i)) for i in claim_order(store.layout.num_shards)]


def _all(order: Order) -> list[Draw]:
    draws = []
    while (draw := order.draw(False)) is not None:
        draws.append(draw)
    return draws


def _places(draws: list[Draw]) -> list[int]:
    return [int(place) for draw in draws for batch in draw.batches for place in batch]


def test_half_of_what_is_there_is_trained_and_counts_as_used_after_its_last_step(
    tiny: Any, train_plan: Any, rolling_store: Store, order_of: Callable[..., Any]
) -> None:
    store, claimed = rolling_store, _claimed(rolling_store)
    tiny.capture(train_plan, store, most=len(claimed) - 1)
    order, _ = order_of(store, batch_anchors=6)
    assert order.used(START) == set()
    draws = [order.draw(False)]
    assert draws[0] is not None
    while order.used(draws[-1].after) == set():
        draws.append(order.draw(False))
    half = -(-(len(claimed) - 1) // 2)
    assert len(draws) > 1
    assert order.used(draws[-1].after) == set(claimed[:half])
    assert draws[-1].after.segment == 0
    draws += _all(order)
    tiny.capture(train_plan, store, most=1)
    store.seal()
    draws += _all(order)
    assert sorted(_places(draws)) == list(range(len(order._samples)))
    assert order.used(draws[-1].after) == set(claimed)


def test_a_resumed_run_draws_what_it_drew_though_shards_are_released(
    tiny: Any,
    train_plan: Any,
    rolling_store: Store,
    order_of: Callable[..., Any],
    joined: Callable[..., Consumption],
) -> None:
    store = rolling_store
    tiny.capture(train_plan, store, most=len(_claimed(store)) - 1)
    order, _ = order_of(store, batch_anchors=6)
    draws = _all(order)
    begin = next(n for n, draw in enumerate(draws) if draw.after.segment == 1)
    part = joined(store, order, START)
    # not a step earlier: the last of a segment is what covers its shards
    part.telling(draws[begin - 2].after)()
    store.refresh()
    assert store.num_released == 0
    part.telling(draws[begin - 1].after)()
    store.refresh()
    assert store.num_released == len(order.used(draws[begin - 1].after)) > 0
    part.close()
    reopened = open_store(store.path)
    for start in (begin, begin + 1):
        position = draws[start - 1].after
        again, _ = order_of(reopened, position, batch_anchors=6)
        rest = _all(again)
        assert _places(rest) == _places(draws[start:])
        assert [draw.after for draw in rest] == [draw.after for draw in draws[start:]]
        joined(reopened, again, position).close()
    # a checkpoint that lies before what was released cannot be gone on from
    again, _ = order_of(reopened, START, batch_anchors=6)
    with pytest.raises(UsageError, match=r"has not trained on \d+ shards .* that were released"):
        joined(reopened, again, START)


def test_less_than_a_step_is_trained_only_when_no_more_comes_and_it_is_said(
    tiny: Any,
    train_plan: Any,
    rolling_store: Store,
    order_of: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tiny.capture(train_plan, rolling_store, most=1)
    order, said = order_of(rolling_store, accumulate=50)
    assert order.draw(False) is None
    assert said == []
    monkeypatch.setattr(follow, "_STALLED_S", 0.05)
    time.sleep(0.1)
    draw = order.draw(False)
    assert draw is not None
    assert order.used(draw.after) == set(_claimed(rolling_store)[:1])
    assert "1 shards hold less than a whole step" in said[0]


def test_while_more_runs_are_awaited_no_store_counts_as_stalled_and_the_run_says_why(
    tiny: Any,
    train_plan: Any,
    rolling_store: Store,
    order_of: Callable[..., Any],
    joined: Callable[..., Consumption],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = rolling_store
    rolling.make_rolling(store.path, store.layout, 2)
    monkeypatch.setattr(follow, "_STALLED_S", 0.02)
    tiny.capture(train_plan, store, most=1)
    order, said = order_of(store, accumulate=50)
    part = joined(store, order, START)
    for _ in range(3):
        assert order.draw(False) is None
        time.sleep(0.03)
    assert said == []
    assert "before 2 training runs follow (--consumers 2): 1 more to start" in awaited([store])
    _write_other(store, has_used=False)
    assert "training runs follow" not in awaited([store])
    time.sleep(0.03)
    draw = order.draw(False)
    assert draw is not None
    assert "training a smaller step" in said[0]
    part.telling(draw.after)()
    store.refresh()
    assert store.num_released == 0


def test_a_run_that_comes_as_the_last_one_ends_the_gathering(
    tiny: Any,
    train_plan: Any,
    rolling_store: Store,
    order_of: Callable[..., Any],
    joined: Callable[..., Consumption],
) -> None:
    store = rolling_store
    rolling.make_rolling(store.path, store.layout, 2)
    tiny.capture(train_plan, store, most=3)
    other = _write_other(store, has_used=True)
    order, _ = order_of(store)
    part = joined(store, order, START)
    # it is done with all of them, and the run that is left does not wait for another
    consumers.remove_row(store.path, other)
    part.telling(_all(order)[-1].after)()
    store.refresh()
    assert store.num_released > 0


def test_an_ordinary_store_never_counts_as_stalled(
    tiny: Any,
    train_plan: Any,
    growing_store: Store,
    order_of: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(follow, "_STALLED_S", 0.01)
    tiny.capture(train_plan, growing_store, most=1)
    order, said = order_of(growing_store, accumulate=50)
    for _ in range(3):
        assert order.draw(False) is None
        time.sleep(0.02)
    assert said == []


def test_a_run_that_was_dropped_ends_and_may_come_back_while_nothing_it_needs_is_gone(
    begun: Begun, joined: Callable[..., Consumption]
) -> None:
    store, order, part = begun.store, begun.order, begun.part
    (row,) = consumers.consumers(store.path, store.layout)
    assert row.name == str(order_directory(order))
    drop.drop(store.path, store.layout, row.name)
    with pytest.raises(ValueError, match=r"was dropped from .*--resume goes on if none"):
        part.telling(begun.draws[-1].after)()
    part.close()
    part = joined(store, order, START)
    part.leave()
    assert consumers.consumers(store.path, store.layout) == []


def test_what_is_used_is_told_once_the_checkpoint_is_durable_and_not_when_it_is_begun(
    begun: Begun,
) -> None:
    tell = begun.part.telling(begun.draws[-1].after)
    (before,) = consumers.consumers(begun.store.path, begun.store.layout)
    assert not before.used.any()
    tell()
    begun.store.refresh()
    (after,) = consumers.consumers(begun.store.path, begun.store.layout)
    assert int(after.used.sum()) == begun.store.num_released == 3


def test_a_checkpoint_is_awaited_where_a_full_store_would_find_room_by_it(begun: Begun) -> None:
    store, part, last = begun.store, begun.part, begun.draws[-1].after

    def told(state: str) -> tuple[bool, bool]:
        status = new_status("capture", 0, "cpu")
        status.state = state
        write_status(f"{store.path}.logs", status)
        return part.is_owed(last), part.is_awaited(last)

    assert (part.is_owed(last), part.is_awaited(last)) == (True, False)
    # there is room, or nobody who would use it: train.save_every is soon enough
    assert told("running") == (True, False)
    assert told("done") == (True, False)
    assert told("waiting") == (True, True)
    # nothing was used, or it was told
    assert not part.is_awaited(START)
    part.telling(last)()
    assert told("waiting") == (False, False)


def test_of_two_runs_the_slower_one_decides(begun: Begun) -> None:
    store, order, part, last = begun.store, begun.order, begun.part, begun.draws[-1]
    _write_other(store, has_used=False)
    part.telling(last.after)()
    store.refresh()
    assert store.num_released == 0
    assert part.has_used(0, claim_order(store.layout.num_shards)[0])
    _write_other(store, has_used=True)
    Releases(store).run()
    assert store.num_released == len(order.used(last.after))


def test_a_store_under_a_quota_is_trained_on_once_by_runs_that_were_there_in_time(
    tiny: Any,
    train_plan: Any,
    rolling_store: Store,
    train_run: Callable[..., Run],
    place: Place,
) -> None:
    store = rolling_store
    tiny.capture(train_plan, store, most=2)
    with pytest.raises(UsageError, match=r"train.epochs is 4 where it must be 1; give --epochs 1"):
        worker.main(train_run(), place, NEW)
    first = claim_order(store.layout.num_shards)[0]
    used = np.array([shard_id == first for shard_id in store.layout.shard_ids()])
    consumers.write_row(store.path, consumers.Consumer(0, "other", "/other", used))
    Releases(store).run()
    with pytest.raises(UsageError, match=r"1 of \d+ shards of .* were released.*--resume"):
        worker.main(train_run(epochs=1), place, NEW)
    # one that was dropped before it had drawn anything is no better off
    tiny.capture(train_plan, store, most=sum(store.layout.num_shards) - 2)
    store.seal()
    with pytest.raises(UsageError, match=r"1 of \d+ shards of .* were released"):
        worker.main(train_run(epochs=1), place, AGAIN)


def test_the_line_that_comes_next_is_none_that_a_rolling_store_refuses(
    tiny: Any,
    train_plan: Any,
    rolling_store: Store,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    store = rolling_store
    monkeypatch.chdir(store.path.parent)

    def last_line() -> str:
        assert cli.dflash.main(["verify", "--deep", "hs"], standalone_mode=False) == 0
        return capfd.readouterr().out.splitlines()[-1]

    tiny.capture(train_plan, store, most=2)
    with pytest.raises(ValueError, match=r"to go on: dflash capture --target tiny --store hs$"):
        last_line()
    # this process stands for a capture that is at work
    write_status(str(paths.log_directory(store.path)), new_status("capture", 0, "cpu"))
    assert last_line() == "next: dflash train --store hs --epochs 1"
    used = np.ones(len(store.layout.shard_ids()), bool)
    consumers.write_row(store.path, consumers.Consumer(0, "other", "/other", used))
    Releases(store).run()
    assert last_line() == "next: dflash status hs"


def test_a_replay_without_held_out_samples_says_where_they_are(
    tiny: Any,
    train_plan: Any,
    rolling_store: Store,
    train_run: Callable[..., Run],
    place: Place,
    shape: DrafterShape,
    tmp_path: Path,
) -> None:
    store = rolling_store
    drafter = Drafter(shape)
    drafter.initialise(0)
    write_zlab(tmp_path / "drafter", shape, drafter.state_dict())
    run = replace(
        train_run(),
        store=StoreConfig(path=str(store.path)),
        eval=EvalConfig(drafter=str(tmp_path / "drafter")),
    )

    def refused(words: str) -> None:
        with pytest.raises(UsageError, match=words):
            evaluate.main(run, place, {}, lambda *_: pytest.fail("replay needs no target"))

    refused(r"none of the \d+ held-out samples of .* is there; give --prompts")
    tiny.capture(train_plan, store, most=2)
    used = np.ones(len(store.layout.shard_ids()), bool)
    consumers.write_row(store.path, consumers.Consumer(0, "other", "/other", used))
    Releases(store).run()
    refused(r"none of the \d+ held-out samples of .*: 2 of \d+ shards were released")


class Killed(BaseException):
    """In place of a signal that ends the whole process."""


def test_a_run_killed_before_its_checkpoint_has_used_nothing_and_goes_on(
    tiny: Any,
    train_plan: Any,
    rolling_store: Store,
    train_run: Callable[..., Run],
    place: Place,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = rolling_store
    tiny.capture(train_plan, store, most=3)
    run = train_run(epochs=1, max_steps=50)
    note = Journal.note

    def dies(self: Journal, step: int, draw: Draw) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "note", dies)
        with pytest.raises(Killed):
            worker.main(run, place, NEW)
    (row,) = consumers.consumers(store.path, store.layout)
    assert not row.used.any()
    assert consumers.presence_text(store.path, row) == "not running"

    def captures(self: Journal) -> None:
        # what the capture does once there is room
        store.refresh()
        if store.num_released and not store.is_complete:
            tiny.capture(train_plan, store, most=sum(store.layout.num_shards) - 3)
            store.seal()

    steps: dict[int, Draw] = {}

    def noted(self: Journal, step: int, draw: Draw) -> None:
        steps[step] = draw
        note(self, step, draw)

    monkeypatch.setattr(Journal, "waiting", captures)
    monkeypatch.setattr(Journal, "note", noted)
    worker.main(run, place, AGAIN)
    assert store.num_released == 3
    samples = catalog([store.table], parse_stores(run.train.stores), run.train)
    assert sorted(_places(list(steps.values()))) == list(range(len(samples)))
    # nobody waits for a run that is over
    assert consumers.consumers(store.path, store.layout) == []


def test_who_waits_for_shards_is_told_whether_a_capture_runs(rolling_store: Store) -> None:
    store = rolling_store
    num_shards = len(store.layout.shard_ids())
    text = f"{store.path} has 0 of {num_shards}, "
    assert awaited([store]) == f"{text}no capture runs (its command goes on with it)"
    status = new_status("capture", 0, "cpu")
    for state in ("running", "waiting"):
        status.state = state
        write_status(f"{store.path}.logs", status)
        assert awaited([store]) == f"{text}its capture is {state}"
