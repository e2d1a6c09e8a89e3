"""Writes a safetensors file straight from the tensors' memory.

The library makes a second copy of every byte while it holds the interpreter's lock, which stops a
training step that runs beside it; a write by the system holds nothing.
Format: length of the header (8 bytes, little-endian), the header as JSON, the tensors end to end.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dflash_pipeline.configs.disk import writing
from dflash_pipeline.store import durable

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
# the header's end, so that tensors of any type are aligned where the file is mapped
_ALIGNMENT = 8


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write contiguous tensors in host memory, the widest types first, and sync the file."""
    ordered = sorted(tensors.items(), key=lambda entry: (-entry[1].element_size(), entry[0]))
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, tensor in ordered:
        if not tensor.is_contiguous() or tensor.device.type != "cpu":
            raise ValueError(f"{name} is not contiguous in host memory: {path} is not written")
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [end, end + tensor.nbytes],
        }
        end += tensor.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
    try:
        with writing(path):
            durable.write_all(descriptor, len(text).to_bytes(8, "little") + text, 0)
            for name, tensor in ordered:
                if tensor.nbytes:
                    place = 8 + len(text) + header[name]["data_offsets"][0]
                    plain = tensor.detach().reshape(-1).view(torch.uint8)
                    durable.write_all(descriptor, plain.numpy(), place)
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
