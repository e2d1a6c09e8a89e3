"""The plan is made once, from all the data, and guards the store against another run."""

from __future__ import annotations

import dataclasses
import gzip
import json
import pickle
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.context import SpawnContext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_pipeline.capture import counting, planning, spool
from dflash_pipeline.capture.continuing import plan_differences
from dflash_pipeline.capture.model import embedding_and_head, resolve
from dflash_pipeline.capture.samples import Conversation, Dropped, read
from dflash_pipeline.capture.spool import Spool, fill, is_held_out
from dflash_pipeline.capture.template import render
from dflash_pipeline.configs.errors import UsageError
from dflash_pipeline.configs.load import load
from dflash_pipeline.configs.schema import (
    CaptureConfig,
    DataConfig,
    Run,
    StoreConfig,
    TargetConfig,
)
from dflash_pipeline.configs.status import find_statuses
from dflash_pipeline.store.build import plan_lock
from dflash_pipeline.store.quota import fixed_bytes, largest_shard_bytes
from dflash_pipeline.store.reader import Store, open_store
from dflash_pipeline.store.rolling import gathering_of
from dflash_pipeline.store.table import HELD_OUT
from places import cpu_place

NUM_ROWS = 40


@pytest.fixture(autouse=True)
def preflights(monkeypatch: pytest.MonkeyPatch) -> list[list[Conversation]]:
    """The preflight has tests of its own; here it only records what it was given."""
    seen: list[list[Conversation]] = []
    monkeypatch.setattr(
        planning.preflight, "check", lambda run, files, first, say: seen.append(first)
    )
    return seen


def rows() -> list[dict[str, Any]]:
    return [
        {
            "id": f"row-{i}",
            "domain": ("math", "code")[i % 2],
            "messages": [
                {"role": "user", "content": f"Question {i // 2}"},
                {"role": "assistant", "content": "word " * (1 + 3 * (i % 13))},
            ],
        }
        for i in range(NUM_ROWS)
    ]


def run_in(folder: Path, target_dir: Path) -> Run:
    data = folder / "talk.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows()))
    return Run(
        target=TargetConfig(id=str(target_dir), num_capture_layers=2),
        data=DataConfig(files=(str(data),), max_len=200, heldout=0.2),
        store=StoreConfig(path=str(folder / "hs"), shard_bytes=80_000),
        capture=CaptureConfig(token_budget=512, num_buckets=2, pad_multiple=16),
    )


@pytest.fixture
def run(tmp_path: Path, target_dir: Path) -> Run:
    return run_in(tmp_path, target_dir)


@pytest.fixture(scope="module")
def planned_run(tmp_path_factory: pytest.TempPathFactory, target_dir: Path) -> Run:
    """A run whose store has been planned; tests only look at it."""
    folder = tmp_path_factory.mktemp("planned")
    made = run_in(folder, target_dir)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planning.preflight, "check", lambda *arguments: None)
        planned(made, folder)
    return made


def planned(run: Run, tmp_path: Path, *, only_count: bool = False) -> str:
    place = cpu_place(tmp_path / "logs", "plan")
    planning.main(run, place, {"kind": "cpu", "num_workers": 1, "only_count": only_count})
    return (tmp_path / "logs" / "plan-0.log").read_text()


def test_the_status_tells_how_many_rows_were_read(planned_run: Run) -> None:
    (told,) = find_statuses(Path(planned_run.store.path).parent / "logs")
    assert (told.done, told.total, told.unit) == (NUM_ROWS, NUM_ROWS, "rows")


def test_who_waits_for_the_plan_of_another_says_so(
    run: Run,
    tmp_path: Path,
    preflights: list[list[Conversation]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    with ThreadPoolExecutor(1) as thread:
        with plan_lock(run.store.path, wait_s=0):
            second = thread.submit(planned, run, tmp_path)
            status = tmp_path / "logs" / "plan-0.status.json"
            while not (status.exists() and "is planning" in status.read_text()):
                assert not second.done()
                time.sleep(0.01)
        second.result()
    told = f"plan: another capture is planning {run.store.path}, this one joins it then"
    assert told in capsys.readouterr().out
    assert len(open_store(run.store.path).table) == NUM_ROWS


def with_data(run: Run, **changes: Any) -> Run:
    return dataclasses.replace(run, data=dataclasses.replace(run.data, **changes))


def test_the_store_holds_every_sample_as_the_template_renders_it(
    run: Run, tmp_path: Path, preflights: list[list[Conversation]]
) -> None:
    planned(run, tmp_path)
    store = open_store(run.store.path)
    tokenizer = resolve(run.target).tokenizer()
    assert len(store.table) == NUM_ROWS
    for number, row in enumerate(rows(), 1):
        i = store.table.find(row["id"])
        ids_T, mask_T = render(tokenizer, row["messages"], run.target)
        found_ids, found_mask = store.tokens(i)
        assert found_ids.tolist() == ids_T[:200].tolist()
        assert found_mask.tolist() == mask_T[:200].tolist()
        assert store.table.source_row[i] == number
        assert store.table.domains[store.table.domain[i]] == row["domain"]
    assert not any(store.is_committed(shard_id) for shard_id in store.layout.shard_ids())
    assert [one.key for one in preflights[0]] == [f"row-{i}" for i in range(8)]


def test_the_store_carries_the_target_it_is_of(planned_run: Run) -> None:
    store, files = open_store(planned_run.store.path), resolve(planned_run.target)
    embed_VH, head_VH = embedding_and_head(files)
    assert np.array_equal(store.embed(), embed_VH)
    assert np.array_equal(store.head(), head_VH)
    assert store.files() == files.files_for_store()
    assert (store.spec.target_dtype, store.spec.layer_ids) == ("fp32", (1, 3))
    assert store.attributes.mask_token_id == 259


def test_samples_of_one_prompt_are_on_one_side_of_the_split(planned_run: Run) -> None:
    table = open_store(planned_run.store.path).table
    side = {table.key(i): int(table.split[i]) for i in range(len(table))}
    for i in range(0, NUM_ROWS, 2):
        assert side[f"row-{i}"] == side[f"row-{i + 1}"]
        assert (side[f"row-{i}"] == HELD_OUT) == is_held_out(f"Question {i // 2}", 0.2)
    assert 0 < sum(side.values()) < NUM_ROWS
    share = np.mean([is_held_out(f"prompt {i}", 0.2) for i in range(5000)])
    assert abs(share - 0.2) < 0.02


def test_the_plan_does_not_depend_on_when_or_where_it_is_made(run: Run, tmp_path: Path) -> None:
    planned(run, tmp_path)
    other = tmp_path / "elsewhere"
    other.mkdir()
    moved = Path(run.data.files[0]).rename(other / "talk.jsonl")
    again = dataclasses.replace(
        with_data(run, files=(str(moved),)),
        store=dataclasses.replace(run.store, path=str(other / "hs")),
    )
    planned(again, other)
    first, second = open_store(run.store.path), open_store(again.store.path)
    assert first.plan_hash == second.plan_hash
    assert first.attributes.data_hash == second.attributes.data_hash
    # and the first store goes on with its data moved
    assert "resuming: 0 of" in planned(with_data(run, files=(str(moved),)), tmp_path)


@pytest.mark.parametrize(
    ("section", "change", "message"),
    [
        ("data", {"max_len": 150}, "max_len: 200 and 150"),
        ("data", {"heldout": 0.1}, r"data.heldout: 0.2 and 0.1"),
        ("target", {"layer_ids": (0, 2)}, r"layer_ids: \(1, 3\) and \(0, 2\)"),
        ("target", {"system_prompt": "Be brief."}, "template_args: "),
        ("target", {"mask_token_id": 260}, "mask_token_id: 259 and 260"),
        ("store", {"last_mode": "none"}, "last_mode: 'bf16' and 'none'"),
        ("store", {"shard_bytes": 50_000}, "store.shard_bytes: 80000 and 50000"),
        ("capture", {"seed": 1}, "capture.seed: 0 and 1"),
    ],
)
def test_a_store_of_another_run_is_refused_with_each_difference(
    planned_run: Run, tmp_path: Path, section: str, change: dict[str, Any], message: str
) -> None:
    part = dataclasses.replace(getattr(planned_run, section), **change)
    with pytest.raises(UsageError, match=message):
        planned(dataclasses.replace(planned_run, **{section: part}), tmp_path)


def test_a_setting_that_a_store_knows_nothing_of_was_as_the_default_is(planned_run: Run) -> None:
    store = open_store(planned_run.store.path)
    recorded: Any = json.loads(json.dumps(store.attributes.run))
    del recorded["capture"]["compile"]
    before = dataclasses.replace(store.attributes, run=recorded)
    assert plan_differences(store.spec, before, planned_run) == []
    compiled = dataclasses.replace(planned_run.capture, compile="on")
    run = dataclasses.replace(planned_run, capture=compiled)
    assert plan_differences(store.spec, before, run) == ["capture.compile: 'auto' and 'on'"]


def test_the_count_says_which_mount_has_no_room(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counting.durable, "free_bytes", lambda _folder: 1 << 20)
    mounts = f"{tmp_path / 'hs'},{tmp_path / 'more'}"
    store = dataclasses.replace(run.store, path=mounts, shard_bytes=1)
    told = planned(dataclasses.replace(run, store=store), tmp_path, only_count=True)
    assert "1.05 MB + 1.05 MB free" in told
    # one file system has both
    assert f"no room: {tmp_path / 'hs'}, {tmp_path / 'more'} would take" in told


def test_other_content_in_the_same_file_is_refused(run: Run, tmp_path: Path) -> None:
    planned(run, tmp_path)
    data = Path(run.data.files[0])
    data.write_text(data.read_text().replace("Question 3", "Question X"))
    with pytest.raises(UsageError, match="the files hold something else"):
        planned(run, tmp_path)


def test_counting_writes_nothing(run: Run, tmp_path: Path) -> None:
    said = planned(run, tmp_path, only_count=True)
    assert f"{NUM_ROWS} samples" in said
    assert "128 bytes a token and 64 a row of last" in said
    assert "% padding" in said
    assert "held out to measure" not in said
    assert {path.name for path in tmp_path.iterdir()} == {"talk.jsonl", "logs"}


@pytest.mark.parametrize(
    "modes",
    [
        {"hidden_mode": "int8"},
        {"hidden_mode": "int4"},
        {"last_mode": "int8"},
        {"last_mode": "int4"},
    ],
)
def test_a_width_that_int8_and_int4_cannot_hold_is_wrong_usage(
    modes: dict[str, Any], tmp_path: Path, make_target_dir: Callable[..., Path]
) -> None:
    run = run_in(tmp_path, make_target_dir("qwen3", hidden_size=24))
    run = dataclasses.replace(run, store=dataclasses.replace(run.store, **modes))
    text = r"hidden size 24, which is not a multiple of 16: .*--hidden-mode bf16"
    with pytest.raises(UsageError, match=text):
        planned(run, tmp_path, only_count=True)


def test_the_count_says_how_to_have_held_out_samples(run: Run, tmp_path: Path) -> None:
    run = dataclasses.replace(run, data=dataclasses.replace(run.data, heldout=0.0))
    said = planned(run, tmp_path, only_count=True)
    assert "(0 held out)" in said
    _, is_told, setting = said.partition("held out to measure the drafter on: to have some, --set ")
    assert is_told
    heldout = load("", [setting.splitlines()[0]], {}).data.heldout
    run = dataclasses.replace(run, data=dataclasses.replace(run.data, heldout=heldout))
    (tmp_path / "logs" / "plan-0.log").unlink()
    said = planned(run, tmp_path, only_count=True)
    assert "(0 held out)" not in said
    assert "held out to measure" not in said


def test_rows_without_a_sample_are_counted_by_reason(run: Run, tmp_path: Path) -> None:
    data = Path(run.data.files[0])
    bad = [
        {"messages": [{"role": "user", "content": "unanswered"}]},
        {"messages": rows()[0]["messages"], "token_ids": [1, 9999], "loss_spans": [[0, 2]]},
        {"messages": rows()[0]["messages"], "token_ids": [1, 2], "loss_spans": [[0, 1]]},
        {"prompt": "x" * 300, "response": "too late"},
    ]
    data.write_text(data.read_text() + "".join(json.dumps(row) + "\n" for row in bad))
    with pytest.raises(ValueError, match="3 of 44 rows are unusable"):
        planned(run, tmp_path)
    assert not Path(run.store.path).exists()
    planned(with_data(run, max_bad_share=0.1), tmp_path)
    assert open_store(run.store.path).attributes.dropped == {
        "a token id outside the target's vocabulary": 1,
        "no answer within data.max_len": 1,
        "no assistant turn: let generate answer it": 1,
        "no supervised pair": 1,
    }


def test_long_samples_are_cut_or_left_out_as_asked(run: Run, tmp_path: Path) -> None:
    cut = with_data(run, max_len=100)
    planned(cut, tmp_path)
    assert open_store(run.store.path).table.num_tokens.max() == 100
    left_out = dataclasses.replace(
        with_data(run, max_len=100, overlong="drop"),
        store=dataclasses.replace(run.store, path=str(tmp_path / "other")),
    )
    planned(left_out, tmp_path)
    store = open_store(left_out.store.path)
    assert store.table.num_tokens.max() < 100
    assert len(store.table) + store.attributes.dropped["longer than data.max_len"] == NUM_ROWS


def test_tokens_of_generate_are_stored_as_they_are(run: Run, tmp_path: Path) -> None:
    data = tmp_path / "answers.jsonl.gz"
    row = {**rows()[0], "token_ids": [5, 6, 7, 8, 9], "loss_spans": [[1, 2], [3, 5]]}
    data.write_bytes(gzip.compress(json.dumps(row).encode()))
    planned(with_data(run, files=(str(data),), heldout=0.0), tmp_path)
    ids_T, mask_T = open_store(run.store.path).tokens(0)
    assert (ids_T.tolist(), mask_T.tolist()) == ([5, 6, 7, 8, 9], [0, 1, 0, 1, 1])


def test_answers_of_another_template_are_refused(run: Run, tmp_path: Path) -> None:
    beside = Path(f"{run.data.files[0]}.logs")
    beside.mkdir()
    (beside / "settings.json").write_text(json.dumps({"template_args": "other"}))
    with pytest.raises(UsageError, match="was generated with template_args 'other'"):
        planned(run, tmp_path)


def test_wrong_layers_and_mask_tokens_end_before_the_data_is_read(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "read", None)
    for change in ({"layer_ids": (5,)}, {"mask_token_id": 258}):
        target = dataclasses.replace(run.target, **change)
        with pytest.raises(ValueError, match=r"layer|mask token"):
            planned(dataclasses.replace(run, target=target), tmp_path)


def test_several_processes_render_the_same_in_the_same_order(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    # threads stand in for processes, which take seconds to load; what they are sent is pickled
    def pool(size: int, context: object, load: Any, arguments: tuple[Any, ...]) -> Any:
        assert isinstance(context, SpawnContext)
        assert pickle.loads(pickle.dumps(arguments)) == arguments
        return ThreadPoolExecutor(size, "render", load, arguments)

    monkeypatch.setattr(spool, "ProcessPoolExecutor", pool)
    monkeypatch.setattr(spool, "_CHUNK", 7)
    spools = []
    for num_alone, num_processes in ((100, 1), (5, 2)):
        monkeypatch.setattr(spool, "_NUM_ALONE", num_alone)
        dropped = Dropped()
        with Spool(None, "teacher") as found:
            tokenizer = resolve(run.target).tokenizer()
            conversations = list(read(run.data.files, 0, dropped))
            assert pickle.loads(pickle.dumps(conversations)) == conversations
            fill(found, conversations, tokenizer, run.target, 272, run.data, num_processes, dropped)
        spools.append(found)
    first, second = spools
    assert first.keys == second.keys == [f"row-{i}" for i in range(NUM_ROWS)]
    assert {name: list(values) for name, values in first.columns.items()} == {
        name: list(values) for name, values in second.columns.items()
    }


def test_a_rendering_process_that_is_killed_is_told_as_that(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(_part: list[Conversation]) -> None:
        raise BrokenProcessPool("A process in the process pool was terminated abruptly")

    def pool(size: int, *_arguments: object) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(size)

    monkeypatch.setattr(spool, "ProcessPoolExecutor", pool)
    monkeypatch.setattr(spool, "_render_part", killed)
    monkeypatch.setattr(spool, "_NUM_ALONE", 5)
    conversations, tokenizer = read(run.data.files, 0, Dropped()), resolve(run.target).tokenizer()
    arguments = (conversations, tokenizer, run.target, 272, run.data, 2, Dropped())
    with (
        Spool(None, "teacher") as found,
        pytest.raises(ValueError, match=r"one of 2 processes .* was killed"),
    ):
        fill(found, *arguments)


def test_a_store_that_lacks_shards_is_tried_again(
    planned_run: Run, tmp_path: Path, preflights: list[list[Conversation]]
) -> None:
    planned(planned_run, tmp_path)
    assert [one.key for one in preflights[0]] == [f"row-{i}" for i in range(8)]


def with_quota(run: Run, num_consumers: int) -> Run:
    capture = dataclasses.replace(run.capture, quota="1TB", num_consumers=num_consumers)
    return dataclasses.replace(run, capture=capture)


def test_the_runs_that_a_quota_waits_for_are_those_of_the_last_line(
    run: Run, tmp_path: Path
) -> None:
    path = Path(run.store.path)
    for num_consumers in (2, 2, 3, 1, 2):
        planned(with_quota(run, num_consumers), tmp_path)
        assert gathering_of(path).num_consumers == num_consumers


def test_once_shards_are_gone_no_further_run_is_waited_for(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned(with_quota(run, 2), tmp_path)
    monkeypatch.setattr(Store, "num_released", 1)
    planned(with_quota(run, 2), tmp_path)
    planned(with_quota(run, 1), tmp_path)
    with pytest.raises(UsageError, match=r"--consumers 3: 1 shards .* when 1 had come together"):
        planned(with_quota(run, 3), tmp_path)


def test_a_quota_that_is_too_small_fails_once_the_plan_is_there_and_the_plan_is_kept(
    run: Run, tmp_path: Path
) -> None:
    small = dataclasses.replace(run, capture=dataclasses.replace(run.capture, quota="1KB"))
    with pytest.raises(ValueError, match=r"1 KB is too small .* The plan in .* is kept") as caught:
        planned(small, tmp_path)
    # exit code 2 would say that nothing was left behind
    assert not isinstance(caught.value, UsageError)
    with pytest.raises(UsageError, match="1 KB is too small"):
        planned(small, tmp_path)
    assert "resuming: 0 of" in planned(with_quota(run, 1), tmp_path)


def test_plan_refuses_a_quota_that_is_too_small_and_names_one_that_is_not(
    run: Run, tmp_path: Path
) -> None:
    def under(quota: str) -> Run:
        return dataclasses.replace(run, capture=dataclasses.replace(run.capture, quota=quota))

    with pytest.raises(UsageError, match="1 KB is too small") as caught:
        planned(under("1KB"), tmp_path, only_count=True)
    enough = re.search(r"give at least (\d+) bytes", str(caught.value))
    assert enough is not None
    assert "shards at a time" in planned(under(enough[1]), tmp_path, only_count=True)
    assert not Path(run.store.path).exists()
    planned(under(enough[1]), tmp_path)
    store = open_store(run.store.path)
    assert fixed_bytes(store) + largest_shard_bytes(store) > int(enough[1]) / 2


def test_consumers_without_a_quota_are_refused() -> None:
    with pytest.raises(ValueError, match=r"num_consumers is 2, but without capture\.quota no"):
        CaptureConfig(num_consumers=2)
    with pytest.raises(ValueError, match="num_consumers must be at least 1, got 0"):
        CaptureConfig(quota="1TB", num_consumers=0)


def test_a_resumed_capture_says_how_far_it_is(planned_run: Run, tmp_path: Path) -> None:
    num_shards = len(open_store(planned_run.store.path).layout.shard_ids())
    assert num_shards > 3
    assert f"resuming: 0 of {num_shards} shards committed" in planned(planned_run, tmp_path)
