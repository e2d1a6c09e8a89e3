"""`dflash merge`: stores of one identity become one, their stored rows taken over byte for byte.

Nothing is decoded. A shard is a hard link where the new store has its capacity and stands on the
same file system; else it is a copy, compared with its checksums on the way, with a new index.
The new store is made as `<store>.planning` and gets its name when it is whole.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from dflash_pipeline.configs.disk import nearest, writing
from dflash_pipeline.configs.place import Place
from dflash_pipeline.store import commit, durable, paths
from dflash_pipeline.store.build import StoreBuilder, plan_lock
from dflash_pipeline.store.check import verify
from dflash_pipeline.store.checksum import crc32c
from dflash_pipeline.store.completion import write_calibration
from dflash_pipeline.store.mergeplan import MergePlan, check_mergeable, merge_plan
from dflash_pipeline.store.reader import Store, open_store
from dflash_pipeline.store.runlog import RunLog
from dflash_pipeline.store.shard import ShardShape
from dflash_pipeline.store.spec import Attributes, ShardId

Say = Callable[[str], None]
Progress = Callable[[int, int], None]

_LOCK_WAIT_S = 1.0
# what a file system answers that cannot make this hard link
_NO_LINK = (errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK)


def merge(
    out: str | Path, inputs: Sequence[str], *, deep: bool, say: Say, progress: Progress
) -> Store:
    """The sealed store at `out` that holds all samples of the `inputs`, which stay as they are.

    `deep`: every row of the inputs is read and checked, once it is known that they fit. ValueError
    names what stands in the way: an input that is damaged, not sealed, released in part or of
    another identity, or a sample that stands in two of them; nothing is left at `out` then.
    """
    # what small files tell before hours of reading rows
    for path in inputs:
        _check_whole(path, deep=False)
    stores = [open_store(path) for path in inputs]
    check_mergeable(stores)
    for path in inputs:
        if deep:
            _check_whole(path, deep=True)
        say(f"{path} is whole" + (", every row was read" if deep else ""))
    plan = merge_plan(stores)
    # the file system that it will stand on
    device = nearest(Path(out).absolute().parent).stat().st_dev
    linked = [one for one in plan.sources if _may_link(stores[one[0]], one[1], plan, device)]
    linked_bytes = sum(_data_bytes(stores[number], shard_id) for number, shard_id in linked)
    first = stores[0]
    with plan_lock(out, wait_s=_LOCK_WAIT_S):
        uncalibrated = replace(first.spec, calibration_hash="")
        with StoreBuilder(
            out,
            uncalibrated,
            plan.layout,
            plan.table,
            _attributes(stores),
            0,
            elsewhere_bytes=linked_bytes,
        ) as builder:
            builder.write_target(
                first.embed(), None if first.is_tied else first.head(), first.files()
            )
            for (number, shard_id), new_id in zip(plan.sources, plan.shard_ids, strict=True):
                rows, _ = stores[number].table.rows_of(shard_id)
                ids_N, mask_N = stores[number].shard_tokens(shard_id)
                builder.write_tokens(new_id, ids_N[:rows], mask_N[:rows])
            filling = _Filling(stores, plan, set(linked), progress)
            store = builder.publish(filling.fill)
    say(
        f"{out}: {len(plan.table)} samples of {len(stores)} stores; {filling.num_linked} shards "
        f"are hard links, {filling.num_copied} are copies"
    )
    return store


def _check_whole(path: str, *, deep: bool) -> None:
    problems = verify(path, deep=deep).problems
    if problems:
        more = f"; and {len(problems) - 3} more" * (len(problems) > 3)
        raise ValueError(f"{path} is damaged: {'; '.join(problems[:3])}{more}")


class _Filling:
    """Brings rows, commit records, calibration and seal into a planned store that has no name."""

    def __init__(
        self,
        stores: Sequence[Store],
        plan: MergePlan,
        linked: set[tuple[int, ShardId]],
        progress: Progress,
    ) -> None:
        self._stores, self._plan, self._linked, self._progress = stores, plan, linked, progress
        self.num_linked = self.num_copied = 0

    def fill(self, directory: Path) -> None:
        """ValueError where a copied row does not match its checksum, or the result is not whole."""
        first = self._stores[0]
        if first.spec.is_quantised:
            entries = first.calibration.entries(first.spec.num_layers, first.spec.has_last)
            write_calibration(directory, entries, first.calibration.report)
        merged = open_store(directory)
        num_shards = len(self._plan.shard_ids)
        pairs = zip(self._plan.sources, self._plan.shard_ids, strict=True)
        for done, ((number, shard_id), new_id) in enumerate(pairs):
            self._progress(done, num_shards)
            is_linked = (number, shard_id) in self._linked
            self._take_over(self._stores[number], shard_id, merged, new_id, is_linked)
        self._progress(num_shards, num_shards)
        merged.seal()
        problems = verify(directory, deep=False).problems
        if problems:
            raise ValueError(f"the merged store is not whole: {'; '.join(problems[:3])}")

    def _take_over(
        self, source: Store, shard_id: ShardId, merged: Store, new_id: ShardId, is_linked: bool
    ) -> None:
        record = source.commit_of(shard_id)
        assert record is not None
        place = source.path / paths.hidden_file(shard_id), merged.path / paths.hidden_file(new_id)
        shapes = source.hidden_shape, merged.hidden_shape
        is_linked = _bring(*place, record.rows, record.hidden_crcs, *shapes, is_linked)
        if source.last_shape is not None and merged.last_shape is not None:
            place = source.path / paths.last_file(shard_id), merged.path / paths.last_file(new_id)
            shapes = source.last_shape, merged.last_shape
            is_linked &= _bring(*place, record.last_rows, record.last_crcs, *shapes, is_linked)
        self.num_linked += is_linked
        self.num_copied += not is_linked
        record = replace(
            record,
            token_crcs=merged.token_crcs(new_id),
            hidden_bytes=merged.hidden_shape.file_bytes(record.rows),
            last_bytes=merged.last_shape.file_bytes(record.last_rows) if merged.last_shape else 0,
        )
        file = merged.path / paths.commit_file(new_id)
        file.parent.mkdir(parents=True, exist_ok=True)
        words = commit.pack(record, merged.spec, merged.layout, new_id.bucket)
        with writing(file):
            file.write_bytes(words.tobytes())


def _bring(
    source: Path,
    target: Path,
    num_rows: int,
    crcs: commit.Words,
    old: ShardShape,
    new: ShardShape,
    is_linked: bool,
) -> bool:
    """Link a shard file, or copy it where that is not possible; whether it is a link."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if is_linked:
        try:
            os.link(source, target)
        except OSError as error:
            if error.errno not in _NO_LINK:
                raise
        else:
            return True
    buffer = np.empty(old.chunk_bytes, np.uint8)
    original = os.open(source, os.O_RDONLY)
    copy = os.open(target, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
    try:
        for chunk in range(old.num_present(num_rows)):
            place = chunk * old.chunk_bytes
            durable.read_all(original, buffer, place)
            if crc32c(buffer) != int(crcs[chunk]):
                raise ValueError(f"{source}: chunk {chunk} does not match its checksum")
            with writing(target):
                durable.write_all(copy, buffer, place)
        index = new.index(num_rows)
        with writing(target):
            durable.write_all(copy, index, new.file_bytes(num_rows) - len(index))
    finally:
        os.close(original)
        os.close(copy)
    return False


def _may_link(store: Store, shard_id: ShardId, plan: MergePlan, device: int) -> bool:
    """The index at the end of a shard file tells the capacity, which must be the new store's."""
    if store.layout.rows_per_shard != plan.layout.rows_per_shard:
        return False
    return (store.path / paths.hidden_file(shard_id)).stat().st_dev == device


def _data_bytes(store: Store, shard_id: ShardId) -> int:
    record = store.commit_of(shard_id)
    return record.hidden_bytes + record.last_bytes if record is not None else 0


def _attributes(stores: Sequence[Store]) -> Attributes:
    """What is known of all of them: reasons counted together, and each capture's configuration."""
    reasons = {reason for store in stores for reason in store.attributes.dropped}
    hashes = "\n".join(store.attributes.data_hash for store in stores)
    return Attributes(
        data_hash=hashlib.sha256(hashes.encode()).hexdigest(),
        mask_token_id=stores[0].attributes.mask_token_id,
        dropped={
            reason: sum(store.attributes.dropped.get(reason, 0) for store in stores)
            for reason in sorted(reasons)
        },
        run={"merged": [dict(store.attributes.run) for store in stores]},
    )


def main(run: object, place: Place, extra: Mapping[str, object]) -> None:
    """Entry of `dflash merge`; extra: out, stores, deep."""
    log = RunLog(place)
    inputs = extra["stores"]
    assert isinstance(inputs, list)

    def progress(done: int, total: int) -> None:
        log.progress(done, total, "shards")

    logs = paths.log_directory(Path(str(extra["out"])))
    is_new = not logs.exists()
    try:
        merge(
            str(extra["out"]),
            [str(one) for one in inputs],
            deep=bool(extra["deep"]),
            say=log.say,
            progress=progress,
        )
    finally:
        if is_new:
            # locks: nobody captures into a merged store
            shutil.rmtree(logs, ignore_errors=True)
