"""Replay of trained drafters over the held-out answers: one process scores several in turn.

    python -m studies.scoring FOLDER DEVICE SECONDS RUN...

A process so pays for its imports once, and several of them share a GPU, which one replay alone
leaves idle. Writes FOLDER/scores/RUN.json, whole or not at all. RUN `lookup` is prompt lookup,
`untrained` a drafter of fresh weights.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from dflash_pipeline.store.reader import Store, open_store
from dflash_pipeline.train.arms import drafters
from dflash_pipeline.train.head import TargetHead
from dflash_pipeline.train.loading import Checkpoint, read_checkpoint
from dflash_pipeline.train.replay import held_out, replayed, replayed_lookup
from dflash_pipeline.train.report import write_json
from dflash_pipeline.train.tally import Answer
from studies.arms import EVAL_STORE

LOOKUP, UNTRAINED = "lookup", "untrained"
LOOKUP_DRAFTS, LOOKUP_NGRAM = 7, 3


def score_path(folder: Path, run: str) -> Path:
    """Where the score of a run stands once it is whole."""
    return folder / "scores" / f"{run}.json"


def counted(store: Store, answers_of: Callable[[int], list[Answer]], end: float) -> dict[str, Any]:
    """Kept tokens and cycles of each answer, whole and before its first loop; {}: out of time."""
    names, found = store.table.domains, dict[str, Any]()
    for index in held_out(store):
        if time.monotonic() > end:
            return {}
        answers = answers_of(index)
        whole = [cycle for answer in answers for cycle in answer.cycles]
        free = [cycle for answer in answers for cycle in answer.loop_free_cycles]
        found[store.table.key(index)] = {
            "domain": names[int(store.table.domain[index])],
            "kept": sum(cycle.kept for cycle in whole),
            "cycles": len(whole),
            "free_kept": sum(cycle.kept for cycle in free),
            "free_cycles": len(free),
        }
    return found


def main() -> None:
    folder, device, end = Path(sys.argv[1]), sys.argv[2], time.monotonic() + float(sys.argv[3])
    torch.set_num_threads(1)
    store = open_store(folder / "stores" / EVAL_STORE)
    dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
    for run in sys.argv[4:]:
        begin = time.monotonic()
        if run == LOOKUP:

            def answers_of(index: int) -> list[Answer]:
                return replayed_lookup(store, index, LOOKUP_DRAFTS, LOOKUP_NGRAM, None)

        else:
            answers_of = _of_drafter(store, folder, run, device, dtype)
        answers = counted(store, answers_of, end)
        if not answers:
            return
        write_json(
            score_path(folder, run),
            {"run": run, "seconds": time.monotonic() - begin, "answers": answers},
        )
        print(f"{run} scored", flush=True)


def _of_drafter(
    store: Store, folder: Path, run: str, device: str, dtype: torch.dtype
) -> Callable[[int], list[Answer]]:
    """The last step of a run, or fresh weights of the shape of any run that is there."""
    if run == UNTRAINED:
        checkpoint = _any_checkpoint(folder)
        _, drafter = drafters(checkpoint, 0, device, dtype)
    else:
        # the last step, not the best: which is best was judged on few samples
        checkpoint = read_checkpoint(folder / "arms" / run / "last")
        drafter, _ = drafters(checkpoint, 0, device, dtype)
    head = TargetHead.from_store(store, checkpoint.shape, device, dtype)
    return lambda index: replayed(store, index, drafter, head, checkpoint.shape, None)


def _any_checkpoint(folder: Path) -> Checkpoint:
    return read_checkpoint(min((folder / "arms").glob("ce-gamma-*/last")))


def read_answers(folder: Path, run: str) -> dict[str, Any]:
    """What `main` wrote of a run."""
    found: dict[str, Any] = json.loads(score_path(folder, run).read_text(encoding="utf-8"))
    return found


if __name__ == "__main__":
    main()
