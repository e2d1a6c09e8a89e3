"""How long a checkpoint stops the training, and what writing it costs the steps beside it.

    python tests/bench/checkpoint.py FOLDER [--tiny]

The drafter of the headline (8B target, 1.05 B parameters; `--tiny`: a few) with masters and
moments, on a GPU where there is one. Prints a line for each of three checkpoints, and writes
checkpoint.json into $OUT where that is set. FOLDER: where they are written; removed at the end.
A tick is a short product launched by the interpreter, as a step is; median and worst of those
beside the writer stand next to those alone.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from dflash_pipeline.train.checkpoint import at_the_beginning
from dflash_pipeline.train.saver import Saver
from dflash_pipeline.train.shape import tensor_shapes

sys.path.append(str(Path(__file__).parents[1]))
from shapes import HEADLINE

NUM_ALONE = 200


def _ticks(square: torch.Tensor, goes_on: Callable[[int], bool]) -> list[float]:
    """Milliseconds of each tick, as the host sees them."""
    times: list[float] = []
    while goes_on(len(times)):
        begin = time.perf_counter()
        product = square @ square
        if product.is_cuda:
            torch.cuda.synchronize()
        times.append((time.perf_counter() - begin) * 1e3)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    is_cuda = torch.cuda.is_available()
    device = torch.device("cuda" if is_cuda else "cpu")
    shape = (
        replace(HEADLINE, hidden_size=256, intermediate_size=512) if arguments.tiny else HEADLINE
    )
    sizes = tensor_shapes(shape)
    state = {
        f"{kind}.{name}": torch.full(size, 0.5, device=device)
        for kind in ("master", "average", "square")
        for name, size in sizes.items()
    }
    square = torch.randn(2048 if is_cuda else 128, 2048 if is_cuda else 128, device=device)
    out = arguments.folder / "checkpoint-bench"
    out.mkdir(parents=True)
    alone = _ticks(square, lambda done: done < NUM_ALONE)
    figures = []
    saver = Saver(out, shape, 1, state)
    try:
        # pinned, as it would be long before the first checkpoint of a run
        saver._made.result()
        for step in (1, 2, 3):
            begin = time.perf_counter()
            progress = replace(at_the_beginning(3), step=step)
            saver.save(state, progress, is_best=False, told=lambda: None)
            stall_s = time.perf_counter() - begin
            beside = _ticks(square, lambda _done: not saver._pending[-1].done())
            figures.append(
                {
                    "parameters": sum(t.numel() for t in state.values()) // 3,
                    "gb": sum(tensor.nbytes for tensor in state.values()) / 1e9,
                    "stall_s": stall_s,
                    "written_s": time.perf_counter() - begin,
                    "tick_alone_ms": statistics.median(alone),
                    "tick_beside_ms": statistics.median(beside) if beside else None,
                    "worst_tick_alone_ms": max(alone),
                    "worst_tick_beside_ms": max(beside) if beside else None,
                }
            )
            print(figures[-1], flush=True)
        saver.close()
    finally:
        shutil.rmtree(out)
    if "OUT" in os.environ:
        device_name = torch.cuda.get_device_name() if is_cuda else "CPU"
        found = {"device": device_name, "torch": torch.__version__, "checkpoints": figures}
        (Path(os.environ["OUT"]) / "checkpoint.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
