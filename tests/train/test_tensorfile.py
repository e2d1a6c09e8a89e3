"""Files that the safetensors library reads back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from dflash_pipeline.train.tensorfile import write_tensors


def test_the_library_reads_the_same_tensors_back(tmp_path: Path) -> None:
    tensors = {
        "flag": torch.tensor([True, False, True]),
        "half": torch.randn(3, 5).bfloat16(),
        "count": torch.tensor(7.0),
        "exact": torch.randn(2, dtype=torch.float64),
        "bytes": torch.arange(11, dtype=torch.uint8),
        "ids": torch.arange(4),
        "none": torch.empty(0, 3),
    }
    path = tmp_path / "some.safetensors"
    write_tensors(path, tensors, {"format": "pt"})
    found = load_file(path)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)
    # each begins where a mapped file may be read as its type: the odd sizes come last
    content = path.read_bytes()
    header_bytes = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + header_bytes])
    for name, tensor in tensors.items():
        assert (8 + header_bytes + header[name]["data_offsets"][0]) % tensor.element_size() == 0
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt"}
    with pytest.raises(FileExistsError):
        write_tensors(path, tensors, {})


def test_what_does_not_lie_in_one_piece_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="turned is not contiguous"):
        write_tensors(tmp_path / "file", {"turned": torch.zeros(2, 3).t()}, {})
    assert not list(tmp_path.iterdir())
