"""A store of int8 or int4 rows is calibrated once, whoever does it, and refused where it errs."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dflash_pipeline.capture import calibrating, worker
from dflash_pipeline.capture.calibrating import chosen_samples
from dflash_pipeline.capture.construction import build_store
from dflash_pipeline.capture.donor import donor
from dflash_pipeline.capture.model import resolve
from dflash_pipeline.capture.planning import check_same
from dflash_pipeline.capture.samples import Conversation, Dropped
from dflash_pipeline.configs.errors import UsageError
from dflash_pipeline.configs.place import Place
from dflash_pipeline.configs.schema import (
    CaptureConfig,
    DataConfig,
    Run,
    StoreConfig,
    TargetConfig,
)
from dflash_pipeline.store import calibration, guard, rows
from dflash_pipeline.store.check import verify
from dflash_pipeline.store.describe import describe
from dflash_pipeline.store.guard import BOUNDS
from dflash_pipeline.store.reader import open_store
from dflash_pipeline.store.report import render
from dflash_pipeline.store.table import claim_order
from places import cpu_place

NUM_SAMPLES = 30


@pytest.fixture
def folder() -> Iterator[Path]:
    """In memory where that is possible: a store is many small synced files."""
    parent = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=parent) as directory:
        yield Path(directory)


def _run(target_dir: Path, path: Path, hidden_mode: str, last_mode: str, **changes: Any) -> Run:
    modes: Any = {"hidden_mode": hidden_mode, "last_mode": last_mode}
    return Run(
        target=TargetConfig(id=str(target_dir), layer_ids=(0, 2, 4)),
        data=DataConfig(files=("data.jsonl",), max_len=96),
        store=StoreConfig(path=str(path), shard_bytes=8_000, **modes),
        capture=CaptureConfig(token_budget=192, pad_multiple=16, num_buckets=2, **changes),
    )


def _plan(run: Run, kind: str = "cpu", seed: int = 0) -> None:
    lengths = np.random.default_rng(seed).integers(8, 60, NUM_SAMPLES)
    conversations = [
        Conversation(
            key=f"sample-{seed}-{row}" if seed else f"sample-{row}",
            source=0,
            row=row,
            domain="code" if row == 3 else "chat",
            messages=(
                {"role": "user", "content": f"Say {row}"},
                {"role": "assistant", "content": "abcdefghij"[row % 10 :] * (int(length) // 8)},
            ),
            text="",
            token_ids=(),
            loss_spans=(),
        )
        for row, length in enumerate(lengths)
    ]
    dropped = Dropped(num_rows=NUM_SAMPLES)
    build_store(run, resolve(run.target), kind, conversations, dropped, "", 1, lambda _text: None)


def _place(run: Run) -> Place:
    return cpu_place(f"{run.store.path}.logs", "capture")


def _capture(run: Run) -> None:
    worker.main(run, _place(run), {})


def _files(path: str) -> dict[str, bytes]:
    found = sorted(file for file in Path(path).rglob("*") if file.is_file())
    return {str(file.relative_to(path)): file.read_bytes() for file in found}


@pytest.mark.parametrize(("hidden_mode", "last_mode"), [("int8", "int8"), ("int4", "int8")])
def test_a_quantised_capture_is_whole_and_near_to_what_the_target_gave(
    hidden_mode: str,
    last_mode: str,
    target_dir: Path,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("DFLASH_POISON", "1")
    plain = _run(target_dir, folder / "plain", "bf16", "bf16")
    run = _run(target_dir, folder / "hs", hidden_mode, last_mode, force=True)
    for one in (plain, run):
        _plan(one)
        _capture(one)
    store, truth = open_store(run.store.path), open_store(plain.store.path)
    assert store.is_sealed
    assert verify(store.path, deep=True).problems == []
    bound = BOUNDS[hidden_mode].error_median
    for i in range(NUM_SAMPLES):
        found, wanted = store.sample(i), truth.sample(truth.table.find(store.table.key(i)))
        gap_TK = np.linalg.norm(found.hidden_TKH - wanted.hidden_TKH, axis=-1)
        assert np.median(gap_TK / np.linalg.norm(wanted.hidden_TKH, axis=-1)) < bound
    said = capsys.readouterr().out
    assert f"calibration: layer 2 as {hidden_mode}: error" in said
    assert f"head on last as {last_mode}: first choice kept in" in said
    found = describe(store.path)
    assert found["total"]["bytes_per_token"] < describe(truth.path)["total"]["bytes_per_token"]
    assert f"layer 4 as {hidden_mode}: error" in render(found)
    # a second start continues it, another mode does not
    files = resolve(run.target)
    check_same(store, run, files, "cpu", "")
    with pytest.raises(UsageError, match="hidden_mode: "):
        check_same(store, replace(run, store=plain.store), files, "cpu", "")


def test_a_second_store_takes_over_the_calibration_and_has_the_same_identity(
    target_dir: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = _run(target_dir, folder / "a", "int4", "int8", force=True)
    anew = _run(target_dir, folder / "anew", "int4", "int8", force=True)
    second = _run(
        target_dir, folder / "b", "int4", "int8", force=True, calibration_from=first.store.path
    )
    for seed, run in enumerate((first, anew, second)):
        _plan(run, seed=seed)
        _capture(run)
    assert f"calibration of {first.store.path} taken over" in capsys.readouterr().out
    stores = [open_store(run.store.path) for run in (first, anew, second)]
    # other data gives another calibration, so that the equality below says something
    assert stores[0].spec != stores[1].spec
    assert stores[0].spec == stores[2].spec
    assert verify(stores[2].path, deep=True).problems == []
    # what is reported are the errors on its own data
    assert stores[0].calibration.report != stores[2].calibration.report
    files = resolve(second.target)
    check_same(stores[2], second, files, "cpu", "")
    other = replace(second, capture=replace(second.capture, calibration_from=anew.store.path))
    with pytest.raises(UsageError, match="calibration_hash: "):
        check_same(stores[2], other, files, "cpu", "")


def test_a_calibration_that_errs_too_much_on_the_new_data_is_refused(
    target_dir: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = _run(target_dir, folder / "a", "int4", "bf16", force=True)
    second = _run(target_dir, folder / "b", "int4", "bf16", calibration_from=first.store.path)
    for seed, run in enumerate((first, second)):
        _plan(run, seed=seed)
    _capture(first)
    strict = {mode: replace(bounds, error_median=1e-4) for mode, bounds in BOUNDS.items()}
    monkeypatch.setattr("dflash_pipeline.store.guard.BOUNDS", strict)
    with pytest.raises(ValueError, match=r"layer 0 as int4: .* does not serve this data; capture"):
        _capture(second)
    assert not open_store(second.store.path).spec.is_calibrated
    # where it comes from was planned, and must be said again
    again = replace(second, capture=replace(second.capture, calibration_from=""))
    with pytest.raises(UsageError, match=r"capture\.calibration_from: '.*a' and ''"):
        check_same(open_store(second.store.path), again, resolve(second.target), "cpu", "")


def test_a_calibration_of_another_identity_is_refused_with_each_difference(
    target_dir: Path, folder: Path
) -> None:
    first = _run(target_dir, folder / "a", "int8", "int8", force=True)
    _plan(first)
    spec = open_store(first.store.path).spec
    with pytest.raises(UsageError, match="is not calibrated yet"):
        donor(first.store.path, spec)
    wanted = replace(spec, hidden_mode="int4", layer_ids=(1, 2, 4), target_hash="other")
    with pytest.raises(UsageError, match=r"target_hash: .*layer_ids: .*hidden_mode: 'int8' and"):
        donor(first.store.path, wanted)
    with pytest.raises(UsageError, match="bf16 / none need no calibration"):
        donor(first.store.path, replace(spec, hidden_mode="bf16", last_mode="none"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("hidden_mode", "last_mode"), [("int8", "int4"), ("int4", "int8")])
def test_a_quantised_capture_on_a_gpu_passes_gate_and_verify(
    hidden_mode: str,
    last_mode: str,
    make_target_dir: Callable[..., Path],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DFLASH_POISON", "1")
    directory = make_target_dir("qwen3", initializer_range=0.1)
    run = _run(directory, folder / "hs", hidden_mode, last_mode, force=True)
    _plan(run, "cuda")
    worker.main(run, replace(_place(run), device="cuda:0", kind="cuda"), {})
    store = open_store(run.store.path)
    assert store.is_sealed
    assert store.readable_N.all()
    assert verify(store.path, deep=True).problems == []


def test_a_mode_that_errs_too_much_stops_the_capture_and_another_is_offered(
    target_dir: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    strict = {mode: replace(bounds, error_median=1e-4) for mode, bounds in BOUNDS.items()}
    monkeypatch.setattr("dflash_pipeline.store.guard.BOUNDS", strict)
    run = _run(target_dir, folder / "hs", "int4", "bf16")
    _plan(run)
    with pytest.raises(ValueError, match=r"layer 0 as int4: .*stored as --hidden-mode int8, "):
        _capture(run)
    store = open_store(run.store.path)
    assert not store.spec.is_calibrated
    assert verify(store.path, deep=True).problems == []
    _capture(replace(run, capture=replace(run.capture, force=True)))
    store = open_store(run.store.path)
    assert store.is_sealed
    assert len(store.calibration.report["missed"]) == 3
    assert "accepted by --force: layer 2 as int4" in render(describe(store.path))


def test_of_two_workers_one_calibrates_and_the_other_waits_and_says_so(
    target_dir: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = _run(target_dir, folder / "hs", "int8", "none", force=True)
    _plan(run)
    store = open_store(run.store.path)
    target = worker.load_target(run, _place(run), store, resolve(run.target))
    begun, may_end = threading.Event(), threading.Event()
    real, calls, said, stores = calibrating._calibrate, [], [], []

    def slow(*arguments: Any) -> Any:
        calls.append(1)
        begun.set()
        assert may_end.wait(30)
        return real(*arguments)

    def wait() -> None:
        may_end.set()
        time.sleep(0.01)

    def work() -> None:
        with calibrating.Leases(store.path, store.layout, heartbeat_s=1, hung_s=60) as leases:
            stores.append(
                calibrating.calibrated(
                    store, target, run.capture, leases, said.append, lambda: None, wait
                )
            )

    monkeypatch.setattr(calibrating, "_calibrate", slow)
    threads = [threading.Thread(target=work) for _ in range(2)]
    threads[0].start()
    assert begun.wait(30)
    threads[1].start()
    for thread in threads:
        thread.join(timeout=60)
    assert len(calls) == 1
    assert said.count("waiting for the calibration that another worker makes") == 1
    assert stores[0].spec == stores[1].spec
    assert stores[0].spec.is_calibrated


def test_whoever_calibrates_the_store_is_the_same_bit_for_bit(
    target_dir: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = _run(target_dir, folder / "whole" / "hs", "int4", "int8", force=True)
    run = _run(target_dir, folder / "again" / "hs", "int4", "int8", force=True)
    for one in (whole, run):
        _plan(one)
    _capture(whole)

    def killed(*_arguments: Any, **_keywords: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(calibrating, "publish_calibration", killed)
        with pytest.raises(KeyboardInterrupt):
            _capture(run)
    _capture(run)
    found, wanted = _files(run.store.path), _files(whole.store.path)
    # the root holds the store's path, in the resolved configuration
    different = {n for n in found.keys() | wanted.keys() if found.get(n) != wanted.get(n)}
    assert different == {"zarr.json"}
    hashes = [open_store(one.store.path).root.hashes for one in (run, whole)]
    assert hashes[0] == hashes[1]


def test_calibration_samples_are_spread_over_the_plan_and_cover_each_domain(
    target_dir: Path, folder: Path
) -> None:
    run = _run(target_dir, folder / "hs", "int8", "none")
    _plan(run)
    table = open_store(run.store.path).table
    # fewer than are wanted: all, and they judge themselves
    assert chosen_samples(table) == (list(range(NUM_SAMPLES)), list(range(NUM_SAMPLES)))
    chosen, others = chosen_samples(table, 5)
    assert 5 <= len(chosen) <= 6
    assert len(others) == 5
    assert not set(chosen) & set(others)
    assert set(table.bucket[chosen].tolist()) == {0, 1}
    assert set(table.domain[chosen].tolist()) == {0, 1}


@pytest.mark.parametrize(
    ("module", "name"), [(calibration, "_calibration"), (guard, "_compared"), (guard, "_softmax")]
)
def test_no_other_worker_takes_over_while_a_step_of_the_calibration_takes_long(
    module: Any, name: str, target_dir: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = _run(target_dir, folder / "hs", "int8", "int8", force=True)
    _plan(run)
    store = open_store(run.store.path)
    target = worker.load_target(run, _place(run), store, resolve(run.target))
    real, slow_once = getattr(module, name), threading.Event()
    begun, ended = threading.Event(), threading.Event()

    def slow(*arguments: Any) -> Any:
        if not slow_once.is_set():
            slow_once.set()
            begun.set()
            # thrice as long as a worker may be silent
            time.sleep(1.5)
            ended.set()
        return real(*arguments)

    monkeypatch.setattr(module, name, slow)
    taken = []

    def look() -> None:
        first = claim_order(store.layout.num_shards)[0]
        settings = {"heartbeat_s": 0.1, "hung_s": 0.5}
        with calibrating.Leases(store.path, store.layout, **settings) as leases:
            assert begun.wait(30)
            while not ended.is_set():
                lease = leases.claim(lambda i: i == first, max_failures=3)
                if lease is not None:
                    taken.append(lease)
                    return
                time.sleep(0.05)

    other = threading.Thread(target=look)
    other.start()
    with calibrating.Leases(store.path, store.layout, heartbeat_s=0.1, hung_s=0.5) as leases:
        found = calibrating.calibrated(
            store, target, run.capture, leases, lambda _text: None, leases.beat, lambda: None
        )
    other.join(timeout=60)
    assert ended.is_set()
    assert taken == []
    assert found.spec.is_calibrated


def test_a_worker_gives_signs_of_life_while_the_gate_quantises(
    target_dir: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = _run(target_dir, folder / "hs", "int8", "none", force=True)
    _plan(run)
    num_beats, encode = [0], rows.quantise.encode
    beat = calibrating.Leases.beat

    def counted(self: Any) -> None:
        num_beats[0] += 1
        beat(self)

    seen: list[int] = []

    def slow(*arguments: Any) -> Any:
        before = num_beats[0]
        if not seen:
            time.sleep(0.5)
            seen.append(num_beats[0] - before)
        return encode(*arguments)

    monkeypatch.setattr(calibrating.Leases, "beat", counted)
    monkeypatch.setattr(rows.quantise, "encode", slow)
    _capture(run)
    assert seen[0] >= 3
