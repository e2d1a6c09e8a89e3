"""`dflash verify --sample N --target T`: are stored rows still what the target gives?

N samples, spread over the plan, are computed again alone and compared within the noise of the
store's mode and compute type, as the gate does before the first commit. A sample that differs is
named, and the row that differs most is traced to its file and its text.
Letters: T tokens, M rows of `last`.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace

import numpy as np
import torch

from dflash_pipeline.capture.gate import Gate
from dflash_pipeline.capture.model import resolve
from dflash_pipeline.capture.target import Target
from dflash_pipeline.capture.worker import check_weights, load_target, prepare_torch
from dflash_pipeline.configs.errors import UsageError
from dflash_pipeline.configs.place import Place
from dflash_pipeline.configs.schema import Run
from dflash_pipeline.store import paths
from dflash_pipeline.store.reader import Store, open_store
from dflash_pipeline.store.runlog import RunLog
from dflash_pipeline.store.table import teacher_positions
from dflash_pipeline.store.text import decoder_of

_TRACED_TOKENS = 12


@dataclass
class Recheck:
    """What was compared and what was found."""

    path: str
    num_samples: int = 0
    num_rows: int = 0
    lines: list[str] = field(default_factory=list)
    """One for each thing compared, over all samples."""
    trace: str = ""
    """The row that differs most of all: its file, its sample, its text."""
    problems: list[str] = field(default_factory=list)


def recheck(store: Store, target: Target, num_samples: int) -> Recheck:
    """Compare so many samples, spread over what is committed. UsageError if there are none."""
    readable = np.flatnonzero(store.readable_N)
    if not len(readable):
        raise UsageError(f"{store.path} has no sample that can be read yet")
    places = np.linspace(0, len(readable) - 1, min(num_samples, len(readable))).round()
    chosen = readable[np.unique(places.astype(int))].tolist()
    # a store does not say which layers, card and torch its rows are of
    gate = Gate(target, store.spec, store.calibration, by_other_code=True)
    found = Recheck(str(store.path))
    errors = {i: _errors(store, gate, i) for i in chosen}
    found.num_samples = len(chosen)
    found.num_rows = int(store.table.num_tokens[chosen].sum())
    found.lines, found.problems = gate.findings()
    for i, of_sample in errors.items():
        for name, error_N in of_sample.items():
            typical, worst = float(error_N.median()), float(error_N.max())
            if not gate.is_noise(name, typical, worst):
                found.problems.append(
                    f"sample {i} ({store.table.key(i)}): {name} differs by {typical:.2g}, worst "
                    f"{worst:.2g}: {_trace(store, i, name, int(error_N.argmax()))}"
                )
    worst_of_all = max(
        (float(error_N.max()), i, name, int(error_N.argmax()))
        for i, of_sample in errors.items()
        for name, error_N in of_sample.items()
        if name != "logits"
    )
    found.trace = f"error {worst_of_all[0]:.2g} in {_trace(store, *worst_of_all[1:])}"
    return found


@torch.inference_mode()
def _errors(store: Store, gate: Gate, i: int) -> dict[str, torch.Tensor]:
    last_MR = store.last(i) if store.spec.has_last else np.empty((0, 0), np.uint8)
    # copies: a tensor over a read-only map would be a warning
    return gate.add(*store.tokens(i), np.array(store.hidden(i)), np.array(last_MR))


def _trace(store: Store, i: int, name: str, row: int) -> str:
    """Where a row of a sample stands, and the text that ends with its token."""
    ids_T, mask_T = store.tokens(i)
    shard_id, table = store.table.shard_id(i), store.table
    is_hidden = name.startswith("layer")
    first = (table.start if is_hidden else table.last_start)[i]
    first = int(first) - shard_id.shard * store.layout.rows_per_shard
    position = row if is_hidden else int(teacher_positions(mask_T, store.spec.last_rows)[row])
    file = paths.hidden_file(shard_id) if is_hidden else paths.last_file(shard_id)
    ids = ids_T[max(0, position + 1 - _TRACED_TOKENS) : position + 1].tolist()
    decode = decoder_of(store)
    text = repr(decode(ids)) if decode else f"ids {' '.join(map(str, ids))}"
    return f"{name}, row {first + row} of {file}: token {position} of {table.key(i)!r}, {text}"


def main(run: Run, place: Place, extra: dict[str, object]) -> None:
    """Entry of `dflash verify --sample`; extra: path, json, sample (how many).

    `run.target.id` empty: the target that the store's capture names. ValueError where a sample
    differs.
    """
    prepare_torch(place)
    store = open_store(str(extra["path"]))
    if not run.target.id:
        run = replace(run, target=replace(run.target, id=_captured_target(store)))
    files = resolve(run.target)
    check_weights(run, store, files)
    target = load_target(run, place, store, files)
    found = recheck(store, target, int(str(extra["sample"])))
    if extra["json"]:
        print(json.dumps(asdict(found), indent=1))
    else:
        log = RunLog(place)
        for line in (*found.lines, f"largest: {found.trace}"):
            log.say(line)
        log.say(f"{found.num_samples} samples, {found.num_rows} rows computed again")
    if found.problems:
        raise ValueError(
            f"{store.path} does not hold what {run.target.id} gives: " + "; ".join(found.problems)
        )


def _captured_target(store: Store) -> str:
    run = store.attributes.run
    parts = run.get("merged")
    # stores that were merged are of one target, whatever each calls it
    for one in parts if isinstance(parts, list) else [run]:
        section = one.get("target") if isinstance(one, dict) else None
        name = section.get("id") if isinstance(section, dict) else None
        if isinstance(name, str) and name:
            return name
    raise UsageError(f"{store.path} does not say where its target is: name it with --target")
