"""The training step of speculators 0.9.0 on the headline of `step.py`: same shape, card and clock.

    python tests/bench/peers.py --their-python PYTHON [--tiny] [--compiled] [--limit 150]

PYTHON is of an environment with `pip install speculators==0.9.0` and a torch of the same version as
here; without the package this says so and ends. Its own drafter and loss are timed with random
weights and data, called as its trainer calls them: cross-entropy with its defaults for DFlash
(D-PACE, fused kernel), all layers with full attention, as in `step.py`. By default dynamo is off
and attention is SDPA with a dense mask; `--compiled` also times what its trainer does by itself,
FlexAttention and a compiled forward pass. Each way is a process of its own that is ended after
`--limit` seconds. Prints, for forward and backward and for these with its gradient clipping,
ms a step (median of 20 over rotated inputs, by CUDA events), ms per 1,000 draft rows and GiB above
weights; writes peers.json into $OUT where that is set. Set beside the line "step 8B CE" of
`python tests/bench/step.py --only step` of the same minutes. `--tiny`: a few parameters, on a CPU
with its eager loss too. SpecForge 0.2.0 is not timed: it installs with a whole server and another
torch alone.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from step import FULL_SIZES, TINY_SIZES, Sizes

from dflash_pipeline.train.drafter import Drafter
from dflash_pipeline.train.shape import DrafterShape

sys.path.append(str(Path(__file__).parents[1]))
from studies.theirs import HOW_TO_INSTALL, THEIR_VERSION, installed_version, their_environment

THEIR_STEP = Path(__file__).parents[1] / "studies" / "their_step.py"


@dataclass(frozen=True)
class Task:
    """What their_step.py is told."""

    shape: DrafterShape
    num_context: int
    num_anchors: int
    num_timed: int
    compiled: bool
    result: str
    """The file that it writes."""


def main() -> int:
    """0: timed, or the package is not there; 1: a way failed or did not finish in its time."""
    options = _options()
    version = installed_version(options.their_python)
    if version != THEIR_VERSION:
        found = f"{version} is" if version else "is not"
        print(f"skipped: speculators {found} installed in {options.their_python}; {HOW_TO_INSTALL}")
        return 0
    sizes = TINY_SIZES if options.tiny else FULL_SIZES
    found_ways = {}
    for name in ("dynamo off", "compiled") if options.compiled else ("dynamo off",):
        found = timed(options.their_python, sizes, name == "compiled", options.limit)
        found_ways[name] = found
        tell(name, found, sizes)
    if os.environ.get("OUT"):
        shape = {"num_context": sizes.num_context, "num_anchors": sizes.num_anchors}
        result = {"what": f"speculators {THEIR_VERSION}", **shape, "ways": found_ways}
        text = json.dumps(result, indent=1) + "\n"
        Path(os.environ["OUT"], "peers.json").write_text(text, encoding="utf-8")
    return int(any("error" in found for found in found_ways.values()))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--their-python", required=True)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--limit", type=float, default=150.0)
    return parser.parse_args()


def timed(python: str, sizes: Sizes, is_compiled: bool, limit_s: float) -> dict[str, Any]:
    """What their_step.py found, with ms for 1,000 draft rows; or `error`, why it found nothing."""
    environment = their_environment()
    if not is_compiled:
        environment["TORCHDYNAMO_DISABLE"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        task, result = Path(folder, "task.json"), Path(folder, "result.json")
        told = Task(
            shape=sizes.drafter,
            num_context=sizes.num_context,
            num_anchors=sizes.num_anchors,
            num_timed=sizes.num_timed,
            compiled=is_compiled,
            result=str(result),
        )
        task.write_text(json.dumps(asdict(told)), encoding="utf-8")
        # -P: modules that stand beside it must not shadow any of theirs
        error = run_within([python, "-P", str(THEIR_STEP), str(task)], environment, limit_s)
        if error:
            return {"error": error}
        found = dict(json.loads(result.read_text(encoding="utf-8")))
    ours = num_parameters(sizes.drafter)
    if found["trained_parameters"] != ours:
        return {"error": f"it trains {found['trained_parameters']:,} parameters, ours {ours:,}"}
    num_rows = sizes.num_anchors * sizes.drafter.block_size
    for figure in found["figures"].values():
        figure["ms_per_1000_rows"] = figure["ms"] / num_rows * 1e3
    return found


def run_within(command: Sequence[str], environment: dict[str, str], limit_s: float) -> str:
    """Run it, and end it with all that it started where it takes longer; why it failed, or ''."""
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as stderr:
        process = subprocess.Popen(command, env=environment, stderr=stderr, start_new_session=True)
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return f"did not finish within {limit_s:.0f} s"
        finally:
            # compiling starts processes of its own
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if process.returncode == 0:
            return ""
        stderr.seek(0)
        said = stderr.read()
    sys.stderr.write(said)
    last = said.strip().splitlines()[-1:] or ["it said nothing"]
    return f"ended with {process.returncode}: {last[0]}"[:600]


def num_parameters(shape: DrafterShape) -> int:
    """What our drafter of this shape trains."""
    with torch.device("meta"):
        return sum(one.numel() for one in Drafter(shape).parameters())


def tell(way: str, found: dict[str, Any], sizes: Sizes) -> None:
    """A line for each figure, in the words of step.py."""
    title = f"speculators {THEIR_VERSION}, {way}"
    if "error" in found:
        print(f"{title:44} error {found['error']}", flush=True)
        return
    about = ("device", "torch", "transformers", "attention", "loss", "trained_parameters")
    print(f"{title:44} {', '.join(f'{key} {found[key]}' for key in about)}")
    print(
        f"{'':44} context tokens {sizes.num_context}, anchors {sizes.num_anchors}, "
        f"block {sizes.drafter.block_size}"
    )
    for name, figure in found["figures"].items():
        numbers = ", ".join(
            f"{key} {figure[key]:.4g}" for key in ("ms", "ms_per_1000_rows", "peak_gib")
        )
        print(f"  {name:42} {numbers}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
