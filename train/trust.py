"""`dflash eval --check`: whether this pipeline measures a drafter as others measured it.

Before: what the drafter reads is written down, so that its own layers are captured. After: the
replay of the store, decoding, and published figures are held against one another.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dflash_pipeline.configs.disk import write_whole
from dflash_pipeline.configs.errors import UsageError
from dflash_pipeline.configs.jsonfile import read_object
from dflash_pipeline.configs.place import Place
from dflash_pipeline.configs.published import published, task_of
from dflash_pipeline.configs.schema import Run
from dflash_pipeline.store.runlog import RunLog
from dflash_pipeline.train.loading import read_checkpoint
from dflash_pipeline.train.report import RESERVED
from dflash_pipeline.train.results import TRAINED

# how far replay may be from decoding: the same cycles in fp32, in bf16 other roundings
_FP32_SHARE, _BF16_SHARE = 0.005, 0.1
# of a published tau, which is of all of a task's prompts under another harness
_LEAST_SHARE = 0.9


def describe(run: Run, place: Place, extra: Mapping[str, object]) -> None:
    """Import the drafter, from the hub too, and write what it reads to extra["out"]."""
    log = RunLog(place)
    checkpoint = read_checkpoint(local(run.eval.drafter))
    shape = checkpoint.shape
    log.say(
        f"drafter {run.eval.drafter} ({checkpoint.layout} layout): {shape.num_layers} layers, block"
        f" {shape.block_size}, reads layers {', '.join(map(str, shape.layer_ids))}"
    )
    values = {
        "path": str(checkpoint.path),
        "layer_ids": list(shape.layer_ids),
        "mask_token_id": shape.mask_token_id,
        "block_size": shape.block_size,
    }
    write_whole(Path(str(extra["out"])), json.dumps(values).encode())


def local(name: str) -> Path:
    """A directory as it is, or the files of a drafter on the hub."""
    if Path(name).is_dir():
        return Path(name)
    if name.startswith(("/", ".", "~")) or name.count("/") != 1:
        raise UsageError(f"drafter {name}: not a directory, and no hub name (owner/name) either")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors"]))
    except (OSError, ValueError) as error:
        raise UsageError(f"drafter {name} cannot be fetched from the hub: {error}") from error


def judge(run: Run, place: Place, extra: Mapping[str, object]) -> None:
    """Compare the results in extra["replayed"] and extra["decoded"] with each other and with the
    published figures of extra["block_size"]. ValueError, after all lines, when one does not hold.
    """
    log = RunLog(place)
    replayed, decoded = (read_object(Path(str(extra[name]))) for name in ("replayed", "decoded"))
    log.say("gate: passed, the store holds what the target computes")
    faults = check_replay(replayed, decoded, log)
    faults += check_published(run.target.id, int(str(extra["block_size"])), decoded, log)
    if faults:
        raise ValueError(f"the check does not hold: {'; '.join(faults)}")
    log.say("check passed")


def check_replay(replayed: Mapping[str, Any], decoded: Mapping[str, Any], log: RunLog) -> list[str]:
    """The answers are the target's own greedy ones: the store must give decoding's acceptance."""
    mine, theirs = _counts(replayed), _counts(decoded)
    common = mine.keys() & theirs.keys()
    if not common:
        return ["replay and decoding have no prompt in common"]
    num_equal = sum(mine[key] == theirs[key] for key in common)
    one, other = _pooled(mine, common), _pooled(theirs, common)
    log.say(
        f"replay: tau {one:.3f}, decoding: tau {other:.3f}; the same cycles on {num_equal} of "
        f"{len(common)} prompts"
    )
    share = _FP32_SHARE if decoded["judged"] else _BF16_SHARE
    if abs(one - other) <= share * other:
        return []
    return [f"tau {one:.3f} by replay and {other:.3f} by decoding, more than {share:.1%} apart"]


def check_published(
    target: str, block_size: int, decoded: Mapping[str, Any], log: RunLog
) -> list[str]:
    """tau by domain beside the published one of the task of that name."""
    known = published(target, block_size)
    if known is None:
        log.say(f"no figure is published here for target {target} with blocks of {block_size}")
        return []
    log.say(f"published: {known.source} ({known.how})")
    faults, num_compared = [], 0
    for domain, numbers in decoded["arms"][TRAINED].items():
        if domain in RESERVED or (task := task_of(domain, known.taus)) is None:
            continue
        num_compared += 1
        tau, (low, high) = numbers["tau_per_prompt"], numbers["tau_per_prompt_interval"]
        wanted = known.taus[task]
        log.say(f"{task}: tau {tau:.2f} here ({low:.2f} to {high:.2f}), published {wanted:.2f}")
        if high < _LEAST_SHARE * wanted:
            faults.append(f"{task}: tau {tau:.2f}, published {wanted:.2f}")
    if not num_compared:
        log.say(f"not compared: no domain of the prompts is called {', '.join(sorted(known.taus))}")
    return faults


def _counts(results: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    return {
        prompt["key"]: (prompt["kept"], prompt["cycles"])
        for prompt in results["per_prompt"][TRAINED]
    }


def _pooled(counts: Mapping[str, tuple[int, int]], keys: set[str]) -> float:
    return sum(counts[key][0] for key in keys) / max(1, sum(counts[key][1] for key in keys))
