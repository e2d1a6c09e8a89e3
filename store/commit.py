"""The commit record of a shard: uint32 words, one chunk file of the array `commit`.

It is the truth: data without its record does not exist. Its last word is the crc32c of the others.
Worker, host and time are not in it, so that two captures of one plan give the same words.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dflash_pipeline.store.checksum import crc32c
from dflash_pipeline.store.spec import SAMPLE_STATES, Layout, StoreSpec

Words = NDArray[np.uint32]

VERSION = 1
"""Version of the record."""
COMMITTED, RELEASED = 1, 2
"""Values of the field `state`: its data is there; its data was used and deleted."""
HALVED, COMPILED = 1, 2
"""Bits of the field `flags`: a batch was halved after running out of memory; compiled layers of
the target computed rows."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Commit:
    """What is known of a committed shard."""

    rows: int
    """Rows of `hidden`."""
    last_rows: int
    """Rows of `last`."""
    hidden_bytes: int
    """Size of the file of `hidden`."""
    last_bytes: int
    """Size of the file of `last`; 0: not stored."""
    token_crcs: tuple[int, int]
    """crc32c of the chunk files of input_ids and loss_mask."""
    amax: NDArray[np.float32]
    """Largest |x| of each captured layer, then of `last`, over the good samples."""
    clipped: Words
    """Values cut off by the quantiser, layer by layer."""
    hidden_crcs: Words
    """crc32c of each inner chunk of `hidden`."""
    last_crcs: Words
    """crc32c of each inner chunk of `last`."""
    states: NDArray[np.uint8]
    """Place of each sample's state in SAMPLE_STATES."""
    is_halved: bool
    """A batch was halved after running out of memory: exempt from bit identity."""
    is_compiled: bool
    """Compiled layers of the target computed rows, which round otherwise than the plain ones."""
    state: int = COMMITTED
    """COMMITTED or RELEASED."""


@functools.lru_cache(maxsize=64)
def fields_of(spec: StoreSpec, layout: Layout, bucket: int) -> dict[str, slice]:
    """Words of each field, in order."""
    num_states = -(-layout.num_samples_per_shard_max[bucket] // 4)
    sizes = {
        "state": 1,
        "version": 1,
        "flags": 1,
        "rows": 1,
        "last_rows": 1,
        "hidden_bytes": 2,
        "last_bytes": 2,
        "token_crcs": 2,
        "amax": spec.num_amax,
        "clipped": spec.num_amax,
        "hidden_crcs": layout.num_chunks,
        "last_crcs": layout.num_chunks if spec.has_last else 0,
        "states": num_states,
        "crc": 1,
    }
    ends = np.cumsum(list(sizes.values())).tolist()
    return {
        name: slice(end - size, end) for (name, size), end in zip(sizes.items(), ends, strict=True)
    }


def width(spec: StoreSpec, layout: Layout, bucket: int) -> int:
    """W, the words of a record of this bucket."""
    return int(fields_of(spec, layout, bucket)["crc"].stop)


def pack(record: Commit, spec: StoreSpec, layout: Layout, bucket: int) -> Words:
    """The record as words, uint32 [W]."""
    fields = fields_of(spec, layout, bucket)
    words = np.zeros(fields["crc"].stop, "<u4")
    states = np.zeros(4 * (fields["states"].stop - fields["states"].start), np.uint8)
    states[: len(record.states)] = record.states
    values: dict[str, Any] = {
        "state": record.state,
        "version": VERSION,
        "flags": HALVED * record.is_halved | COMPILED * record.is_compiled,
        "rows": record.rows,
        "last_rows": record.last_rows,
        "hidden_bytes": _halves(record.hidden_bytes),
        "last_bytes": _halves(record.last_bytes),
        "token_crcs": record.token_crcs,
        "amax": np.asarray(record.amax, "<f4").view("<u4"),
        "clipped": record.clipped,
        "states": states.view("<u4"),
    }
    for name, value in values.items():
        words[fields[name]] = value
    for name, crcs in (("hidden_crcs", record.hidden_crcs), ("last_crcs", record.last_crcs)):
        words[fields[name]][: len(crcs)] = crcs
    words[-1] = crc32c(words[:-1].view(np.uint8))
    return words


def unpack(words: Words, spec: StoreSpec, layout: Layout, bucket: int) -> Commit:
    """The record of checked words (see `problem`)."""
    part = {name: words[place] for name, place in fields_of(spec, layout, bucket).items()}
    rows, last_rows = int(part["rows"][0]), int(part["last_rows"][0])
    return Commit(
        state=int(part["state"][0]),
        rows=rows,
        last_rows=last_rows,
        hidden_bytes=_joined(part["hidden_bytes"]),
        last_bytes=_joined(part["last_bytes"]),
        token_crcs=(int(part["token_crcs"][0]), int(part["token_crcs"][1])),
        amax=part["amax"].view("<f4"),
        clipped=part["clipped"],
        hidden_crcs=part["hidden_crcs"][: -(-rows // layout.chunk_rows)],
        last_crcs=part["last_crcs"][: -(-last_rows // layout.chunk_rows)],
        states=np.ascontiguousarray(part["states"]).view(np.uint8),
        is_halved=bool(part["flags"][0] & HALVED),
        is_compiled=bool(part["flags"][0] & COMPILED),
    )


def with_state(words: Words, state: int) -> Words:
    """The same record in another state, COMMITTED or RELEASED."""
    changed = words.copy()
    changed[0] = state
    changed[-1] = crc32c(changed[:-1].view(np.uint8))
    return changed


def problem(words: Words, expected_width: int, rows: tuple[int, int]) -> str:
    """Why these are no record of a shard with `rows` (hidden, last); empty if they are one."""
    if len(words) != expected_width:
        return f"has {4 * len(words)} bytes, expected {4 * expected_width}"
    if int(words[-1]) != crc32c(np.ascontiguousarray(words[:-1]).view(np.uint8)):
        return "does not match its own checksum"
    if words[0] not in (COMMITTED, RELEASED) or words[1] != VERSION:
        return f"has state {words[0]} and version {words[1]}: update dflash-pipeline"
    if (int(words[3]), int(words[4])) != rows:
        return f"counts {words[3]} and {words[4]} rows, the plan {rows[0]} and {rows[1]}"
    return ""


def are_whole(words_SW: Words, rows_S: Words, last_rows_S: Words) -> bool:
    """Whether `problem` finds nothing in any record of a bucket; many at once.

    Letters: S shards of the bucket, W words of a record.
    """
    is_known = np.isin(words_SW[:, 0], (COMMITTED, RELEASED)) & (words_SW[:, 1] == VERSION)
    is_planned = (words_SW[:, 3] == rows_S) & (words_SW[:, 4] == last_rows_S)
    crcs = [crc32c(content) for content in words_SW.view(np.uint8)[:, :-4]]
    return bool((is_known & is_planned & (words_SW[:, -1] == crcs)).all())


def state_codes(bad: dict[int, str], first: int, num_samples: int) -> NDArray[np.uint8]:
    """State code of each sample of a shard whose first sample is `first`."""
    codes = np.zeros(num_samples, np.uint8)
    for sample, reason in bad.items():
        if not 0 <= sample - first < num_samples:
            raise ValueError(f"sample {sample} is not in this shard")
        # a reason this format has no code for must not be mistaken for a good sample
        known = reason in SAMPLE_STATES[1:]
        codes[sample - first] = SAMPLE_STATES.index(reason if known else "other")
    return codes


def _halves(value: int) -> tuple[int, int]:
    return value & 0xFFFFFFFF, value >> 32


def _joined(words: Words) -> int:
    return int(words[0]) | int(words[1]) << 32
