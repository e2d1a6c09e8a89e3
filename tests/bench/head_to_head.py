"""The same data and the same seconds: speculators 0.9.0 and this trainer, both judged by replay.

    python tests/bench/head_to_head.py FOLDER --store STORE --eval-store STORE --target CONFIG
        --their-python PYTHON [--seconds 120] [--samples 4000] [--gpus 0] [--prompts FILE]

PYTHON is of an environment with `pip install speculators==0.9.0` (for a machine without a network:
offline.sh pack-theirs). Both train the drafter that CONFIG, a preset or a file, describes on the
same SAMPLES training samples of STORE, which is of bf16 rows: same layers, block, captured layers,
tokens and blocks a batch. All else are each one's own defaults: optimizer, learning rate, schedule,
loss, weighting, windows, first weights; what CONFIG tunes of these is set back. A probe of each
measures its steps a second; then each trains for as many steps as fit SECONDS, over which its
schedule runs out, again where that was off by more than a tenth; without equal seconds nothing is
compared (exit code 5). Start-up and compiling are not counted, and are told. Both checkpoints then
go through `dflash eval`: replay of the held-out answers of the other store and, with --prompts
(repeatable), decoding of --limit of them a domain. Writes head_to_head.json into FOLDER, and into
$OUT where that is set, with each part as soon as it is known. A line that was cut off is run again:
what it had prepared, trained in time or judged is kept; what was of another store, other samples or
settings is done anew.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
from dflash_pipeline.capture.model import resolve
from dflash_pipeline.configs.load import load, to_dict
from dflash_pipeline.configs.schema import Run
from dflash_pipeline.store.reader import Store, open_store
from dflash_pipeline.store.table import TRAIN
from dflash_pipeline.train.hashing import hashed
from dflash_pipeline.train.report import write_json
from studies.exchange import final_norm, write_samples
from studies.result import machine
from studies.running import environment
from studies.theirs import HOW_TO_INSTALL, THEIR_VERSION, installed_version, their_environment

THEIR_TRAINING = Path(__file__).parents[1] / "studies" / "their_training.py"
PROBE_STEPS = 40
# of a probe: what comes before is warm-up
WARM_STEPS = 15
NUM_VALIDATED = 4
# of the seconds that are asked for: a run beyond it is no comparison
TOLERANCE = 0.1
TRIES = 3


def main() -> int:
    """0: both trained and judged; 4: speculators is not there; 5: not for the same time."""
    options = _options()
    folder: Path = options.folder.resolve()
    their_python = shutil.which(options.their_python)
    if not their_python or installed_version(their_python) != THEIR_VERSION:
        print(
            f"skipped: {options.their_python} has no speculators {THEIR_VERSION}; {HOW_TO_INSTALL}"
        )
        return 4
    folder.mkdir(parents=True, exist_ok=True)
    run = load(options.target, options.set, {})
    store = open_store(options.store)
    rows = (store.spec.hidden_mode, store.spec.last_mode, store.spec.last_rows)
    if rows != ("bf16", "bf16", "teacher"):
        raise SystemExit(f"{options.store} keeps {rows}: bf16 rows, and `last` of teachers, wanted")
    data, chosen = folder / "data", _chosen(store, options.samples)
    size_bytes = _prepared(data, store, chosen, run, folder)
    asked = {
        "seconds": options.seconds,
        "store": str(options.store.resolve()),
        "samples": options.samples,
        # a file may say something else by the next call
        "run": to_dict(run),
        "judged": [str(options.eval_store), *map(str, options.prompts), options.limit],
    }
    found: dict[str, Any] = {
        "what": f"speculators {THEIR_VERSION} and this trainer, the same data and seconds",
        "machine": machine(),
        "samples": len(chosen) - NUM_VALIDATED,
        "tokens": int(store.table.num_tokens[chosen[:-NUM_VALIDATED]].sum()),
        "seconds": options.seconds,
        "bytes": {"speculators": size_bytes, "store": _store_bytes(store, chosen)},
    }
    found["ours"] = kept(folder, "ours", asked, lambda: _ours(options, folder))
    _write(folder, found)
    found["theirs"] = kept(
        folder,
        "theirs",
        asked | {"their": options.their},
        lambda: _theirs(options, folder, their_python, run, store),
    )
    late = [name for name in ("ours", "theirs") if not is_in_time(found[name], options.seconds)]
    found["same_seconds"] = not late
    _write(folder, found)
    if not late:
        found |= _judged(options, folder, lambda judged: _write(folder, found | judged))
        _write(folder, found)
    print(json.dumps(found, indent=1))
    if late:
        print(
            f"no comparison: asked for {options.seconds:.0f} s each, trained "
            + ", ".join(f"{name} {found[name]['training_s']:.0f} s" for name in ("ours", "theirs"))
            + f" (within {TOLERANCE:.0%} is wanted); use a machine that does nothing else"
        )
        return 5
    return 0


def _write(folder: Path, found: Mapping[str, Any]) -> None:
    """What is known by now: the line may be cut off, and the machine gone by then."""
    text = json.dumps(found, indent=1) + "\n"
    for out in {str(folder), os.environ.get("OUT", str(folder))}:
        (Path(out) / "head_to_head.json").write_text(text, encoding="utf-8")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--eval-store", type=Path, required=True)
    parser.add_argument("--target", required=True)
    parser.add_argument("--their-python", required=True)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--samples", type=int, default=4000)
    parser.add_argument("--gpus", default="")
    parser.add_argument("--prompts", type=Path, action="append", default=[])
    parser.add_argument("--limit", type=int, default=6)
    parser.add_argument("--set", action="append", default=[], help="over CONFIG, for both")
    parser.add_argument(
        "--their", action="append", default=[], help="further word of their command, as =--lr=1e-3"
    )
    options = parser.parse_args()
    # the commands run in FOLDER, where a path would be another
    if (file := Path(options.target)).is_file():
        options.target = str(file.resolve())
    return options


def _chosen(store: Store, count: int) -> list[int]:
    """Training samples drawn by hash; the last few are what theirs must hold out."""
    table = store.table
    usable = np.flatnonzero((table.split == TRAIN) & (table.num_anchors > 0) & store.readable_N)
    lot = hashed(17, table.sample_id[usable])
    drawn: list[int] = usable[np.argsort(lot, kind="stable")][: count + NUM_VALIDATED].tolist()
    if len(drawn) <= NUM_VALIDATED:
        raise SystemExit(f"{store.path} has {len(drawn)} training samples: too few")
    return drawn


def _prepared(data: Path, store: Store, chosen: list[int], run: Run, folder: Path) -> int:
    """Their files and our list of what is left out; made once for the same samples."""
    mark = folder / "prepared.json"
    asked = {"store": str(store.path.resolve()), "samples": chosen}
    if mark.exists() and (before := _read(mark)).get("asked") == asked:
        return int(before["bytes"])
    mark.unlink(missing_ok=True)
    shutil.rmtree(data, ignore_errors=True)
    size_bytes = write_samples(store, chosen, final_norm(resolve(run.target)), data)
    trained = set(chosen[:-NUM_VALIDATED])
    dropped = [store.table.key(i) for i in range(len(store.table)) if i not in trained]
    (folder / "dropped.txt").write_text("".join(f"{key}\n" for key in dropped), encoding="utf-8")
    write_json(mark, {"asked": asked, "bytes": size_bytes})
    return size_bytes


def _store_bytes(store: Store, chosen: list[int]) -> int:
    rows = int(store.table.num_tokens[chosen].sum()) * store.hidden_shape.row_bytes
    assert store.last_shape is not None
    return rows + int(store.table.num_teacher[chosen].sum()) * store.last_shape.row_bytes


def _dflash(folder: Path, words: list[str]) -> float:
    """Run one of our commands; its seconds."""
    program = [sys.executable, "-P", "-c", "from dflash_pipeline.cli import main; main()"]
    begin = time.time()
    subprocess.run([*program, *words], cwd=folder, env=environment(), check=True)
    return time.time() - begin


def _device_words(options: argparse.Namespace) -> list[str]:
    return ["--gpus", options.gpus] if options.gpus else []


def in_time(train: Callable[[int], dict[str, Any]], rate: float, seconds: float) -> dict[str, Any]:
    """The run of as many steps as take `seconds`, within TOLERANCE; the last of TRIES else.

    A machine may be slower or faster than it was for the probe: the run itself then says how many
    steps would have fitted, and is done again, as its schedule must end with its time.
    """
    found: dict[str, Any] = {}
    for number in range(1, TRIES + 1):
        found = train(max(1, math.floor(rate * seconds))) | {"tries": number}
        if is_in_time(found, seconds):
            break
        rate = found["steps"] / found["training_s"]
    return found


def kept(
    folder: Path, name: str, asked: Mapping[str, Any], train: Callable[[], dict[str, Any]]
) -> dict[str, Any]:
    """What an earlier call for the same trained in its time; trained now where there is none."""
    path = folder / f"{name}.json"
    if path.exists() and (before := _read(path))["asked"] == asked:
        return dict(before["found"])
    # of the checkpoint that goes now
    for judged in [path, *folder.glob(f"{name}-*.json"), *folder.glob("both-*.json")]:
        judged.unlink(missing_ok=True)
    found = train()
    if is_in_time(found, asked["seconds"]):
        write_json(path, {"asked": asked, "found": found})
    return found


def is_in_time(found: Mapping[str, Any], seconds: float) -> bool:
    """Whether a run trained for the time that it was given."""
    return abs(float(found["training_s"]) - seconds) <= TOLERANCE * seconds


def _ours(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    rate = _our_run(options, folder, "probe", PROBE_STEPS)["steps_per_s"]
    return in_time(lambda steps: _our_run(options, folder, "ours", steps), rate, options.seconds)


def untuned() -> dict[str, object]:
    """The defaults of what a preset tunes for its target: theirs has nothing of the kind. What
    follows from the block's size (gamma) and from memory stays."""
    defaults = Run()
    settings = {f"optim.{name}": value for name, value in asdict(defaults.optim).items()}
    for name, value in asdict(defaults.loss).items():
        if name not in ("gamma", "position_chunk"):
            settings[f"loss.{name}"] = value
    return settings | {"drafter.init_std": defaults.drafter.init_std}


def _our_run(options: argparse.Namespace, folder: Path, name: str, steps: int) -> dict[str, Any]:
    shutil.rmtree(folder / name, ignore_errors=True)
    words = ["train", "--config", options.target, "--store", str(options.store.resolve())]
    words += ["--out", name, "--drop-sample", "@dropped.txt", "--max-steps", str(steps)]
    words += ["--epochs", "100000", *_device_words(options)]
    settings = untuned() | {
        "train.validate_every": 0,
        "train.validate_samples": 1,
        "train.save_every": 10**9,
        "train.log_every": 5,
    }
    for text in [*options.set, *(f"{key}={value}" for key, value in settings.items())]:
        words += ["--set", text]
    seconds = _dflash(folder, words)
    lines = (folder / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    told = [record for record in map(json.loads, lines) if "loss" in record]
    # a line stands for the steps since the one before it
    first = next(
        place for place, one in enumerate(told) if one["step"] >= min(WARM_STEPS, steps // 2)
    )
    passed_s, num = told[-1]["time"] - told[first]["time"], told[-1]["step"] - told[first]["step"]
    return {
        "command": " ".join(["dflash", *words]),
        "steps": told[-1]["step"],
        "steps_per_s": num / passed_s,
        "training_s": passed_s * told[-1]["step"] / num,
        "whole_command_s": seconds,
    }


def _theirs(
    options: argparse.Namespace, folder: Path, python: str, run: Run, store: Store
) -> dict[str, Any]:
    probe = _their_run(options, folder, python, run, store, "their-probe", PROBE_STEPS, 0)
    per_epoch = probe["steps_per_epoch"]
    return in_time(
        lambda steps: _their_run(options, folder, python, run, store, "theirs", steps, per_epoch),
        probe["steps_per_s"],
        options.seconds,
    )


def _their_run(
    options: argparse.Namespace,
    folder: Path,
    python: str,
    run: Run,
    store: Store,
    name: str,
    steps: int,
    per_epoch: int,
) -> dict[str, Any]:
    """per_epoch: steps of an epoch, about; 0: not known."""
    data, out = folder / "data", folder / name
    shutil.rmtree(out, ignore_errors=True)
    (data / "times.json").unlink(missing_ok=True)
    num_rows = sum(1 for _ in (data / "samples.jsonl").open(encoding="utf-8"))
    is_cuda = not options.gpus.startswith("cpu")
    # it ends with its steps: enough of epochs that are not all as long as the first
    epochs = 2 * math.ceil(steps / per_epoch) if per_epoch else PROBE_STEPS
    words = {
        "speculator-type": "dflash",
        "verifier-name-or-path": str(resolve(run.target).directory),
        "data-path": str(data),
        "save-path": str(out),
        "on-missing": "raise",
        "num-layers": run.drafter.num_layers,
        "block-size": run.drafter.block_size,
        "mask-token-id": store.attributes.mask_token_id,
        "max-anchors": run.train.batch_anchors,
        "total-seq-len": run.train.batch_tokens,
        "train-data-ratio": (num_rows - NUM_VALIDATED + 0.5) / num_rows,
        "max-steps": steps,
        "epochs": epochs,
        # of the whole run one at its end (and theirs after the first epoch, always)
        "checkpoint-freq": epochs,
        "log-freq": 10**9,
        "num-workers": 12 if is_cuda else 0,
        "seed": run.train.seed,
    }
    # the ids of the library count the embedding's output
    ids = [str(layer_id + 1) for layer_id in store.spec.layer_ids]
    # -P: modules that stand beside it must not shadow any of theirs
    command = [python, "-P", str(THEIR_TRAINING), str(data)]
    command += [f"--{key}={value}" for key, value in words.items()]
    command += ["--target-layer-ids", *ids, "--no-resume-from-checkpoint"]
    if not is_cuda:
        # FlexAttention's backward and the fused loss are CUDA's
        command += ["--draft-attn-impl=eager", "--loss-implementation=eager"]
        command += ["--hidden-states-dtype=float32"]
    command += options.their
    begin = time.time()
    subprocess.run(command, cwd=folder, env=their_environment(), check=True)
    seconds = time.time() - begin
    told = json.loads((data / "times.json").read_text(encoding="utf-8"))
    times, warm = told["steps"], min(WARM_STEPS, len(told["steps"]) // 2)
    # the end holds the last checkpoint and validation as well: the last step counts as the others
    passed_s, num = times[-1] - times[warm], len(times) - 1 - warm
    return {
        "command": " ".join(command[1:]),
        "steps": len(times),
        "steps_per_epoch": told["steps_per_epoch"],
        "steps_per_s": num / passed_s,
        "median_step_s": statistics.median(np.diff(times[warm:]).tolist()),
        "training_s": passed_s * len(times) / num,
        "whole_command_s": seconds,
    }


def _judged(
    options: argparse.Namespace, folder: Path, tell: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """`dflash eval` of both checkpoints on the same held-out answers, and their difference.

    tell: is told what there is by then, after each way of judging."""
    ways = {"replayed": ["--store", str(options.eval_store.resolve())]}
    if options.prompts:
        ways["decoded"] = ["--config", options.target, "--limit", str(options.limit)]
        for file in options.prompts:
            ways["decoded"] += ["--prompts", str(file.resolve())]
    checkpoints = {"ours": "ours/last", "theirs": str(_last_epoch(folder / "theirs"))}
    found: dict[str, Any] = {}
    for way, words in ways.items():
        files = {name: f"{name}-{way}.json" for name in checkpoints}
        lines = [
            ["eval", "--drafter", path, *words, "--json", files[name]]
            for name, path in checkpoints.items()
            if not (folder / files[name]).exists()
        ]
        # each waits for its own launches: one alone leaves a GPU idle
        place = [*_device_words(options), "--share-gpu"]
        with ThreadPoolExecutor(len(checkpoints)) as pool:
            for judged in [pool.submit(_dflash, folder, [*line, *place]) for line in lines]:
                judged.result()
        both = f"both-{way}.json"
        _dflash(folder, ["eval", "--compare", *files.values(), "--json", both])
        arms = {name: _read(folder / file)["arms"]["trained"] for name, file in files.items()}
        tau = {
            name: {domain: one["tau"] for domain, one in arm.items() if domain != "seconds"}
            for name, arm in arms.items()
        }
        found[way] = {"tau": tau, "difference": _read(folder / both)["domains"]}
        tell(found)
    return found


def _read(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text(encoding="utf-8")))


def _last_epoch(out: Path) -> Path:
    """The checkpoint of the last epoch that was saved."""
    found = [path for path in out.iterdir() if path.is_dir() and path.name.isdecimal()]
    if not found:
        raise SystemExit(f"{out} holds no checkpoint of an epoch")
    return max(found, key=lambda path: int(path.name))


if __name__ == "__main__":
    sys.exit(main())
