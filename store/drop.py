"""`dflash status --drop`: a rolling store waits for a training run no longer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from dflash_pipeline.configs.errors import UsageError
from dflash_pipeline.store import metadata
from dflash_pipeline.store.consumers import consumers, release_lock, remove_row
from dflash_pipeline.store.spec import Layout


def drop(store: Path, layout: Layout, name: str) -> None:
    """Remove the row of the run with this directory or id; UsageError if there is none."""
    with release_lock(store):
        found = consumers(store, layout)
        wanted = str(Path(name).absolute())
        chosen = [one for one in found if name in (one.id, one.name) or wanted == one.name]
        if not found:
            raise UsageError(f"no training run follows {store}: there is none to drop")
        if not chosen:
            known = ", ".join(one.name for one in found)
            raise UsageError(
                f"no training run {name} follows {store}: --drop takes one of these: {known}"
            )
        for one in chosen:
            remove_row(store, one)


def main(run: object, place: object, extra: Mapping[str, object]) -> None:
    """Entry of `dflash status --drop`; extra: path, drop."""
    store = Path(str(extra["path"]))
    _, _, layout, _ = metadata.read_root(store)
    drop(store, layout, str(extra["drop"]))
    print(f"{store} waits for {extra['drop']} no longer")
