"""What the parts of a capture took, for who predicts other captures by them."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class BatchTime:
    """What one batch took."""

    num_sequences: int
    num_positions: int
    """Its padded length."""
    device_s: float
    """Seconds in which the device worked on it."""


@dataclass(frozen=True, slots=True)
class SampleTime:
    """What one sample took that was computed alone."""

    num_tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Times:
    """In the order in which they came."""

    batches: list[BatchTime] = field(default_factory=list)
    calibrated: list[SampleTime] = field(default_factory=list)
    """Samples that the calibration was made from, or judged by."""
    gated: list[SampleTime] = field(default_factory=list)
    """Samples that the gate judged before the first commit."""
