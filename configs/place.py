"""Where one process of a stage runs."""

from __future__ import annotations

from dataclasses import dataclass


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
    rendezvous: str
    """`init_method` of torch.distributed."""
    threads: int
    """CPU threads that this process may keep busy."""
