"""Replay of trained drafters over the held-out answers: one process scores several in turn.

    python -m studies.scoring FOLDER DEVICE RUN...

A process so pays for its imports once, and several of them share a GPU, which one replay alone
leaves idle while it reads. Each run reads the store for itself: that is less than 3 % of a replay
on a CPU, and the runs of a process would all be cut short where one is now. Writes
FOLDER/scores/RUN.json, whole or not at all; SIGINT ends it, and what it had counted of a run by
then stands in FOLDER/scores/RUN.part, with which the next call goes on. RUN `lookup` is prompt
lookup, `untrained` a drafter of fresh weights.
"""

from __future__ import annotations

import json
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from dflash_pipeline.store.reader import Store, open_store
from dflash_pipeline.train.arms import drafters
from dflash_pipeline.train.head import TargetHead
from dflash_pipeline.train.loading import Checkpoint, read_checkpoint
from dflash_pipeline.train.replay import Replayed, held_out, replayed, replayed_lookup
from dflash_pipeline.train.report import write_json
from studies.arms import EVAL_STORE, objective_arms
from studies.running import end_with_parent

LOOKUP, UNTRAINED = "lookup", "untrained"
LOOKUP_DRAFTS, LOOKUP_NGRAM = 7, 3

Replay = Callable[[Sequence[int]], Replayed]


def score_path(folder: Path, run: str) -> Path:
    """Where the score of a run stands once it is whole."""
    return folder / "scores" / f"{run}.json"


def part_path(folder: Path, run: str) -> Path:
    """Where that stands which was counted of a run when the time was up."""
    return folder / "scores" / f"{run}.part"


def count(store: Store, replay: Replay, found: dict[str, Any]) -> None:
    """Kept tokens and cycles of each answer that is not there yet, whole and before its first
    loop, by its key."""
    names = store.table.domains
    left = [index for index in held_out(store) if store.table.key(index) not in found]
    for index, answers in replay(left):
        whole = [cycle for answer in answers for cycle in answer.cycles]
        free = [cycle for answer in answers for cycle in answer.loop_free_cycles]
        found[store.table.key(index)] = {
            "domain": names[int(store.table.domain[index])],
            "kept": sum(cycle.kept for cycle in whole),
            "cycles": len(whole),
            "free_kept": sum(cycle.kept for cycle in free),
            "free_cycles": len(free),
        }


def main() -> int:
    """0: all are scored; 1: some could not be, the others are; 130: stopped."""
    end_with_parent()
    folder, device, runs = Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
    torch.set_num_threads(1)
    store = open_store(folder / "stores" / EVAL_STORE)
    failed = []
    for run in runs:
        try:
            score(store, folder, run, device)
        except KeyboardInterrupt:
            return 128 + signal.SIGINT
        except Exception:
            traceback.print_exc()
            failed.append(run)
    if failed:
        print(f"not scored: {', '.join(failed)}; why stands above", flush=True)
    return int(bool(failed))


def score(store: Store, folder: Path, run: str, device: str) -> None:
    """One run, or as much of it as there is until KeyboardInterrupt."""
    begin, part = time.monotonic(), part_path(folder, run)
    found: dict[str, Any] = {"run": run, "seconds": 0.0, "answers": {}}
    if part.exists():
        found = json.loads(part.read_text(encoding="utf-8"))
    before_s, answers = found["seconds"], found["answers"]
    try:
        count(store, _replay_of(store, folder, run, device), answers)
    except KeyboardInterrupt:
        if answers:
            write_json(part, found | {"seconds": before_s + time.monotonic() - begin})
        raise
    write_json(score_path(folder, run), found | {"seconds": before_s + time.monotonic() - begin})
    part.unlink(missing_ok=True)
    print(f"{run} scored", flush=True)


def _replay_of(store: Store, folder: Path, run: str, device: str) -> Replay:
    if run == LOOKUP:
        return lambda samples: replayed_lookup(store, samples, LOOKUP_DRAFTS, LOOKUP_NGRAM, None)
    dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
    return _of_drafter(store, folder, run, device, dtype)


def _of_drafter(store: Store, folder: Path, run: str, device: str, dtype: torch.dtype) -> Replay:
    """The last step of a run, or fresh weights of the shape of any objective's run."""
    if run == UNTRAINED:
        checkpoint = _any_checkpoint(folder)
        _, drafter = drafters(checkpoint, 0, device, dtype)
    else:
        # the last step, not the best: which is best was judged on few samples
        checkpoint = read_checkpoint(folder / "arms" / run / "last")
        drafter, _ = drafters(checkpoint, 0, device, dtype)
    head = TargetHead.from_store(store, checkpoint.shape, device, dtype)
    return lambda samples: replayed(store, samples, drafter, head, None)


def _any_checkpoint(folder: Path) -> Checkpoint:
    names = {arm.name for arm in objective_arms((0,))}
    found = (folder / "arms").glob("*/last")
    return read_checkpoint(
        min(path for path in found if path.parent.name.rpartition("-s")[0] in names)
    )


def read_answers(folder: Path, run: str) -> dict[str, Any]:
    """What `main` wrote of a run."""
    found: dict[str, Any] = json.loads(score_path(folder, run).read_text(encoding="utf-8"))
    return found


if __name__ == "__main__":
    sys.exit(main())
