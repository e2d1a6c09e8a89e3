"""A capture gives each sample its own states whatever happens to its workers on the way."""

from __future__ import annotations

import functools
import itertools
import multiprocessing
import os
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from builds import launches
from dflash_pipeline.capture import forward, gate, worker
from dflash_pipeline.capture.construction import build_store
from dflash_pipeline.capture.forward import Forward
from dflash_pipeline.capture.model import TargetFiles, resolve
from dflash_pipeline.capture.offload import DeviceBuffer, Parcel
from dflash_pipeline.capture.pack import BatchIndex, index_batch
from dflash_pipeline.capture.quantise import Quantiser
from dflash_pipeline.capture.samples import Conversation, Dropped
from dflash_pipeline.capture.shapes import extremes, largest_batch, planned_shapes
from dflash_pipeline.capture.shards import Worker
from dflash_pipeline.capture.target import Target
from dflash_pipeline.capture.times import Times
from dflash_pipeline.configs.counts import Counts
from dflash_pipeline.configs.errors import UsageError
from dflash_pipeline.configs.place import Place
from dflash_pipeline.configs.schema import (
    CaptureConfig,
    DataConfig,
    Run,
    StoreConfig,
    TargetConfig,
)
from dflash_pipeline.configs.status import find_statuses
from dflash_pipeline.store import paths
from dflash_pipeline.store.check import verify
from dflash_pipeline.store.lease import Lease, Leases
from dflash_pipeline.store.reader import open_store
from dflash_pipeline.store.spec import ShardId
from dflash_pipeline.store.table import claim_order
from places import cpu_place

LAYER_IDS = (0, 2, 4)
NUM_SAMPLES = 40


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """In memory where that is possible: a store is many small synced files."""
    parent = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=parent) as directory:
        yield Path(directory)


def _conversation(row: int, answer: str) -> Conversation:
    return Conversation(
        key=f"sample-{row}",
        source=0,
        row=row,
        domain="chat",
        messages=(
            {"role": "user", "content": f"Say {row}"},
            {"role": "assistant", "content": answer},
        ),
        text="",
        token_ids=(),
        loss_spans=(),
    )


def _run(target_dir: Path, path: Path, **store: Any) -> Run:
    return Run(
        target=TargetConfig(id=str(target_dir), layer_ids=LAYER_IDS),
        data=DataConfig(files=("data.jsonl",), max_len=96),
        store=StoreConfig(path=str(path), **{"shard_bytes": 40_000, **store}),
        capture=CaptureConfig(token_budget=192, pad_multiple=16, num_buckets=3),
    )


def _plan(run: Run, kind: str = "cpu") -> None:
    rng = np.random.default_rng(0)
    # letters drawn anew: in a run of one letter a row is as good as its neighbour's
    conversations = [
        _conversation(row, "".join(rng.choice(list("abcdefghij"), length)))
        for row, length in enumerate(rng.integers(1, 60, NUM_SAMPLES))
    ]
    # the one answer with a z: tests make that token's embedding not a number
    conversations[7] = _conversation(7, "xyz")
    files = resolve(run.target)
    build_store(run, files, kind, conversations, Dropped(num_rows=40), "", 1, lambda _text: None)


@pytest.fixture(scope="module")
def planned(folder: Path, make_target_dir: Callable[..., Path]) -> Path:
    """A store that is planned and not captured."""
    _plan(_run(make_target_dir("qwen3"), folder / "planned"))
    return folder / "planned"


@pytest.fixture
def run(
    planned: Path, folder: Path, target_dir: Path, request: pytest.FixtureRequest
) -> Iterator[Run]:
    """A run over a fresh copy of the planned store."""
    path = folder / request.node.name
    shutil.copytree(planned, path, symlinks=True)
    yield _run(target_dir, path)
    shutil.rmtree(path)


@pytest.fixture(scope="module")
def whole(planned: Path, folder: Path, target_dir: Path) -> dict[str, bytes]:
    """Every file of a store captured without incident."""
    path = folder / "whole"
    shutil.copytree(planned, path, symlinks=True)
    worker.main(_run(target_dir, path), _place(path), {})
    return _files(path)


def _place(path: Path, rank: int = 0, world: int = 1) -> Place:
    return cpu_place(f"{path}.logs", "capture", rank, world)


def _capture(run: Run) -> None:
    worker.main(run, _place(Path(run.store.path)), {})


def _files(path: Path) -> dict[str, bytes]:
    found = sorted(file for file in path.rglob("*") if file.is_file())
    return {str(file.relative_to(path)): file.read_bytes() for file in found}


def _differing(path: Path, whole: dict[str, bytes]) -> list[str]:
    found = _files(path)
    return sorted(
        name for name in found.keys() | whole.keys() if found.get(name) != whole.get(name)
    )


def test_each_sample_holds_the_targets_own_states(
    run: Run, make_model: Callable[..., PreTrainedModel]
) -> None:
    _capture(run)
    store = open_store(run.store.path)
    model = make_model("qwen3")
    assert store.is_sealed
    assert store.readable_N.all()
    assert verify(store.path, deep=True).problems == []
    assert sum(store.layout.num_shards) > 5
    for number in range(0, NUM_SAMPLES, 3):
        sample = store.sample(number)
        ids_1T = torch.from_numpy(sample.ids_T.astype(np.int64))[None]
        with torch.no_grad():
            states = model(ids_1T, output_hidden_states=True).hidden_states
        for place, layer_id in enumerate(LAYER_IDS):
            np.testing.assert_allclose(
                sample.hidden_TKH[:, place], states[layer_id + 1][0], rtol=5e-3, atol=1e-3
            )
        assert sample.last_MH is not None
        teacher = np.flatnonzero(sample.mask_T[1:])
        np.testing.assert_allclose(sample.last_MH, states[-1][0][teacher], rtol=5e-3, atol=1e-3)
    commit = store.commit_of(ShardId(0, 0))
    assert commit is not None
    rows = [store.sample(i) for i in range(*store.table.of_shard(ShardId(0, 0)).indices(99))]
    largest = np.stack([np.abs(sample.hidden_TKH).max(axis=(0, 2)) for sample in rows]).max(0)
    np.testing.assert_array_equal(commit.amax[:3], largest)


def test_a_second_run_of_a_complete_store_loads_no_target(
    run: Run, whole: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    _capture(run)
    monkeypatch.setattr(worker, "load_target", None)
    _capture(run)
    assert _differing(Path(run.store.path), whole) == []


def test_poisoned_buffers_change_nothing(
    run: Run, whole: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DFLASH_POISON", "1")
    _capture(run)
    assert _differing(Path(run.store.path), whole) == []


def test_a_store_without_last_is_captured(folder: Path, target_dir: Path) -> None:
    run = _run(target_dir, folder / "no-last", last_mode="none")
    _plan(run)
    _capture(run)
    assert verify(run.store.path, deep=True).problems == []
    assert open_store(run.store.path).sample(3).last_MH is None


@pytest.mark.parametrize("family", ["qwen3_5_nested", "qwen3_moe", "gpt_oss"])
def test_other_families_pass_gate_and_verify_too(
    family: str, folder: Path, make_target_dir: Callable[..., Path]
) -> None:
    run = _run(make_target_dir(family), folder / f"cpu-{family}")
    _plan(run)
    _capture(run)
    assert verify(run.store.path, deep=True).problems == []
    assert open_store(run.store.path).readable_N.all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("family", ["qwen3", "gemma3", "gpt_oss", "qwen3_moe", "qwen3_5"])
def test_a_capture_on_a_gpu_passes_gate_and_verify(
    family: str,
    folder: Path,
    make_target_dir: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DFLASH_POISON", "1")
    run = _run(make_target_dir(family, initializer_range=0.1), folder / f"cuda-{family}")
    _plan(run, "cuda")
    place = replace(_place(Path(run.store.path)), device="cuda:0", kind="cuda")
    worker.main(run, place, {})
    assert verify(run.store.path, deep=True).problems == []
    assert open_store(run.store.path).readable_N.all()


def _break_token(monkeypatch: pytest.MonkeyPatch, value: float) -> None:
    load = worker.load_target

    def broken(run: Run, place: Place, store: Any, files: TargetFiles) -> Target:
        target = load(run, place, store, files)
        token_id = files.tokenizer().convert_tokens_to_ids("z")
        target.backbone.embed_tokens.weight.data[token_id] = value
        return target

    monkeypatch.setattr(worker, "load_target", broken)


def test_a_sample_with_a_row_that_is_no_number_is_marked_and_the_rest_is_kept(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _break_token(monkeypatch, torch.nan)
    _capture(replace(run, capture=replace(run.capture, max_bad_share=0.03)))
    store = open_store(run.store.path)
    bad = store.table.find("sample-7")
    assert np.flatnonzero(~store.readable_N).tolist() == [bad]
    assert store.num_rows(bad) == 0
    assert verify(store.path, deep=True).problems == []
    assert "bad sample sample-7" in capsys.readouterr().out


def test_too_many_bad_samples_fail_the_run(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    _break_token(monkeypatch, torch.inf)
    with pytest.raises(ValueError, match=r"1 of 40 samples .*sample-7; more than .*max_bad_share"):
        _capture(run)
    assert not open_store(run.store.path).is_complete


GPU_IS_FULL = torch.OutOfMemoryError("CUDA out of memory")
HOST_IS_FULL = RuntimeError(
    "DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."
)


def _short_of_memory(
    monkeypatch: pytest.MonkeyPatch, most: int, ids: int = -1, error: Exception = GPU_IS_FULL
) -> None:
    """Batches of more than `most` sequences do not fit; nor does one that holds token `ids`."""
    whole_run = Target.run

    def run(self: Target, ids_BT: torch.Tensor, take: Any) -> Any:
        if len(ids_BT) > most or bool((ids_BT == ids).any()):
            raise error
        return whole_run(self, ids_BT, take)

    monkeypatch.setattr(Target, "run", run)


@pytest.mark.parametrize("error", [GPU_IS_FULL, HOST_IS_FULL, MemoryError()])
def test_a_batch_that_does_not_fit_is_halved_and_its_shard_marked(
    error: Exception,
    run: Run,
    whole: dict[str, bytes],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    store = open_store(run.store.path)
    most = largest_batch(store).num_sequences
    _short_of_memory(monkeypatch, most - 1, error=error)
    _capture(run)
    store.refresh()
    assert store.is_complete
    marked = [store.commit_of(i).is_halved for i in store.layout.shard_ids()]
    assert any(marked)
    assert not all(marked)
    (told, *_) = [line for line in capsys.readouterr().out.splitlines() if "halving" in line]
    holders = ["weights", "the ring of row buffers", "activations at"]
    holders += ["allocator's reserve"] * (error is GPU_IS_FULL)
    for holder in holders:
        assert f"{holder} " in told
    assert "lower capture.token_budget" in told
    assert verify(store.path, deep=True).problems == []
    # on a CPU the halves have the bits of the whole; the mark itself differs
    assert all(
        "/commit" in name or "commit_sealed" in name
        for name in _differing(Path(run.store.path), whole)
    )


def test_the_warm_up_builds_the_kernel_for_every_launch_of_a_capture(
    folder: Path, target_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Halved batches among them, whose index begins anywhere. On a CPU by Triton's keys alone."""
    pytest.importorskip("triton", reason="triton has no build for this platform")
    from dflash_pipeline.capture.quantise_kernel import launch_encode

    run = _run(target_dir, folder / "launches", hidden_mode="int4", last_mode="int8")
    run = replace(run, capture=replace(run.capture, force=True))
    _plan(run)
    encode, begin, part = Quantiser.encode, Forward.__init__, Forward._part
    num_warm, begun = list[int](), set[int]()

    def encoded(self: Quantiser, hidden: Any, index_N: Any, rows: Any, largest: Any) -> None:
        if len(index_N):
            own = self.centre_H, self.inlier_H, self.kept_k
            launch_encode(hidden, index_N, *own, rows, largest, self.calibration)
        encode(self, hidden, index_N, rows, largest)

    def warm(self: Forward, store: Any, target: Target, *rest: Any) -> None:
        begin(self, store, target, *rest)
        self._packer.warm_up(target.dtype, target.device)
        num_warm.append(len(keys))

    def halved(self: Forward, batch: slice, width: int, buffer: DeviceBuffer) -> None:
        if batch.start not in begun and batch.stop - batch.start > 1:
            begun.update(range(batch.start, batch.stop))
            raise GPU_IS_FULL
        part(self, batch, width, buffer)

    monkeypatch.setattr(Quantiser, "encode", encoded)
    monkeypatch.setattr(Forward, "__init__", warm)
    monkeypatch.setattr(Forward, "_part", halved)
    with launches() as keys:
        _capture(run)
    (first,) = num_warm
    assert len(set(keys[:first])) == 2
    assert len(keys) > 100
    assert set(keys[first:]) == set(keys[:first])


def test_a_shard_that_keeps_failing_is_set_aside_named_and_tried_again_by_the_next_run(
    run: Run, whole: dict[str, bytes], target_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token_id = resolve(run.target).tokenizer().convert_tokens_to_ids("z")
    with monkeypatch.context() as patch:
        _short_of_memory(patch, 99, token_id)
        store = open_store(run.store.path)
        failing = store.table.shard_id(store.table.find("sample-7"))
        with pytest.raises(
            ValueError,
            match=f"shards {failing} of .* failed 3 times each.*"
            f"shard {failing}: the GPU's memory ran out in half of a batch of .* weights .*ring",
        ):
            _capture(run)
    store.refresh()
    assert [i for i in store.layout.shard_ids() if store.is_open(i)] == [failing]
    _capture(run)
    assert _differing(Path(run.store.path), whole) == []


def test_a_target_that_fails_everywhere_ends_the_run(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forward(_target: Target, _ids_BT: torch.Tensor, _take: Any) -> None:
        raise RuntimeError("no kernel image is available")

    monkeypatch.setattr(Target, "run", forward)
    with pytest.raises(ValueError, match="RuntimeError: no kernel image is available"):
        _capture(run)


def _fail_late(monkeypatch: pytest.MonkeyPatch, calls: Callable[[int], bool]) -> None:
    """What the device meets in a batch comes out when its rows are waited for."""
    wait, count = Parcel.wait, itertools.count()

    def failing(parcel: Parcel) -> None:
        if calls(next(count)):
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        wait(parcel)

    monkeypatch.setattr(Parcel, "wait", failing)


def test_what_the_device_meets_after_a_batch_was_queued_counts_against_its_shard(
    run: Run,
    whole: dict[str, bytes],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    _fail_late(monkeypatch, lambda call: call == 3)
    _capture(run)
    assert "failed (1 of 3): RuntimeError: CUDA error: an illegal" in capsys.readouterr().out
    assert _differing(Path(run.store.path), whole) == []


def test_a_device_that_is_broken_is_named_before_its_buffers_are_waited_for(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(_forward: forward.Forward, failed: Exception) -> None:
        raise ValueError(f"the device is unusable after: {failed}")

    _fail_late(monkeypatch, lambda call: call >= 3)
    monkeypatch.setattr(forward.Forward, "check_device", check)
    with pytest.raises(ValueError, match="the device is unusable after: RuntimeError: CUDA error"):
        _capture(run)
    store = open_store(run.store.path)
    leases = Leases(store.path, store.layout, heartbeat_s=10, hung_s=600)
    with leases:
        # against its shard all the same: it may be what breaks devices
        assert sum(leases.failures().values()) == 1


def _moved(*arguments: Any) -> BatchIndex:
    """Each row where its neighbour's should be."""
    index = index_batch(*arguments)
    return replace(index, row_N=np.roll(index.row_N, 1))


def _stop_at(now: int, then: int) -> None:
    if now == then:
        os.kill(os.getpid(), signal.SIGTERM)


def test_rows_that_the_gate_refuses_are_never_committed(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forward, "index_batch", _moved)
    with pytest.raises(ValueError, match="the gate refuses these rows, they are not committed"):
        _capture(run)
    store = open_store(run.store.path)
    assert not any(store.is_committed(i) for i in store.layout.shard_ids())


def _other_numbers(target: Target, ids_BT: torch.Tensor, take: Any, *, run: Any) -> torch.Tensor:
    """Batches by a kernel that is wrong here, while samples alone are right."""
    weight = target.layers[1].self_attn.o_proj.weight.data
    weight *= 2
    try:
        found_BTH: torch.Tensor = run(target, ids_BT, take)
    finally:
        weight /= 2
    return found_BTH


@pytest.mark.parametrize("fault", ["rows", "numbers"])
def test_the_gate_runs_again_on_resume_and_what_was_committed_stays(
    fault: str, run: Run, whole: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first start passes it; the second one's machine or software may be another."""
    path = Path(run.store.path)
    with monkeypatch.context() as patch:
        seen = _Seen(run, patch)
        seen.before_batch = lambda _target: _stop_at(len(seen.queued), 6)
        with pytest.raises(KeyboardInterrupt, match="SIGTERM"):
            _capture(run)
    store = open_store(path)
    committed = [one for one in store.layout.shard_ids() if store.is_committed(one)]
    before = _files(path)
    assert committed
    with monkeypatch.context() as patch:
        if fault == "rows":
            patch.setattr(forward, "index_batch", _moved)
        else:
            patch.setattr(Target, "run", functools.partialmethod(_other_numbers, run=Target.run))
        with pytest.raises(ValueError, match="the gate refuses these rows, they are not committed"):
            _capture(run)
    store.refresh()
    assert [one for one in store.layout.shard_ids() if store.is_committed(one)] == committed
    # the refused shard's files stay until the next start, without a commit none are read
    after = _files(path)
    assert {name: after.get(name) for name in before} == before
    _capture(run)
    assert _differing(path, whole) == []


def test_a_target_that_does_not_fit_says_what_holds_the_memory(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*_arguments: Any) -> Target:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(worker, "load_target", load)
    with pytest.raises(ValueError, match=r"ran out in loading the target .*--gpus-per-target"):
        _capture(run)


def test_a_target_that_cannot_be_loaded_for_a_plan_that_is_there_fails_and_leaves_it(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_arguments: object) -> Target:
        raise UsageError("the checkpoint lacks a.weight")

    monkeypatch.setattr(Target, "load", refuse)
    with pytest.raises(ValueError, match=r"lacks a\.weight\. .* planned for these") as caught:
        _capture(run)
    # exit code 2 would say that nothing was left behind
    assert not isinstance(caught.value, UsageError)
    assert not open_store(run.store.path).is_complete


def test_a_worker_counts_what_others_committed_though_a_release_saw_it_first(
    run: Run, whole: dict[str, bytes], folder: Path
) -> None:
    """Under a quota a release refreshes the worker's store too, between its own looks."""
    store = open_store(run.store.path)
    parts: Any = SimpleNamespace(device=torch.device("cpu"), device_bytes=0, say=None)
    own = Worker(store, parts, run.capture, parts, parts, parts, parts, parts, Times())
    assert own._num_committed == 0
    own._submitted[store.layout.shard_ids()[0]] = (7, 1)
    shutil.rmtree(run.store.path)
    shutil.copytree(folder / "whole", run.store.path, symlinks=True)
    store.refresh()
    own.refresh()
    assert own._num_committed == int(store.table.num_tokens.sum())
    assert own._submitted == {}


def test_the_counts_of_a_worker_are_those_of_its_store(run: Run) -> None:
    _capture(run)
    store = open_store(run.store.path)
    (found,) = find_statuses(Path(run.store.path))
    counts = Counts(**found.counts)
    assert counts.num_tokens == store.table.num_tokens.sum()
    rows = [store.hidden(i).nbytes + store.last(i).nbytes for i in range(NUM_SAMPLES)]
    assert counts.size_bytes == sum(rows)
    assert counts.num_places > counts.num_tokens
    assert 0 < counts.device_s < counts.seconds < counts.held_s
    log = Path(f"{run.store.path}.logs/capture-0.log").read_text()
    assert f"{NUM_SAMPLES} samples" in log
    assert f"{counts.num_tokens:,.0f} tokens in " in log


def test_a_store_of_other_weights_is_refused(
    run: Run, make_target_dir: Callable[..., Path]
) -> None:
    other = replace(run.target, id=str(make_target_dir("qwen3", tie_word_embeddings=True)))
    with pytest.raises(UsageError, match="planned for other weights"):
        _capture(replace(run, target=other))


def test_a_signal_ends_it_between_batches_and_the_next_run_goes_on(
    run: Run, whole: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    num_batches = 0

    def compute(self: forward.Forward, batch: slice, slot: Any) -> bool:
        nonlocal num_batches
        num_batches += 1
        if num_batches == 6:
            os.kill(os.getpid(), signal.SIGTERM)
        return whole_compute(self, batch, slot)

    whole_compute = forward.Forward.compute
    monkeypatch.setattr(forward.Forward, "compute", compute)
    with pytest.raises(KeyboardInterrupt, match="SIGTERM"):
        _capture(run)
    assert num_batches == 6
    assert signal.getsignal(signal.SIGTERM) == before
    store = open_store(run.store.path)
    assert any(store.is_committed(i) for i in store.layout.shard_ids())
    assert not store.is_complete
    _capture(run)
    assert _differing(Path(run.store.path), whole) == []


class _Seen:
    """The order in which a capture queues batches and waits for their rows."""

    def __init__(self, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
        self.store = open_store(run.store.path)
        self.queued: list[ShardId] = []
        """Of each batch, before it is computed."""
        self.events: list[str] = []
        self.failed: list[ShardId] = []
        self.before_batch: Callable[[Target], None] = lambda _target: None
        compute, wait, fail = forward.Forward.compute, Parcel.wait, Lease.fail

        def computed(own: forward.Forward, batch: slice, slot: Any) -> bool:
            self.queued.append(self.store.table.shard_id(batch.start))
            self.events.append(f"{self.queued[-1]} queued")
            self.before_batch(own._target)
            return compute(own, batch, slot)

        def waited(parcel: Parcel) -> None:
            self.events.append("waited")
            wait(parcel)

        def counted(lease: Lease) -> None:
            self.failed.append(lease.shard_id)
            fail(lease)

        monkeypatch.setattr(forward.Forward, "compute", computed)
        monkeypatch.setattr(Parcel, "wait", waited)
        monkeypatch.setattr(Lease, "fail", counted)

    def last_of_third(self) -> int:
        """Place of the third shard's last batch among all, from 0."""
        shards = claim_order(self.store.layout.num_shards)[:3]
        return sum(len(self.store.table.batches_of(one)) for one in shards) - 1


def test_a_shards_last_rows_are_waited_for_once_the_next_shard_is_queued(
    run: Run, whole: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for the first shard, which the gate judges before anything is queued behind it."""
    seen = _Seen(run, monkeypatch)
    _capture(run)
    first = len(seen.store.table.batches_of(seen.queued[0]))
    after = seen.events[2 * first :]
    assert seen.events[: 2 * first].count("waited") == first
    assert len(set(seen.queued)) == sum(seen.store.layout.num_shards) > 5
    assert after[1::2] == [event for event in after[1::2] if event != "waited"] + ["waited"]
    assert after[2::2] == ["waited"] * (len(after) // 2 - 1)
    assert _differing(Path(run.store.path), whole) == []


@pytest.mark.parametrize("later", [False, True], ids=["at once", "once queued"])
def test_a_failure_counts_against_its_own_shard_and_what_was_queued_before_it_is_kept(
    later: bool, run: Run, whole: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = _Seen(run, monkeypatch)
    place = seen.last_of_third()
    if later:
        # met in the third shard's last batch, while the next shard's first is queued behind it
        _fail_late(monkeypatch, lambda call: call == place)
    else:
        compute, calls = Target.run, itertools.count()

        def failing(target: Target, ids_BT: torch.Tensor, take: Any) -> torch.Tensor:
            if len(seen.queued) == place + 2 and next(calls) == 0:
                raise RuntimeError("no such kernel")
            return compute(target, ids_BT, take)

        monkeypatch.setattr(Target, "run", failing)
    _capture(run)
    third, fourth = claim_order(seen.store.layout.num_shards)[2:4]
    assert seen.failed == [third if later else fourth]
    num_batches = {one: len(seen.store.table.batches_of(one)) for one in set(seen.queued)}
    again = {one: seen.queued.count(one) - num for one, num in num_batches.items()}
    repeated = {third: num_batches[third], fourth: 1} if later else {fourth: 1}
    assert {one: num for one, num in again.items() if num} == repeated
    assert _differing(Path(run.store.path), whole) == []


def test_a_shard_that_is_computed_whole_when_a_signal_comes_is_kept(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = _Seen(run, monkeypatch)
    place = seen.last_of_third()

    def stop(_target: Target) -> None:
        if len(seen.queued) == place + 1:
            os.kill(os.getpid(), signal.SIGTERM)

    seen.before_batch = stop
    with pytest.raises(KeyboardInterrupt, match="SIGTERM"):
        _capture(run)
    assert len(seen.queued) == place + 1
    store = open_store(run.store.path)
    committed = {one for one in store.layout.shard_ids() if store.is_committed(one)}
    assert committed == set(claim_order(store.layout.num_shards)[:3])


def test_the_gate_judges_the_shard_that_other_compiled_code_computed_not_the_one_before_it(
    run: Run, whole: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = _Seen(run, monkeypatch)
    place, judged = seen.last_of_third(), list[set[ShardId]]()
    check = gate.check

    def version(target: Target) -> None:
        if len(seen.queued) == place + 2:
            target.versions.add(7)

    def checked(target: Target, spec: Any, calibrated: Any, samples: Any, *rest: Any, **by: Any):
        judged.append({seen.store.table.shard_id(sample) for sample in samples})
        return check(target, spec, calibrated, samples, *rest, **by)

    seen.before_batch = version
    monkeypatch.setattr(gate, "check", checked)
    _capture(run)
    first, _, _, fourth = claim_order(seen.store.layout.num_shards)[:4]
    assert judged == [{first}, {fourth}]
    # the mark of compiled layers alone
    differing = _differing(Path(run.store.path), whole)
    assert differing == sorted([paths.commit_file(fourth), paths.SEALED_FILE])


def test_what_compiled_layers_have_queued_goes_when_they_are_given_up(
    run: Run,
    whole: dict[str, bytes],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    seen = _Seen(run, monkeypatch)
    place, load = seen.last_of_third(), worker.load_target

    def loaded(*arguments: Any) -> Target:
        target = load(*arguments)
        target.is_compiled = True
        return target

    run_target = Target.run

    def failing(target: Target, ids_BT: torch.Tensor, take: Any) -> torch.Tensor:
        if target.is_compiled and len(seen.queued) == place + 2:
            raise RuntimeError("no such kernel")
        return run_target(target, ids_BT, take)

    monkeypatch.setattr(worker, "load_target", loaded)
    monkeypatch.setattr(Target, "run", failing)
    _capture(run)
    assert "compiled layers do not serve (RuntimeError: no such" in capsys.readouterr().out
    third, fourth = claim_order(seen.store.layout.num_shards)[2:4]
    assert seen.failed == [fourth]
    # its rows were the compiled layers' too, and not handed over yet
    assert seen.queued.count(third) == 2 * len(seen.store.table.batches_of(third))
    assert _differing(Path(run.store.path), whole) == []


def test_the_warm_up_shapes_are_each_buckets_smallest_and_largest(run: Run) -> None:
    store = open_store(run.store.path)
    shapes = extremes(planned_shapes(store.table, store.layout))
    sizes = largest_batch(store)
    assert len(shapes) <= 2 * len(store.layout.num_shards)
    assert shapes[0][0] * shapes[0][1] == sizes.num_places <= 192
    assert all(width % 16 == 0 for _, width in shapes)


# forked from a server that has imported torch and transformers once
_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload(["dflash_pipeline.capture.worker"])


def _slowly(run: Run, place: Place, _extra: dict[str, object]) -> None:
    """A worker that is met alive after the shards it is to be killed between."""
    compute = Forward.compute

    def slow(self: Forward, batch: slice, buffer: DeviceBuffer) -> bool:
        time.sleep(0.02)
        return compute(self, batch, buffer)

    with patch.object(Forward, "compute", slow):
        worker.main(run, place, {})


def _start(run: Run, rank: int, world: int, main: Any = worker.main) -> ForkServerProcess:
    place = _place(Path(run.store.path), rank, world)
    process = _PROCESSES.Process(target=main, args=(run, place, {}))
    process.start()
    return process


def _num_committed(run: Run) -> int:
    return sum(1 for _ in Path(run.store.path).glob("b*/commit/c/*/0"))


def test_three_workers_killed_at_random_then_two_give_the_same_store_bit_for_bit(
    run: Run, whole: dict[str, bytes]
) -> None:
    chance = random.Random(0)
    num_shards = sum(open_store(run.store.path).layout.num_shards)
    workers = [_start(run, rank, 3, _slowly) for rank in range(3)]
    try:
        for kill_at, killed in zip((1, num_shards // 3, num_shards // 2), workers, strict=True):
            end = time.monotonic() + 60
            while _num_committed(run) < kill_at and time.monotonic() < end:
                time.sleep(0.002)
            time.sleep(chance.uniform(0, 0.02))
            killed.kill()
            killed.join()
        assert [process.exitcode for process in workers] == [-signal.SIGKILL] * 3
        assert 1 <= _num_committed(run) < num_shards
        workers = [_start(run, rank, 2) for rank in range(2)]
        for process in workers:
            process.join(timeout=120)
        assert [process.exitcode for process in workers] == [0, 0]
    finally:
        for process in workers:
            process.kill()
            process.join()
    assert _differing(Path(run.store.path), whole) == []
    assert verify(run.store.path, deep=True).problems == []


def _taken(run: Run, rank: int) -> Path:
    return Path(f"{run.store.path}.taken-{rank}")


def _noting(run: Run, place: Place, before_batch: Callable[[], None]) -> None:
    """A worker that notes each shard that it takes."""
    take, compute = Worker.take, Forward.compute

    def noted(self: Worker, lease: Lease) -> None:
        with _taken(run, place.rank).open("a") as file:
            file.write(f"{lease.shard_id}\n")
        take(self, lease)

    def paced(self: Forward, batch: slice, buffer: DeviceBuffer) -> bool:
        before_batch()
        return compute(self, batch, buffer)

    with patch.object(Worker, "take", noted), patch.object(Forward, "compute", paced):
        worker.main(run, place, {})


def _wait_until(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + 100
    while not is_so():
        assert time.monotonic() < end, "the other worker does not get on"
        time.sleep(0.005)


def _fast(run: Run, place: Place, _extra: dict[str, object]) -> None:
    _noting(run, place, lambda: _wait_until(_taken(run, SLOW).exists))


def _slow(run: Run, place: Place, _extra: dict[str, object]) -> None:
    """Each of its batches takes as long as three shards of the other, or what is left for it."""
    num_shards = sum(open_store(run.store.path).layout.num_shards)

    def before_batch() -> None:
        # at most two are its own: one that it computes, and one whose rows are on their way
        wanted = min(_num_committed(run) + 3, num_shards - 2)
        _wait_until(lambda: _num_committed(run) >= wanted)

    _noting(run, place, before_batch)


SLOW = 1
"""Rank of the slow worker."""


def test_a_fast_worker_takes_more_shards_than_a_slow_one_and_each_is_taken_once(
    run: Run, whole: dict[str, bytes]
) -> None:
    workers = [_start(run, rank, 2, main) for rank, main in enumerate((_fast, _slow))]
    try:
        for process in workers:
            process.join(timeout=120)
        assert [process.exitcode for process in workers] == [0, 0]
    finally:
        for process in workers:
            process.kill()
            process.join()
    fast, slow = (_taken(run, rank).read_text().splitlines() for rank in range(2))
    layout = open_store(run.store.path).layout
    assert sorted(fast + slow) == sorted(map(str, layout.shard_ids()))
    assert len(fast) >= 2 * len(slow) > 0
    assert _differing(Path(run.store.path), whole) == []


def test_the_start_after_the_end_removes_what_a_worker_left_that_died_near_it(
    run: Run, whole: dict[str, bytes]
) -> None:
    _capture(run)
    holders = Path(f"{run.store.path}.logs") / "holders"
    (holders / "host-1-dead.json").write_text("{}")
    left = Path(run.store.path) / "b0" / "commit" / "c" / "0" / f".0.{'a' * 32}.tmp"
    left.touch()
    _capture(run)
    assert list(holders.iterdir()) == []
    assert _differing(Path(run.store.path), whole) == []
