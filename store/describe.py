"""`dflash inspect`: what a store holds, how far it is, how to read it. Never fails on data."""

from __future__ import annotations

import contextlib
import difflib
import json
import os
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dflash_pipeline.configs.errors import UsageError
from dflash_pipeline.configs.mounts import root_of
from dflash_pipeline.store import durable, glance, paths, stripes
from dflash_pipeline.store.commit import COMMITTED, RELEASED, Commit
from dflash_pipeline.store.consumers import consumers, presence_text
from dflash_pipeline.store.reader import Store, open_store
from dflash_pipeline.store.report import render, sample_text
from dflash_pipeline.store.rolling import awaited_text
from dflash_pipeline.store.snippet import snippet
from dflash_pipeline.store.spec import SAMPLE_STATES, ShardId
from dflash_pipeline.store.table import HELD_OUT
from dflash_pipeline.store.text import decoder_of

Records = dict[ShardId, Commit]

_SHOWN_TOKENS = 48


def describe(path: str | Path, sample: str = "") -> dict[str, Any]:
    """All that `inspect` shows, as plain JSON values; only a path without a store raises.

    `sample`: key or number of the one to show whole, empty: the first tokens of the first one.
    UsageError if the store has no such sample.
    """
    root = root_of(path)
    problems: list[str] = []
    found: dict[str, Any] = {"path": str(path), "problems": problems}
    try:
        store = _opened(path, problems)
    except (OSError, ValueError) as error:
        if not (root / "zarr.json").exists():
            raise
        problems.append(str(error))
        return found
    table, layout, records = store.table, store.layout, _records(store)
    is_held_out = table.split == HELD_OUT
    found |= {
        "identity": store.spec.to_dict(),
        "layout": layout.to_dict(),
        "data_hash": store.attributes.data_hash,
        "plan_hash": store.plan_hash,
        "mask_token_id": store.attributes.mask_token_id,
        "state": _state(store),
        "samples": {
            "all": len(table),
            "held_out": int(is_held_out.sum()),
            "readable": int(store.readable_N.sum()),
            "domains": {
                name: int((table.domain == number).sum())
                for number, name in enumerate(table.domains)
            },
        },
        "dropped": dict(store.attributes.dropped),
        "bad": {
            reason: int((store.state_N == code).sum())
            for code, reason in enumerate(SAMPLE_STATES)
            if code and (store.state_N == code).any()
        },
        "buckets": _buckets(store, records),
        "lengths": _histogram(table.num_tokens),
        "layers": _layers(store, records),
        "calibration": dict(store.calibration.report),
        "consumers": _consumers(store, problems),
        "awaited": _awaited(store, problems),
        "leftovers": _leftovers(store),
        "mounts": [str(mount) for mount in stripes.mounts_of(root, layout)],
        "snippet": _snippet(store, root),
    }
    found["total"] = _total(store, found["buckets"])
    found["progress"] = _progress(store, records, found["total"], found["state"])
    found["sample"] = _sample(store, _named(store, sample), problems)
    return found


def _opened(path: str | Path, problems: list[str]) -> Store:
    """As any reader opens it, or, where that is refused, with what is wrong listed."""
    try:
        return open_store(path)
    except (OSError, ValueError):
        # a sealed store's records are then read one by one, which takes its time
        return Store(path, problems)


def describe_progress(store: Store) -> dict[str, Any]:
    """The part of it that changes while a store grows."""
    records = _records(store)
    total = _total(store, _buckets(store, records))
    state = _state(store)
    progress = _progress(store, records, total, state)
    return {"state": state, "total": total, "progress": progress}


def _records(store: Store) -> Records:
    """The record of each committed shard: unpacked once, there may be tens of thousands."""
    found = ((i, store.commit_of(i)) for i in store.layout.shard_ids())
    return {i: record for i, record in found if record is not None}


def _buckets(store: Store, records: Records) -> list[dict[str, Any]]:
    return [_bucket(store, records, bucket) for bucket in range(len(store.layout.num_shards))]


def _named(store: Store, sample: str) -> int | None:
    """The number of the sample with this key, or of this number."""
    table = store.table
    if not sample:
        return None
    try:
        return table.find(sample)
    except KeyError:
        if sample.isdecimal() and int(sample) < len(table):
            return int(sample)
    near = difflib.get_close_matches(sample, [table.key(i) for i in range(len(table))], n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise UsageError(
        f"--sample {sample}: no key of {store.path}, and no number below {len(table)}{hint}"
    )


def _state(store: Store) -> str:
    if store.is_sealed and store.spec.is_calibrated:
        return "sealed"
    is_stopped = glance.has_stopped(str(store.path))
    if store.spec.is_calibrated and not store.is_complete:
        return "stopped" if is_stopped else "growing"
    reached = "complete, not sealed" if store.spec.is_calibrated else "not calibrated yet"
    return f"{reached}, stopped" if is_stopped else reached


def _bucket(store: Store, records: Records, bucket: int) -> dict[str, Any]:
    table, num_shards = store.table, store.layout.num_shards[bucket]
    is_here = table.bucket == bucket
    shard_ids = [ShardId(bucket, shard) for shard in range(num_shards)]
    mine = [records[i] for i in shard_ids if i in records]
    rows = sum(record.rows for record in mine)
    data = sum(record.hidden_bytes + record.last_bytes for record in mine)
    released = [record for record in mine if record.state == RELEASED]
    return {
        "bucket": bucket,
        "max_len": store.layout.bucket_bounds[bucket],
        "samples": int(is_here.sum()),
        "tokens": int(table.num_tokens[is_here].sum()),
        "shards": num_shards,
        "committed_shards": len(mine),
        "released_shards": len(released),
        "compiled_shards": sum(record.is_compiled for record in mine),
        "committed_tokens": rows,
        "fill": rows / max(1, len(mine) * store.layout.rows_per_shard),
        "bytes": data,
        "released_bytes": sum(record.hidden_bytes + record.last_bytes for record in released),
        "bytes_per_token": data / max(1, rows),
    }


def _total(store: Store, buckets: list[dict[str, Any]]) -> dict[str, Any]:
    shards = ("shards", "committed_shards", "released_shards", "compiled_shards")
    names = ("samples", "tokens", *shards, "committed_tokens", "bytes", "released_bytes")
    total: dict[str, Any] = {name: sum(bucket[name] for bucket in buckets) for name in names}
    rows, num_states = total["committed_tokens"], store.spec.num_amax
    total["bytes_per_token"] = total["bytes"] / max(1, rows)
    # against bf16 of every captured layer and of `last` for every token
    plain = 2 * store.spec.hidden_size * num_states * rows
    total["ratio_to_bf16"] = plain / total["bytes"] if total["bytes"] else 0.0
    return total


def _progress(
    store: Store, records: Records, total: Mapping[str, Any], state: str
) -> dict[str, Any]:
    """Rate and time left, from when commit records appeared; no time where nobody is at work."""
    times: list[tuple[float, int]] = []
    for shard_id, record in records.items():
        # a release writes the record anew
        if record.state == COMMITTED:
            # a record of the seal alone has no time
            with contextlib.suppress(OSError):
                file = f"{store.path}/{paths.commit_file(shard_id)}"
                times.append((os.stat(file).st_mtime, record.rows))
    left = total["tokens"] - total["committed_tokens"]
    times.sort()
    # the first record's own duration is unknown, so its rows do not count
    wall_s = times[-1][0] - times[0][0] if times else 0.0
    rate = sum(rows for _, rows in times[1:]) / wall_s if wall_s > 0 else 0.0
    return {
        "tokens_left": left,
        "tokens_per_s": rate,
        "eta_s": left / rate if rate and "stopped" not in state else None,
        "last_commit_age_s": time.time() - times[-1][0] if times else None,
    }


def _histogram(length_N: Any) -> list[dict[str, int]]:
    """Samples whose length lies in [from, to), ranges doubling."""
    powers = Counter(np.floor(np.log2(np.maximum(length_N, 1))).astype(int).tolist())
    return [
        {"from": 1 << power, "to": 2 << power, "samples": powers[power]} for power in sorted(powers)
    ]


def _layers(store: Store, records: Records) -> list[dict[str, Any]]:
    """Largest value and number of clipped ones of each layer, over all committed shards."""
    names = [*(str(i) for i in store.spec.layer_ids), *(["last"] if store.spec.has_last else [])]
    amax, clipped = np.zeros(len(names), np.float32), np.zeros(len(names), np.int64)
    for record in records.values():
        amax = np.maximum(amax, record.amax)
        clipped += record.clipped
    return [
        {"layer": name, "amax": float(peak), "clipped": int(count)}
        for name, peak, count in zip(names, amax, clipped, strict=True)
    ]


def _consumers(store: Store, problems: list[str]) -> list[dict[str, Any]]:
    """The training runs that follow a rolling store."""
    try:
        found = consumers(store.path, store.layout)
    except ValueError as error:
        problems.append(str(error))
        return []
    return [
        {
            "name": one.name,
            "used_shards": int(one.used.sum()),
            "presence": presence_text(store.path, one),
        }
        for one in found
    ]


def _awaited(store: Store, problems: list[str]) -> str:
    """Whether a rolling store waits for more training runs; empty: it does not."""
    try:
        return awaited_text(store.path, store.layout) if store.is_rolling else ""
    except ValueError as error:
        problems.append(str(error))
        return ""


def _leftovers(store: Store) -> list[str]:
    """Files of interrupted captures: no harm, they go at the next start."""
    tops = (store.path, *stripes.mounts_of(store.path, store.layout))
    found = [name for top in tops for name in durable.temporaries_below(top)]
    return sorted(found)


def _sample(store: Store, named: int | None, problems: list[str]) -> dict[str, Any] | None:
    """The sample, or the first readable one cut short: its text or ids, the size of its rows."""
    readable = np.flatnonzero(store.readable_N)
    if named is None and not len(readable):
        return None
    i = int(readable[0]) if named is None else named
    try:
        ids_T, mask_T = store.tokens(i)
        hidden_TKH = store.decode_hidden(store.hidden(i))
    except (OSError, ValueError) as error:
        problems.append(str(error))
        return None
    shown = slice(None) if named is not None else slice(_SHOWN_TOKENS)
    ids, mask = ids_T[shown].tolist(), mask_T[shown].tolist()
    decode = decoder_of(store)
    with np.errstate(over="ignore", invalid="ignore"):
        rms_TK = np.sqrt(np.square(hidden_TKH, dtype=np.float64).mean(2))
        rows = zip(
            store.spec.layer_ids, np.median(np.abs(hidden_TKH), (0, 2)), rms_TK.T, strict=True
        )
        return {
            "sample": i,
            "key": store.table.key(i),
            "domain": store.table.domains[int(store.table.domain[i])],
            "num_tokens": len(ids_T),
            "num_supervised": int(mask_T.sum()),
            "ids": ids,
            "text": decode(ids) if decode else None,
            "supervised": [
                {"from": begin, "to": end, "text": decode(ids[begin:end]) if decode else None}
                for begin, end in _runs(mask)
            ],
            "layers": [
                {
                    "layer": layer,
                    "median_abs": float(median),
                    "rms_p50": float(np.quantile(rms_T, 0.5)),
                    "rms_p99": float(np.quantile(rms_T, 0.99)),
                }
                for layer, median, rms_T in rows
            ],
        }


def _snippet(store: Store, root: Path) -> str:
    """Lines that read the first readable sample; where none is yet, what will be the first."""
    readable, table = np.flatnonzero(store.readable_N), store.table
    i = int(readable[0]) if len(readable) else 0
    return snippet(str(root), store.spec.hidden_mode, i, int(table.bucket[i]), int(table.start[i]))


def _runs(mask: list[int]) -> list[tuple[int, int]]:
    """Where the supervised tokens stand, as [from, to)."""
    edges = np.flatnonzero(np.diff([0, *mask, 0]))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def main(run: object, place: object, extra: Mapping[str, object]) -> None:
    """Entry of `dflash inspect`; extra: path, json, sample."""
    found = describe(str(extra["path"]), str(extra["sample"]))
    if extra["json"]:
        print(json.dumps(found, indent=1, ensure_ascii=False))
    else:
        print(sample_text(found) if extra["sample"] else render(found))
