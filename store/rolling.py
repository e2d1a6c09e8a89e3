"""What makes a store a rolling one: the document of the array `consumers`.

Its attributes say how many training runs must follow the store before the first shard is released
(one, where they say nothing), and whether so many ever did at one time: who ended or was dropped
since has been there, and is not waited for again.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dflash_pipeline.configs.errors import UsageError
from dflash_pipeline.configs.jsonfile import read_object
from dflash_pipeline.store import durable, metadata, paths
from dflash_pipeline.store.consumers import (
    ABOUT_BYTES,
    CRC_BYTES,
    MOST_CONSUMERS,
    NOT_RUNNING,
    consumer_line,
    consumers,
    presence_text,
)
from dflash_pipeline.store.documents import Document, array, canonical
from dflash_pipeline.store.spec import Layout


@dataclass(frozen=True, slots=True)
class Gathering:
    """The runs that must come together before anything is released."""

    num_consumers: int
    is_over: bool
    """So many were registered at one time."""


ONE = Gathering(num_consumers=1, is_over=False)
"""Of whoever comes first."""


def consumers_document(layout: Layout, gathering: Gathering) -> Document:
    """The array's document."""
    end = ABOUT_BYTES + len(layout.shard_ids())
    width = end + CRC_BYTES
    attributes: Document = {
        "fields": {"about": [0, ABOUT_BYTES], "used": [ABOUT_BYTES, end], "crc": [end, width]}
    }
    if gathering.num_consumers > 1:
        attributes |= {"num_consumers": gathering.num_consumers, "gathered": gathering.is_over}
    codec = {"name": "bytes"}
    shape, chunk, dims = (MOST_CONSUMERS, width), (1, width), ("consumer", "byte")
    return array("uint8", shape, chunk, [codec], dims, attributes)


def _document_file(store: Path) -> Path:
    return store / paths.CONSUMERS / "zarr.json"


def is_rolling(store: Path) -> bool:
    """Whether shards of this store are released once they were used."""
    return _document_file(store).exists()


def make_rolling(store: Path, layout: Layout, num_consumers: int) -> None:
    """Add the array, or change how many runs it waits for; under `release_lock` if others may too.

    UsageError for more than it has rows.
    """
    if num_consumers > MOST_CONSUMERS:
        raise UsageError(
            f"--consumers {num_consumers}: at most {MOST_CONSUMERS} runs can follow a store"
        )
    if not is_rolling(store):
        durable.make_directories(_document_file(store).parent)
    elif gathering_of(store).num_consumers == num_consumers:
        return
    _write(store, layout, Gathering(num_consumers, is_over=False))


def _write(store: Path, layout: Layout, gathering: Gathering) -> None:
    file = _document_file(store)
    # of a process that was killed here
    for leftover in durable.temporaries(file.parent):
        leftover.unlink(missing_ok=True)
    durable.write_durably(file, canonical(consumers_document(layout, gathering)))


def gathering_of(store: Path) -> Gathering:
    """What the array of a rolling store says; ValueError if it is damaged."""
    file = _document_file(store)
    try:
        attributes = read_object(file)["attributes"]
        num_consumers = attributes.get("num_consumers", ONE.num_consumers)
        is_over = attributes.get("gathered", ONE.is_over)
        if type(num_consumers) is not int or type(is_over) is not bool or num_consumers < 1:
            raise ValueError(f"num_consumers {num_consumers!r}, gathered {is_over!r}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{file} is damaged ({error}): nothing is released; capture with --quota into another "
            "--store"
        ) from None
    return Gathering(num_consumers, is_over)


def num_missing(store: Path, layout: Layout) -> int:
    """Runs that must still come before the first release."""
    gathering = gathering_of(store)
    if gathering.is_over:
        return 0
    return max(0, gathering.num_consumers - len(consumers(store, layout)))


def gather(store: Path, layout: Layout) -> bool:
    """Whether enough runs follow, or once did; kept for ever from then on. Under `release_lock`."""
    if num_missing(store, layout):
        return False
    gathering = gathering_of(store)
    if gathering.num_consumers > 1 and not gathering.is_over:
        _write(store, layout, Gathering(gathering.num_consumers, is_over=True))
    return True


def awaited_text(store: Path, layout: Layout) -> str:
    """How many of several runs are still awaited, for people; empty: none, or one alone will do."""
    missing, wanted = num_missing(store, layout), gathering_of(store).num_consumers
    if not missing or wanted == 1:
        return ""
    return (
        f"no shard is released before {wanted} training runs follow (--consumers {wanted}): "
        f"{missing} more to start"
    )


def consumer_lines(store: Path) -> list[str]:
    """A line a registered run, and whether more are awaited; none unless the store is rolling."""
    if not is_rolling(store):
        return []
    _, _, layout, _ = metadata.read_root(store)
    lines = [
        consumer_line(one.name, int(one.used.sum()), len(one.used), presence_text(store, one))
        for one in consumers(store, layout)
    ]
    awaited = awaited_text(store, layout)
    return [*lines, awaited] if awaited else lines


def stopped_runs(store: Path, layout: Layout) -> list[str]:
    """The registered runs of a rolling store that have not used all, and whose processes are not
    there."""
    return [
        one.name
        for one in consumers(store, layout)
        if not one.used.all() and presence_text(store, one) == NOT_RUNNING
    ]
