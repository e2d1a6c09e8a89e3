"""What `stages.py` measures with: the commands over one random target, and figures as they come."""

from __future__ import annotations

import argparse
import json
import os
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jobs import Job
from random_target import SHAPES, lognormal_lengths, save_conversations, save_random_target

from dflash_pipeline.configs.gpus import listed, parse
from dflash_pipeline.store import paths

# seconds: what a command may take before it counts as hung
PART_LIMIT_S = 300.0


@dataclass(frozen=True)
class Sizes:
    """What is trained, and how long the samples are."""

    longest: int
    mean: int
    token_budget: int
    anchors: int
    block: int
    layers: int
    shard_bytes: int
    batches_a_step: int
    steps: int


FULL = Sizes(3072, 951, 49152, 512, 16, 5, 1 << 28, 8, 40)
TINY = Sizes(96, 48, 384, 8, 4, 1, 1 << 14, 4, 200)


class Stages:
    """The commands over one target and one file of conversations; figures as they come."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        self.folder, self.all = folder, parse(options.gpus)
        self.capturing, self.training = options.capture, options.train
        self.sizes = TINY if options.shape == "tiny" else FULL
        self.begin, self._limit_s = time.perf_counter(), options.limit
        self.results: dict[str, dict[str, Any]] = {}
        self.faults: list[str] = []
        self._write(options)

    def part(self, name: str, work: Callable[[], dict[str, Any]]) -> None:
        """Run one part and tell its figures, unless it is too late for it."""
        at_s = time.perf_counter() - self.begin
        if at_s > self._limit_s:
            print(f"{name}: left out, {at_s:.0f} s have passed", flush=True)
            return
        num_faults = len(self.faults)
        found: dict[str, Any] = {}
        try:
            found = work()
        except Exception as error:
            # the parts after it are worth their minutes all the same
            traceback.print_exc()
            self.faults.append(f"{name}: {type(error).__name__}: {error}")
        found |= {"part_s": round(time.perf_counter() - self.begin - at_s, 1)}
        if self.faults[num_faults:]:
            found["faults"] = self.faults[num_faults:]
        self.results[name] = found
        print(f"{name}: {json.dumps(found)}", flush=True)
        (Path(os.environ.get("OUT", self.folder.parent)) / "stages.json").write_text(
            json.dumps(self.results, indent=1) + "\n"
        )

    def expect(self, holds: bool, what: str) -> None:
        """A fault where it does not hold."""
        if not holds:
            self.faults.append(what)

    def first(self, num: int) -> str:
        """The first devices of all, as an option."""
        return listed(self.all, self.all.ids[:num])

    def every(self) -> str:
        return self.first(len(self.all.ids))

    def capture(self, store: str, devices: str, *words: str) -> Job:
        return Job(self.folder, "capture", "--store", store, "--gpus", devices, *words)

    def train(self, store: str, out: str, devices: str, *words: str) -> Job:
        """Training whose optimizer step has `batches_a_step` batches on any number of devices."""
        sets = ("--set", f"train.accumulate={self.accumulate(devices)}")
        return Job(
            self.folder, "train", "--store", store, "--out", out, "--gpus", devices, *sets, *words
        )

    def accumulate(self, devices: str) -> int:
        """Batches a rank adds up, so that a step has `batches_a_step` on these devices."""
        return max(1, self.sizes.batches_a_step // len(parse(devices).ids))

    def run(self, job: Job, code: int = 0) -> float:
        """Wait for it; seconds from its start to its end. A fault unless it ends with `code`."""
        ended = job.wait(PART_LIMIT_S)
        self.expect(ended == code, f"{job.line}: ended with {ended}, not {code}: {job.last_line()}")
        return job.seconds

    def store(self) -> str:
        """Of the capture on most devices; made where no part has."""
        done = sorted(self.folder.glob(f"hs-[0-9]*/{paths.SEALED_FILE}"))
        if not done:
            self.run(self.capture("hs-0", self.every()))
            return "hs-0"
        return done[-1].relative_to(self.folder).parts[0]

    def store_bytes(self, store: str) -> tuple[int, int]:
        """Bytes of rows, and of all else."""
        rows = rest = 0
        for path in (self.folder / store).rglob("*"):
            if path.is_file():
                is_row = "/hidden/c/" in str(path) or "/last/c/" in str(path)
                rows += path.stat().st_size * is_row
                rest += path.stat().st_size * (not is_row)
        return rows, rest

    def _write(self, options: argparse.Namespace) -> None:
        sizes = self.sizes
        device = torch.device("cuda" if self.all.kind == "cuda" else "cpu")
        save_random_target(self.folder / "target", SHAPES[options.shape], device, seed=0)
        if device.type == "cuda":
            # a GPU that holds memory of this process would be refused as occupied
            torch.cuda.empty_cache()
        if options.lengths == "mixed":
            num = int(options.tokens / sizes.mean)
            lengths = lognormal_lengths(num, sizes.mean, sizes.longest, seed=1)
        else:
            lengths = [sizes.longest + 80] * int(options.tokens / sizes.longest)
        save_conversations(self.folder / "data.jsonl", lengths, seed=2)
        (self.folder / "dflash.toml").write_text(f"""
[target]
id = "target"
thinking = "default"
{"layer_ids = [0, 2, 4]" if options.shape == "tiny" else ""}

[data]
files = ["data.jsonl"]
max_len = {sizes.longest}
heldout = 0.01

[store]
hidden_mode = "int4"
last_mode = "int8"
shard_bytes = {sizes.shard_bytes}

[capture]
token_budget = {sizes.token_budget}
force = true

[drafter]
num_layers = {sizes.layers}
block_size = {sizes.block}

[train]
epochs = 1
anchors_per_sample = {sizes.anchors}
batch_anchors = {sizes.anchors}
batch_tokens = {sizes.longest}
log_every = 2
save_every = 10
validate_every = 0
validate_samples = 4
""")
