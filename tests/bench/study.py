"""Which loss, weighting, precision, store mode, order and shape make the better drafter.

    python tests/bench/study.py STAGE FOLDER --prompts DIR [--size full|tiny] [--seeds 3]
        [--gpus 0-1] [--per-gpu 8] [--minutes 9]

STAGE: estimate, data, store, arms, score, report, or `all`: one after another as far as time goes.
DIR holds train_{math,code,chat}.jsonl and eval_{math,code,chat}.jsonl; `tiny` is of the toy target
and writes its own. Run it again to go on: each stage does what is missing, stops in time, and says
what is left (exit code 3). `arms` trains in two rounds: the losses, then, once `score` has chosen
the best of them, everything that is asked of it. `report` writes study.json, study.md and study.png
into FOLDER/report, and into $OUT where that is set, of whatever is scored by then.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from studies import cost, result
from studies.running import Deadline, OutOfTime
from studies.sizes import SIZES
from studies.stages import Study, make_importable

STAGES = ("data", "store", "arms", "score", "arms", "score", "report")


def main() -> int:
    """0: done; 3: time was up, run the same line again."""
    parser = argparse.ArgumentParser()
    parser.add_argument("stage", choices=["estimate", "all", *dict.fromkeys(STAGES)])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--size", choices=list(SIZES), default="full")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--gpus", default="")
    parser.add_argument("--per-gpu", type=int, default=8)
    parser.add_argument("--minutes", type=float, default=9.0)
    options = parser.parse_args()
    make_importable()
    study = Study(
        options.folder.resolve(),
        options.size,
        tuple(range(options.seeds)),
        options.gpus,
        options.per_gpu,
        Deadline(options.minutes),
    )
    if options.stage == "estimate":
        num_devices = len(study.devices.ids)
        print("\n".join(cost.lines(SIZES[options.size], options.seeds, num_devices)))
        return 0
    prompts = options.prompts.resolve() if options.prompts else None
    study.prepare(prompts)
    os.chdir(study.folder)
    command = shlex.join(["python", "tests/bench/study.py", *sys.argv[1:]])
    for stage in STAGES if options.stage == "all" else (options.stage,):
        begin = time.monotonic()
        print(f"{stage}: begun, {study.deadline.left_s:.0f} s left", flush=True)
        try:
            if stage == "report":
                result.write(study, command)
            else:
                getattr(study, stage)()
        except OutOfTime as out_of_time:
            print(f"{stage}: time is up after {time.monotonic() - begin:.0f} s")
            print(f"left: {out_of_time}; run the same line again", flush=True)
            return 3
        print(f"{stage}: done in {time.monotonic() - begin:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
