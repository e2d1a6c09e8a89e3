"""Where each part of a store lies; relative to the store's directory unless said otherwise."""

from __future__ import annotations

from pathlib import Path

from dflash_pipeline.store.spec import ShardId


def beside(store: Path, suffix: str) -> Path:
    """A sibling of the store: `.logs` (leases, logs, status) or `.planning` (being built)."""
    store = store.absolute()
    return store.with_name(store.name + suffix)


def log_directory(store: Path) -> Path:
    """Everything that is not data, outside the Zarr group."""
    return beside(store, ".logs")


def hidden_file(shard_id: ShardId) -> str:
    """The shard file of the captured layers."""
    return f"b{shard_id.bucket}/hidden/c/{shard_id.shard}/0/0"


def last_file(shard_id: ShardId) -> str:
    """The shard file of the post-norm last state."""
    return f"b{shard_id.bucket}/last/c/{shard_id.shard}/0"


def data_files(shard_id: ShardId) -> tuple[str, str]:
    """The files that a release deletes."""
    return hidden_file(shard_id), last_file(shard_id)


def token_file(shard_id: ShardId, name: str) -> str:
    """The chunk of `input_ids` or `loss_mask`."""
    return f"b{shard_id.bucket}/{name}/c/{shard_id.shard}"


def commit_file(shard_id: ShardId) -> str:
    """The commit record: the shard exists if and only if this file does."""
    return f"b{shard_id.bucket}/commit/c/{shard_id.shard}/0"


def token_crc_file(bucket: int) -> str:
    """Checksums of the token chunks of a bucket."""
    return f"b{bucket}/token_crc/c/0/0"


def column_file(name: str) -> str:
    """A column of the sample table."""
    return f"samples/{name}/c/0"


def target_file(name: str) -> str:
    """A file of the target, kept byte for byte."""
    return f"target/files/{name}/c/0"


def consumer_file(number: int) -> str:
    """The row of a consumer: which shards a training run has used."""
    return f"{CONSUMERS}/c/{number}/0"


def release_lock_file(store: Path) -> Path:
    """Held by whoever changes the consumers or releases shards; not in the store."""
    return log_directory(store) / "release.lock"


CONSUMERS = "consumers"
CALIBRATION = "calibration"
KEPT_FILE = "calibration/kept/c/0/0"
CENTRE_FILE = "calibration/centre/c/0/0"
EMBED_FILE = "target/embed/c/0/0"
HEAD_FILE = "target/head/c/0/0"
SEALED_FILE = "commit_sealed/c/0"
