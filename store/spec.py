"""What a store is: its identity (StoreSpec), the arrangement of its rows (Layout), Attributes.

A layer id is the 0-based layer whose OUTPUT is meant; Hugging Face's `hidden_states` index is
id + 1. Letters: N rows, K captured layers, H hidden size, V vocabulary.
"""

from __future__ import annotations

import functools
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, TypeVar

from dflash_pipeline.configs.schema import MOST_TOKENS

FORMAT = 1
"""Version of the on-disk format; a reader refuses a newer one."""
CHUNK_ROWS = 256
"""Rows of an inner chunk, the piece that one checksum covers."""
SAMPLE_STATES = ("ok", "not_finite", "zero_rows", "other")
"""Why a sample has no rows; its place in this tuple is the code in the commit record."""
QUANTISED_MODES = ("int8", "int4")
HIDDEN_MODES = ("bf16", *QUANTISED_MODES)
LAST_MODES = (*HIDDEN_MODES, "none")
LAST_ROWS = ("teacher", "all")
# of a hash that is shown
_SHOWN_DIGITS = 12

Record = TypeVar("Record")


class ShardId(NamedTuple):
    """A bucket and the number of a shard in it."""

    bucket: int
    shard: int

    def __str__(self) -> str:
        return f"b{self.bucket}/{self.shard}"


def _check(holds: bool, message: str) -> None:
    if not holds:
        raise ValueError(message)


def _value(found: object, kind: object, name: str) -> object:
    """`found` as the declared type of a field, else a ValueError that names the field."""
    if kind in (str, int):
        _check(type(found) is kind, f"{name} must be {getattr(kind, '__name__', kind)}: {found!r}")
        return found
    if typing.get_origin(kind) is tuple:
        _check(isinstance(found, list | tuple), f"{name} must be a list: {found!r}")
        inner = typing.get_args(kind)[0]
        items = typing.cast("Sequence[object]", found)
        return tuple(_value(item, inner, f"{name}[{i}]") for i, item in enumerate(items))
    _check(isinstance(found, dict), f"{name} must be a table: {found!r}")
    return found


@functools.cache
def _kinds(cls: Any) -> dict[str, object]:
    return typing.get_type_hints(cls)


def from_dict(cls: type[Record], found: object, name: str) -> Record:
    """A record from parsed JSON; unknown, missing or mistyped fields raise ValueError."""
    _check(isinstance(found, dict), f"{name} must be a table, got {type(found).__name__}")
    values = typing.cast("dict[str, object]", found)
    kinds = _kinds(typing.cast("Any", cls))
    unknown, missing = sorted(set(values) - set(kinds)), sorted(set(kinds) - set(values))
    _check(not unknown, f"{name} has unknown fields {unknown}: written by another program version")
    _check(not missing, f"{name} lacks the fields {missing}")
    return cls(**{key: _value(values[key], kinds[key], f"{name}.{key}") for key in kinds})


def to_dict(record: Any) -> dict[str, object]:
    """A record as plain JSON values."""
    values = ((item.name, getattr(record, item.name)) for item in fields(record))
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values}


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreSpec:
    """Identity: two stores may be trained together if and only if these are equal."""

    format: int
    """Version of the on-disk format."""
    target_id: str
    """Base name of the target's directory, file or hub id."""
    target_hash: str
    """Hash of the target's weights."""
    target_dtype: str
    """Type the target computed in: bf16 or fp32."""
    quantisation: str
    """The target's own weight quantisation; empty: none."""
    layer_ids: tuple[int, ...]
    """Captured layers, the output of each, in the order of the K axis."""
    num_target_layers: int
    """Layers of the target."""
    hidden_size: int
    """H."""
    vocab_size: int
    """V."""
    hidden_mode: str
    """How a captured layer's row is stored."""
    last_mode: str
    """How the post-norm last state is stored; none: not at all."""
    last_rows: str
    """Positions kept in `last`: teacher (those whose next token is supervised) or all."""
    calibration_hash: str
    """Hash of the quantiser's calibration; empty for bf16, and until the capture has calibrated."""
    tokenizer_hash: str
    """Hash of the tokenizer's files."""
    template_hash: str
    """Hash of the chat template."""
    template_args: str
    """Template arguments, thinking and system prompt included, as JSON text."""
    max_len: int
    """Longest sample, in tokens."""
    overlong: str
    """What was done to longer ones: truncate or drop."""

    def __post_init__(self) -> None:
        _check(
            1 <= self.format <= FORMAT,
            f"store format {self.format} is not known here (this program reads up to {FORMAT}): "
            "update dflash-pipeline",
        )
        _check(1 <= self.num_target_layers <= 1 << 16, "identity.num_target_layers out of range")
        _check(1 <= len(self.layer_ids) <= 1 << 10, "identity.layer_ids must name 1 to 1024 layers")
        _check(
            all(0 <= i < self.num_target_layers for i in self.layer_ids),
            f"identity.layer_ids {self.layer_ids} outside 0..{self.num_target_layers - 1}",
        )
        _check(
            len(set(self.layer_ids)) == len(self.layer_ids), "identity.layer_ids repeats a layer"
        )
        _check(1 <= self.hidden_size <= 1 << 20, f"identity.hidden_size {self.hidden_size}")
        _check(1 <= self.vocab_size <= 1 << 28, f"identity.vocab_size {self.vocab_size}")
        _check(1 <= self.max_len <= MOST_TOKENS, f"identity.max_len {self.max_len}")
        for name, known in (
            ("hidden_mode", HIDDEN_MODES),
            ("last_mode", LAST_MODES),
            ("last_rows", LAST_ROWS),
        ):
            _check(
                getattr(self, name) in known,
                f"identity.{name} {getattr(self, name)!r} is not one of {known}: "
                "update dflash-pipeline",
            )
        _check(
            not (self.is_quantised and self.hidden_size % 16),
            f"identity.hidden_size {self.hidden_size} is not a multiple of 16: store its rows as "
            "bf16, not as int8 or int4",
        )
        _check(
            self.is_quantised or not self.calibration_hash,
            "identity.calibration_hash is set although all rows are bf16",
        )

    @property
    def is_quantised(self) -> bool:
        """Whether some rows are int8 or int4."""
        return not {self.hidden_mode, self.last_mode}.isdisjoint(QUANTISED_MODES)

    @property
    def is_calibrated(self) -> bool:
        """Whether the identity is complete: rows can be written and read."""
        return not self.is_quantised or self.calibration_hash != ""

    @property
    def num_layers(self) -> int:
        """K."""
        return len(self.layer_ids)

    @property
    def has_last(self) -> bool:
        """Whether the post-norm last state is stored."""
        return self.last_mode != "none"

    @property
    def num_amax(self) -> int:
        """Entries of the per-layer statistics: K, and one for `last` when it is stored."""
        return self.num_layers + self.has_last

    def differences(self, other: StoreSpec) -> list[str]:
        """Each field that differs, as `name: mine and theirs`; empty if identical.

        Of hashes the first digits, which tell them apart.
        """
        return [
            f"{item.name}: {_short(item.name, self)} and {_short(item.name, other)}"
            for item in fields(self)
            if getattr(self, item.name) != getattr(other, item.name)
        ]

    def to_dict(self) -> dict[str, object]:
        """Plain JSON values."""
        return to_dict(self)

    @classmethod
    def from_dict(cls, found: object) -> StoreSpec:
        """The inverse of `to_dict`, refusing what it does not know."""
        return from_dict(cls, found, "identity")


def _short(name: str, spec: StoreSpec) -> str:
    value = getattr(spec, name)
    return repr(value[:_SHOWN_DIGITS] if name.endswith("_hash") else value)


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """How the plan arranges samples in buckets, shards and batches."""

    rows_per_shard: int
    """Capacity of a shard, a multiple of `chunk_rows`; the same in every bucket and for `last`."""
    chunk_rows: int
    """Rows of an inner chunk (CHUNK_ROWS)."""
    token_budget: int
    """Tokens of a padded batch, at most."""
    pad_multiple: int
    """The padded length of a batch is a multiple of this many tokens."""
    bucket_bounds: tuple[int, ...]
    """Longest sample of each bucket, in tokens, ascending."""
    num_shards: tuple[int, ...]
    """Shards of each bucket."""
    num_samples_per_shard_max: tuple[int, ...]
    """Most samples of a shard of each bucket: fixes the width of its commit record."""
    seed: int
    """Seed of the order of batches."""

    def __post_init__(self) -> None:
        num_buckets = len(self.bucket_bounds)
        _check(1 <= num_buckets <= 1024, f"layout has {num_buckets} buckets, expected 1 to 1024")
        _check(
            len(self.num_shards) == len(self.num_samples_per_shard_max) == num_buckets,
            "layout: bucket_bounds, num_shards and num_samples_per_shard_max differ in length",
        )
        _check(1 <= self.chunk_rows <= 1 << 20, f"layout.chunk_rows {self.chunk_rows}")
        _check(
            0 < self.rows_per_shard <= 1 << 32 and self.rows_per_shard % self.chunk_rows == 0,
            f"layout.rows_per_shard {self.rows_per_shard} is not a multiple of {self.chunk_rows}",
        )
        _check(
            all(0 <= n <= 1 << 24 for n in self.num_shards) and sum(self.num_shards) > 0,
            f"layout.num_shards {self.num_shards}: expected 0 to 2^24 each, not all 0",
        )
        _check(
            all(1 <= n <= 1 << 24 for n in self.num_samples_per_shard_max),
            f"layout.num_samples_per_shard_max {self.num_samples_per_shard_max} out of range",
        )
        _check(
            sorted(self.bucket_bounds) == list(self.bucket_bounds),
            f"layout.bucket_bounds {self.bucket_bounds} must ascend",
        )

    @property
    def num_chunks(self) -> int:
        """Inner chunks of a full shard."""
        return self.rows_per_shard // self.chunk_rows

    def shard_ids(self) -> list[ShardId]:
        """All shards, bucket by bucket."""
        return [ShardId(b, s) for b, n in enumerate(self.num_shards) for s in range(n)]

    def to_dict(self) -> dict[str, object]:
        """Plain JSON values."""
        return to_dict(self)

    @classmethod
    def from_dict(cls, found: object) -> Layout:
        """The inverse of `to_dict`, refusing what it does not know."""
        return from_dict(cls, found, "layout")


@dataclass(frozen=True, kw_only=True, slots=True)
class Attributes:
    """What else is known of a store; not part of its identity."""

    data_hash: str
    """Hash of the data files and of the settings they were read with."""
    mask_token_id: int
    """Embedding row that stands for a masked slot."""
    dropped: Mapping[str, int]
    """Rows of the data that became no sample, counted by reason."""
    run: Mapping[str, object]
    """The resolved configuration of the capture."""

    @classmethod
    def from_dict(cls, found: object) -> Attributes:
        """From parsed JSON, refusing what it does not know."""
        return from_dict(cls, found, "attributes")

    def to_dict(self) -> dict[str, object]:
        """Plain JSON values."""
        return to_dict(self)

    @property
    def heldout_shares(self) -> list[object]:
        """Each share of prompts that was held out (data.heldout); of a merged store, of each part.

        By another share, a prompt may be held out in one store and trained on in the other.
        """
        return _heldout_shares(self.run)


def _heldout_shares(run: Mapping[str, object]) -> list[object]:
    parts = run.get("merged")
    if isinstance(parts, list):
        return list(dict.fromkeys(share for part in parts for share in _heldout_shares(part)))
    data = run.get("data")
    return [data.get("heldout")] if isinstance(data, dict) else []
