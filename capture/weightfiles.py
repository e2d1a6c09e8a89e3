"""A target's files in its directory: those of its weights, fetched and hashed, and its JSON.

Weights are only ever read from safetensors; a pickled checkpoint (.bin, .pt) is refused.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from dflash_pipeline.configs.errors import UsageError, first_line
from dflash_pipeline.configs.jsonfile import read_object
from dflash_pipeline.store.flatfiles import sha256_of


def found(name: str, directory: Path) -> tuple[Path, ...]:
    """The safetensors files, fetched from the hub if need be, in name order.

    UsageError, naming the target `name`, where there is none or one is missing.
    """
    if not any(directory.glob("*.safetensors")) and is_snapshot(directory):
        snapshot(name, directory.name, with_weights=True)
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        names = _indexed(index)
    else:
        names = sorted(path.name for path in directory.glob("*.safetensors"))
    if not names:
        pickled = sorted(
            path.name for path in directory.iterdir() if path.suffix in {".bin", ".pt"}
        )
        hint = f"; {pickled[0]} is a pickle and is not read" if pickled else ""
        raise UsageError(
            f"target {name}: no .safetensors file in {directory}{hint}: save the model as "
            "safetensors"
        )
    missing = [one for one in names if not (directory / one).is_file()]
    if missing:
        raise UsageError(f"target {name}: {directory / missing[0]} is missing: fetch it again")
    return tuple(directory / one for one in names)


def digest(paths: Sequence[Path]) -> str:
    """sha256 over name and sha256 of each file, in the given order; reads all of them."""
    with ThreadPoolExecutor(max_workers=min(8, len(paths))) as pool:
        digests = list(pool.map(sha256_of, paths))
    lines = [f"{path.name} {one}\n" for path, one in zip(paths, digests, strict=True)]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def snapshot(name: str, revision: str | None, *, with_weights: bool) -> Path:
    """Directory of the hub's files; from the cache when offline. UsageError where there is none."""
    from huggingface_hub import snapshot_download

    patterns = ["*.json", "*.jinja", "*.txt", "*.model", "*.py"]
    if with_weights:
        patterns.append("*.safetensors")
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
    except (OSError, ValueError) as error:
        # hub errors are OSErrors (HTTP, offline, nothing in the cache) or ValueErrors (bad name)
        raise UsageError(
            f"target {name}: no such directory, and the hub does not give it: {first_line(error)}"
        ) from error


def is_snapshot(directory: Path) -> bool:
    """Whether a directory is the hub's, from where files may be missing."""
    return directory.parent.name == "snapshots"


def _indexed(index: Path) -> list[str]:
    """File names in a checkpoint's index, each of the index's own directory."""
    places = json_object(index).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise UsageError(f"{index} names no weights: expected a weight_map")
    names = sorted({str(name) for name in places.values()})
    foreign = [name for name in names if Path(name).name != name]
    if foreign:
        raise UsageError(f"{index} names {foreign[0]!r}: expected files of its own directory")
    return names


def json_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file. UsageError where it holds none."""
    try:
        return read_object(path)
    except ValueError as error:
        raise UsageError(f"{path.parent}: {error}") from error
