"""The capture's speed against a bare prefill of the same batches, and a loop of the peers' kind.

    python tests/bench/capture.py [--tiny] [--disk DIR] [--memory DIR] [--limit 150]

A target of Qwen3-8B's shape with random weights, made on the device; conversations of lognormal
length (mean 951 tokens, sigma 0.8, at most 4,096), 20,000 of them planned. Prints a line for each
figure, in real tokens a second, and writes capture.json into $OUT where that is set: padding of the
plan; the bare prefill; ours to --disk and to --memory (a folder in memory) as int4 and as bf16, the
gate passed before the clock starts; batches of 16 padded to their longest under a mask, copied and
written one sample after another; the memory over 500 batches of mixed shapes. A part that would
begin after `--limit` seconds is left out, and said to be. `--tiny` runs all of it on a CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from dflash_pipeline.capture.batches import plan
from dflash_pipeline.capture.calibrating import calibrated
from dflash_pipeline.capture.offload import BatchSizes, Offload
from dflash_pipeline.capture.pack import Packer, index_batch
from dflash_pipeline.capture.stop import Stop
from dflash_pipeline.capture.target import Target
from dflash_pipeline.capture.warmup import (
    largest_batch,
    num_positions,
    planned_shapes,
    warm_up,
)
from dflash_pipeline.capture.worker import Worker
from dflash_pipeline.configs.memory import gib, usage
from dflash_pipeline.configs.place import Place, let_memory_grow
from dflash_pipeline.configs.schema import CaptureConfig
from dflash_pipeline.store.bf16 import bf16_bits
from dflash_pipeline.store.build import StoreBuilder, plan_lock
from dflash_pipeline.store.calibration import Calibrated
from dflash_pipeline.store.lease import Leases
from dflash_pipeline.store.reader import Store
from dflash_pipeline.store.rows import row_bytes
from dflash_pipeline.store.runlog import RunLog
from dflash_pipeline.store.spec import CHUNK_ROWS, FORMAT, Attributes, Layout, StoreSpec
from dflash_pipeline.store.table import build_table, claim_order, hash64
from dflash_pipeline.store.writer import StoreWriter

SEED = 0
# the smallest to the largest batch of it, for memory
NUM_MIXED, NUM_SETTLED = 500, 50
PEER_BATCH = 16


@dataclass(frozen=True)
class Sizes:
    """What is measured: the headline's shape, or one that a CPU can do."""

    hidden: int
    middle: int
    heads: int
    keys: int
    layers: int
    vocabulary: int
    layer_ids: tuple[int, ...]
    mean: int
    longest: int
    num_samples: int
    token_budget: int
    pad_multiple: int
    shard_bytes: int
    num_tokens: int
    """Captured by each way."""
    mixed_tokens: int
    """Of a batch of mixed shape, at most."""


FULL = Sizes(
    hidden=4096,
    middle=12288,
    heads=32,
    keys=8,
    layers=36,
    vocabulary=151936,
    layer_ids=(1, 9, 17, 25, 33),
    mean=951,
    longest=4096,
    num_samples=20_000,
    token_budget=49152,
    pad_multiple=64,
    shard_bytes=1 << 30,
    num_tokens=150_000,
    mixed_tokens=1024,
)
TINY = Sizes(
    hidden=64,
    middle=96,
    heads=4,
    keys=2,
    layers=8,
    vocabulary=512,
    layer_ids=(1, 3, 5),
    mean=60,
    longest=256,
    num_samples=400,
    token_budget=2048,
    pad_multiple=16,
    shard_bytes=1 << 20,
    num_tokens=9_000,
    mixed_tokens=128,
)


class Bench:
    """Figures, as they come."""

    def __init__(self, sizes: Sizes, device: torch.device, limit_s: float) -> None:
        self.sizes, self.device, self._limit_s = sizes, device, limit_s
        self._begin = time.perf_counter()
        self.figures: dict[str, dict[str, float]] = {}

    def part(self, name: str, work: Callable[[], dict[str, float]]) -> None:
        """Run one part and tell its figures, unless it is too late for it."""
        at_s = time.perf_counter() - self._begin
        if at_s > self._limit_s:
            print(f"{name:24} left out: {at_s:.0f} s have passed", flush=True)
            return
        found = work()
        self.figures[name] = found
        shown = ", ".join(f"{key} {value:,.4g}" for key, value in found.items())
        print(f"{name:24} {shown} ({time.perf_counter() - self._begin:.0f} s)", flush=True)

    def ratio(self, name: str, one: str, other: str) -> None:
        """Tokens a second of one part over those of another."""
        if one in self.figures and other in self.figures:
            found = self.figures[one]["tok_s"] / self.figures[other]["tok_s"]
            self.part(f"{name}: {one.partition(', ')[2]}", lambda: {"ratio": found})

    def sync(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def random_target(sizes: Sizes, device: torch.device) -> Target:
    """Random weights of the shape, made on the device."""
    config = transformers.Qwen3Config(
        vocab_size=sizes.vocabulary,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.middle,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.keys,
        head_dim=sizes.hidden // sizes.heads,
        max_position_embeddings=2 * sizes.longest,
        tie_word_embeddings=False,
    )
    torch.manual_seed(SEED)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with device:
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    # all-ones norms would hide a norm done twice from the gate
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return Target(model, sizes.layer_ids)


def lengths(sizes: Sizes) -> np.ndarray:
    """Lognormal lengths, sigma 0.8."""
    random = np.random.default_rng(SEED)
    drawn = random.lognormal(np.log(sizes.mean) - 0.32, 0.8, sizes.num_samples)
    return np.clip(drawn, 8, sizes.longest).astype(np.int64)


def planned_store(sizes: Sizes, path: Path, mode: str) -> Store:
    """A store of random tokens, nothing captured yet; `mode` of hidden and last."""
    num_tokens_M = lengths(sizes)
    config = CaptureConfig()
    token_bytes = len(sizes.layer_ids) * row_bytes(mode, sizes.hidden)
    found = plan(
        num_tokens_M,
        num_buckets=config.num_buckets,
        token_budget=sizes.token_budget,
        pad_multiple=sizes.pad_multiple,
        shard_rows=-(-sizes.shard_bytes // token_bytes),
        seed=SEED,
    )
    spec = StoreSpec(
        format=FORMAT,
        target_id="random",
        target_hash="",
        target_dtype="bf16",
        quantisation="",
        layer_ids=sizes.layer_ids,
        num_target_layers=sizes.layers,
        hidden_size=sizes.hidden,
        vocab_size=sizes.vocabulary,
        hidden_mode=mode,
        last_mode=mode,
        last_rows="teacher",
        calibration_hash="",
        tokenizer_hash="",
        template_hash="",
        template_args="{}",
        max_len=sizes.longest,
        overlong="truncate",
    )
    layout = Layout(
        rows_per_shard=-(-found.num_rows_per_shard_max // CHUNK_ROWS) * CHUNK_ROWS,
        chunk_rows=CHUNK_ROWS,
        token_budget=sizes.token_budget,
        pad_multiple=sizes.pad_multiple,
        bucket_bounds=found.bucket_bounds,
        num_shards=found.num_shards,
        num_samples_per_shard_max=found.num_samples_per_shard_max,
        seed=SEED,
    )
    ordered_M = num_tokens_M[found.order_M]
    # the first third is the prompt, whose rows need no last state
    num_teacher_M = ordered_M - np.maximum(ordered_M // 3, 1)
    zeros_M = np.zeros_like(ordered_M)
    columns = {
        "source": zeros_M,
        "source_row": found.order_M,
        "domain": zeros_M,
        "split": zeros_M,
        "num_tokens": ordered_M,
        "num_teacher": num_teacher_M,
        "num_anchors": num_teacher_M - 1,
        "token_hash": np.array([hash64(str(i).encode()) for i in found.order_M], np.uint64),
        "bucket": found.bucket_M,
        "shard": found.shard_M,
        "batch": found.batch_M,
    }
    keys = [f"sample-{i}" for i in found.order_M]
    table = build_table(keys, columns, layout, [""], ["random"])
    attributes = Attributes(data_hash="", mask_token_id=0, dropped={}, run={})
    random = np.random.default_rng(SEED)
    with (
        plan_lock(path, wait_s=10),
        StoreBuilder(path, spec, layout, table, attributes, 0) as builder,
    ):
        # nobody trains from it
        embed_VH = bf16_bits(np.ones((sizes.vocabulary, sizes.hidden), np.float32))
        builder.write_target(embed_VH, None, {"config.json": b"{}"})
        for shard_id in layout.shard_ids():
            own_M = ordered_M[table.of_shard(shard_id)]
            masks = [np.arange(length) >= max(length // 3, 1) for length in own_M]
            ids_N = random.integers(0, sizes.vocabulary, int(own_M.sum()))
            builder.write_tokens(
                shard_id, ids_N.astype(np.uint32), np.concatenate(masks).astype(np.uint8)
            )
        return builder.publish()


def bare_prefill(bench: Bench, target: Target, store: Store) -> dict[str, float]:
    """The target alone on the batches that `ours` is timed on: ids there, states dropped."""
    batches, num_tokens, num_places = [], 0, 0
    # the first shard is not timed, the others are whole
    for shard_id in claim_order(store.layout.num_shards)[1:]:
        if num_tokens >= bench.sizes.num_tokens:
            break
        for batch in store.table.batches_of(shard_id):
            width = num_positions(int(store.table.num_tokens[batch].max()), store.layout)
            shape = (batch.stop - batch.start, width)
            batches.append(torch.randint(bench.sizes.vocabulary, shape, device=bench.device))
            num_tokens += int(store.table.num_tokens[batch].sum())
            num_places += batches[-1].numel()
    bench.sync()
    begin = time.perf_counter()
    for ids_BT in batches:
        target.run(ids_BT, lambda _place, _hidden_BTH: None)
    bench.sync()
    seconds = time.perf_counter() - begin
    return {
        "tok_s": num_tokens / seconds,
        "tokens": num_tokens,
        "padding": 1 - num_tokens / num_places,
        "batches": len(batches),
    }


def padding(bench: Bench, store: Store) -> dict[str, float]:
    """Of the whole plan."""
    sizes, table = bench.sizes, store.table
    places = [
        (batch.stop - batch.start) * num_positions(int(table.num_tokens[batch].max()), store.layout)
        for shard_id in store.layout.shard_ids()
        for batch in table.batches_of(shard_id)
    ]
    return {
        "samples": sizes.num_samples,
        "batches": len(places),
        "padding": 1 - int(table.num_tokens.sum()) / sum(places),
    }


def ours(bench: Bench, target: Target, folder: Path, mode: str) -> dict[str, float]:
    """Shard after shard as a worker writes them; the first, with gate and calibration, untimed."""
    path = folder / f"hs-{mode}"
    store = planned_store(bench.sizes, path, mode)
    if not bench.figures:
        bench.part("plan", lambda: padding(bench, store))
        warm_up(target, planned_shapes(store))
    if f"bare prefill, {mode}" not in bench.figures:
        bench.part(f"bare prefill, {mode}", lambda: bare_prefill(bench, target, store))
    config = CaptureConfig(token_budget=bench.sizes.token_budget, force=True)
    place = Place(
        rank=0,
        world=1,
        device=str(bench.device),
        kind=bench.device.type,
        log_dir=f"{path}.logs",
        stage="capture",
        rendezvous="",
        threads=1,
    )
    try:
        with ExitStack() as stack:
            log = _Quiet(place)
            stop = stack.enter_context(Stop())
            leases = stack.enter_context(Leases(path, store.layout, heartbeat_s=10, hung_s=600))
            store = calibrated(store, target, config, leases, log.say, leases.beat, lambda: None)
            offload = stack.enter_context(
                Offload(
                    largest_batch(store),
                    target.device,
                    num_slots=config.device_buffers,
                    num_buffers=config.host_buffers,
                    poison=False,
                )
            )
            writer = stack.enter_context(StoreWriter(store, leases, depth=config.host_buffers))
            worker = Worker(store, target, config, log, stop, leases, offload, writer, None)
            _take(worker, leases, store, config)
            before, begin = worker.counts(), time.perf_counter()
            after = before
            while after.num_tokens - before.num_tokens < bench.sizes.num_tokens:
                if not _take(worker, leases, store, config):
                    break
                after = worker.counts()
            writer.wait()
            seconds = time.perf_counter() - begin
        num_tokens = after.num_tokens - before.num_tokens
        return {
            "tok_s": num_tokens / seconds,
            "tokens": num_tokens,
            "padding": 1 - num_tokens / (after.num_places - before.num_places),
            "busy": (after.device_s - before.device_s) / seconds,
            "disk_wait": (after.buffer_wait_s - before.buffer_wait_s) / seconds,
            "gb_s": (after.size_bytes - before.size_bytes) / seconds / 1e9,
        }
    finally:
        shutil.rmtree(path, ignore_errors=True)
        shutil.rmtree(f"{path}.logs", ignore_errors=True)


def _take(worker: Worker, leases: Leases, store: Store, config: CaptureConfig) -> bool:
    lease = leases.claim(store.is_open, max_failures=config.max_shard_failures)
    if lease is not None:
        worker.take(lease)
    return lease is not None


class _Quiet(RunLog):
    """The figures are told by the benchmark."""

    def say(self, text: str) -> None:
        self.note(text)

    def counted(self, *_arguments: Any) -> None:
        """Nothing."""


def peers_loop(bench: Bench, target: Target, folder: Path) -> dict[str, float]:
    """Samples in data order, 16 a batch, padded and masked; blocking copies, a write a sample."""
    sizes, path = bench.sizes, folder / "peer.bin"
    num_tokens_M = lengths(sizes)
    done = places = batches = 0
    target_tokens = sizes.num_tokens // 4
    begin = 0.0
    try:
        with path.open("wb") as file, torch.inference_mode():
            for first in range(0, len(num_tokens_M), PEER_BATCH):
                own_B = num_tokens_M[first : first + PEER_BATCH]
                ids_BT = torch.zeros((len(own_B), int(own_B.max())), dtype=torch.int64)
                mask_BT = torch.zeros_like(ids_BT)
                for row, length in enumerate(own_B):
                    ids_BT[row, :length] = torch.randint(sizes.vocabulary, (int(length),))
                    mask_BT[row, :length] = 1
                if batches == 1:
                    # the first one warms up
                    bench.sync()
                    begin, done, places = time.perf_counter(), 0, 0
                output = target.backbone(
                    input_ids=ids_BT.to(bench.device),
                    attention_mask=mask_BT.to(bench.device),
                    use_cache=False,
                    output_hidden_states=True,
                )
                states = [output.hidden_states[layer + 1] for layer in sizes.layer_ids]
                states.append(output.last_hidden_state)
                stacked_BTKH = torch.stack(states, dim=2)
                for row, length in enumerate(own_B):
                    rows = stacked_BTKH[row, :length].to(torch.bfloat16).cpu()
                    file.write(rows.view(torch.int16).numpy().tobytes())
                done += int(own_B.sum())
                places += ids_BT.numel()
                batches += 1
                if batches > 1 and done >= target_tokens:
                    break
            os.fsync(file.fileno())
        seconds = time.perf_counter() - begin
        return {"tok_s": done / seconds, "padding": 1 - done / places, "batches": batches - 1}
    finally:
        path.unlink(missing_ok=True)


def memory(bench: Bench, target: Target) -> dict[str, float]:
    """What is held after 500 batches of mixed shapes more than after the first 50."""
    sizes, random = bench.sizes, np.random.default_rng(SEED)
    most = BatchSizes(
        num_places=sizes.mixed_tokens,
        num_sequences=sizes.mixed_tokens,
        num_rows=sizes.mixed_tokens,
        num_last_rows=sizes.mixed_tokens,
        num_layers=len(sizes.layer_ids),
        num_bounds=len(sizes.layer_ids) + 1,
        row_bytes=row_bytes("bf16", sizes.hidden),
        last_row_bytes=row_bytes("bf16", sizes.hidden),
    )
    packer = Packer(Calibrated(), target.device)
    held: list[tuple[int, int]] = []
    with Offload(most, target.device, num_slots=2, num_buffers=4, poison=False) as offload:
        for number in range(NUM_MIXED):
            width = int(random.integers(1, sizes.mixed_tokens // sizes.pad_multiple + 1))
            width *= sizes.pad_multiple
            rows_B = random.integers(1, width + 1, sizes.mixed_tokens // width).tolist()
            slot = offload.slot()
            ids_BT = random.integers(0, sizes.vocabulary, (len(rows_B), width))
            teachers = [np.arange(length) for length in rows_B]
            part = slot.part(ids_BT, index_batch(rows_B, teachers, width))
            packer.begin(part.out)

            def take(place: int, hidden_BTH: torch.Tensor, part: Any = part) -> None:
                packer.layer(place, hidden_BTH, part.index, part.out)

            packer.last(target.run(part.ids_BT, take), part.index, part.out)
            parcel = offload.send(slot, lambda: None)
            parcel.wait()
            parcel.release()
            if number in (NUM_SETTLED - 1, NUM_MIXED - 1):
                used = usage(torch, target.device)
                held.append((used.reserved, used.host_peak))
    (device_then, host_then), (device_now, host_now) = held
    return {
        "device_gib": gib(device_now),
        "device_growth_mib": (device_now - device_then) / 2**20,
        "host_gib": gib(host_now),
        "host_growth_mib": (host_now - host_then) / 2**20,
    }


def _ours_and_ratio(bench: Bench, target: Target, folder: Path, mode: str, name: str) -> None:
    bench.part(f"ours, {mode} to {name}", lambda: ours(bench, target, folder, mode))
    bench.ratio("  over bare", f"ours, {mode} to {name}", f"bare prefill, {mode}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--disk", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--memory", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--limit", type=float, default=150.0)
    options = parser.parse_args()
    let_memory_grow(torch.__version__)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not options.tiny:
        parser.error("there is no GPU: use --tiny")
    bench = Bench(TINY if options.tiny else FULL, device, options.limit)
    target = random_target(bench.sizes, device)
    with ExitStack() as stack:
        disk, in_memory = (
            Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-", dir=parent)))
            for parent in (options.disk, options.memory)
        )
        folders = {"memory": in_memory, "disk": disk}
        for mode, name in (("int4", "memory"), ("bf16", "memory"), ("int4", "disk")):
            _ours_and_ratio(bench, target, folders[name], mode, name)
        bench.part("a loop of the peers' kind", lambda: peers_loop(bench, target, disk))
        bench.ratio("  ours over it", "ours, int4 to disk", "a loop of the peers' kind")
        bench.part("memory", lambda: memory(bench, target))
        _ours_and_ratio(bench, target, disk, "bf16", "disk")
    if os.environ.get("OUT"):
        result = {
            "device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "figures": bench.figures,
        }
        Path(os.environ["OUT"], "capture.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
