"""`dflash eval`: the drafter, an untrained one and prompt lookup in one table.

With prompts the target decodes for real, greedy or sampled, and every greedy output is compared
with plain decoding, which is timed in the same run; without, the held-out samples of a store are
replayed and no target is needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from dflash_pipeline.configs.errors import UsageError
from dflash_pipeline.configs.place import Place
from dflash_pipeline.configs.schema import Run
from dflash_pipeline.store.runlog import RunLog
from dflash_pipeline.train.decoding import by_decoding
from dflash_pipeline.train.evaltarget import OpenTarget
from dflash_pipeline.train.loading import read_checkpoint
from dflash_pipeline.train.plot import draw
from dflash_pipeline.train.replaying import by_replay
from dflash_pipeline.train.report import table, to_json, write_json


def main(run: Run, place: Place, extra: Mapping[str, object], open_target: OpenTarget) -> None:
    """Measure, print the table, write `run.eval.json`.

    extra: `passing`, true where a later stage reads that file and it is removed then.
    Raises ValueError, after both, when outputs differ in fp32.
    """
    if place.world != 1:
        raise UsageError(f"eval runs on one device, --gpus names {place.world}")
    if not run.eval.drafter:
        raise UsageError("eval needs --drafter: a run, one of its steps, or a checkpoint")
    log = RunLog(place)
    checkpoint = read_checkpoint(run.eval.drafter)
    log.say(f"drafter {checkpoint.path} ({checkpoint.layout} layout)")
    if run.eval.prompts:
        report = by_decoding(run, place, checkpoint, open_target, log)
    elif run.store.path:
        report = by_replay(run, place, checkpoint, log)
    else:
        raise UsageError("eval needs --prompts to decode, or --store to replay held-out samples")
    for line in table(report):
        log.say(line)
    if run.eval.json:
        write_json(Path(run.eval.json), to_json(report))
        if not extra.get("passing"):
            log.say(f"results are in {run.eval.json}")
    if run.eval.plot:
        draw(Path(run.eval.plot), report)
        log.say(f"figure is in {run.eval.plot}")
    if report.is_judged and not report.is_identical:
        first = next(found for found in report.mismatches if not found.is_exempt)
        raise ValueError(
            f"outputs differ from plain greedy decoding: {first.arm} on prompt {first.key} at new "
            f"token {first.place}, where the top-2 gap is {first.gap:.4f}"
        )
