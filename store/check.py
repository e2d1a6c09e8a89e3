"""`dflash verify`: whether a store is whole; each fault is named by its file, shard and chunk.

Fast: metadata, commit records, sizes and indices. Deep: every byte, and every row is finite, not
zero, and within the range its capture saw. Temporary files and data without a commit record are
what an interrupted capture leaves: notes, no faults. The data of a released shard is not there.
"""

from __future__ import annotations

import json
import os
import shlex
import stat
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

from dflash_pipeline.configs.mounts import root_of
from dflash_pipeline.configs.sizes import size_text
from dflash_pipeline.store import durable, flatfiles, metadata, paths, stripes
from dflash_pipeline.store.build import remaining_bytes
from dflash_pipeline.store.calibrationgroup import (
    calibration_documents,
    calibration_files,
    read_calibration,
)
from dflash_pipeline.store.consumers import MOST_CONSUMERS, consumers
from dflash_pipeline.store.documents import Document, canonical, kinds
from dflash_pipeline.store.metadata import TOKEN_ARRAYS
from dflash_pipeline.store.reader import Store
from dflash_pipeline.store.rolling import consumers_document, gathering_of, is_rolling
from dflash_pipeline.store.shardcheck import (
    lost_its_record,
    sealed_faults,
    shard_faults,
    token_chunk_faults,
    token_faults,
)
from dflash_pipeline.store.spec import Attributes, Layout, ShardId

_THREADS = 4
# in an error, which is one line
_NAMED_SHARDS = 20


@dataclass
class Report:
    """What was looked at and what was found."""

    path: str
    is_deep: bool
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    num_shards: int = 0
    num_committed: int = 0
    """Released ones included."""
    num_released: int = 0
    checked_bytes: int = 0
    wall_s: float = 0.0
    damaged_shards: list[ShardId] = field(default_factory=list)
    """Those whose data or commit record is damaged or missing: what a capture can redo."""
    is_seal_damaged: bool = False
    no_repair: str = ""
    """Why damaged shards cannot be uncommitted, and what to do instead; empty: they can."""

    def count_text(self) -> str:
        """`1 problem`, `2 problems`."""
        return f"{len(self.problems)} problem{'s' * (len(self.problems) != 1)}"


def verify(path: str | Path, *, deep: bool) -> Report:
    """Check a store; only a path without a store raises."""
    begin = time.monotonic()
    report = Report(str(path), deep)
    root = root_of(path)
    try:
        parsed, spec, layout, attributes = metadata.read_root(root)
    except (OSError, ValueError) as error:
        if not (root / "zarr.json").exists():
            raise
        report.problems.append(str(error))
        return report
    report.no_repair = _no_repair(report.path, root, layout, attributes)
    documents = metadata.documents(parsed, spec, layout)
    try:
        calibrated = read_calibration(root, spec)
    except (OSError, ValueError) as error:
        report.problems.append(str(error))
    else:
        if spec.is_calibrated:
            documents |= calibration_documents(spec, layout, calibrated)
    if is_rolling(root):
        try:
            documents[paths.CONSUMERS] = consumers_document(layout, gathering_of(root))
        except ValueError as error:
            report.problems.append(str(error))
    report.problems += _metadata_faults(root, documents)
    report.problems += stripes.link_faults(root, spec, layout)
    if deep:
        report.problems += _hash_faults(root, parsed)
    try:
        store = Store(path, report.problems)
    except (OSError, ValueError) as error:
        report.problems.append(str(error))
    else:
        _check_store(store, report, deep)
    report.problems = list(dict.fromkeys(report.problems))
    report.wall_s = time.monotonic() - begin
    return report


def _no_repair(path: str, root: Path, layout: Layout, attributes: Attributes) -> str:
    if "merged" in attributes.run:
        return (
            f"{path} was made by dflash merge, no capture can redo its shards: remove it and merge "
            "the stores again"
        )
    # what stands there may be whole: uncommitted, it would all be captured again
    return "; ".join(stripes.missing_mounts(root, layout))


def _check_store(store: Store, report: Report, deep: bool) -> None:
    shard_ids = store.layout.shard_ids()
    report.num_shards = len(shard_ids)
    report.num_committed = sum(store.is_committed(shard_id) for shard_id in shard_ids)
    report.num_released = store.num_released
    _check_files(store, report)
    of_seal = list(sealed_faults(store))
    report.problems += of_seal
    report.is_seal_damaged = bool(of_seal)
    if report.num_committed and not store.spec.is_calibrated:
        report.problems.append(f"{store.path} has committed shards but no calibration")
    with ThreadPoolExecutor(_THREADS) as threads:
        for faults in threads.map(lambda i: list(token_chunk_faults(store, i, deep)), shard_ids):
            report.problems += faults
        found = threads.map(lambda i: shard_faults(store, i, deep), shard_ids)
        for shard_id, (faults, num_bytes) in zip(shard_ids, found, strict=True):
            report.problems += faults
            report.checked_bytes += num_bytes
            if faults or lost_its_record(store, shard_id):
                report.damaged_shards.append(shard_id)
    if deep:
        report.problems += token_faults(store)
    needed, free = remaining_bytes(store), stripes.free_bytes(store.path, store.layout)
    # a rolling store is not meant to hold all of it at the same time
    if needed > free and not store.is_rolling:
        report.notes.append(f"{size_text(needed)} are still to come, {size_text(free)} are free")


def _metadata_faults(root: Path, documents: Mapping[str, Document]) -> Iterator[str]:
    """Each array must be what identity and layout make of it; and links must lead where they do."""
    for name, document in documents.items():
        file = root / name / "zarr.json"
        try:
            found = json.loads(flatfiles.inside(root, f"{name}/zarr.json").read_bytes())
        except FileNotFoundError:
            yield f"{file} is missing"
        except OSError as error:
            yield f"{file} cannot be read: {error.strerror}"
        except (ValueError, RecursionError):
            yield f"{file} is no JSON, or leads out of the store"
        else:
            if found != document:
                keys = sorted(k for k in document if _entry(found, k) != document[k])
                yield f"{file} differs from the plan in {', '.join(keys) or 'added fields'}"
        if name.startswith("raw/") and name.count("/") == 2:
            link, target = root / name / "c", f"../../../{name.removeprefix('raw/')}/c"
            if not link.is_symlink() or os.readlink(link) != target:
                yield f"{link} is not a link to {target}"


def _entry(found: object, key: str) -> object:
    return found.get(key) if isinstance(found, dict) else None


def _hash_faults(root: Path, parsed: metadata.Root) -> Iterator[str]:
    content = (root / "zarr.json").read_bytes()
    if content != canonical(json.loads(content)):
        yield f"{root / 'zarr.json'} was not written by this program as it stands"
    for name, expected in parsed.hashes.items():
        try:
            found = flatfiles.sha256_of(flatfiles.inside(root, name))
        except OSError as error:
            yield f"{root / name} cannot be read: {error.strerror}"
        except ValueError as error:
            yield str(error)
        else:
            if found != expected:
                yield f"{root / name} does not match its sha256: changed or damaged"


def _check_files(store: Store, report: Report) -> None:
    """Nothing in the store but what belongs there."""
    root = store.path
    known = {"zarr.json", paths.SEALED_FILE, *store.root.hashes}
    if store.is_rolling:
        known |= {f"{paths.CONSUMERS}/zarr.json", *map(paths.consumer_file, range(MOST_CONSUMERS))}
        try:
            consumers(root, store.layout)
        except ValueError as error:
            report.problems.append(str(error))
    if not store.spec.is_calibrated:
        unfinished = calibration_files(store.spec, store.layout)
        known |= set(unfinished)
        if any((root / name).exists() for name in unfinished):
            report.notes.append("a calibration was interrupted: the next capture repeats it")
    for shard_id in store.layout.shard_ids():
        data = [paths.hidden_file(shard_id)]
        if store.spec.has_last:
            data.append(paths.last_file(shard_id))
        known |= {*data, paths.commit_file(shard_id)}
        known |= {paths.token_file(shard_id, name) for name in TOKEN_ARRAYS}
        is_there = any((root / name).exists() for name in data)
        if is_there and not store.is_committed(shard_id):
            report.notes.append(f"shard {shard_id} has data without a commit record")
        if is_there and store.is_released(shard_id):
            report.notes.append(f"shard {shard_id} is released: the next release deletes its data")
    buckets = range(len(store.layout.num_shards))
    links = {root / f"raw/b{b}/{kind}/c" for b in buckets for kind, _, _ in kinds(store.spec)}
    folders = {
        root / stripes.shard_folder(shard_id, kind)
        for shard_id in store.layout.shard_ids()
        for kind, _, _ in kinds(store.spec)
    }
    for top in (root, *stripes.mounts_of(root, store.layout)):
        for directory, _, names in os.walk(top):
            for name in names:
                file = Path(directory) / name
                # a link is listed as a file while there is nothing behind it; judged elsewhere
                if file in links or (file in folders and file.is_symlink()):
                    continue
                if durable.is_temporary(name):
                    report.notes.append(f"{file} was left by an interrupted capture")
                elif str(file.relative_to(top)) not in known:
                    report.problems.append(f"{file} does not belong into a store")
                elif not stat.S_ISREG(file.lstat().st_mode):
                    report.problems.append(f"{file} is not a plain file")


def main(run: object, place: object, extra: Mapping[str, object]) -> None:
    """Entry of `dflash verify`; extra: path, deep, json."""
    report = verify(str(extra["path"]), deep=bool(extra["deep"]))
    if extra["json"]:
        print(json.dumps(asdict(report), indent=1))
    else:
        for line in (*report.problems, *(f"note: {note}" for note in report.notes)):
            print(line)
        rate = size_text(report.checked_bytes / max(report.wall_s, 1e-9))
        read = f", {size_text(report.checked_bytes)} at {rate}/s" if report.is_deep else ""
        released = f" ({report.num_released} of them released)" if report.num_released else ""
        print(f"{report.num_committed} of {report.num_shards} shards committed{released}{read}")
    fail(report)


def fail(report: Report) -> None:
    """ValueError with their number and what to do, if there are problems; they were listed."""
    if not report.problems:
        return
    told = f"{report.count_text()} in {report.path}, listed above: "
    if report.no_repair:
        raise ValueError(f"{told}{report.no_repair}")
    if report.damaged_shards or report.is_seal_damaged:
        shards = ", ".join(map(str, report.damaged_shards[:_NAMED_SHARDS])) or "the seal alone"
        more = "" if len(report.damaged_shards) <= _NAMED_SHARDS else ", ..."
        deep = " --deep" if report.is_deep else ""
        raise ValueError(
            f"{told}dflash verify{deep} --repair {shlex.quote(report.path)} uncommits what is "
            f"damaged (shards {shards}{more}), and the same dflash capture does it again"
        )
    if not report.num_shards:
        raise ValueError(f"{told}nothing else was looked at; is that the store's own directory?")
    raise ValueError(
        f"{told}no shard is damaged, so --repair does not help; capture the store anew"
    )
