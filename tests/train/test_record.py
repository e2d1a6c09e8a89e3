"""What a run was begun with, and whether one that goes on is the same."""

from __future__ import annotations

import errno
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dflash_pipeline.configs.errors import UsageError
from dflash_pipeline.configs.place import Place
from dflash_pipeline.configs.schema import Run
from dflash_pipeline.store.reader import Store
from dflash_pipeline.train import record, worker


def test_out_must_be_free_or_resumed(
    whole_store: Store, train_run: Callable[..., Run], tmp_path: Path
) -> None:
    run, out = train_run(), tmp_path / "out"
    with pytest.raises(UsageError, match="no run to resume"):
        record.begin(out, run, [whole_store.root], resume=True)
    (out / "logs").mkdir(parents=True)
    record.begin(out, run, [whole_store.root], resume=False)
    with pytest.raises(UsageError, match=r"not empty \(it holds run\.json\).*--resume"):
        record.begin(out, run, [whole_store.root], resume=False)
    record.begin(out, run, [whole_store.root], resume=True)


def test_resume_names_each_difference_and_allows_what_changes_no_value(
    whole_store: Store, train_run: Callable[..., Run], tmp_path: Path
) -> None:
    run, out = train_run(), tmp_path / "out"
    record.begin(out, run, [whole_store.root], resume=False)
    free = replace(run, train=replace(run.train, log_every=99, keep=1, timeout_s=7.0))
    record.begin(out, free, [whole_store.root], resume=True)
    changed = replace(
        run,
        drafter=replace(run.drafter, block_size=8),
        optim=replace(run.optim, lr=1.0),
        train=replace(run.train, batch_anchors=32),
    )
    with pytest.raises(UsageError) as error:
        record.begin(out, changed, [whole_store.root], resume=True)
    for difference in (
        "drafter.block_size: 4, now 8",
        "optim.lr: 0.002, now 1.0",
        "train.batch_anchors: 16, now 32",
    ):
        assert difference in str(error.value)
    others = {"plan_hash": "other", "identity": {**whole_store.root.identity, "max_len": 7}}
    for what, value in others.items():
        root = replace(whole_store.root, **{what: value})
        with pytest.raises(UsageError, match=f"another {what}"):
            record.begin(out, run, [root], resume=True)
    # settings alone, where the stores are not known
    record.check_same(out, run, None)


@pytest.mark.parametrize("content", [b"", b'{"run": ', b"[]", b"{}", b"\xff", b'{"run": {}}'])
def test_a_damaged_record_of_a_run_is_named(
    content: bytes, whole_store: Store, train_run: Callable[..., Run], tmp_path: Path
) -> None:
    run, out = train_run(), tmp_path / "out"
    record.begin(out, run, [whole_store.root], resume=False)
    (out / "run.json").write_bytes(content)
    with pytest.raises(UsageError, match=r"run\.json is damaged .*--init-from"):
        record.begin(out, run, [whole_store.root], resume=True)


@pytest.mark.parametrize(("old", "told"), [("epochs", "train.turns"), ("train", "trains")])
def test_a_record_of_another_version_is_no_damage(
    old: str, told: str, whole_store: Store, train_run: Callable[..., Run], tmp_path: Path
) -> None:
    run, out = train_run(), tmp_path / "out"
    record.begin(out, run, [whole_store.root], resume=False)
    file = out / "run.json"
    file.write_text(file.read_text().replace(f'"{old}"', f'"{told.split(".")[-1]}"'))
    words = rf"written by another version .*{told}.*version that it names.* --init-from {out}$"
    with pytest.raises(UsageError, match=words):
        record.begin(out, run, [whole_store.root], resume=True)


def test_resume_refuses_another_share_of_a_store(
    whole_store: Store, train_run: Callable[..., Run], tmp_path: Path
) -> None:
    run, out, path = train_run(), tmp_path / "out", whole_store.path
    half = replace(run, train=replace(run.train, stores=(f"{path}:0.5",)))
    record.begin(out, half, [whole_store.root], resume=False)
    record.begin(out, half, [whole_store.root], resume=True)
    whole = replace(run, train=replace(run.train, stores=(str(path),)))
    with pytest.raises(UsageError, match=r"store 0 .*another share"):
        record.begin(out, whole, [whole_store.root], resume=True)


def test_a_run_has_one_process_that_writes_it(
    whole_store: Store, train_run: Callable[..., Run], tmp_path: Path, monkeypatch: Any
) -> None:
    run, out = train_run(), tmp_path / "out"
    record.begin(out, run, [whole_store.root], resume=False)
    record.check_free(out)
    with record.held(out):
        message = r"another process trains into .*/out at this moment .*: wait until it has ended"
        with pytest.raises(UsageError, match=message), record.held(out):
            pytest.fail("two hold it")
        with pytest.raises(UsageError, match=message):
            record.check_free(out)
        # that it is not empty, and --resume, would not help
        with pytest.raises(UsageError, match=message):
            record.begin(out, run, [whole_store.root], resume=False)
    record.check_free(out)

    def without_locks(*_arguments: object) -> bool:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(record.durable, "lock", without_locks)
    record.check_free(out)


def test_of_starts_at_the_same_moment_one_alone_begins(
    whole_store: Store, train_run: Callable[..., Run], tmp_path: Path, monkeypatch: Any
) -> None:
    """All have seen an empty OUT before the first of them writes."""
    num_starts, out, create = 4, tmp_path / "out", record.durable.create
    all_have_looked = threading.Barrier(num_starts)

    def waits(path: Path, data: bytes) -> None:
        all_have_looked.wait(30)
        create(path, data)

    monkeypatch.setattr(record.durable, "create", waits)
    runs = [train_run(seed=seed) for seed in range(num_starts)]

    def start(run: Run) -> str:
        try:
            record.begin(out, run, [whole_store.root], resume=False)
        except UsageError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(num_starts) as starts:
        told = list(starts.map(start, runs))
    assert told.count("") == 1
    refused = [one for one in told if one]
    assert all(one.startswith(f"another process trains into {out}") for one in refused)
    record.check_same(out, runs[told.index("")], [whole_store.root])
    assert [path.name for path in out.iterdir()] == ["run.json"]


def test_a_run_that_another_process_writes_is_not_gone_on_with(
    whole_store: Store, train_run: Callable[..., Run], place: Place
) -> None:
    run = train_run(max_steps=1)
    out = Path(run.train.out)
    record.begin(out, run, [whole_store.root], resume=False)
    before = sorted(path.name for path in out.iterdir())
    with record.held(out), pytest.raises(UsageError, match="another process trains into"):
        worker.main(run, place, {"resume": True})
    assert sorted(path.name for path in out.iterdir() if path.name != "logs") == before


def test_the_record_is_compared_without_torch() -> None:
    code = "import sys, dflash_pipeline.train.record; print(*sys.modules)"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert "torch" not in answer.stdout.decode().split()
