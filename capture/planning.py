"""The plan of a capture: made once by one process, and checked by every later run.

A store that exists is continued only if its identity, its data and the numbers that arrange it
are those of this run; each difference is named.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, islice

from dflash_pipeline.capture import preflight, preview, sources, worker
from dflash_pipeline.capture.arguments import template_arguments_text
from dflash_pipeline.capture.compiled import SPREAD
from dflash_pipeline.capture.construction import (
    build_store,
    store_spec,
)
from dflash_pipeline.capture.continuing import DATA_FIELDS, plan_differences, refuse, refuse_merged
from dflash_pipeline.capture.donor import donor
from dflash_pipeline.capture.model import TargetFiles, resolve
from dflash_pipeline.capture.samples import Conversation, Dropped, read
from dflash_pipeline.capture.settings import check_generated
from dflash_pipeline.configs import inputs
from dflash_pipeline.configs.errors import UsageError
from dflash_pipeline.configs.mounts import root_of, split
from dflash_pipeline.configs.place import Place
from dflash_pipeline.configs.schema import CaptureConfig, Run
from dflash_pipeline.configs.sizes import parse_size
from dflash_pipeline.store.build import existing, plan_lock
from dflash_pipeline.store.consumers import release_lock
from dflash_pipeline.store.quota import check_quota, fixed_bytes, largest_shard_bytes
from dflash_pipeline.store.reader import Store
from dflash_pipeline.store.rolling import gathering_of, is_rolling, make_rolling
from dflash_pipeline.store.runlog import RunLog
from dflash_pipeline.store.stripes import check_named

NUM_PREFLIGHT = 8
# another capture of the same store may be planning; it takes as long as reading all data does
_LOCK_WAIT_S = 24 * 3600.0


def main(run: Run, place: Place, extra: dict[str, object]) -> None:
    """Plan the capture of `run`, or check that the store there is its own.

    extra: `kind` (cuda or cpu: where the target will run), `num_workers` (processes that will
    capture), `only_count` (say what it would be and write nothing).
    """
    _plan(run, place, extra, resolve(run.target))


def _plan(run: Run, place: Place, extra: dict[str, object], files: TargetFiles) -> None:
    log = RunLog(place)
    kind, only_count = str(extra["kind"]), bool(extra["only_count"])
    num_workers = int(str(extra["num_workers"]))
    inputs.check_data(run.data.files)
    # refused here, before anything is read
    files.layer_ids(run.target)
    files.mask_token_id(run.target)
    store_spec(run, files, kind, "not read")
    wanted = {
        "tokenizer_hash": files.tokenizer_hash(),
        "template_args": template_arguments_text(run.target),
    }
    check_generated(run.data.files, wanted)
    if run.capture.compile == "on" and run.target.num_gpus > 1:
        raise UsageError(SPREAD)
    if only_count:
        for line in preview.lines(run, files, kind, place.threads, num_workers):
            log.say(line)
        return
    files.check_weights()
    if run.capture.calibration_from:
        donor(run.capture.calibration_from, store_spec(run, files, kind, files.weight_hash()))
    path = root_of(run.store.path)

    def waiting() -> None:
        log.waiting(f"another capture is planning {path}, this one joins it then")

    with plan_lock(path, wait_s=_LOCK_WAIT_S, waiting=waiting):
        store = existing(path)
        hashed = data_hash(run)
        if store is not None:
            check_named(path, store.layout, split(run.store.path)[1:])
            check_same(store, run, files, kind, hashed)
        dropped = Dropped()
        conversations = read(run.data.files, run.data.limit, dropped)
        if store is None or not store.is_complete:
            first = list(islice(conversations, NUM_PREFLIGHT))
            preflight.check(run, files, first, log.say)
        if store is not None:
            log.say(progress_text(store))
            apply_quota(store, run.capture, num_workers)
            return
        counted = _counted(chain(first, conversations), dropped, log)
        store = build_store(run, files, kind, counted, dropped, hashed, place.threads, log.say)
        log.say(f"planned {len(store.table)} samples in {sum(store.layout.num_shards)} shards")
        try:
            apply_quota(store, run.capture, num_workers)
        except UsageError as error:
            # no refusal that leaves nothing behind: reading all data may have taken hours
            raise ValueError(f"{error}. The plan in {path} is kept") from error


def apply_quota(store: Store, config: CaptureConfig, num_workers: int) -> None:
    """Let the store release shards from now on. UsageError if the quota is too small to go on, or
    if runs shall be waited for that could not see all samples any longer."""
    quota_bytes = parse_size(config.quota)
    if not quota_bytes or store.is_complete:
        return
    largest = largest_shard_bytes(store)
    check_quota(quota_bytes, fixed_bytes(store), largest, num_workers, str(store.path))
    with release_lock(store.path):
        store.refresh()
        before = gathering_of(store.path).num_consumers if is_rolling(store.path) else 1
        if store.num_released and config.num_consumers > before:
            raise UsageError(
                f"--consumers {config.num_consumers}: {store.num_released} shards of {store.path} "
                f"were released when {before} had come together; more runs could not see all "
                f"samples. Go on with --consumers {before}, or capture into another --store"
            )
        make_rolling(store.path, store.layout, config.num_consumers)


def plan_and_capture(run: Run, place: Place, extra: dict[str, object]) -> None:
    """Both in the one process of a capture on one device: it starts, and reads all weights for
    their hash, once."""
    # before the trial capture of the plan, which uses torch already
    worker.prepare_torch(place)
    files = resolve(run.target)
    _plan(run, place, extra, files)
    worker.work(run, place, files)


def data_hash(run: Run) -> str:
    """Hash of what the data files hold and of how they are read; their place does not matter."""
    values = {
        "sources": [
            (name, sources.content_hash(file))
            for name, file in zip(sources.stems(run.data.files), run.data.files, strict=True)
        ],
        "settings": {name: getattr(run.data, name) for name in DATA_FIELDS},
    }
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def check_same(store: Store, run: Run, files: TargetFiles, kind: str, hashed: str) -> None:
    """Raise UsageError that lists each difference between a store and this run."""
    refuse_merged(run.store.path, store.attributes)
    wanted = store_spec(run, files, kind, files.weight_hash())
    # the calibration follows from the rest, and no plan has one yet
    found = replace(store.spec, calibration_hash="").differences(wanted)
    if store.attributes.mask_token_id != files.mask_token_id(run.target):
        found.append(
            f"mask_token_id: {store.attributes.mask_token_id} and {files.mask_token_id(run.target)}"
        )
    found += plan_differences(store.spec, store.attributes, run)
    if store.attributes.data_hash != hashed and not found:
        found.append("data: the files hold something else than when the store was planned")
    refuse(run.store.path, found)


def progress_text(store: Store) -> str:
    """How much of a store there is."""
    store.refresh()
    shard_ids = store.layout.shard_ids()
    num_done = sum(store.is_committed(shard_id) for shard_id in shard_ids)
    return f"resuming: {num_done} of {len(shard_ids)} shards committed"


def _counted(
    conversations: Iterator[Conversation], dropped: Dropped, log: RunLog
) -> Iterator[Conversation]:
    for conversation in conversations:
        log.progress(dropped.num_rows, 0, "rows")
        yield conversation
    log.progress(dropped.num_rows, dropped.num_rows, "rows")
