"""What a drafter remembers of its store, beside its weights, and whether a line contradicts it.

Loads no torch: the command line asks as well, before anything else does.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from dflash_pipeline.configs.errors import UsageError
from dflash_pipeline.configs.inputs import EXPECTED_DRAFTER, STORE_FILE
from dflash_pipeline.configs.jsonfile import read_object
from dflash_pipeline.configs.load import RUN_FILE
from dflash_pipeline.store.reader import Store
from dflash_pipeline.store.spec import StoreSpec

TRAINED_ON = "trained_on.json"
"""In a checkpoint's directory, where it was written here."""
_HASHED_ROWS = 256


def rendering(spec: StoreSpec) -> dict[str, str]:
    """What of a store's identity says how its conversations became tokens."""
    return {
        "tokenizer_hash": spec.tokenizer_hash,
        "template_hash": spec.template_hash,
        "template_args": spec.template_args,
    }


def trained_on(store: Store) -> dict[str, str]:
    """What a drafter remembers of its store: `rendering`, and which target's states it holds."""
    named = {"target_id": store.spec.target_id, "embedding_hash": embedding_hash(store.embed())}
    return rendering(store.spec) | named


def embedding_hash(bits_VH: npt.NDArray[np.uint16]) -> str:
    """sha256 of rows from all over an embedding, bits of bf16: tells targets apart in whatever
    files they came, and costs nothing."""
    rows = bits_VH[:: max(1, len(bits_VH) // _HASHED_ROWS)]
    return hashlib.sha256(np.ascontiguousarray(rows).tobytes()).hexdigest()


def remembered(directory: Path) -> Mapping[str, str]:
    """What the drafter in a checkpoint's directory remembers; empty: nobody wrote it down.

    ValueError where the file is damaged.
    """
    file = directory / TRAINED_ON
    return read_object(file) if file.is_file() else {}


def check_rendering(
    path: Path, trained_on: Mapping[str, str], found: Mapping[str, str], whose: str
) -> None:
    """Raise UsageError if prompts are made in another way than the store that was trained on.

    A drafter knows what its target says under one template and one set of arguments; under others
    (thinking on instead of off) tau is that of another task. path, trained_on: of the drafter;
    whose: what `found` is of.
    """
    differing = [
        f"{name} {trained_on[name]!r}, {whose} has {value!r}"
        for name, value in found.items()
        if name in trained_on and trained_on[name] != value
    ]
    if differing:
        raise UsageError(
            f"drafter {path} was trained on a store of {'; '.join(differing)}: its tau would be "
            "that of another task. Set --thinking, --template-arg and --system-prompt, or the "
            "target, to those of the store"
        )


def checkpoint_directory(path: Path) -> Path:
    """Follow a run directory to a step: `best`, else `last`, each a link or a file with a name.

    UsageError for a run without a checkpoint, a store and any other directory without a drafter;
    ValueError where there is no directory.
    """
    if not path.is_dir():
        raise ValueError(f"{path} is not a directory: {EXPECTED_DRAFTER}")
    for name in ("best", "last"):
        pointer = path / name
        if pointer.is_dir():
            return pointer
        if pointer.is_file():
            return inside(path, pointer.read_text().strip())
    if not (path / "config.json").is_file():
        if (path / RUN_FILE).is_file():
            raise UsageError(
                f"{path} is a run without a checkpoint: its first is written after "
                "train.save_every steps, or when it is stopped"
            )
        if (path / STORE_FILE).is_file():
            raise UsageError(f"{path} is a store, not a drafter: {EXPECTED_DRAFTER}")
        raise UsageError(
            f"{path} is not a drafter, it holds no config.json, no best and no last step: "
            f"{EXPECTED_DRAFTER}"
        )
    return path


def inside(directory: Path, name: str) -> Path:
    """`name` within `directory`; a name that leads elsewhere is refused."""
    if not name or Path(name).name != name or name in (".", ".."):
        raise ValueError(f"{directory} names {name!r}, expected the plain name of a file in it")
    return directory / name
