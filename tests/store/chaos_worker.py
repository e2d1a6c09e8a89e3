"""Forks capture processes for the tests that kill them: python chaos_worker.py STORE SAMPLES.

Each line on stdin is a pause in seconds between two batches; the answer is the process's id. Forks
of one warm process start in milliseconds, so that most of their life is work.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from dflash_pipeline.store.reader import open_store

sys.path.append(str(Path(__file__).parents[1]))
import tiny_store

if __name__ == "__main__":
    path, plan = sys.argv[1], tiny_store.make_plan(int(sys.argv[2]))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while line := sys.stdin.readline():
        child = os.fork()
        if child == 0:
            store = open_store(path)
            tiny_store.capture(plan, store, pause_s=float(line))
            if store.is_complete:
                store.seal()
            os._exit(0)
        print(child, flush=True)
