"""Writes the golden store: python tests/store/make_golden.py DIRECTORY. Once a format, then never.

The committed store must open for ever with the values that `tiny_store.py` gives for five samples.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from dflash_pipeline.store import paths

sys.path.append(str(Path(__file__).parents[1]))
import tiny_store

NUM_SAMPLES = 5

if __name__ == "__main__":
    directory = Path(sys.argv[1])
    plan = tiny_store.make_plan(NUM_SAMPLES, rows=208, chunk_rows=16)
    store = tiny_store.build(plan, directory)
    tiny_store.capture(plan, store)
    store.seal()
    shutil.rmtree(paths.log_directory(directory))
