"""Whether `dflash plan` foretells what the same commands then take, on data of other lengths.

    python tests/bench/plan.py [--shape tiny|0.6b|4b|8b] [--folder DIR] [--mode int4] [--rounds 1]

A random target of the shape is written to a folder in --folder, then conversations of lognormal
length, one set short (mean 600 tokens, sigma 0.8) and one long (mean 1,500, sigma 0.5). `dflash
plan` measures on the short ones; from that measurement it predicts the long ones, which are then
captured and trained on by the commands themselves, one epoch. Prints the seconds of the measuring
command and, for each stage, what was predicted, what it took and their ratio: the whole command
from its first to its last moment, and its steady part alone (tokens and steps a second). `--rounds`
repeats all of it and ends with medians. Where others use the machine's cores meanwhile,
`--processor-time` (on a CPU) has each process measure its own processor seconds instead of the
wall's. Prints each figure once it is known; where $OUT is set, plan.json is written there, and
plan.log: what the commands said, and when. About four minutes on one H200.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import multiprocessing
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

import numpy as np
import torch
import transformers

from dflash_pipeline.configs import status
from dflash_pipeline.configs.costs import CaptureCosts, DiskCosts, TrainCosts, TrainWork
from dflash_pipeline.configs.load import from_dict, load, to_dict
from dflash_pipeline.configs.measuring import work_of
from dflash_pipeline.configs.prediction import HOUR_S, Predictor
from dflash_pipeline.configs.schema import Run

sys.path.append(str(Path(__file__).parents[1]))
from places import cpu_place
from tiny_targets import tiny_tokenizer

SEED = 0


@dataclass(frozen=True)
class Shape:
    """A target, and how much of what is captured and trained on."""

    hidden: int
    middle: int
    layers: int
    heads: int
    keys: int
    vocabulary: int
    is_tied: bool
    num_short: int
    num_long: int
    scale: float = 1.0
    """Of all lengths."""


SHAPES = {
    "tiny": Shape(128, 256, 8, 4, 2, 1024, True, 1200, 450, scale=0.15),
    "0.6b": Shape(1024, 3072, 28, 16, 8, 151936, True, 6000, 3000),
    "4b": Shape(2560, 9728, 36, 32, 8, 151936, True, 2000, 400),
    "8b": Shape(4096, 12288, 36, 32, 8, 151936, False, 1500, 300),
}
SHORT, LONG = (600, 0.8), (1500, 0.5)
MAX_LEN = 4096


def write_target(shape: Shape, folder: Path) -> None:
    """A random model of the shape in bf16, with a tokenizer of bytes."""
    config = transformers.Qwen3Config(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.middle,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.keys,
        head_dim=128 if shape.hidden > 128 else 32,
        max_position_embeddings=2 * MAX_LEN,
        tie_word_embeddings=shape.is_tied,
        pad_token_id=256,
        eos_token_id=258,
    )
    torch.manual_seed(SEED)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    # all-ones norms would hide a norm done twice from the gate
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    # in several files, as such models are published: they are hashed side by side
    model.save_pretrained(folder, max_shard_size="4GB")
    tiny_tokenizer().save_pretrained(folder)


def write_target_apart(shape: Shape, folder: Path) -> None:
    """In a process that ends: its memory on the GPU would have `dflash plan` refuse that."""
    child = multiprocessing.get_context("spawn").Process(target=write_target, args=(shape, folder))
    child.start()
    child.join()
    if child.exitcode:
        sys.exit(f"writing the target failed with exit code {child.exitcode}")


def write_data(path: Path, count: int, mean: float, sigma: float, scale: float) -> None:
    """Conversations, a third of each the question; a byte is a token."""
    random = np.random.default_rng(SEED)
    drawn_M = random.lognormal(np.log(mean) - sigma**2 / 2, sigma, count)
    letters = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz     ", np.uint8)
    with path.open("w") as file:
        for number, length in enumerate(np.clip(drawn_M, 64, MAX_LEN) * scale):
            text = random.choice(letters, int(length)).tobytes().decode()
            # marks of the turns take about 40 bytes of it
            turns = {"user": text[: len(text) // 3], "assistant": text[len(text) // 3 : -40]}
            messages = [{"role": role, "content": f"{said}."} for role, said in turns.items()]
            file.write(json.dumps({"id": f"{path.stem}{number}", "messages": messages}) + "\n")


@dataclass(frozen=True)
class Took:
    """What a command took, and what it printed."""

    wall_s: float
    cpu_s: float
    stdout: str


def dflash(folder: Path, *words: str) -> Took:
    """Run a command in the folder; its own messages are shown where it fails, and go, each with the
    second it came at, to plan.log in $OUT."""
    before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    running = subprocess.Popen(
        [sys.executable, "-m", "dflash_pipeline.cli", *words],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with ThreadPoolExecutor(2) as threads:
        outputs = (running.stdout, running.stderr)
        told = list(threads.map(_timed, outputs, itertools.repeat(begin)))
    code, wall_s = running.wait(), time.perf_counter() - begin
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    stdout, stderr = ("".join(line for _, line in lines) for lines in told)
    if os.environ.get("OUT"):
        with Path(os.environ["OUT"], "plan.log").open("a") as log:
            log.write(f"dflash {' '.join(words)}\n")
            log.writelines(
                f"{at:8.1f} {line.rstrip()}\n" for at, line in sorted(itertools.chain(*told))
            )
    if code:
        sys.exit(f"{' '.join(words)}: {stdout[-2000:]}{stderr[-2000:]}")
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Took(wall_s, cpu_s, stdout)


def _timed(output: IO[str], begin: float) -> list[tuple[float, str]]:
    """Its lines, each with the seconds since `begin`."""
    return [(time.perf_counter() - begin, line) for line in output]


def in_processor_time(folder: Path, entry: str, run: Run, extra: dict[str, object]) -> float:
    """Run a stage in a process of its own, whose clocks count its processor time; seconds."""
    job = folder / "job.json"
    job.write_text(json.dumps({"entry": entry, "run": to_dict(run), "extra": extra}))
    words = [sys.executable, __file__, "--job", str(job)]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{entry}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    return float(done.stdout.splitlines()[-1])


def work_off(job: Path) -> None:
    """What `in_processor_time` starts."""
    for name in ("perf_counter", "monotonic"):
        setattr(time, name, time.process_time)
    # before the stages import it by name
    status.process_age_s = time.process_time
    told = json.loads(job.read_text())
    module, _, function = told["entry"].partition(":")
    place = cpu_place(job.parent / "logs", module.rpartition(".")[2])
    getattr(importlib.import_module(f"dflash_pipeline.{module}"), function)(
        from_dict(told["run"]), place, told["extra"]
    )
    print(time.process_time())


def one_round_in_processor_time(folder: Path, config: list[str]) -> Iterator[tuple[str, float]]:
    """Each process of the same commands, without the one that only waits for them."""
    short, long = (
        load("", [*config[1::2], f'data.files=["{name}.jsonl"]', "store.path=store"], {})
        for name in ("short", "long")
    )
    long = replace(
        long,
        train=replace(long.train, out="run"),
        capture=replace(long.capture, force=True),
    )
    measured = {}
    for name, run in (("measured", short), ("counted", long)):
        (folder / name).mkdir()
        extra: dict[str, object] = {
            "folder": name,
            "is_measured": name == "counted",
            "with_answers": True,
            "kind": "cpu",
        }
        for stage in ("capture", "train"):
            entry = f"{stage}.measure:main"
            measured[name, stage] = in_processor_time(folder, entry, run, extra)
    predictor = Predictor(
        long,
        work_of(json.loads((folder / "counted/work.json").read_text())),
        CaptureCosts(**json.loads((folder / "measured/costs.json").read_text())),
        TrainWork(**json.loads((folder / "counted/train_work.json").read_text())),
        TrainCosts(**json.loads((folder / "measured/train_costs.json").read_text())),
        DiskCosts(**json.loads((folder / "measured/disk.json").read_text())),
    )
    extra = {"kind": "cpu", "num_workers": 1, "only_count": False}
    took = {
        "capture": in_processor_time(folder, "capture.planning:plan_and_capture", long, extra),
        "train": in_processor_time(folder, "train.worker:main", long, {"resume": False}),
    }
    yield "plan: cpu s", sum(s for (name, _), s in measured.items() if name == "measured")
    for stage in (predictor.capture(1), predictor.train(1)):
        predicted_s = stage.hours * HOUR_S
        yield f"{stage.name}: predicted s", predicted_s
        yield f"{stage.name}: cpu s", took[stage.name]
        yield f"ratio: {stage.name}, whole", predicted_s / took[stage.name]


def one_round(folder: Path, config: list[str]) -> Iterator[tuple[str, float]]:
    """Measure on the short ones, predict the long ones, and run them."""
    base = ["--set", "train.stores=", *config]
    planned = ["plan", "--store", "store", "--measurement", "measured.json", "--json"]
    measured = dflash(folder, *planned, "--data", "short.jsonl", *base)
    yield "plan: wall s", measured.wall_s
    yield "plan: cpu s", measured.cpu_s
    told = json.loads(dflash(folder, *planned, "--data", "long.jsonl", *base).stdout)
    (way,) = (one for one in told["ways"] if one["name"] == "one after the other")
    predicted = {stage["name"]: stage["hours"] * HOUR_S for stage in way["stages"]}
    rates = {stage["name"]: stage["rate"] for stage in way["stages"]}

    captured = dflash(
        folder, "capture", "--store", "store", "--data", "long.jsonl", "--force", *config
    )
    yield from _stage("capture", predicted["capture"], captured)
    (status,) = json.loads(dflash(folder, "status", "store", "--json").stdout)
    token_s = status["counts"]["num_tokens"] / status["counts"]["seconds"]
    yield "capture: predicted tok/s", rates["capture"]
    yield "capture: tok/s", token_s
    yield "ratio: capture, rate", token_s / rates["capture"]
    inspected = json.loads(dflash(folder, "inspect", "store", "--json").stdout)
    work = told["work"]
    yield "samples, predicted / true", work["num_samples"] / inspected["samples"]["all"]
    yield "bytes, predicted / true", work["store_bytes"] / tree_bytes(folder / "store")

    trained = dflash(folder, "train", "--store", "store", "--out", "run", *config)
    yield from _stage("train", predicted["train"], trained)
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    steps = [line for line in map(json.loads, lines) if "loss" in line]
    # up to the first line there is the compiler's time
    first, last = steps[0], steps[-1]
    step_s = (last["time"] - first["time"]) / (last["step"] - first["step"])
    yield "train: predicted step ms", 1e3 / rates["train"]
    yield "train: step ms", 1e3 * step_s
    yield "ratio: train, step", 1 / rates["train"] / step_s
    yield "steps, predicted / true", told["num_steps"] / last["step"]


def _stage(name: str, predicted_s: float, took: Took) -> Iterator[tuple[str, float]]:
    """The whole command, from its first to its last moment."""
    yield f"{name}: predicted s", predicted_s
    yield f"{name}: wall s", took.wall_s
    yield f"{name}: cpu s", took.cpu_s
    yield f"ratio: {name}, whole", predicted_s / took.wall_s
    yield f"ratio: {name}, whole, of cpu s", predicted_s / took.cpu_s


def tree_bytes(folder: Path) -> int:
    """Bytes of all files below."""
    files = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    return sum(path.stat().st_size for path in files if "raw" not in path.parts)


def settings(shape: Shape, mode: str) -> list[str]:
    """What all commands are told; the rest is as it is by default."""
    sets = [
        "target.id=target",
        "data.max_len=4096",
        f"store.hidden_mode={mode}",
        f"store.last_mode={mode}",
        "train.epochs=1",
        "train.log_every=5",
        "train.validate_samples=16",
    ]
    if shape.scale < 1:
        sets += [
            "capture.token_budget=4096",
            "store.shard_bytes=4000000",
            "train.batch_anchors=64",
            "train.anchors_per_sample=16",
            "train.batch_tokens=2048",
            "drafter.num_layers=2",
            "drafter.block_size=8",
        ]
    return [word for one in sets for word in ("--set", one)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    is_cuda = torch.cuda.is_available()
    parser.add_argument("--shape", choices=list(SHAPES), default="0.6b" if is_cuda else "tiny")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--mode", choices=["bf16", "int8", "int4"], default="int4")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--processor-time", action="store_true")
    parser.add_argument("--job", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job:
        work_off(options.job)
        return
    shape = SHAPES[options.shape]
    with tempfile.TemporaryDirectory(prefix="bench-", dir=options.folder) as name:
        folder = Path(name)
        write_target_apart(shape, folder / "target")
        write_data(folder / "short.jsonl", shape.num_short, *SHORT, shape.scale)
        write_data(folder / "long.jsonl", shape.num_long, *LONG, shape.scale)
        config = settings(shape, options.mode)
        if is_cuda:
            config += ["--gpus", "0"]
        rounds: list[dict[str, float]] = []
        for number in range(options.rounds):
            for made in ("measured.json", "measured", "counted", "store", "store.logs", "run"):
                path = folder / made
                if path.is_dir():
                    shutil.rmtree(path)
                path.unlink(missing_ok=True)
            print(f"round {number + 1} of {options.rounds}")
            rounds.append({})
            tried = one_round_in_processor_time if options.processor_time else one_round
            for key, value in tried(folder, config):
                print(f"  {key:28} {value:,.4g}", flush=True)
                rounds[-1][key] = value
                write_result(options, rounds)
    if options.rounds > 1:
        print("medians")
        for key, value in medians(rounds).items():
            print(f"  {key:28} {value:,.4g}")


def medians(rounds: list[dict[str, float]]) -> dict[str, float]:
    """Of the rounds that know a figure by now."""
    return {key: statistics.median(one[key] for one in rounds if key in one) for key in rounds[0]}


def write_result(options: argparse.Namespace, rounds: list[dict[str, float]]) -> None:
    """What is known by now."""
    if os.environ.get("OUT"):
        result = {
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
            "torch": torch.__version__,
            "shape": options.shape,
            "mode": options.mode,
            "medians": medians(rounds),
            "rounds": rounds,
        }
        Path(os.environ["OUT"], "plan.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
