"""`/nvme0/hs,/nvme1/hs`: one store whose shards are shared out over several mounts."""

from __future__ import annotations

from pathlib import Path

from dflash_pipeline.configs.errors import UsageError


def split(text: str) -> tuple[str, ...]:
    """The directories that a store is written as, its own first.

    A directory that itself has a comma in its name is one. UsageError for an empty or a repeated
    entry.
    """
    if "," not in text or Path(text).exists():
        return (text,)
    parts = tuple(part.strip() for part in text.split(","))
    if not all(parts) or len({str(Path(part).absolute()) for part in parts}) != len(parts):
        raise UsageError(f"--store {text}: expected different directories, separated by commas")
    return parts


def root_of(store: str | Path) -> Path:
    """The store's own directory; logs stand beside it."""
    return store if isinstance(store, Path) else Path(split(store)[0])
