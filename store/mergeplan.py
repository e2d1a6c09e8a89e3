"""Which stores can become one, and where each of their shards then stands.

A shard keeps its samples, their order and its length bucket; buckets of one bound become one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dflash_pipeline.configs.errors import UsageError
from dflash_pipeline.store.commit import RELEASED
from dflash_pipeline.store.reader import Store
from dflash_pipeline.store.spec import Layout, ShardId
from dflash_pipeline.store.table import SampleTable, build_table

_NAMED_SAMPLES = 5
_KEPT_COLUMNS = ("source_row", "split", "num_tokens", "num_teacher", "num_anchors", "token_hash")


@dataclass(frozen=True, slots=True)
class MergePlan:
    """The plan of the store that others are merged into."""

    layout: Layout
    table: SampleTable
    sources: list[tuple[int, ShardId]]
    """(store, its shard), in the order of `shard_ids`."""
    shard_ids: list[ShardId]
    """The place of each in the new store, bucket by bucket."""


def check_mergeable(stores: Sequence[Store]) -> None:
    """UsageError unless all stores are sealed, of one identity, and without a sample in common."""
    first, *others = stores
    for store in stores:
        if not store.is_sealed:
            raise UsageError(
                f"{store.path} is not sealed: finish its capture (run the same command again) first"
            )
        if any(_is_released(store, shard_id) for shard_id in store.layout.shard_ids()):
            raise UsageError(
                f"{store.path} was captured under a quota, and part of it is released: capture its "
                "data anew without --quota"
            )
    of_calibration = f" (int8 and int4: --calibration-from {first.path})"
    for other in others:
        found = first.spec.differences(other.spec)
        found += _other_differences(first, other)
        if found:
            raise UsageError(
                f"{first.path} and {other.path} cannot be merged, they differ in "
                f"{'; '.join(found)}: capture one of them again with the settings of the other"
                + of_calibration
                * any(text.startswith("calibration_hash") for text in found)
            )
    for place, store in enumerate(stores):
        for before in stores[:place]:
            _check_apart(before, store)


def _is_released(store: Store, shard_id: ShardId) -> bool:
    record = store.commit_of(shard_id)
    return record is not None and record.state == RELEASED


def _other_differences(first: Store, other: Store) -> list[str]:
    """What is not identity, but would make one store of the two wrong."""
    values = {
        "mask_token_id": (first.attributes.mask_token_id, other.attributes.mask_token_id),
        "chunk_rows": (first.layout.chunk_rows, other.layout.chunk_rows),
        "data.heldout": (first.attributes.heldout_shares, other.attributes.heldout_shares),
    }
    return [f"{name}: {one!r} and {two!r}" for name, (one, two) in values.items() if one != two]


def _check_apart(one: Store, two: Store) -> None:
    shared = np.intersect1d(one.table.sample_id, two.table.sample_id)
    if not len(shared):
        return
    places = np.flatnonzero(np.isin(two.table.sample_id, shared[:_NAMED_SAMPLES]))
    names = ", ".join(repr(two.table.key(int(i))) for i in places)
    more = ", ..." * (len(shared) > _NAMED_SAMPLES)
    hint = "capture the new data without them"
    if not np.isin(two.table.token_hash, one.table.token_hash).any():
        # other text under the same keys: each sample counts once then
        hint += f", or train on both with --store {one.path} --store {two.path}"
    raise UsageError(
        f"{len(shared)} samples stand in both {one.path} and {two.path} ({names}{more}): {hint}"
    )


def merge_plan(stores: Sequence[Store]) -> MergePlan:
    """Layout and sample table of checked stores (`check_mergeable`) as one."""
    layouts = [store.layout for store in stores]
    by_bound: dict[int, list[tuple[int, ShardId]]] = {}
    for number, layout in enumerate(layouts):
        for shard_id in layout.shard_ids():
            bound = layout.bucket_bounds[shard_id.bucket]
            by_bound.setdefault(bound, []).append((number, shard_id))
    bounds = sorted(by_bound)
    most = [
        max(layouts[number].num_samples_per_shard_max[i.bucket] for number, i in by_bound[bound])
        for bound in bounds
    ]
    layout = Layout(
        rows_per_shard=max(one.rows_per_shard for one in layouts),
        chunk_rows=layouts[0].chunk_rows,
        token_budget=max(one.token_budget for one in layouts),
        pad_multiple=math.gcd(*(one.pad_multiple for one in layouts)),
        bucket_bounds=tuple(bounds),
        num_shards=tuple(len(by_bound[bound]) for bound in bounds),
        num_samples_per_shard_max=tuple(most),
        seed=layouts[0].seed,
    )
    sources = [source for bound in bounds for source in by_bound[bound]]
    return MergePlan(layout, _table(stores, sources, layout), sources, layout.shard_ids())


def _table(
    stores: Sequence[Store], sources: Sequence[tuple[int, ShardId]], layout: Layout
) -> SampleTable:
    domains = tuple(dict.fromkeys(name for store in stores for name in store.table.domains))
    names = tuple(dict.fromkeys(name for store in stores for name in store.table.sources))
    parts = [(stores[number].table, stores[number].table.of_shard(i)) for number, i in sources]
    columns = {
        name: np.concatenate([getattr(table, name)[samples] for table, samples in parts])
        for name in (*_KEPT_COLUMNS, "batch")
    }
    columns["domain"] = np.concatenate(
        [_renumbered(table.domain[samples], table.domains, domains) for table, samples in parts]
    )
    columns["source"] = np.concatenate(
        [_renumbered(table.source[samples], table.sources, names) for table, samples in parts]
    )
    sizes = [samples.stop - samples.start for _, samples in parts]
    shard_ids = layout.shard_ids()
    columns["bucket"] = np.repeat([i.bucket for i in shard_ids], sizes)
    columns["shard"] = np.repeat([i.shard for i in shard_ids], sizes)
    keys = [table.key(i) for table, samples in parts for i in range(len(table))[samples]]
    return build_table(keys, columns, layout, domains, names)


def _renumbered(
    values: np.ndarray[tuple[int, ...], np.dtype[np.int32]],
    before: Sequence[str],
    after: Sequence[str],
) -> np.ndarray[tuple[int, ...], np.dtype[np.int32]]:
    """Numbers of names in `before` as numbers of the same names in `after`."""
    return np.array([after.index(name) for name in before], np.int32)[values]
