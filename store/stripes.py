"""A store over several mounts: whole shards lie on other disks, behind links in the store itself.

The plan, the tokens and the commit records stay in the store's own directory. The folder of a
shard's rows, `b0/hidden/c/7`, is there or is a link to the same path below another mount; so every
reader, plain zarr included, finds it, and the writer's rename stays within one file system. Shards
take turns in claim order, so that all disks are written and read at the same time.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from dflash_pipeline.configs.errors import UsageError
from dflash_pipeline.store import durable
from dflash_pipeline.store.documents import kinds
from dflash_pipeline.store.spec import Layout, ShardId, StoreSpec
from dflash_pipeline.store.table import claim_order

MOST_MOUNTS = 64
_DEPTH = 4
"""Folders from a mount down to that of a shard: bucket, array, `c`, number."""


def shard_folder(shard_id: ShardId, kind: str) -> str:
    """Where the rows of a shard lie, below a mount."""
    return f"b{shard_id.bucket}/{kind}/c/{shard_id.shard}"


def elsewhere(layout: Layout, num_mounts: int) -> dict[ShardId, int]:
    """The number of the mount, from 1, of each shard that is not in the store's own directory."""
    order = claim_order(layout.num_shards)
    return {i: turn % num_mounts for turn, i in enumerate(order) if turn % num_mounts}


def check_free(mounts: Sequence[Path]) -> None:
    """UsageError unless nothing but empty folders is at the further mounts of a new store."""
    if len(mounts) >= MOST_MOUNTS:
        raise UsageError(f"a store over {len(mounts) + 1} mounts: at most {MOST_MOUNTS}")
    for mount in mounts:
        for folder, _, names in os.walk(mount):
            if names:
                raise UsageError(
                    f"{mount} holds files ({folder}/{names[0]}), the store that is planned needs "
                    "it empty: name another directory, or remove them"
                )


def lay(directory: Path, mounts: Sequence[Path], spec: StoreSpec, layout: Layout) -> None:
    """Make the folders of shards on further mounts, and the links to them in `directory`."""
    for mount in mounts:
        durable.check_file_system(mount)
    turns = elsewhere(layout, len(mounts) + 1)
    for shard_id, number in turns.items():
        for kind, _, _ in kinds(spec):
            target = mounts[number - 1].absolute() / shard_folder(shard_id, kind)
            target.mkdir(parents=True, exist_ok=True)
            link = directory / shard_folder(shard_id, kind)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(target)
    for mount in mounts:
        for folder, folders, _ in os.walk(mount):
            durable.sync(Path(folder))
            if Path(folder).name == "c":
                # the shards' own folders are empty
                folders.clear()


def mounts_of(store: Path, layout: Layout) -> list[Path]:
    """The further mounts of a store, in their order; none if all of it is in one directory."""
    found: dict[Path, None] = {}
    for shard_id in claim_order(layout.num_shards)[:MOST_MOUNTS]:
        link = store / shard_folder(shard_id, "hidden")
        if link.is_symlink():
            found[Path(os.readlink(link)).parents[_DEPTH - 1]] = None
    return list(found)


def missing_mounts(store: Path, layout: Layout) -> list[str]:
    """A line for each further mount that is not there, as it should be."""
    lines = []
    for shard_id in claim_order(layout.num_shards)[:MOST_MOUNTS]:
        link = store / shard_folder(shard_id, "hidden")
        if link.is_symlink() and not link.is_dir():
            mount = Path(os.readlink(link)).parents[_DEPTH - 1]
            lines.append(
                f"{store} is striped over {mount}, which is not there: mount it, or put back what "
                "was in it"
            )
    return list(dict.fromkeys(lines))


def link_faults(store: Path, spec: StoreSpec, layout: Layout) -> Iterator[str]:
    """Each folder of a shard that is not where the turns of the mounts put it."""
    mounts = mounts_of(store, layout)
    turns = elsewhere(layout, len(mounts) + 1)
    for shard_id in layout.shard_ids():
        number = turns.get(shard_id, 0)
        for kind, _, _ in kinds(spec):
            name = shard_folder(shard_id, kind)
            target = str(mounts[number - 1] / name) if number else None
            link = store / name
            found = os.readlink(link) if link.is_symlink() else None
            if found != target:
                yield f"{link} leads to {found or 'itself'}, expected {target or 'itself'}"


def check_named(store: Path, layout: Layout, named: Sequence[str]) -> None:
    """ValueError unless `named`, the further mounts that somebody wrote, are those of the store."""
    wanted = [str(mount) for mount in mounts_of(store, layout)]
    found = [str(Path(name).absolute()) for name in named]
    if found and found != wanted:
        raise ValueError(
            f"{store} is striped over {', '.join(wanted) or 'no other directory'}, but "
            f"{', '.join(found)} was named: write it as {','.join([str(store), *wanted])}"
        )


def free_bytes(store: Path, layout: Layout) -> int:
    """Bytes that may still be written on all file systems of a store."""
    folders = [store, *(mount for mount in mounts_of(store, layout) if mount.is_dir())]
    devices = {folder.stat().st_dev: folder for folder in folders}
    return sum(durable.free_bytes(folder) for folder in devices.values())
