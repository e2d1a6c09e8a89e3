"""Both stages on the GPUs of one machine: beside one another, one after the other, and killed.

    python tests/bench/stages.py DIR --gpus 0-1 --capture 0 --train 1 [--shape 8b] [PART ...]
    python tests/bench/stages.py DIR --gpus 0-7 --capture 0-4 --train 5-7 --tokens 3e6
    python tests/bench/stages.py DIR --gpus cpu:2 --capture cpu:1 --train cpu:1 --shape tiny

A target of Qwen3-8B's shape with random weights and conversations of random letters, `--tokens` of
them, each `--longest` tokens or of lognormal lengths (`--lengths mixed`); int4 rows with int8
`last`. Every part runs the commands themselves, and tells what was seen beside what was expected:

    plan            what `dflash plan` predicts for these devices
    capture:N       capture on N devices
    train:N         training on N devices, the same batches in each optimizer step
    follow          capture on --capture, while training follows on --train
    quota           the same with a bounded store: what was trained on is deleted
    handover        training follows; at the seal it is stopped, and resumed on all devices
    sweep           a drafter a device
    slow, hung      a rank that stands still for some seconds, or for good
    kill-rank, kill-worker, kill-stages    -9 to one process, or to everything; then run again

What is made in DIR is removed at the end. stages.json goes into $OUT, or DIR, after each part; a
part that would begin after `--limit` seconds is left out and said to be. Exit code 1 where
something was not as expected.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from disturbances import rank_killed, stages_killed, stood_still, worker_killed
from jobs import Job, capture_figures, sealed, train_figures, wait_until
from random_target import SHAPES
from stagebench import PART_LIMIT_S, Stages

from dflash_pipeline.configs.gpus import Devices, parse


def captured(stages: Stages, num: int) -> dict[str, Any]:
    """The store of `capture:N` stays: training reads it."""
    wall_s = stages.run(stages.capture(f"hs-{num}", stages.first(num)))
    figures = capture_figures(stages.folder / f"hs-{num}")
    rows, rest = stages.store_bytes(f"hs-{num}")
    return figures | {"wall_s": wall_s, "row_bytes": rows, "other_bytes": rest}


def trained(stages: Stages, num: int) -> dict[str, Any]:
    """So many optimizer steps on `num` devices, as on one: the same curve within rounding."""
    steps = ("--epochs", "50", "--max-steps", str(stages.sizes.steps))
    out = f"run-{num}"
    wall_s = stages.run(stages.train(stages.store(), out, stages.first(num), *steps))
    figures = train_figures(stages.folder / out) | {"wall_s": wall_s}
    alone = stages.folder / "run-1" / "metrics.jsonl"
    if num > 1 and alone.exists():
        losses = train_figures(alone.parent)["losses"], figures["losses"]
        figures["largest_loss_difference"] = max(
            abs(one - other) for one, other in zip(*losses, strict=True)
        )
    return figures


def followed(stages: Stages, quota: bool = False) -> dict[str, Any]:
    """Both stages are started together, as in the README."""
    store, words = ("hs-quota", []) if quota else ("hs-follow", [])
    found: dict[str, Any] = {}
    if quota:
        rows, rest = stages.store_bytes(stages.store())
        # enough for some shards, far from all of them
        found["quota_bytes"] = rest + rest // 8 + int(0.5 * rows)
        words = ["--quota", str(found["quota_bytes"])]
    capture = stages.capture(store, stages.capturing, *words)
    train = stages.train(store, f"run-{store}", stages.training)
    found["capture_wall_s"] = stages.run(capture)
    found["train_wall_s"] = stages.run(train)
    found["capture"] = capture_figures(stages.folder / store)
    found["train"] = train_figures(stages.folder / f"run-{store}")
    if quota:
        found["bytes_at_end"] = sum(stages.store_bytes(store))
    return found


def handed_over(stages: Stages) -> dict[str, Any]:
    """The capture's devices go to the trainer when the store is whole."""
    store, out = "hs-handover", "run-handover"
    capture = stages.capture(store, stages.capturing)
    train = stages.train(store, out, stages.training, "--epochs", "3")
    stages.expect(
        wait_until(lambda: sealed(stages.folder / store) or train.has_ended, PART_LIMIT_S),
        "handover: the store was not sealed in time",
    )
    train.terminate()
    found: dict[str, Any] = {"stop_s": _timed(lambda: stages.run(train, code=143))}
    stages.run(capture)
    before = train_figures(stages.folder / out)
    resumed = Job(
        stages.folder,
        "train",
        *("--store", store, "--out", out, "--gpus", stages.every()),
        # that of the run: a step has more batches now, and the schedule is that of their number
        *("--set", f"train.accumulate={stages.accumulate(stages.training)}"),
        *("--epochs", "3", "--resume"),
    )
    found["resume_wall_s"] = stages.run(resumed)
    after = train_figures(stages.folder / out, since_step=before["steps"])
    return found | {"before": before, "after": after}


def swept(stages: Stages) -> dict[str, Any]:
    """As many variants as devices, each on one."""
    names = [f"seed{number}" for number in range(len(stages.all.ids))]
    tables = [f"[{name}]\ntrain.seed = {number}\n" for number, name in enumerate(names)]
    (stages.folder / "sweep.toml").write_text("\n".join(tables))
    steps = ("--epochs", "50", "--max-steps", str(stages.sizes.steps // 2))
    job = Job(
        stages.folder,
        "train",
        *("--store", stages.store(), "--out", "sweep", "--gpus", stages.every()),
        *("--sweep", "sweep.toml", *steps),
    )
    wall_s = stages.run(job)
    figures = [train_figures(stages.folder / "sweep" / name) for name in names]
    rates = [one["draft_rows_per_s"] for one in figures]
    return {"wall_s": wall_s, "draft_rows_per_s": rates, "sum": sum(rates)}


def planned(stages: Stages) -> dict[str, Any]:
    """What is predicted for the split, and for all its devices on one stage after the other."""
    job = Job(
        stages.folder,
        "plan",
        *("--store", "hs-plan", "--json"),
        *("--capture-gpus", stages.capturing, "--train-gpus", stages.training),
    )
    wall_s = stages.run(job)
    return {"wall_s": wall_s, "prediction": job.printed_json()}


def _timed(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def scaling(stages: Stages) -> dict[str, Any]:
    """Of each stage: figures of N devices over N times those of one."""
    found: dict[str, Any] = {}
    for stage, name in (("capture", "tokens_per_s"), ("train", "draft_rows_per_s")):
        rates = {
            int(part.partition(":")[2]): figures[name]
            for part, figures in stages.results.items()
            if part.startswith(f"{stage}:")
        }
        if 1 in rates:
            found[stage] = {num: rate / rates[1] / num for num, rate in sorted(rates.items())}
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("parts", nargs="*")
    parser.add_argument("--gpus", required=True, help="all devices that are used")
    parser.add_argument("--capture", required=True, help="side by side: those that capture")
    parser.add_argument("--train", required=True, help="side by side: those that train")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="8b")
    parser.add_argument("--tokens", type=float, default=600e3)
    parser.add_argument("--lengths", choices=("fixed", "mixed"), default="mixed")
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds")
    options = parser.parse_intermixed_args()
    devices: Devices = parse(options.gpus)
    counts = [num for num in (1, 2, 4, 8) if num <= len(devices.ids)]
    every: dict[str, Callable[[Stages], dict[str, Any]]] = {"plan": planned}
    every |= {f"capture:{num}": lambda one, num=num: captured(one, num) for num in counts}
    every |= {f"train:{num}": lambda one, num=num: trained(one, num) for num in counts}
    every |= {
        "follow": followed,
        "quota": lambda one: followed(one, quota=True),
        "handover": handed_over,
        "sweep": swept,
        "slow": lambda one: stood_still(one, for_good=False),
        "hung": lambda one: stood_still(one, for_good=True),
        "kill-rank": rank_killed,
        "kill-worker": worker_killed,
        "kill-stages": stages_killed,
    }
    if unknown := set(options.parts) - set(every):
        parser.error(f"no part {', '.join(sorted(unknown))}: there are {', '.join(every)}")
    with tempfile.TemporaryDirectory(dir=options.directory) as made:
        stages = Stages(Path(made), options)
        for name in options.parts or every:
            stages.part(name, lambda name=name: every[name](stages))
        stages.part("scaling", lambda: scaling(stages))
    for fault in stages.faults:
        print(f"fault: {fault}")
    return int(bool(stages.faults))


if __name__ == "__main__":
    raise SystemExit(main())
