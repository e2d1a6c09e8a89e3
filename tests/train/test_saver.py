"""Checkpoints written beside the training: nothing waits, nothing is lost, nothing is half."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from dflash_pipeline.train import checkpoint
from dflash_pipeline.train.checkpoint import Progress, at_the_beginning
from dflash_pipeline.train.drafter import Drafter
from dflash_pipeline.train.loading import read_checkpoint
from dflash_pipeline.train.saver import Saver
from dflash_pipeline.train.setup import Training
from dflash_pipeline.train.shape import DrafterShape


def _state(shape: DrafterShape, seed: int) -> dict[str, Tensor]:
    drafter = Drafter(shape)
    drafter.initialise(seed)
    state = {f"master.{name}": tensor.detach() for name, tensor in drafter.named_parameters()}
    # the types and sizes that an optimizer has beside its fp32 masters
    return state | {"step": torch.tensor(float(seed)), "counts": torch.zeros(2).double()}


def _progress(step: int) -> Progress:
    return replace(at_the_beginning(9), step=step)


def _nothing() -> None:
    """Nobody waits to be told."""


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Writing a checkpoint begins when it is set."""
    opened, before = threading.Event(), checkpoint.write_tensors

    def waits(path: Path, tensors: Mapping[str, Tensor], metadata: Any) -> None:
        assert opened.wait(30)
        before(path, tensors, metadata)

    monkeypatch.setattr(checkpoint, "write_tensors", waits)
    return opened


def test_training_goes_on_while_what_was_is_written(
    tmp_path: Path, shape: DrafterShape, gate: threading.Event
) -> None:
    state = _state(shape, 1)
    wanted = {name: tensor.clone() for name, tensor in state.items()}
    saver = Saver(tmp_path, shape, 3, state)
    torch.manual_seed(5)
    # the thread is busy, as with the checkpoint before
    saver._thread.submit(gate.wait, 30)
    saver.save(state, _progress(1), True, _nothing)
    drawn = torch.rand(3)
    for tensor in state.values():
        tensor.fill_(torch.nan)
    assert checkpoint.newest(tmp_path) is None
    gate.set()
    saver.close()
    progress, found = checkpoint.load(tmp_path / "best", torch.device("cpu"))
    assert progress == _progress(1)
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor)
    # the generator as it stood when the copy was taken
    assert torch.equal(torch.rand(3), drawn)


def test_a_checkpoint_is_not_copied_over_one_that_is_still_written(
    tmp_path: Path, shape: DrafterShape, gate: threading.Event
) -> None:
    first, second = _state(shape, 1), _state(shape, 2)
    saver = Saver(tmp_path, shape, 3, first)
    saver.save(first, _progress(1), False, _nothing)
    with ThreadPoolExecutor(1) as training:
        saved = training.submit(saver.save, second, _progress(2), False, _nothing)
        with pytest.raises(TimeoutError):
            saved.result(0.3)
        gate.set()
        saved.result(30)
    saver.close()
    for step, state in ((1, first), (2, second)):
        path = checkpoint.step_directory(tmp_path, step)
        _, found = checkpoint.load(path, torch.device("cpu"))
        assert all(torch.equal(found[name], tensor) for name, tensor in state.items())


def test_a_step_is_written_once_and_may_become_the_best_later(
    tmp_path: Path, shape: DrafterShape
) -> None:
    state = _state(shape, 1)
    saver = Saver(tmp_path, shape, 1, state)
    for step, is_best in ((1, True), (2, False), (3, False), (3, True), (4, False)):
        saver.save(state, _progress(step), is_best, _nothing)
    saver.close()
    # the best before went with the others
    assert sorted(path.name for path in tmp_path.glob("step-*")) == [
        "step-00000003",
        "step-00000004",
    ]
    assert (tmp_path / "best").readlink() == Path("step-00000003")


def test_what_a_later_validation_found_is_told_without_writing_the_step_again(
    tmp_path: Path, shape: DrafterShape
) -> None:
    state, written = _state(shape, 1), replace(_progress(2), best_tau=2.0)
    judged = replace(written, best_tau=2.5, best_step=2, validated_step=2)
    saver = Saver(tmp_path, shape, 3, state)
    saver.save(state, written, False, _nothing)
    state["step"].fill_(9)
    saver.save(state, judged, True, _nothing)
    saver.close()
    found, tensors = checkpoint.load(tmp_path / "best", torch.device("cpu"))
    assert (found, float(tensors["step"])) == (judged, 1.0)
    # the same where the step was on disk already when the run went on from it
    saver = Saver(tmp_path, shape, 3, state)
    saver.found(judged)
    saver.save(state, replace(judged, num_stale=1), False, _nothing)
    saver.close()
    found, tensors = checkpoint.load(tmp_path / "last", torch.device("cpu"))
    assert (found, float(tensors["step"])) == (replace(judged, num_stale=1), 1.0)


def test_what_a_checkpoint_allows_is_done_once_it_is_durable_and_not_when_it_failed(
    tmp_path: Path,
    shape: DrafterShape,
    gate: threading.Event,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    state, told = _state(shape, 1), list[int]()

    def tell() -> None:
        found = checkpoint.newest(tmp_path)
        assert found is not None
        told.append(checkpoint.load(found, torch.device("cpu"))[0].step)

    saver = Saver(tmp_path, shape, 3, state)
    saver.save(state, _progress(1), False, tell)
    assert told == []
    gate.set()
    saver.close()
    assert told == [1]

    def full(*_arguments: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(checkpoint, "write_tensors", full)
    saver = Saver(tmp_path, shape, 3, state)
    saver.save(state, _progress(2), False, tell)
    with pytest.raises(OSError, match="No space left"):
        saver.close()
    assert told == [1]


def test_the_best_stays_where_a_better_one_could_not_be_written(
    tmp_path: Path, shape: DrafterShape, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = _state(shape, 1)
    saver = Saver(tmp_path, shape, 1, state)
    saver.save(state, _progress(1), True, _nothing)
    saver.save(state, _progress(2), False, _nothing)
    saver.close()

    def full(*_arguments: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(checkpoint, "write_tensors", full)
    saver = Saver(tmp_path, shape, 1, state)
    saver.save(state, _progress(3), True, _nothing)
    with pytest.raises(OSError, match="No space left"):
        saver.close()
    assert (tmp_path / "best").readlink() == Path("step-00000001")
    assert (tmp_path / "best" / "config.json").is_file()


def test_an_error_of_the_writer_reaches_the_next_call(
    tmp_path: Path, shape: DrafterShape, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_arguments: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(checkpoint, "write_tensors", full)
    state = _state(shape, 1)
    for call in ("save", "check", "close"):
        saver = Saver(tmp_path, shape, 3, state)
        saver.save(state, _progress(1), False, _nothing)
        while not saver._pending[0].done():
            time.sleep(0.01)
        arguments = (state, _progress(2), False, _nothing) if call == "save" else ()
        with pytest.raises(OSError, match="No space left"):
            getattr(saver, call)(*arguments)
    assert checkpoint.newest(tmp_path) is None


WRITER = """
    import sys
    from pathlib import Path
    from dataclasses import replace
    import torch
    from dflash_pipeline.train.checkpoint import at_the_beginning, newest
    from dflash_pipeline.train.drafter import Drafter
    from dflash_pipeline.train.loading import read_checkpoint
    from dflash_pipeline.train.saver import Saver

    torch.set_num_threads(1)
    out = Path(sys.argv[1])
    found = newest(out)
    begin = int(found.name.removeprefix("step-")) + 1
    drafter = Drafter(replace(read_checkpoint(found).shape, hidden_size=512))
    state = {f"master.{name}": tensor.detach() for name, tensor in drafter.named_parameters()}
    saver = Saver(out, drafter.shape, 2, state)
    for step in range(begin, 10_000):
        progress = replace(at_the_beginning(9), step=step)
        saver.save(state, progress, step % 3 == 0, lambda: None)
        print(step, flush=True)
"""


def test_a_kill_at_any_moment_leaves_a_whole_checkpoint(
    tmp_path: Path, shape: DrafterShape
) -> None:
    first = _state(shape, 1) | {"rng": torch.get_rng_state()}
    checkpoint.save(tmp_path, shape, first, _progress(1))
    for number in range(3):
        with subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(WRITER), str(tmp_path)],
            stdout=subprocess.PIPE,
            text=True,
        ) as writer:
            assert writer.stdout is not None
            for _ in range(2 + number % 3):
                assert writer.stdout.readline(), "it ended before it was killed"
            # somewhere in a write of a few dozen milliseconds
            time.sleep(0.015 * number)
            os.kill(writer.pid, signal.SIGKILL)
        assert writer.returncode == -signal.SIGKILL
        for path in tmp_path.glob("step-*"):
            progress, state = checkpoint.load(path, torch.device("cpu"))
            assert path.name == f"step-{progress.step:08d}"
            assert read_checkpoint(path).tensors.keys() == {
                name.removeprefix("master.") for name in state if name.startswith("master.")
            }
        assert (tmp_path / "last").resolve().is_dir()
    Saver(tmp_path, shape, 2, _state(shape, 1)).close()
    assert not list(tmp_path.glob(".*step-*"))


def test_a_run_that_ends_waits_for_its_checkpoint_though_the_journal_cannot_be_closed() -> None:
    """As on a full disk: the last points of TensorBoard's curves find no room."""
    done: list[str] = []

    def fails() -> None:
        raise OSError("No space left on device")

    training: Any = SimpleNamespace(
        journal=SimpleNamespace(close=fails),
        profiler=SimpleNamespace(close=lambda step: done.append(f"trace {step}")),
        progress=SimpleNamespace(step=7),
        clock=SimpleNamespace(stage_now=""),
        saver=SimpleNamespace(close=lambda: done.append("checkpoint")),
    )
    with pytest.raises(OSError, match="No space left"):
        Training.close(training)
    assert done == ["trace 7", "checkpoint"]
    assert training.clock.stage_now == "checkpoint"
