"""`dflash train` itself over a store of random int4 rows: what feed and optimizer add to the step.

    python tests/bench/training.py DIR [--tiny] [--steps 60] [--lengths fixed|mixed] [--io auto]

The drafter of Qwen3-8B (`--tiny`: a few parameters, on a CPU too), 8,192 draft rows a batch, two
batches an optimizer step. `fixed`: documents of 3,072 tokens, one a batch, to set beside `step.py`;
`mixed`: 96 of lognormal lengths (sigma 0.8, at most 3,072, on average 804), packed. Prints the
medians of the log lines after the first ones, when the first step was done, and device memory over
the run; writes training.json into $OUT where that is set. Store and run are removed at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dflash_pipeline.store.bf16 import bf16_bits
from dflash_pipeline.store.build import StoreBuilder, plan_lock
from dflash_pipeline.store.calibration import calibrate
from dflash_pipeline.store.completion import publish_calibration
from dflash_pipeline.store.lease import Leases
from dflash_pipeline.store.quantise import encode
from dflash_pipeline.store.reader import Store
from dflash_pipeline.store.spec import CHUNK_ROWS, Attributes, Layout
from dflash_pipeline.store.table import build_table, hash64
from dflash_pipeline.store.writer import StoreWriter

sys.path.append(str(Path(__file__).parents[1]))
import tiny_store

POOL_ROWS = 4096
LOG_EVERY = 5
SKIPPED_LINES = 3


@dataclass(frozen=True)
class Size:
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    num_samples: int
    longest: int
    anchors: int
    block: int


FULL = Size(4096, 12288, 32, 8, 128, 151936, 96, 3072, 512, 16)
TINY = Size(64, 128, 4, 2, 16, 1024, 24, 256, 16, 4)
LAYER_IDS = (1, 9, 17, 25, 33)
NUM_TARGET_LAYERS = 36


def lengths_of(size: Size, kind: str) -> npt.NDArray[np.int64]:
    if kind == "fixed":
        return np.full(size.num_samples, size.longest)
    sigma = 0.8
    mean = 951 * size.longest / FULL.longest
    drawn = np.random.default_rng(1).lognormal(np.log(mean) - sigma**2 / 2, sigma, size.num_samples)
    return drawn.clip(8, size.longest).astype(np.int64)


def build_store(path: Path, size: Size, lengths: npt.NDArray[np.int64]) -> None:
    """Sealed, every sample supervised throughout; its rows are cut out of one encoded pool."""
    spec = tiny_store.make_spec(
        hidden_mode="int4",
        last_mode="int8",
        layer_ids=LAYER_IDS,
        num_target_layers=NUM_TARGET_LAYERS,
        hidden_size=size.hidden,
        vocab_size=size.vocab,
        max_len=size.longest,
        last_rows="all",
    )
    samples_per_shard = 16
    num_shards = -(-len(lengths) // samples_per_shard)
    shard_of = np.arange(len(lengths)) // samples_per_shard
    rows = max(int(lengths[shard_of == shard].sum()) for shard in range(num_shards))
    layout = Layout(
        rows_per_shard=-(-rows // CHUNK_ROWS) * CHUNK_ROWS,
        chunk_rows=CHUNK_ROWS,
        token_budget=size.longest,
        pad_multiple=8,
        bucket_bounds=(size.longest,),
        num_shards=(num_shards,),
        num_samples_per_shard_max=(samples_per_shard,),
        seed=0,
    )
    random = np.random.default_rng(0)
    ids = [random.integers(0, size.vocab - 1, length, np.uint32) for length in lengths]
    number = list(range(len(lengths)))
    columns = {
        "source": [0 for _ in number],
        "source_row": number,
        "domain": [0 for _ in number],
        "split": [0 for _ in number],
        "num_tokens": lengths.tolist(),
        "num_teacher": lengths.tolist(),
        "num_anchors": (lengths - 1).tolist(),
        "token_hash": [hash64(ids_T.tobytes()) for ids_T in ids],
        "bucket": [0 for _ in number],
        "shard": shard_of.tolist(),
        "batch": [place % samples_per_shard for place in number],
    }
    table = build_table(
        [f"sample-{place}" for place in number], columns, layout, ("random",), ("random.jsonl",)
    )
    attributes = Attributes(data_hash="d0", mask_token_id=size.vocab - 1, dropped={}, run={})
    config = {
        "model_type": "qwen3",
        "hidden_size": size.hidden,
        "intermediate_size": size.intermediate,
        "num_hidden_layers": NUM_TARGET_LAYERS,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "head_dim": size.head_dim,
        "vocab_size": size.vocab,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "max_position_embeddings": 40960,
    }
    weights = [
        bf16_bits(random.standard_normal((size.vocab, size.hidden), np.float32) * 0.02)
        for _ in range(2)
    ]
    with (
        plan_lock(path, wait_s=10),
        StoreBuilder(path, spec, layout, table, attributes, 0) as builder,
    ):
        builder.write_target(*weights, {"config.json": json.dumps(config).encode()})
        for shard_id in layout.shard_ids():
            chosen = [ids[i] for i in np.flatnonzero(shard_of == shard_id.shard)]
            joined = np.concatenate(chosen)
            builder.write_tokens(shard_id, joined, np.ones(len(joined), np.uint8))
        store = builder.publish()
    _capture(store, layout, size, table)


def _capture(store: Store, layout: Layout, size: Size, table: Any) -> None:
    random = np.random.default_rng(2)
    pool_NKH = random.standard_normal((POOL_ROWS, len(LAYER_IDS), size.hidden), np.float32)
    last_NH = random.standard_normal((POOL_ROWS, size.hidden), np.float32)
    calibrations = calibrate(pool_NKH[:512], last_NH[:512], "int4", "int8")
    *of_layers, of_last = calibrations
    rows_NKR = np.stack(
        [encode(pool_NKH[:, place], one) for place, one in enumerate(of_layers) if one], axis=1
    )
    assert of_last is not None
    last_NR = encode(last_NH, of_last)
    amax = np.ones(store.spec.num_amax, np.float32)
    clipped = np.zeros(store.spec.num_amax, np.uint32)
    with Leases(store.path, layout, heartbeat_s=1, hung_s=600) as leases:
        lease = leases.claim(store.is_open, max_failures=3)
        assert lease is not None
        with lease:
            store = publish_calibration(store, calibrations, {"layers": []}, lease)
        with StoreWriter(store, leases, depth=2) as writer:
            while lease := leases.claim(store.is_open, max_failures=3):
                writer.begin(lease)
                for samples in table.batches_of(lease.shard_id):
                    num = int(table.num_tokens[samples].sum())
                    writer.put(rows_NKR[:num], last_NR[:num], lambda: None)
                writer.finish(amax, clipped, {}, halved=False)
                writer.commit()
    store.refresh()
    store.seal()


def train(folder: Path, size: Size, steps: int, io: str) -> dict[str, Any]:
    """Runs the command; what its log lines say."""
    settings = {
        # the objective of the figures that it is set beside
        "loss.ce": 1.0,
        "loss.kl": 0.0,
        "drafter.num_layers": 5,
        "drafter.block_size": size.block,
        "train.anchors_per_sample": size.anchors,
        "train.batch_anchors": size.anchors,
        "train.batch_tokens": size.longest,
        "train.accumulate": 2,
        "train.epochs": 1000,
        "train.max_steps": steps,
        "train.log_every": LOG_EVERY,
        "train.validate_every": 0,
        "train.save_every": 10**6,
        "feed.io": io,
    }
    command = [
        sys.executable,
        "-m",
        "dflash_pipeline.cli",
        "train",
        "--store",
        "hs",
        "--out",
        "run",
    ]
    for name, value in settings.items():
        command += ["--set", f"{name}={value}"]
    begin = time.time()
    subprocess.run(command, cwd=folder, check=True)
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    told = [record for record in map(json.loads, lines) if "loss" in record]
    steady = told[SKIPPED_LINES:]

    def median(name: str) -> float:
        return statistics.median(record[name] for record in steady)

    rows = median("draft_rows_per_s")
    return {
        "steps": told[-1]["step"],
        "draft_rows_per_s": rows,
        "ms_per_1000_rows": 1e6 / rows,
        "tokens_per_s": median("tokens_per_s"),
        "wait_share": median("wait_share"),
        "first_line_s": told[0]["time"] - begin,
        "memory_gib": [told[SKIPPED_LINES]["memory_gib"], told[-1]["memory_gib"]],
        "reserved_gib": [
            told[SKIPPED_LINES]["reserved_memory_gib"],
            told[-1]["reserved_memory_gib"],
        ],
        "host_gib": [told[SKIPPED_LINES]["host_memory_gib"], told[-1]["host_memory_gib"]],
        "stages_ms": {name: median(name) for name in steady[0] if name.endswith("_ms")},
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--lengths", choices=("fixed", "mixed"), default="fixed")
    parser.add_argument("--io", default="auto")
    options = parser.parse_args()
    size = TINY if options.tiny else FULL
    with tempfile.TemporaryDirectory(dir=options.directory) as made:
        folder = Path(made)
        begin = time.perf_counter()
        build_store(folder / "hs", size, lengths_of(size, options.lengths))
        built_s = time.perf_counter() - begin
        result = {"lengths": options.lengths, "io": options.io, "built_s": built_s}
        result |= train(folder, size, options.steps, options.io)
    print(json.dumps(result))
    if "OUT" in os.environ:
        path = Path(os.environ["OUT"]) / f"training-{options.lengths}.json"
        path.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
