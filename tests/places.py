"""The place of a process on the CPU, for tests that call a stage's entry themselves."""

from __future__ import annotations

from pathlib import Path

from dflash_pipeline.configs.place import Place


def cpu_place(log_dir: str | Path, stage: str, rank: int = 0, world: int = 1) -> Place:
    """One thread, and nobody to meet."""
    return Place(
        rank=rank,
        world=world,
        device="cpu",
        kind="cpu",
        log_dir=str(log_dir),
        stage=stage,
        number=rank,
        rendezvous="",
        threads=1,
    )
