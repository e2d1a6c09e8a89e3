"""A drafter read from disk, with suspicion: of a run, or a z-lab or speculators checkpoint.

The exact set of names and shapes is asserted before anything is loaded; only safetensors is read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from dflash_pipeline.configs.jsonfile import read_object
from dflash_pipeline.train import layout
from dflash_pipeline.train.layoutname import layout_name
from dflash_pipeline.train.remembered import checkpoint_directory, inside, remembered
from dflash_pipeline.train.shape import DrafterShape

WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
# the format's own limit; a longer header is a broken or hostile file
_MAX_HEADER_BYTES = 100_000_000
_FLOATS = {"BF16", "F16", "F32"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """A drafter read from disk."""

    path: Path
    """The directory that held it: a run directory leads to one of its steps."""
    layout: str
    """`zlab` or `speculators`."""
    shape: DrafterShape
    tensors: dict[str, torch.Tensor]
    """Under `Drafter`'s names, in the dtype of the file (bf16 when written here)."""
    trained_on: Mapping[str, str]
    """`trained_on` of the store it was trained on; empty where nobody wrote it down."""


def read_checkpoint(path: str | Path) -> Checkpoint:
    """A run directory (its best step, else its last), a step, a z-lab or a speculators checkpoint.

    ValueError, in one line with the path, for anything that is not exactly that.
    """
    directory = checkpoint_directory(Path(path))
    optional: dict[str, tuple[int, ...]] = {}
    try:
        config = _read_json(directory / "config.json")
        name = layout_name(config)
        if name == "speculators":
            shape = layout.shape_from_speculators(config)
            optional = layout.speculators_optional(shape)
        else:
            shape = layout.shape_from_zlab(config)
        tensors = _read_tensors(directory, layout.zlab_tensors(shape), optional)
        trained_on = remembered(directory)
    except KeyError as error:
        missing = f"{directory}/config.json has no key {error}"
        raise ValueError(f"{missing}: not a DFlash drafter") from error
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{directory} is not a drafter that can be read: {error}") from error
    if name == "speculators":
        for extra in layout.target_tensors(shape):
            tensors.pop(extra, None)
        # an offset from the drafter's id to the target's, and which of the target's it knows
        offset_V, known_V = tensors.pop("d2t", None), tensors.pop("t2d", None)
        is_mapped = offset_V is not None and bool(offset_V.any())
        if is_mapped or (known_V is not None and not bool(known_V.all())):
            raise ValueError(f"{directory} maps its vocabulary: only full vocabularies are read")
    for tensor_name, tensor in tensors.items():
        if not torch.isfinite(tensor).all():
            raise ValueError(f"{directory}: {tensor_name} holds NaN or Inf: no use as a drafter")
    return Checkpoint(
        path=directory,
        layout=name,
        shape=shape,
        tensors=layout.split(tensors, shape),
        trained_on=trained_on,
    )


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ValueError(f"{path.name} is missing")
    return read_object(path)


def _read_tensors(
    directory: Path,
    expected: Mapping[str, tuple[int, ...]],
    optional: Mapping[str, tuple[int, ...]],
) -> dict[str, torch.Tensor]:
    """Check every header first, then load; some writers put `model.` before each name."""
    if (directory / _INDEX).is_file():
        weight_map = _read_json(directory / _INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ValueError(f"{_INDEX} names no file (weight_map)")
        names = sorted(set(weight_map.values()))
    else:
        names = [WEIGHTS]
    files = [inside(directory, name) for name in names]
    found: dict[str, tuple[int, ...]] = {}
    for file in files:
        for name, (dtype, size) in _header(file).items():
            plain = name.removeprefix("model.")
            if plain in found:
                raise ValueError(f"{name} stands in it twice")
            if dtype not in _FLOATS and plain not in optional:
                raise ValueError(f"{name} has dtype {dtype}, expected one of {sorted(_FLOATS)}")
            found[plain] = size
    there = {name: size for name, size in optional.items() if name in found}
    if problems := layout.differences({**expected, **there}, found):
        raise ValueError("; ".join(problems))
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        tensors |= {name.removeprefix("model."): t for name, t in load_file(file).items()}
    return tensors


def _header(file: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Name -> (dtype, shape), without loading."""
    if not file.is_file():
        raise ValueError(f"{file.name} is missing")
    size_bytes = file.stat().st_size
    with file.open("rb") as stream:
        header_bytes = int.from_bytes(stream.read(8), "little")
        if size_bytes < 8 or header_bytes > min(size_bytes - 8, _MAX_HEADER_BYTES):
            raise ValueError(
                f"{file.name} ({size_bytes} bytes) claims a header of {header_bytes}: truncated"
            )
        try:
            # every size, offset and type that it claims is held against the file
            with safe_open(file, framework="pt"):
                header = json.loads(stream.read(header_bytes))
        except SafetensorError as error:
            raise ValueError(f"{file.name} is truncated or damaged ({error})") from error
    tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
    return {name: (entry["dtype"], tuple(entry["shape"])) for name, entry in tensors.items()}
