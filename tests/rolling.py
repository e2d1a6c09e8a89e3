"""A capture and a training run side by side whose processes may be killed at any moment.

A plain module, for tests/test_rolling.py and tests/bench/chaos.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from dflash_pipeline.capture.construction import build_store
from dflash_pipeline.capture.model import resolve
from dflash_pipeline.capture.planning import apply_quota
from dflash_pipeline.capture.samples import Conversation, Dropped
from dflash_pipeline.configs.load import load, to_dict
from dflash_pipeline.configs.schema import Run
from dflash_pipeline.store.reader import Store
from places import cpu_place


def run_of(folder: Path, name: str, quota: str, sets: tuple[str, ...] = (), **train: Any) -> Run:
    """The preset `tiny` over `folder / target`: store and run directory are called `name`."""
    sets = ("target.layer_ids=[0, 2]", "store.shard_bytes=30000", *sets)
    options = {
        "target.id": str(folder / "target"),
        "data.files": (str(folder / "data.jsonl"),),
        "store.path": str(folder / name),
        "capture.quota": quota,
        "train.out": str(folder / f"{name}-run"),
    }
    run = load("tiny", sets, options)
    return replace(run, train=replace(run.train, **train))


def with_checks(run: Run) -> Run:
    """The same run, whose trainer compares the checksum of every chunk that it reads."""
    return replace(run, feed=replace(run.feed, check=True))


def plan(run: Run, num_samples: int) -> Store:
    """The store of a run over made-up conversations, with nothing captured yet."""
    lengths = np.random.default_rng(0).integers(4, 40, num_samples)
    conversations = [
        Conversation(
            key=f"sample-{row}",
            source=0,
            row=row,
            domain="chat",
            messages=(
                {"role": "user", "content": f"Say {row}"},
                {"role": "assistant", "content": "abcdefghij"[row % 10] * int(length)},
            ),
            text="",
            token_ids=(),
            loss_spans=(),
        )
        for row, length in enumerate(lengths)
    ]
    dropped = Dropped(num_rows=num_samples)
    files = resolve(run.target)
    store = build_store(run, files, "cpu", conversations, dropped, "", 1, lambda _text: None)
    apply_quota(store, run.capture, 1)
    return store


class Host:
    """Starts processes of one run; each is named by its stage and rank."""

    def __init__(
        self, run: Run, num_capture: int, *, num_train: int = 1, beside: Host | None = None
    ) -> None:
        """`beside`: of another run, whose forking process serves this one as well."""
        self.run, self._num = run, {"capture": num_capture, "train": num_train}
        self._beside = beside
        if beside is None:
            script = Path(__file__).with_name("rolling_worker.py")
            pipe = subprocess.PIPE
            self._host = subprocess.Popen([sys.executable, str(script)], stdin=pipe, stdout=pipe)
        else:
            self._host = beside._host
        self.out = Path(run.train.out)
        self._alive: dict[str, int] = {}

    @property
    def record(self) -> Path:
        """Of the first rank."""
        return self.record_of(0)

    def record_of(self, rank: int) -> Path:
        """What a rank trained on, step by step."""
        return self.out.with_name(f"{self.out.name}.{rank}.steps")

    @property
    def batches(self) -> Path:
        """Folder of the batches that this run's ranks had."""
        return self.out.with_name(f"{self.out.name}.batches")

    @property
    def releases(self) -> Path:
        """What each release of a shard into this run's store went by."""
        return Path(f"{self.run.store.path}.releases")

    def start(self, stage: str, rank: int) -> None:
        """Start, or go on, as the same command line does."""
        is_capture = stage == "capture"
        log_dir = f"{self.run.store.path}.logs" if is_capture else str(self.out / "logs")
        place = cpu_place(log_dir, stage, rank, self._num[stage])
        meeting = self.out.with_name(f"{self.out.name}.meeting")
        place = replace(place, rendezvous=f"file://{meeting}")
        resume = (self.out / "run.json").exists()
        task = {
            "stage": stage,
            "run": to_dict(self.run),
            "place": asdict(place),
            "extra": {} if is_capture else {"resume": resume},
            "record": str(self.record_of(rank)),
            "batches": str(self.batches),
            "releases": str(self.releases),
            "output": str(self.output(stage, rank)),
            "ended": str(self._ended(stage, rank)),
        }
        assert self._host.stdin is not None
        assert self._host.stdout is not None
        self._host.stdin.write(json.dumps(task).encode() + b"\n")
        self._host.stdin.flush()
        self._alive[f"{stage}-{rank}"] = int(self._host.stdout.readline())

    def output(self, stage: str, rank: int) -> Path:
        """What a process says."""
        return self.out.with_name(f"{self.out.name}.{stage}-{rank}.txt")

    def _ended(self, stage: str, rank: int) -> Path:
        return self.out.with_name(f"{self.out.name}.{stage}-{rank}.ended")

    def is_over(self, stage: str, rank: int) -> bool:
        """Whether it did all its work."""
        return self._ended(stage, rank).exists()

    def is_alive(self, stage: str, rank: int) -> bool:
        process = self._alive.get(f"{stage}-{rank}")
        return process is not None and _is_alive(process)

    def kill(self, stage: str, rank: int) -> None:
        """SIGKILL, and wait until it is gone."""
        process = self._alive[f"{stage}-{rank}"]
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
        while _is_alive(process):
            time.sleep(0.002)

    def close(self) -> None:
        for process in self._alive.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        if self._beside is not None:
            return
        self._host.kill()
        self._host.wait()
        for pipe in (self._host.stdin, self._host.stdout):
            if pipe is not None:
                pipe.close()


def _is_alive(process: int) -> bool:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, 0)
        return True
    return False


def trained_samples(record: Path) -> list[int]:
    """Samples of the steps that count."""
    return [sample for drawn in trained_steps(record).values() for sample in drawn]


def trained_steps(record: Path) -> dict[int, list[int]]:
    """Samples of each step; one that was done again counts as it was done last."""
    steps: dict[int, list[int]] = {}
    for line in record.read_text().splitlines():
        step, samples = json.loads(line)
        steps = {before: drawn for before, drawn in steps.items() if before < step} | {
            step: samples
        }
    return steps


def file_bytes(directory: Path) -> int:
    """Bytes of all files below a directory."""
    total = 0
    for parent, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += (Path(parent) / name).lstat().st_size
    return total


@contextlib.contextmanager
def watched(directory: Path) -> Iterator[list[int]]:
    """The sizes that a directory had, looked at again and again."""
    sizes: list[int] = []
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.wait(0.01):
            sizes.append(file_bytes(directory))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield sizes
    finally:
        is_over.set()
        thread.join()
