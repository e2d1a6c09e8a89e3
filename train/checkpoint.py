"""The run directory: what a run was told, and checkpoints that are whole or not there.

A checkpoint is a drafter that servers load (z-lab layout, bf16) with `state/` inside, the fp32
masters, moments and position. It is written under another name, synced, and renamed: whatever is
called `step-...` is whole.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from dflash_pipeline.configs.errors import UsageError
from dflash_pipeline.configs.load import RUN_FILE, differences, from_dict, to_dict
from dflash_pipeline.configs.schema import Run
from dflash_pipeline.configs.shares import parse_stores
from dflash_pipeline.store import durable
from dflash_pipeline.store.reader import Store
from dflash_pipeline.train.export import write_zlab
from dflash_pipeline.train.order import Position
from dflash_pipeline.train.shape import DrafterShape
from dflash_pipeline.train.tensorfile import write_tensors

_STATE = "state"
_STEP_NAME = re.compile(r"step-(\d{8,})")
# what may change between a run and its continuation: it decides no parameter's value
_FREE = (
    "out",
    "stores",
    "init_from",
    "follow",
    "log_every",
    "save_every",
    "keep",
    "validate_every",
    "validate_samples",
    "patience",
    "min_gain",
    "max_bad_steps",
    "timeout_s",
    "profile",
)
# files that stand in a run directory before the run begins
_NOT_A_RUN = {"logs"}


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a run is, and what it has reached."""

    step: int
    """Optimizer steps done."""
    position: Position
    best_tau: float
    """Of the best validation so far; 0: none."""
    best_step: int
    plateau_tau: float
    """Of the last validation that counted as a gain (train.min_gain)."""
    num_stale: int
    """Validations since then."""


def begin(out: Path, run: Run, stores: Sequence[Store], resume: bool) -> None:
    """Rank 0, before anything is written: is OUT free, or is it this very run?

    UsageError for a non-empty OUT without `resume`, and for each setting or store that differs.
    """
    record = out / RUN_FILE
    if not resume:
        found = sorted({path.name for path in out.glob("*")} - _NOT_A_RUN)
        if found:
            raise UsageError(
                f"{out} is not empty (it holds {found[0]}): go on with it by --resume, or name "
                "another --out"
            )
        out.mkdir(parents=True, exist_ok=True)
        _write_json(record, _description(run, stores))
        return
    if not record.is_file():
        raise UsageError(
            f"{out} holds no {RUN_FILE}: there is no run to resume, leave --resume out"
        )
    try:
        before = json.loads(record.read_bytes())
        recorded, records = from_dict(before["run"]), list(before["stores"])
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{record} is damaged ({error}): what the run was begun with is not known; begin a new "
            f"run with another --out, from its weights by --init-from {out}"
        ) from None
    kept = {name: getattr(recorded.train, name) for name in _FREE}
    now = replace(run, train=replace(run.train, **kept))
    changed = differences(recorded, now, ("drafter", "loss", "optim", "train"))
    changed += _store_changes(records, _store_records(run, stores))
    if changed:
        raise UsageError(
            f"{out} was begun with other settings ({'; '.join(changed)}): set them back, or begin "
            "a new run with another --out"
        )


def withdraw(out: Path) -> None:
    """Take back what `begin` wrote for a new run that was refused before its first step: the same
    --out may be named again. Logs stay."""
    (out / RUN_FILE).unlink(missing_ok=True)


def _description(run: Run, stores: Sequence[Store]) -> dict[str, Any]:
    return {
        "run": to_dict(run),
        "stores": _store_records(run, stores),
        "versions": {"python": platform.python_version()}
        | {name: version(name) for name in ("dflash-pipeline", "torch", "numpy")},
    }


def _store_records(run: Run, stores: Sequence[Store]) -> list[dict[str, Any]]:
    texts = run.train.stores or (run.store.path,)
    return [
        {
            "name": text,
            "share": share.share,
            "plan_hash": store.plan_hash,
            "identity": store.spec.to_dict(),
        }
        for text, share, store in zip(texts, parse_stores(texts), stores, strict=True)
    ]


def _store_changes(
    before: Sequence[Mapping[str, Any]], now: Sequence[Mapping[str, Any]]
) -> list[str]:
    """A store may have moved; its plan, identity and share may not have changed."""
    if len(before) != len(now):
        return [f"number of stores: {len(before)}, now {len(now)}"]
    return [
        f"store {index} ({then['name']}): another {what} at {here['name']}"
        for index, (then, here) in enumerate(zip(before, now, strict=True))
        for what in ("share", "plan_hash", "identity")
        if json.dumps(then[what], sort_keys=True) != json.dumps(here[what], sort_keys=True)
    ]


def step_directory(out: Path, step: int) -> Path:
    """Where the checkpoint of a step is, or will be."""
    return out / f"step-{step:08d}"


def save(
    out: Path,
    shape: DrafterShape,
    state: Mapping[str, Tensor],
    progress: Progress,
    trained_on: Mapping[str, str] | None = None,
) -> Path:
    """Write OUT/step-..., whole or not at all, and let OUT/last point to it.

    `state`, in host memory: what `Optimizer.state` gave, and `rng`, torch's CPU generator.
    trained_on: see `export.trained_on`.
    """
    final = step_directory(out, progress.step)
    aside = out / f".{final.name}"
    # left by a process that died while writing
    shutil.rmtree(aside, ignore_errors=True)
    prefix = "master."
    masters = {name.removeprefix(prefix): state[name] for name in state if name.startswith(prefix)}
    folder = aside / _STATE
    try:
        write_zlab(aside, shape, masters, trained_on)
        folder.mkdir()
        write_tensors(folder / "state.safetensors", state, {})
        _write_json(folder / "state.json", asdict(progress))
        for path in (folder, aside):
            durable.sync(path)
    except BaseException:
        # on a full disk it would keep the space that the log and the next start need
        shutil.rmtree(aside, ignore_errors=True)
        raise
    if final.exists():
        # the same step again, after a resume from an earlier one
        old = out / f".{final.name}.old"
        shutil.rmtree(old, ignore_errors=True)
        final.rename(old)
        aside.rename(final)
        shutil.rmtree(old)
    else:
        aside.rename(final)
    durable.sync(out)
    point(out, "last", final)
    return final


def load(path: Path, device: torch.device) -> tuple[Progress, dict[str, Tensor]]:
    """`state/` of a checkpoint; restores torch's CPU generator.

    ValueError where it is missing, damaged, or holds numbers that are not finite.
    """
    folder = path / _STATE
    try:
        entry = json.loads((folder / "state.json").read_bytes())
        progress = Progress(**entry | {"position": Position(**entry["position"])})
        tensors = load_file(folder / "state.safetensors", device=str(device))
        generator = tensors.pop("rng").cpu()
        bad = [name for name, tensor in tensors.items() if not torch.isfinite(tensor).all()]
        if bad:
            raise ValueError(f"{bad[0]} holds NaN or Inf")
        torch.set_rng_state(generator)
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
        raise ValueError(
            f"{folder} is damaged or not whole ({error}): remove {path} and run the same line "
            "again, it goes on from the checkpoint before"
        ) from error
    return progress, tensors


def newest(out: Path) -> Path | None:
    """The checkpoint with the most steps; None: the run ended before its first."""
    steps = _steps(out)
    return steps[-1] if steps else None


def _steps(out: Path) -> list[Path]:
    found = [path for path in out.glob("step-*") if _STEP_NAME.fullmatch(path.name)]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


def prune(out: Path, keep: int) -> None:
    """Remove all but the newest `keep` checkpoints and the best."""
    best = out / "best"
    spared = best.resolve() if best.is_symlink() else None
    for path in _steps(out)[:-keep]:
        if path.resolve() != spared:
            # renamed first: half a checkpoint must not look like one
            doomed = out / f".{path.name}.old"
            shutil.rmtree(doomed, ignore_errors=True)
            path.rename(doomed)
            shutil.rmtree(doomed)


def point(out: Path, name: str, to: Path) -> None:
    """A relative link OUT/name, replaced in one step."""
    aside = out / f".{name}"
    aside.unlink(missing_ok=True)
    aside.symlink_to(to.name)
    os.replace(aside, out / name)
    durable.sync(out)


def trim_metrics(path: Path, step: int) -> None:
    """Drop the lines of steps that a resumed run will do again, and a line that a kill tore."""
    if not path.exists():
        return
    kept = []
    for line in path.read_bytes().splitlines():
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line + b"\n")
        except (ValueError, KeyError, TypeError):
            continue
    aside = path.with_name(f".{path.name}")
    aside.write_bytes(b"".join(kept))
    os.replace(aside, path)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    durable.write_durably(path, json.dumps(content, indent=2).encode())
