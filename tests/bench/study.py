"""Which loss, weighting, precision, store mode, order and shape make the better drafter.

    python tests/bench/study.py STAGES FOLDER --prompts DIR [--memory DIR] [--seeds 3]
        [--size full|rehearsal|tiny] [--gpus 0-1] [--per-gpu 9] [--minutes 9]
        [--arms NAME,... [--objective NAME] [--rate 1e-3]] [--answers DIR]

STAGES: `estimate`, `all`, or some of data, store, arms, score, decode and report with commas
between them, done one after another as far as time goes; `all` is
data,store,arms,score,arms,score,report. DIR
holds train_{math,code,chat}.jsonl and eval_{math,code,chat}.jsonl; `rehearsal` takes a few of them
on any machine, `tiny` is of the toy target and writes its own. With --memory, a folder of its own
on /dev/shm, half of every store lies there. Run it again to go on: each stage does what is missing,
stops in time, and says what is left (exit code 3). What fails is told at the end (exit code 1): no
run ends another, a stage only those that need all of it. `arms` trains in two rounds: the losses,
then, once `score` has chosen the best of them, everything that is asked of it, what matters most
first. --arms wants these alone, and the stores that they read: of the objectives, `following`, what
is asked of the best one (of --objective, where it is given), and, trained only so, the long ones,
long-gamma and long-dpace, and an epoch of these at other learning rates (rate-5e-4 to rate-4e-3;
--rate has the long ones take one). `report` writes study.json, study.md and study.png into
FOLDER/report, and into $OUT where that is set, of whatever is scored by then; so does every
`score`, and every line that ends early.

`decode` is `dflash eval` of the best of the long arms that are scored (where none is, of all):
greedy, then sampled, in decode.json beside the report; each is begun only where it should fit into
what is left. What $OUT takes is copied off a machine that goes away: `data` puts the answers there,
`decode` the best run's checkpoint, each packed in a few parts (`cat NAME.*.tar.xz | tar xJ`). With
--answers, a folder of such parts, they are taken from there (in place of --prompts too), unless
their target, prompts or settings are others, and are not sent again: the same line begins anew on
another machine, and goes on where it was.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from dflash_pipeline.configs.status import process_age_s
from studies import cost, result
from studies.arms import objective_arms
from studies.running import Deadline, OutOfTime
from studies.sizes import SIZES
from studies.stages import DECODE, Study, make_importable, named_stages

MOST_IMPORTS_S = 60.0
PER_GPU = 9
"""Eighteen runs ask for the best objective, and as many are asked of it: two rounds of each."""


def main() -> int:
    """0: done; 1: something failed, and is told; 2: the line asks for what cannot be; 3: time was
    up, run the same line again."""
    options = _options()
    make_importable(options.per_gpu)
    study = Study(
        options.folder.resolve(),
        options.size,
        tuple(range(options.seeds)),
        options.gpus,
        options.per_gpu,
        Deadline(options.minutes, _begin()),
        options.memory.resolve() if options.memory else None,
        tuple(filter(None, options.arms.split(","))),
        options.objective,
        options.rate,
        options.answers.resolve() if options.answers else None,
    )
    if options.stages == ("estimate",):
        num_devices = len(study.devices.ids)
        has_memory = options.memory is not None
        print("\n".join(cost.lines(SIZES[options.size], options.seeds, num_devices, has_memory)))
        return 0
    try:
        study.all_wanted()
        study.prepare(options.prompts.resolve() if options.prompts else None)
    except (ValueError, OSError) as error:
        print(f"study.py: {error}", file=sys.stderr)
        return 2
    os.chdir(study.folder)
    command = shlex.join(["python", "tests/bench/study.py", *sys.argv[1:]])
    return run_stages(study, options.stages, command)


def _begin() -> float:
    """When this process began: imports take their share of the time. The system may not tell."""
    return time.monotonic() - min(max(process_age_s(), 0.0), MOST_IMPORTS_S)


def run_stages(study: Study, stages: Sequence[str], command: str) -> int:
    """Each stage in turn; the report as often as there may be something new to tell, as the
    machine may not be there for another call."""
    code, failures = 0, list[str]()
    for place, stage in enumerate(stages):
        begin = time.monotonic()
        if stage == "arms":
            _foretell(study, stages[place:])
        print(f"{stage}: begun, {study.deadline.left_s:.0f} s left", flush=True)
        try:
            if stage != "report":
                getattr(study, stage)()
        except OutOfTime as out_of_time:
            print(f"{stage}: time is up after {time.monotonic() - begin:.0f} s")
            print(f"left: {out_of_time}; run the same line again", flush=True)
            code = 3
        except (RuntimeError, ValueError, OSError) as error:
            traceback.print_exc()
            failures.append(f"{stage}: {error}")
        except BaseException:
            _report(study, command)
            raise
        else:
            print(f"{stage}: done in {time.monotonic() - begin:.0f} s", flush=True)
        is_over = code != 0 or (bool(failures) and not study.can_go_on)
        if is_over or stage in ("score", DECODE, "report"):
            _report(study, command)
        if is_over:
            break
    # a run is tried again by each round
    failures += dict.fromkeys(study.failures)
    if failures:
        print("\n".join(["failed:", *failures]), flush=True)
    return 1 if failures else code


def _foretell(study: Study, stages: Sequence[str]) -> None:
    """What is left may be more than this call has time for: better known before it begins."""
    costs = study.foretold(stages)
    told = ", ".join(f"{one.name} {one.seconds:.0f} s" for one in costs)
    total_s = sum(one.seconds for one in costs)
    told = f"{told}; {total_s:.0f} s in all" if costs else f"size {study.size_name} is not"
    print(f"estimated: {told}; this call has {study.deadline.left_s:.0f} s left", flush=True)


def _report(study: Study, command: str) -> None:
    if study.has_scores:
        result.write(study, command)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("stages", type=named_stages)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--memory", type=Path)
    parser.add_argument("--answers", type=Path)
    parser.add_argument("--size", choices=list(SIZES), default="full")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--gpus", default="")
    parser.add_argument("--per-gpu", type=int, default=PER_GPU)
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--arms", default="")
    parser.add_argument("--rate", type=float, default=0.0)
    parser.add_argument("--objective", choices=[arm.name for arm in objective_arms(())], default="")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
