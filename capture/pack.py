"""A padded batch -> rows without padding, in the store's form, with what is needed to judge them.

Letters: B sequences, T positions, N packed rows, M rows of `last`, K captured layers, H hidden,
L = K layers, then `last` when it is stored.
Trap: nothing here may leave the device's stream: no `.item()`, no shape that depends on data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

Int = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class BatchIndex:
    """Which places of a padded batch are rows; int64 columns, in the order of the store."""

    row_N: Int
    """Flat place b * T + t of each row."""
    sequence_N: Int
    """Sequence b of each row."""
    teacher_M: Int
    """Flat place of each row of `last`."""
    teacher_sequence_M: Int
    """Sequence of each row of `last`."""


def index_batch(
    lengths_B: Sequence[int], teachers_B: Sequence[Int], num_positions: int
) -> BatchIndex:
    """The index of a batch of sequences padded to `num_positions`.

    `teachers_B` gives, for each sequence, the positions whose `last` is stored.
    """
    starts = [sequence * num_positions for sequence in range(len(lengths_B))]
    rows = [start + np.arange(length) for start, length in zip(starts, lengths_B, strict=True)]
    teachers = [start + places for start, places in zip(starts, teachers_B, strict=True)]
    sequence = np.arange(len(lengths_B))
    return BatchIndex(
        row_N=np.concatenate(rows).astype(np.int64),
        sequence_N=np.repeat(sequence, lengths_B),
        teacher_M=np.concatenate(teachers).astype(np.int64),
        teacher_sequence_M=np.repeat(sequence, [len(places) for places in teachers]),
    )


@dataclass(frozen=True, slots=True, eq=False)
class DeviceIndex:
    """A BatchIndex on the device."""

    row_N: torch.Tensor
    sequence_N: torch.Tensor
    teacher_M: torch.Tensor
    teacher_sequence_M: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class PackedRows:
    """Where `pack` writes; made once by `offload` and sliced, never made anew."""

    hidden_NKH: torch.Tensor
    """Rows of the captured layers, bf16."""
    last_MH: torch.Tensor
    """Rows of the post-norm last state, bf16; M = 0 where `last` is not stored."""
    largest_BL: torch.Tensor
    """Largest |x| of each sequence and layer, fp32; infinite if one of its values is not finite."""
    faintest_BL: torch.Tensor
    """Smallest, over a sequence's rows, of a row's largest |x|: 0 means a row of zeros."""


@torch.inference_mode()
def pack(
    hidden_KBTH: Sequence[torch.Tensor],
    last_BTH: torch.Tensor,
    index: DeviceIndex,
    out: PackedRows,
) -> None:
    """Write the rows and their bounds into `out`, on the current stream.

    fp32 states are rounded to the nearest bf16, ties to even: the bits of `store.rows.bf16_bits`.
    """
    out.largest_BL.zero_()
    out.faintest_BL.fill_(torch.inf)
    for place, hidden_BTH in enumerate(hidden_KBTH):
        rows_NH = hidden_BTH.flatten(0, 1).index_select(0, index.row_N)
        out.hidden_NKH[:, place].copy_(rows_NH)
        _bound(out, place, out.hidden_NKH[:, place], index.sequence_N)
    if out.last_MH.shape[0]:
        out.last_MH.copy_(last_BTH.flatten(0, 1).index_select(0, index.teacher_M))
        _bound(out, len(hidden_KBTH), out.last_MH, index.teacher_sequence_M)


def _bound(out: PackedRows, place: int, rows_NH: torch.Tensor, sequence_N: torch.Tensor) -> None:
    largest_N = rows_NH.abs().amax(dim=1).float()
    # a NaN would make the order of the reduction matter
    largest_N = torch.where(torch.isfinite(largest_N), largest_N, torch.inf)
    out.largest_BL[:, place].scatter_reduce_(0, sequence_N, largest_N, "amax")
    out.faintest_BL[:, place].scatter_reduce_(0, sequence_N, largest_N, "amin")


def bad_sequences(
    largest_BL: NDArray[np.float32], faintest_BL: NDArray[np.float32]
) -> dict[int, str]:
    """Sequences whose rows must not be used -> the reason, one of `store.spec.SAMPLE_STATES`."""
    bad: dict[int, str] = {}
    for sequence in np.flatnonzero(~np.isfinite(largest_BL).all(axis=1)):
        bad[int(sequence)] = "not_finite"
    for sequence in np.flatnonzero((faintest_BL == 0).any(axis=1)):
        bad.setdefault(int(sequence), "zero_rows")
    return bad
