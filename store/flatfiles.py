"""Files of a store that are one array each, opened once their place and size are checked."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import numpy as np


def sha256_of(file: Path) -> str:
    """sha256 of a file's bytes."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def read_flat(store: Path, name: str, dtype: str, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """A flat array of the store read whole; ValueError if it is missing or of another size."""
    return np.fromfile(_checked(store, name, dtype, shape), dtype).reshape(shape)


def map_flat(store: Path, name: str, dtype: str, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """The same as a read-only memory map."""
    return np.memmap(_checked(store, name, dtype, shape), dtype, "r", 0, shape)


def _checked(store: Path, name: str, dtype: str, shape: tuple[int, ...]) -> Path:
    file = inside(store, name)
    expected = int(np.prod(shape, dtype=object)) * np.dtype(dtype).itemsize
    try:
        found = file.stat().st_size
    except FileNotFoundError:
        raise ValueError(f"{file} is missing: the store is damaged") from None
    if found != expected:
        raise ValueError(f"{file} has {found} bytes, expected {expected}: the store is damaged")
    return file


def inside(store: Path, name: str) -> Path:
    """The file of this name, which must not lead out of the store through a link."""
    file = store / name
    root = os.path.join(os.path.realpath(store), "")
    if not os.path.realpath(file).startswith(root):
        raise ValueError(f"{file} leads out of the store: refused")
    return file
