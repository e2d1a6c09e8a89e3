"""What `dflash plan` counts and measures, as plain numbers: work and its cost, for each stage.

Written as JSON by one process, read by another; costs may be kept in a file for other data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

CPU = "CPU"


@dataclass(frozen=True, kw_only=True, slots=True)
class Mount:
    """A directory that a store's shards are shared out over."""

    path: str
    needed_bytes: int
    """Of the store, below it."""
    free_bytes: int
    device_id: int
    """Of its file system: directories of one share its room."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CaptureWork:
    """What the data are to a capture."""

    num_samples: int
    num_heldout: int
    num_tokens: int
    num_supervised: int
    num_padded: int
    """Tokens with the padding of all batches."""
    store_bytes: int
    rows_bytes: int
    """Of these, rows: what is written batch by batch and read by each epoch."""
    mounts: Sequence[Mount]
    """The store's own directory first."""
    read_s: float
    """Seconds of reading and rendering the data."""
    batches: Sequence[float]
    """Number of batches, their places, and the places each times its padded length; sums."""
    warm_batches: Sequence[float]
    """The same of those that a worker computes before its first; zeros on a CPU."""
    calibrated: Sequence[float]
    """Samples that the calibration computes alone, and their tokens; zeros where there is none."""
    gated: Sequence[float]
    """The same of those that the gate does, of the first shard."""
    answer_steps: float
    """Steps of generating the answers anew, in batches of generate.batch_size."""
    is_compiled: bool
    """So much work, on such devices, has the target's layers compiled (`capture.compile`)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CaptureCosts:
    """What that costs one device."""

    device: str
    """The GPU's name, or `CPU`."""
    is_compiled: bool
    """Of the work that it was measured for."""
    import_s: float
    """Until a process of a capture has loaded its libraries."""
    plan_s: float
    """Of planning, beside reading the data and keeping their tokens: preflight, weights, target."""
    token_s: float
    """Of keeping one token in the plan."""
    load_s: float
    """Until a worker's target is ready, after the libraries."""
    fixed_s: float
    """What a worker does once after that, whatever the data: buffers, the calibration's and the
    gate's own part, the last shard."""
    calibrated_s: Sequence[float]
    """Seconds for each of `CaptureWork.calibrated`."""
    gated_s: Sequence[float]
    """Seconds for each of `CaptureWork.gated`."""
    busy: float
    """Share of the time in which the device has a batch, while the disk does not bind."""
    batch_s: Sequence[float]
    """Seconds for each of `CaptureWork.batches`."""
    answer_step_s: float
    """Of one of `CaptureWork.answer_steps`; 0: not measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DiskCosts:
    """What the disks of a store's mounts give, which both stages share."""

    worker_bytes_per_s: float
    """Written durably by one thread."""
    write_bytes_per_s: Sequence[float]
    """By several at the same time on all mounts; of each mount."""
    read_bytes_per_s: Sequence[float]
    """Read by several at the same time out of the page cache's reach; of each mount."""
    cached_bytes: int
    """Rows up to this many bytes stay in the page cache once they are written or read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainWork:
    """What the data are to an epoch of training."""

    batches: Sequence[float]
    """Number of batches, their tokens, their blocks, and pairs of a block and its context; sums."""
    validated: Sequence[float]
    """Held-out samples replayed at a validation, and their blocks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainCosts:
    """What that costs one device."""

    start_s: float
    """Until the first step, compiling included."""
    batch_s: Sequence[float]
    """Seconds for each of `TrainWork.batches`, the optimizer's and the log's share included."""
    validated_s: Sequence[float]
    """Seconds for each of `TrainWork.validated`."""
    checkpoint_s: float
    """That a checkpoint stops the training."""
    checkpoint_bytes: int
    """That it then writes beside it."""
