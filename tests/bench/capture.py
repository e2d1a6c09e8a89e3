"""The capture's speed, eager and compiled, against a bare prefill of the same batches, its floor,
and a loop of the peers' kind.

    python tests/bench/capture.py [--part NAME ...] [--tiny] [--disk DIR] [--memory DIR] [--trace]

Random weights made on the device; conversations of lognormal length (mean 951 tokens, sigma 0.8, at
most 4,096), 20,000 of them planned. Each part is a process of its own, ended after its limit, and
may be run alone; all of them take about eleven minutes on one H200:

    8b        shape of Qwen3-8B: padding of the plan; the bare prefill; ours to --memory (a folder
              in memory) and to --disk as int4 and to --disk as bf16, and the seconds until the
              first shard, the gated one, was committed; a loop of the peers' kind: 16 samples
              padded under a mask, blocking copies, torch.save of each; then bare and ours as int4
              with compiled layers
    0.6b      shape of Qwen3-0.6B: bare and ours to --memory as int4, eager and compiled
    27b       shape of Qwen3.5-27B, three layers of four linear attention: bare and ours
    rows      shape of Qwen3-8B: the bare prefill of rows of 512, 1,024 and 2,048 tokens alike,
              eager and compiled, without a store
    memory    what is held after 500 batches of mixed shapes more than after the first 50

Ours is timed from the commit of the second shard to that of the last (`tok_s`), and beside it as
the main thread saw it, without the disk's own moment for the last one (`loop_tok_s`). Prints a line
for each figure: real tokens a second, share of the floor (`planned.floor_s`), ratios; writes
capture.json into $OUT where that is set. `--tiny` runs all of it on a CPU. `--trace` (parts 8b and
0.6b) times nothing, and tells instead where the time goes with compiled layers, int4 to memory: the
kernels of a batch beside those of the bare prefill, and what the main thread did while the device
had nothing to do (`gaps.py`); under a minute and a half a part.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import transformers

from dflash_pipeline.capture.calibrating import calibrated
from dflash_pipeline.capture.compiled import compile_layers, num_compiled
from dflash_pipeline.capture.offload import BatchSizes, Offload
from dflash_pipeline.capture.pack import Packer, index_batch
from dflash_pipeline.capture.shapes import Shape, extremes, largest_batch, planned_shapes, shape_of
from dflash_pipeline.capture.shards import Worker
from dflash_pipeline.capture.stop import Stop
from dflash_pipeline.capture.target import Target
from dflash_pipeline.capture.times import Times
from dflash_pipeline.capture.voice import Silence
from dflash_pipeline.capture.warmup import warm_up
from dflash_pipeline.configs.memory import gib, usage
from dflash_pipeline.configs.place import let_memory_grow
from dflash_pipeline.configs.schema import CaptureConfig
from dflash_pipeline.store import paths
from dflash_pipeline.store.calibration import Calibrated
from dflash_pipeline.store.lease import Leases
from dflash_pipeline.store.reader import Store
from dflash_pipeline.store.rows import row_bytes
from dflash_pipeline.store.spec import ShardId
from dflash_pipeline.store.table import claim_order
from dflash_pipeline.store.writer import StoreWriter
from gaps import Trace, comparison
from planned import SEED, SIZES, Sizes, floor_s, lengths, planned_store, random_target

# the smallest to the largest batch of it, for memory
NUM_MIXED, NUM_SETTLED = 500, 50
PEER_BATCH = 16
Way = tuple[str, str]
WAYS: dict[str, list[Way]] = {
    "8b": [("int4", "memory"), ("int4", "disk"), ("bf16", "disk")],
    "0.6b": [("int4", "memory")],
    "27b": [("int4", "memory")],
}
TRACED = ("8b", "0.6b")
LIMITS_S = {"8b": 370.0, "0.6b": 110.0, "27b": 150.0, "rows": 100.0, "memory": 50.0}
# rows of one length, and how often a batch of them is timed
ROW_WIDTHS, NUM_ROW_BATCHES = (512, 1024, 2048), 5


class Bench:
    """Figures of one part, as they come."""

    def __init__(self, sizes: Sizes, device: torch.device, result: Path | None) -> None:
        self.sizes, self.device, self._result = sizes, device, result
        self._begin = time.perf_counter()
        self.figures: dict[str, dict[str, float]] = {}

    def tell(self, name: str, found: dict[str, float]) -> None:
        """Keep and print figures; a part that is cut off has told those that it had."""
        self.figures[name] = found
        shown = ", ".join(f"{key} {value:,.4g}" for key, value in found.items())
        print(f"  {name:24} {shown} ({time.perf_counter() - self._begin:.0f} s)", flush=True)
        if self._result:
            self._result.write_text(json.dumps(self.figures))

    def ratio(self, one: str, other: str) -> None:
        """Tokens a second of one way over those of another."""
        found = self.figures[one]["tok_s"] / self.figures[other]["tok_s"]
        self.tell(f"{one} / {other}", {"ratio": found})

    def sync(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def timed_shards(bench: Bench, store: Store) -> list[slice]:
    """Batches of the shards that each way is timed on: the first two are not."""
    batches: list[slice] = []
    num_tokens = 0
    for shard_id in claim_order(store.layout.num_shards)[2:]:
        if num_tokens >= bench.sizes.num_tokens:
            break
        batches += store.table.batches_of(shard_id)
        num_tokens += store.table.rows_of(shard_id)[0]
    return batches


def bare_prefill(
    bench: Bench, target: Target, store: Store, trace: Trace | None = None
) -> dict[str, float]:
    """The target alone on the batches that `ours` is timed on: ids there, states dropped."""
    table, batches = store.table, timed_shards(bench, store)
    shapes = [shape_of(batch, table, store.layout) for batch in batches]
    num_tokens = sum(int(table.num_tokens[batch].sum()) for batch in batches)
    ids = [torch.randint(bench.sizes.vocabulary, one, device=bench.device) for one in shapes]
    bench.sync()
    begin = time.perf_counter()
    with trace or nullcontext():
        for ids_BT in ids:
            target.run(ids_BT, lambda _place, _hidden_BTH: None)
        bench.sync()
    seconds = time.perf_counter() - begin
    return {
        "tok_s": num_tokens / seconds,
        "of_floor": floor_s(bench.sizes, target, shapes) / seconds,
        "tokens": num_tokens,
        "padding": 1 - num_tokens / sum(count * width for count, width in shapes),
        "batches": len(batches),
    }


def equal_rows(bench: Bench, target: Target, way: str) -> None:
    """The bare prefill of batches whose rows all have one length."""
    for shape in _row_shapes(bench.sizes):
        ids_BT = torch.randint(bench.sizes.vocabulary, shape, device=bench.device)
        seconds = []
        for _ in range(1 + NUM_ROW_BATCHES):
            bench.sync()
            begin = time.perf_counter()
            target.run(ids_BT, lambda _place, _hidden_BTH: None)
            bench.sync()
            seconds.append(time.perf_counter() - begin)
        # the first one warms up
        median = statistics.median(seconds[1:])
        found = {
            "tok_s": ids_BT.numel() / median,
            "of_floor": floor_s(bench.sizes, target, [shape]) / median,
        }
        bench.tell(f"{shape[0]} x {shape[1]}, {way}", found)


def _row_shapes(sizes: Sizes) -> list[Shape]:
    """Of two thirds of a batch's tokens, as the reference figures are (32,768 at full size)."""
    budget = sizes.token_budget * 2 // 3
    widths = [width for width in ROW_WIDTHS if width <= sizes.longest] or [sizes.longest]
    return [(budget // width, width) for width in widths]


def padding(bench: Bench, store: Store) -> dict[str, float]:
    """Of the whole plan."""
    planned = planned_shapes(store.table, store.layout)
    places = [count * width for shapes in planned for count, width in shapes]
    return {
        "samples": bench.sizes.num_samples,
        "batches": len(places),
        "padding": 1 - int(store.table.num_tokens.sum()) / sum(places),
    }


def ours(
    bench: Bench, target: Target, store: Store, trace: Trace | None = None
) -> dict[str, float]:
    """Shard after shard as a worker writes them.

    Not timed: the first, with gate and calibration, and the second, before which nothing is queued.
    trace: of what is timed.
    """
    # where compiled layers do not pass the gate, that is the figure: no plain ones in their place
    setting: Literal["on", "off"] = "on" if target.is_compiled else "off"
    config = CaptureConfig(token_budget=bench.sizes.token_budget, force=True, compile=setting)
    log, started = Silence(), time.perf_counter()
    try:
        with ExitStack() as stack:
            stop = stack.enter_context(Stop())
            leases = Leases(store.path, store.layout, heartbeat_s=10, hung_s=600)
            stack.enter_context(leases)
            store = calibrated(store, target, config, leases, log.say, leases.beat, lambda: None)
            offload = stack.enter_context(
                Offload(
                    largest_batch(store),
                    target.device,
                    num_device_buffers=config.device_buffers,
                    num_host_buffers=config.host_buffers,
                    poison=False,
                )
            )
            writer = stack.enter_context(StoreWriter(store, leases, depth=config.host_buffers))
            worker = Worker(store, target, config, log, stop, leases, offload, writer, Times())
            taken = [_take(worker, leases, store, config)]
            first_s = time.perf_counter() - started
            taken.append(_take(worker, leases, store, config))
            # at both ends a shard's last batch is on the device and not yet counted
            before, begin, num_tokens = worker.counts(), time.perf_counter(), 0
            with trace or nullcontext():
                while num_tokens < bench.sizes.num_tokens:
                    taken.append(_take(worker, leases, store, config))
                    num_tokens += store.table.rows_of(taken[-1])[0]
            after, seconds = worker.counts(), time.perf_counter() - begin
            worker.settle()
            writer.wait()
        files = [store.path / paths.commit_file(shard_id) for shard_id in taken]
        committed_s = [file.stat().st_mtime_ns / 1e9 for file in files]
        counted = after.num_tokens - before.num_tokens
        return {
            "tok_s": num_tokens / (committed_s[-1] - committed_s[1]),
            "loop_tok_s": counted / seconds,
            "tokens": num_tokens,
            "padding": 1 - counted / (after.num_places - before.num_places),
            "busy": (after.device_s - before.device_s) / seconds,
            "disk_wait": (after.buffer_wait_s - before.buffer_wait_s) / seconds,
            "gb_s": (after.size_bytes - before.size_bytes) / seconds / 1e9,
            "first_shard_s": first_s,
        }
    finally:
        shutil.rmtree(store.path, ignore_errors=True)
        shutil.rmtree(f"{store.path}.logs", ignore_errors=True)


def _take(worker: Worker, leases: Leases, store: Store, config: CaptureConfig) -> ShardId:
    lease = leases.claim(store.is_open, max_failures=config.max_shard_failures)
    if lease is None:
        raise ValueError("the plan has too few shards for what is to be timed")
    worker.take(lease)
    return lease.shard_id


def peers_loop(bench: Bench, target: Target, folder: Path) -> dict[str, float]:
    """Samples in data order, 16 a batch, padded and masked; blocking copies, a file a sample."""
    sizes, path = bench.sizes, folder / "peers"
    path.mkdir()
    num_tokens_M = lengths(sizes)
    done = places = batches = 0
    target_tokens = sizes.num_tokens // 4
    begin = 0.0
    try:
        with torch.inference_mode():
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
                    torch.save(rows, path / f"{first + row}.pt")
                done += int(own_B.sum())
                places += ids_BT.numel()
                batches += 1
                if batches > 1 and done >= target_tokens:
                    break
        seconds = time.perf_counter() - begin
        return {"tok_s": done / seconds, "padding": 1 - done / places, "batches": batches - 1}
    finally:
        shutil.rmtree(path)


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
    with Offload(
        most, target.device, num_device_buffers=2, num_host_buffers=4, poison=False
    ) as offload:
        for number in range(NUM_MIXED):
            width = int(random.integers(1, sizes.mixed_tokens // sizes.pad_multiple + 1))
            width *= sizes.pad_multiple
            rows_B = random.integers(1, width + 1, sizes.mixed_tokens // width).tolist()
            buffer = offload.device_buffer()
            ids_BT = random.integers(0, sizes.vocabulary, (len(rows_B), width))
            teachers = [np.arange(length) for length in rows_B]
            part = buffer.part(ids_BT, index_batch(rows_B, teachers, width))
            packer.begin(part.out)

            def take(place: int, hidden_BTH: torch.Tensor, part: Any = part) -> None:
                packer.layer(place, hidden_BTH, part.index, part.out)

            packer.last(target.run(part.ids_BT, take), part.index, part.out)
            parcel = offload.send(buffer, lambda: None)
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


class _Folders:
    """Where each way writes."""

    def __init__(self, disk: Path, in_memory: Path) -> None:
        self._parents = {"disk": disk, "memory": in_memory}
        self._count = 0

    def store(self, sizes: Sizes, mode: str, where: str) -> Store:
        """Planned anew: each way writes its own."""
        self._count += 1
        return planned_store(sizes, self._parents[where] / f"hs-{self._count}", mode)

    @property
    def disk(self) -> Path:
        return self._parents["disk"]


def _ready(bench: Bench, folders: _Folders) -> tuple[Target, Store]:
    """The target, warm, and a planned store for the bare prefill."""
    target = random_target(bench.sizes, bench.device)
    store = folders.store(bench.sizes, "int4", "memory")
    bench.tell("plan", padding(bench, store))
    warm_up(target, extremes(planned_shapes(store.table, store.layout)))
    return target, store


def plain(bench: Bench, folders: _Folders, ways: Sequence[Way]) -> tuple[Target, Store]:
    """Bare and ours; ways: mode and place."""
    target, store = _ready(bench, folders)
    bench.tell("bare", bare_prefill(bench, target, store))
    for mode, where in ways:
        name = f"{mode} to {where}"
        bench.tell(name, ours(bench, target, folders.store(bench.sizes, mode, where)))
        bench.ratio(name, "bare")
    return target, store


def compiled(
    bench: Bench, folders: _Folders, store: Store, ways: Sequence[Way], backend: str
) -> None:
    """The same with compiled layers, `store` planned for the bare prefill."""
    # made anew: the gate has left hooks on the layers that no compiler takes
    target = random_target(bench.sizes, bench.device)
    before, begin = num_compiled(), time.perf_counter()
    planned = planned_shapes(store.table, store.layout)
    shapes = [shape for found in planned for shape in found]
    served = compile_layers(target, shapes, backend=backend)
    versions = num_compiled() - before
    bench.tell("compiling", {"seconds": time.perf_counter() - begin, "versions": versions})
    warm_up(target, extremes(planned))
    bench.tell("bare, compiled", bare_prefill(bench, target, store))
    bench.ratio("bare, compiled", "bare")
    for mode, where in ways:
        other, name = f"{mode} to {where}", f"{mode} to {where}, compiled"
        bench.tell(name, ours(bench, target, folders.store(bench.sizes, mode, where)))
        bench.ratio(name, other)
        bench.ratio(name, "bare, compiled")
    later = num_compiled() - before - versions
    bench.tell("compiled later", {"versions": later, "served": served.share})


def traced(bench: Bench, folders: _Folders, backend: str) -> None:
    """Where the time of ours goes, beside the bare prefill; nothing is timed."""
    target = random_target(bench.sizes, bench.device)
    store = folders.store(bench.sizes, "int4", "memory")
    planned = planned_shapes(store.table, store.layout)
    compile_layers(target, [shape for found in planned for shape in found], backend=backend)
    warm_up(target, extremes(planned))
    bare, own = Trace(), Trace()
    bare_prefill(bench, target, store, bare)
    ours(bench, target, folders.store(bench.sizes, "int4", "memory"), own)
    shards = {store.table.shard_id(batch.start) for batch in timed_shards(bench, store)}
    for line in [*own.lines(len(shards)), *comparison(own, bare)]:
        print(f"  {line}", flush=True)


def run_part(name: str, options: argparse.Namespace) -> None:
    """One part, in this process."""
    let_memory_grow(torch.__version__)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shape = "8b" if name in ("rows", "memory") else name
    if options.tiny:
        shape = "tiny hybrid" if name == "27b" else "tiny"
    # making code for a CPU takes a minute: there the tracer alone is tried
    backend = "inductor" if device.type == "cuda" else "eager"
    bench = Bench(SIZES[shape], device, options.result)
    with ExitStack() as stack:
        folders = _Folders(
            *(
                Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-", dir=parent)))
                for parent in (options.disk, options.memory)
            )
        )
        if name == "rows":
            target = random_target(bench.sizes, device)
            equal_rows(bench, target, "eager")
            compile_layers(target, _row_shapes(bench.sizes), backend=backend)
            equal_rows(bench, target, "compiled")
            return
        if name == "memory":
            bench.tell("memory", memory(bench, random_target(bench.sizes, device)))
            return
        if options.trace:
            traced(bench, folders, backend)
            return
        target, store = plain(bench, folders, WAYS[name])
        if name == "8b":
            bench.tell("peers' loop", peers_loop(bench, target, folders.disk))
            bench.ratio("int4 to disk", "peers' loop")
            bench.ratio("bf16 to disk", "peers' loop")
        del target
        if name != "27b":
            compiled(bench, folders, store, WAYS[name][:2], backend)


def run_apart(name: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One part in a process of its own; its figures, of one that was cut off those it had."""
    result = folder / f"{name}.json"
    words = [sys.executable, __file__, "--part", name, "--result", str(result)]
    words += ["--disk", str(options.disk), "--memory", str(options.memory)]
    print(f"{name}: at most {LIMITS_S[name]:.0f} s", flush=True)
    words += [f"--{switch}" for switch in ("tiny", "trace") if getattr(options, switch)]
    child = subprocess.Popen(words, start_new_session=True)
    try:
        code = child.wait(timeout=LIMITS_S[name])
        ended = "" if code == 0 else f"failed with exit code {code}"
    except subprocess.TimeoutExpired:
        ended = f"cut off after {LIMITS_S[name]:.0f} s"
    finally:
        # with all that it has started
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    if ended:
        print(f"  {ended}", flush=True)
    figures = json.loads(result.read_text()) if result.is_file() else {}
    return {"ended": ended or "whole", "figures": figures}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", action="append", choices=list(LIMITS_S), default=[])
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--trace", action="store_true")
    parser.add_argument("--disk", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--memory", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    is_cuda = torch.cuda.is_available()
    if not is_cuda and not options.tiny:
        parser.error("there is no GPU: use --tiny")
    if options.trace and not set(options.part) <= set(TRACED):
        parser.error(f"--trace is of the parts {' and '.join(TRACED)}")
    if options.trace and not options.part:
        options.part = list(TRACED)
    for folder in (options.disk, options.memory):
        folder.mkdir(parents=True, exist_ok=True)
    if options.result:
        run_part(options.part[0], options)
        return
    # ended from outside, the part that runs ends as well
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    parts: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        for one in options.part or list(LIMITS_S):
            parts[one] = run_apart(one, options, Path(name))
            write_result(parts, is_cuda)


def write_result(parts: dict[str, Any], is_cuda: bool) -> None:
    """What is known by now."""
    if os.environ.get("OUT"):
        result = {
            "device": torch.cuda.get_device_name() if is_cuda else "CPU",
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "parts": parts,
        }
        Path(os.environ["OUT"], "capture.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
