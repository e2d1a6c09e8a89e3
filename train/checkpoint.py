"""The run directory: checkpoints that are whole or not there.

A checkpoint is a drafter that servers load (z-lab layout, bf16) with `state/` inside, the fp32
masters, moments and position. It is written under another name, synced, and renamed: whatever is
called `step-...` is whole.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from dflash_pipeline.configs.disk import is_full, write_whole
from dflash_pipeline.configs.errors import UsageError
from dflash_pipeline.configs.jsonfile import read_object
from dflash_pipeline.configs.load import RUN_FILE
from dflash_pipeline.configs.sizes import size_text
from dflash_pipeline.store import durable
from dflash_pipeline.train.export import write_zlab
from dflash_pipeline.train.order import Position
from dflash_pipeline.train.shape import DrafterShape
from dflash_pipeline.train.tensorfile import write_tensors

FORMAT = 1
"""Of `state/`, in state.json; one more with each change of what a run that goes on reads there."""
_STATE = "state"
_PROGRESS = "state.json"
_STEP_NAME = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """Where a run is, and what it has reached."""

    step: int
    """Optimizer steps done."""
    position: Position
    schedule_step: int
    """Steps of the learning rate's schedule done: `step`, unless the number of ranks changed; a
    run that follows stores has its place from what it draws."""
    num_steps: int
    """All steps of the schedule, by the plan for this number of ranks."""
    best_tau: float
    """Of the best validation so far; 0: none."""
    best_step: int
    plateau_tau: float
    """Of the last validation that counted as a gain (train.min_gain)."""
    num_stale: int
    """Validations since then."""
    validated_step: int
    """Of the last validation; -1: none."""


def at_the_beginning(num_steps: int) -> Progress:
    """Of a run that is planned to take so many steps."""
    return Progress(
        step=0,
        position=Position(0, 0, 0),
        schedule_step=0,
        num_steps=num_steps,
        best_tau=0.0,
        best_step=0,
        plateau_tau=0.0,
        num_stale=0,
        validated_step=-1,
    )


def replanned(progress: Progress, num_steps: int) -> Progress:
    """The same for a plan of `num_steps`, which differs for another number of ranks: as large a
    share of the schedule is done, so that the learning rate goes on where it was."""
    done = round(progress.schedule_step * num_steps / progress.num_steps)
    return replace(progress, schedule_step=done, num_steps=num_steps)


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
    trained_on: see `remembered.trained_on`.
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
        _write_progress(folder, progress)
        for path in (folder, aside):
            durable.sync(path)
    except BaseException as error:
        # on a full disk it would keep the space that the log and the next start need
        shutil.rmtree(aside, ignore_errors=True)
        if isinstance(error, OSError) and is_full(error):
            raise ValueError(
                f"no space left for checkpoint {final} ({error.strerror}; "
                f"{size_text(durable.free_bytes(out))} free now that what was written of it is "
                "removed): free some, or keep fewer by --set train.keep, then go on with --resume"
            ) from error
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


def tell(out: Path, progress: Progress) -> None:
    """Let the checkpoint of `progress.step`, which is there, tell what has been reached since."""
    _write_progress(step_directory(out, progress.step) / _STATE, progress)


def load(path: Path, device: torch.device) -> tuple[Progress, dict[str, Tensor]]:
    """`state/` of a checkpoint; restores torch's CPU generator.

    UsageError where another version of the program wrote it; ValueError where it is missing,
    damaged, or holds numbers that are not finite.
    """
    folder = path / _STATE
    with _damage_told(path):
        entry = read_object(folder / _PROGRESS)
    if why := _other_version(entry):
        raise UsageError(
            f"{folder} was written by another version of dflash-pipeline ({why}): go on with the "
            f"version that wrote it ({path.parent / RUN_FILE} names the one that began the run), "
            f"or begin a new run with another --out, from its weights by --init-from {path}"
        )
    with _damage_told(path):
        progress = Progress(**entry | {"position": Position(**entry["position"])})
        tensors = load_file(folder / "state.safetensors", device=str(device))
        generator = tensors.pop("rng").cpu()
        bad = [name for name, tensor in tensors.items() if not torch.isfinite(tensor).all()]
        if bad:
            raise ValueError(f"{bad[0]} holds NaN or Inf")
        torch.set_rng_state(generator)
    return progress, tensors


@contextmanager
def _damage_told(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
        raise ValueError(
            f"{path / _STATE} is damaged or not whole ({error}): remove {path} and run the same "
            "line again, it goes on from the checkpoint before"
        ) from error


def _other_version(entry: dict[str, Any]) -> str:
    """How a whole state.json differs from those that are written today, empty: it does not; takes
    the format out of it. What a crash leaves is no JSON, so another set of keys is no damage."""
    # the first ones did not name it, and may hold all the same
    found = entry.pop("format", FORMAT)
    if found != FORMAT:
        return f"{_PROGRESS} has format {found}, this version reads {FORMAT}"
    differing = _key_differences(Progress, entry)
    if isinstance(position := entry.get("position"), dict):
        differing += _key_differences(Position, position, "position.")
    return f"{_PROGRESS} {', '.join(differing)}" if differing else ""


def _key_differences(kind: type, entry: Mapping[str, Any], prefix: str = "") -> list[str]:
    known = [one.name for one in fields(kind)]
    lacking = [f"lacks {prefix}{name}" for name in known if name not in entry]
    return lacking + [f"holds {prefix}{name}" for name in entry if name not in known]


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
    write_whole(path, b"".join(kept))


def _write_progress(folder: Path, progress: Progress) -> None:
    content = json.dumps({"format": FORMAT} | asdict(progress), indent=2)
    durable.write_durably(folder / _PROGRESS, content.encode())
