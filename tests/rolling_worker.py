"""Forks capture and training processes for the tests that kill them: python rolling_worker.py.

Each line on stdin is one JSON task {stage, run, place, extra, record}; the answer is the process's
id. Forks of one warm process start in milliseconds. `record` names a file: a line a trained step,
with the samples that it drew.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

import torch

from dflash_pipeline.capture import worker as capture_worker
from dflash_pipeline.configs.load import from_dict
from dflash_pipeline.configs.place import Place
from dflash_pipeline.train import worker as train_worker
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


def work(task: dict[str, Any]) -> None:
    run, place = from_dict(task["run"]), Place(**task["place"])
    if task["stage"] == "capture":
        capture_worker.main(run, place, task["extra"])
    else:
        Journal.note = noting(task["record"])  # type: ignore[method-assign]
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
