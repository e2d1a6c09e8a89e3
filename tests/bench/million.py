"""A store of a million samples: how long it takes to open and to inspect, and how much memory.

    python tests/bench/million.py DIR [--samples 1000000] [--rounds 3]

Writes a sealed store of the shape of Qwen3-8B into DIR (int4 features of 5 layers and int8 `last`,
6 length buckets, 19 to 3,072 tokens a sample, shards of about 1 GiB) and removes it at the end.
Plan, tokens and commit records are real; the files of rows have their size and no content, as
neither command reads them but for one sample. Each figure is of a process of its own; wall and
processor time are without its imports, the peak of its resident memory is with them. Writes
million.json into $OUT where that is set, and ends with 1 when a bound is missed: 2 s and 300 MB to
open, 5 s to inspect.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from dflash_pipeline.store import commit, paths
from dflash_pipeline.store.build import StoreBuilder
from dflash_pipeline.store.calibration import calibrate
from dflash_pipeline.store.completion import write_calibration
from dflash_pipeline.store.reader import Store, open_store
from dflash_pipeline.store.rows import row_bytes
from dflash_pipeline.store.spec import CHUNK_ROWS, FORMAT, Attributes, Layout, ShardId, StoreSpec
from dflash_pipeline.store.table import SampleTable, build_table

WIDTH, VOCABULARY, LAYERS = 4096, 256, (1, 9, 17, 25, 33)
BOUNDS = (256, 512, 1024, 1536, 2048, 3072)
OPEN_S, OPEN_BYTES, INSPECT_S = 2.0, 300e6, 5.0

# run in a fresh process: imports first, then the clock
OPEN = """
import sys, time
from dflash_pipeline.store.reader import open_store
begin, used = time.perf_counter(), time.process_time()
store = open_store(sys.argv[1])
assert store.is_complete and len(store.table) == int(sys.argv[2])
wall, cpu = time.perf_counter() - begin, time.process_time() - used
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(wall, cpu, 1024 * int(peak.split()[1]))
"""
INSPECT = """
import contextlib, io, sys, time
from dflash_pipeline.store.describe import main
begin, used = time.perf_counter(), time.process_time()
with contextlib.redirect_stdout(io.StringIO()) as out:
    main(None, None, {"path": sys.argv[1], "json": False, "sample": ""})
wall, cpu = time.perf_counter() - begin, time.process_time() - used
assert "sealed" in out.getvalue()
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(wall, cpu, 1024 * int(peak.split()[1]))
"""


def specification() -> StoreSpec:
    """Qwen3-8B with a small vocabulary: its embedding plays no part here."""
    return StoreSpec(
        format=FORMAT,
        target_id="million",
        target_hash="0",
        target_dtype="bf16",
        quantisation="",
        layer_ids=LAYERS,
        num_target_layers=36,
        hidden_size=WIDTH,
        vocab_size=VOCABULARY,
        hidden_mode="int4",
        last_mode="int8",
        last_rows="teacher",
        calibration_hash="",
        tokenizer_hash="0",
        template_hash="0",
        template_args="{}",
        max_len=BOUNDS[-1],
        overlong="truncate",
    )


def plan(num_samples: int, spec: StoreSpec) -> tuple[Layout, SampleTable]:
    """Samples of log-normal lengths, in shards of about 1 GiB of `hidden`."""
    random = np.random.default_rng(0)
    num_tokens = np.clip(random.lognormal(6.6, 0.7, num_samples), 19, BOUNDS[-1]).astype(np.int64)
    bucket = np.searchsorted(BOUNDS, num_tokens)
    order = np.lexsort((num_tokens, bucket))
    num_tokens, bucket = num_tokens[order], bucket[order]
    capacity = (1 << 30) // (len(LAYERS) * row_bytes("int4", WIDTH)) // CHUNK_ROWS * CHUNK_ROWS
    shard = np.empty(num_samples, np.int64)
    for number in range(len(BOUNDS)):
        mine = np.flatnonzero(bucket == number)
        # so many are sure to fit, whichever they are
        shard[mine] = np.arange(len(mine)) // (capacity // BOUNDS[number])
    num_shards = [int(shard[bucket == b].max(initial=-1)) + 1 for b in range(len(BOUNDS))]
    layout = Layout(
        rows_per_shard=capacity,
        chunk_rows=CHUNK_ROWS,
        token_budget=49152,
        pad_multiple=64,
        bucket_bounds=BOUNDS,
        num_shards=tuple(num_shards),
        num_samples_per_shard_max=tuple(capacity // bound for bound in BOUNDS),
        seed=0,
    )
    columns = {
        "source": np.zeros(num_samples, np.int64),
        "source_row": np.arange(num_samples),
        "domain": np.arange(num_samples) % 3,
        "split": (np.arange(num_samples) % 50 == 0).astype(np.uint8),
        "num_tokens": num_tokens,
        "num_teacher": num_tokens - 1,
        "num_anchors": num_tokens - 1,
        "token_hash": random.integers(0, 1 << 60, num_samples, np.uint64),
        "bucket": bucket,
        "shard": shard,
        "batch": np.zeros(num_samples, np.int64),
    }
    keys = [f"conversation-{i:07d}" for i in range(num_samples)]
    return layout, build_table(keys, columns, layout, ("chat", "code", "math"), ("data.jsonl",))


def write_rows(store: Store, shard_id: ShardId) -> None:
    """Files of the right size, and a record of a shard whose rows nobody will read."""
    rows, last_rows = store.table.rows_of(shard_id)
    assert store.last_shape is not None
    sizes = store.hidden_shape.file_bytes(rows), store.last_shape.file_bytes(last_rows)
    names = paths.hidden_file(shard_id), paths.last_file(shard_id), paths.commit_file(shard_id)
    for name in names:
        (store.path / name).parent.mkdir(parents=True, exist_ok=True)
    for name, size in zip(names, sizes, strict=False):
        with (store.path / name).open("wb") as stream:
            stream.truncate(size)
            index = store.hidden_shape.index(rows) if name == names[0] else b""
            stream.seek(size - len(index))
            stream.write(index)
    samples, num_chunks = store.table.of_shard(shard_id), store.layout.num_chunks
    record = commit.Commit(
        rows=rows,
        last_rows=last_rows,
        hidden_bytes=sizes[0],
        last_bytes=sizes[1],
        token_crcs=store.token_crcs(shard_id),
        amax=np.ones(store.spec.num_amax, np.float32),
        clipped=np.zeros(store.spec.num_amax, np.uint32),
        hidden_crcs=np.zeros(num_chunks, np.uint32),
        last_crcs=np.zeros(num_chunks, np.uint32),
        states=np.zeros(samples.stop - samples.start, np.uint8),
        is_halved=False,
        is_compiled=False,
    )
    words = commit.pack(record, store.spec, store.layout, shard_id.bucket)
    (store.path / names[2]).write_bytes(words.tobytes())


def write_store(path: Path, num_samples: int) -> Store:
    """The sealed store."""
    spec = specification()
    layout, table = plan(num_samples, spec)
    attributes = Attributes(data_hash="0", mask_token_id=0, dropped={}, run={})
    random = np.random.default_rng(1)
    states = random.standard_normal((512, len(LAYERS), WIDTH), np.float32)
    calibrations = calibrate(states, states[:, 0], spec.hidden_mode, spec.last_mode)

    def fill(directory: Path) -> None:
        write_calibration(directory, calibrations, {"layers": []})
        store = open_store(directory)
        for shard_id in layout.shard_ids():
            write_rows(store, shard_id)
        store.seal()

    # files without content take no room
    size = sum(layout.num_shards) * 3 << 30
    with StoreBuilder(path, spec, layout, table, attributes, 0, elsewhere_bytes=size) as builder:
        builder.write_target(np.zeros((VOCABULARY, WIDTH), np.uint16), None, {})
        for shard_id in layout.shard_ids():
            rows, _ = table.rows_of(shard_id)
            builder.write_tokens(shard_id, np.zeros(rows, np.uint32), np.ones(rows, np.uint8))
        return builder.publish(fill)


def measured(script: str, store: Store, num_rounds: int) -> dict[str, float]:
    """Median wall and processor time and largest memory over processes of their own."""
    command = [sys.executable, "-c", script, str(store.path), str(len(store.table))]
    runs = []
    for _ in range(num_rounds):
        ended = subprocess.run(command, capture_output=True, text=True, check=True)
        runs.append(tuple(map(float, ended.stdout.split())))
    walls, cpus, sizes = zip(*runs, strict=True)
    return {
        "wall_s": round(statistics.median(walls), 3),
        "cpu_s": round(statistics.median(cpus), 3),
        "peak_mb": round(max(sizes) / 1e6, 1),
    }


def main() -> int:
    """0 if every bound holds."""
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--samples", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="million-", dir=arguments.directory))
    try:
        begin = time.monotonic()
        store = write_store(folder / "hs", arguments.samples)
        print(f"written in {time.monotonic() - begin:.0f} s", flush=True)
        opened = measured(OPEN, store, arguments.rounds)
        inspected = measured(INSPECT, store, arguments.rounds)
    finally:
        shutil.rmtree(folder)
    record = {
        "command": f"python tests/bench/million.py DIR --samples {arguments.samples}",
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "samples": len(store.table),
        "tokens": int(store.table.num_tokens.sum()),
        "shards": sum(store.layout.num_shards),
        "open": opened,
        "inspect": inspected,
    }
    print(json.dumps(record, indent=1))
    if out := os.environ.get("OUT"):
        (Path(out) / "million.json").write_text(json.dumps(record, indent=1) + "\n")
    holds = opened["wall_s"] <= OPEN_S and opened["peak_mb"] * 1e6 <= OPEN_BYTES
    return 0 if holds and inspected["wall_s"] <= INSPECT_S else 1


if __name__ == "__main__":
    sys.exit(main())
