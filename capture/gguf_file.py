"""A GGUF file -> its metadata and its tensors in float32. Every length in it is checked.

Blocks of 32 values share a scale; the low halves of a 4-bit block's bytes are its values 0 to 15.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from dflash_pipeline.configs.errors import UsageError

STRING, ARRAY = 8, 9
SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}


class _Cursor:
    """Reads little-endian values in order; refuses to read past the end."""

    def __init__(self, path: Path) -> None:
        self.path, self.position = path, 0
        size_bytes = path.stat().st_size
        with open(path, "rb") as file:
            # an empty file cannot be mapped
            self.data = memoryview(
                mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size_bytes else b""
            )

    def bytes(self, count: int) -> memoryview:
        if count > len(self.data) - self.position:
            raise UsageError(f"{self.path}: cut short or damaged at byte {self.position}")
        self.position += count
        return self.data[self.position - count : self.position]

    def number(self, code: str) -> Any:
        return struct.unpack("<" + code, self.bytes(struct.calcsize("<" + code)))[0]

    def string(self) -> str:
        return bytes(self.bytes(self.number("Q"))).decode("utf-8", "replace")

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.string()
        if kind == ARRAY:
            element, count = self.number("I"), self.number("Q")
            if element == ARRAY or count > len(self.data):
                raise UsageError(f"{self.path}: damaged array at byte {self.position}")
            return [self.value(element) for _ in range(count)]
        if kind not in SCALARS:
            raise UsageError(f"{self.path}: unknown value type {kind} at byte {self.position}")
        return self.number(SCALARS[kind])


def read(path: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The metadata and the tensors (float32, HF's axis order) of a GGUF file, version 2 or 3."""
    cursor = _Cursor(path)
    if len(cursor.data) < 24 or bytes(cursor.bytes(4)) != b"GGUF":
        raise UsageError(f"{path} is no GGUF file")
    version, num_tensors, num_values = (cursor.number(code) for code in "IQQ")
    if version not in (2, 3):
        raise UsageError(f"{path}: GGUF version {version}; 2 and 3 are read")
    values: dict[str, Any] = {}
    for _ in range(num_values):
        key = cursor.string()
        values[key] = cursor.value(cursor.number("I"))
    places = []
    for _ in range(num_tensors):
        name, num_axes = cursor.string(), cursor.number("I")
        if num_axes > 4:
            raise UsageError(f"{path}: tensor {name} has {num_axes} axes")
        # GGUF counts axes from the fastest one
        shape = tuple(reversed([cursor.number("Q") for _ in range(num_axes)]))
        places.append((name, shape, cursor.number("I"), cursor.number("Q")))
    alignment = int(values.get("general.alignment", 32))
    if alignment < 1:
        raise UsageError(f"{path}: alignment {alignment}")
    base = -(-cursor.position // alignment) * alignment
    tensors = {}
    for name, shape, kind, offset in places:
        if kind not in DECODERS:
            raise UsageError(
                f"{path}: tensor {name} has ggml type {kind}; F32, F16, Q4_1 and Q8_0 are read"
            )
        block_bytes, block_size, decode = DECODERS[kind]
        count = math.prod(shape)
        if count % block_size:
            raise UsageError(
                f"{path}: tensor {name} of {count} values is no whole number of blocks"
            )
        cursor.position = base + offset
        blocks = np.frombuffer(cursor.bytes(count // block_size * block_bytes), np.uint8)
        tensors[name] = decode(blocks.reshape(-1, block_bytes)).reshape(shape)
    return values, tensors


def _halves(blocks: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(blocks).view(np.float16).astype(np.float32)


def _q8_0(blocks: np.ndarray) -> np.ndarray:
    """Blocks of 32: a half scale, then 32 int8."""
    scaled: np.ndarray = _halves(blocks[:, :2]) * blocks[:, 2:].view(np.int8).astype(np.float32)
    return scaled


def _q4_1(blocks: np.ndarray) -> np.ndarray:
    """Blocks of 32: half scale, half minimum, 16 bytes whose low halves are values 0 to 15."""
    scale_and_minimum = _halves(blocks[:, :4])
    quants = np.concatenate([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], axis=1).astype(np.float32)
    scaled: np.ndarray = scale_and_minimum[:, :1] * quants + scale_and_minimum[:, 1:]
    return scaled


def _f32(blocks: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(blocks).view(np.float32).copy()


# ggml type -> bytes and values of a block, and its decoder
DECODERS: dict[int, tuple[int, int, Callable[[np.ndarray], np.ndarray]]] = {
    0: (4, 1, _f32),
    1: (2, 1, _halves),
    3: (20, 32, _q4_1),
    8: (34, 32, _q8_0),
}
