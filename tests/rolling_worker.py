"""Forks capture and training processes for the tests that kill them: python rolling_worker.py.

Each line on stdin is one JSON task {stage, run, place, extra, record, batches, releases}; the
answer is the process's id. Forks of one warm process start in milliseconds. `record` names a file:
a line a trained step, with the samples that it drew. In the folder `batches`, where it is there,
each batch is kept as it was trained on. `releases` names a file: a line a shard that was released,
with the checkpoint that each run had by then.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dflash_pipeline.capture import worker as capture_worker
from dflash_pipeline.configs.load import from_dict
from dflash_pipeline.configs.place import Place
from dflash_pipeline.store import release
from dflash_pipeline.store.consumers import consumers
from dflash_pipeline.store.spec import Layout, ShardId
from dflash_pipeline.train import window
from dflash_pipeline.train import worker as train_worker
from dflash_pipeline.train.feed import Batch
from dflash_pipeline.train.follow import Draw
from dflash_pipeline.train.journal import Journal


def noting(record: str) -> Any:
    """`Journal.note`, which also keeps what it was told."""
    note = Journal.note

    def noted(self: Journal, step: int, draw: Draw) -> None:
        places = [int(place) for batch in draw.batches for place in batch]
        samples = [int(self._samples.sample_C[place]) for place in places]
        with Path(record).open("a") as file:
            file.write(json.dumps([step, samples]) + "\n")
        note(self, step, draw)

    return noted


def keeping(folder: Path, rank: int) -> Any:
    """`learn`, which also keeps features, teacher's states and places of its batch."""
    learn, numbers = window.learn, itertools.count()

    def kept(batch: Batch, *arguments: Any) -> None:
        assert batch.teacher is not None
        np.savez(
            folder / f"{rank}-{next(numbers)}.npz",
            feature_NKH=batch.feature_NKH.numpy(),
            state_UH=batch.teacher.state_UH.numpy(),
            places=batch.samples,
        )
        learn(batch, *arguments)

    return kept


def telling(releases: Path) -> Any:
    """`write_released`, which first tells by which checkpoints it goes."""
    write = release.write_released

    def told(store: Path, spec: Any, layout: Layout, shard_id: ShardId, rows: Any) -> None:
        runs = [Path(one.name) for one in consumers(store, layout)]
        steps = {str(run): int((run / "last").readlink().name.split("-")[1]) for run in runs}
        with releases.open("a") as file:
            file.write(json.dumps([*shard_id, steps]) + "\n")
        write(store, spec, layout, shard_id, rows)

    return told


def work(task: dict[str, Any]) -> None:
    run, place = from_dict(task["run"]), Place(**task["place"])
    release.write_released = telling(Path(task["releases"]))
    if Path(task["batches"]).is_dir():
        window.learn = keeping(Path(task["batches"]), place.rank)
    if task["stage"] == "capture":
        capture_worker.main(run, place, task["extra"])
    else:
        Journal.note = noting(task["record"])
        train_worker.main(run, place, task["extra"])


if __name__ == "__main__":
    torch.set_num_threads(1)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while line := sys.stdin.readline():
        task = json.loads(line)
        child = os.fork()
        if child == 0:
            log = os.open(task["output"], os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o644)
            os.dup2(log, 1)
            os.dup2(log, 2)
            try:
                work(task)
                Path(task["ended"]).touch()
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(0)
        print(child, flush=True)
