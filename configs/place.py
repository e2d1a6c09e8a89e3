"""Where one process of a stage runs, and what follows from the place alone."""

from __future__ import annotations

import os
from dataclasses import dataclass

# set by tests: buffers are overwritten when they come back, so that a late reader is found out
POISON_VARIABLE = "DFLASH_POISON"


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """One process among `world` equal ones; written by the launcher, read by the stage."""

    rank: int
    world: int
    device: str
    """`cuda:0` (the process sees one GPU only) or `cpu`."""
    kind: str
    """`cuda` or `cpu`."""
    log_dir: str
    stage: str
    number: int
    """Names its log and its status; the rank, unless another launch is at work in `log_dir`."""
    rendezvous: str
    """`init_method` of torch.distributed."""
    threads: int
    """CPU threads that this process may keep busy."""


def dtype_name(wanted: str, kind: str) -> str:
    """A `dtype` setting as bf16 or fp32; auto: bf16 on CUDA, fp32 on a CPU."""
    if wanted != "auto":
        return wanted
    return "bf16" if kind == "cuda" else "fp32"


def is_poisoned() -> bool:
    """Whether buffers are overwritten when they come back."""
    return os.environ.get(POISON_VARIABLE) == "1"


def let_memory_grow(torch_version: str) -> None:
    """Before CUDA starts: batches differ in shape, and freed blocks of one would not fit another.

    torch 2.10 renamed the variable that says so.
    """
    is_old = tuple(int(part) for part in torch_version.split(".")[:2]) < (2, 10)
    name = "PYTORCH_CUDA_ALLOC_CONF" if is_old else "PYTORCH_ALLOC_CONF"
    os.environ.setdefault(name, "expandable_segments:True")
