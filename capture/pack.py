"""A padded batch -> rows without padding, in the store's form, with what is needed to judge them.

Letters: B sequences, T positions, N packed rows, M rows of `last`, K captured layers, H hidden,
R bytes of a stored row, L = K layers, then `last` when it is stored.
Trap: nothing here may leave the device's stream: no `.item()`, no shape that depends on data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from dflash_pipeline.capture.quantise import Quantiser
from dflash_pipeline.store.calibration import Calibrated

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
    """Where a Packer writes; made once by `offload` and sliced, never made anew."""

    hidden_NKR: torch.Tensor
    """Stored rows of the captured layers, uint8."""
    last_MR: torch.Tensor
    """Stored rows of the post-norm last state, uint8; M = 0 where `last` is not stored."""
    largest_BL: torch.Tensor
    """Largest |x| of each sequence and layer, fp32; infinite if one of its values is not finite."""
    faintest_BL: torch.Tensor
    """Smallest, over a sequence's rows, of a row's largest |x|: 0 means a row of zeros."""


class Packer:
    """Turns a layer's padded states into stored rows as soon as the layer has made them."""

    def __init__(self, calibrated: Calibrated, device: torch.device) -> None:
        self._hidden = [Quantiser(one, device) for one in calibrated.hidden]
        self._last = [Quantiser(one, device) for one in calibrated.last]

    @torch.inference_mode()
    def warm_up(self, dtype: torch.dtype, device: torch.device) -> None:
        """Compile what `device` needs for states of this type, before the clock starts."""
        for quantiser in (*self._hidden[:1], *self._last):
            hidden_1H = torch.ones((1, quantiser.calibration.hidden_size), device=device).to(dtype)
            row_1R = torch.empty((1, quantiser.row_bytes), dtype=torch.uint8, device=device)
            index_1 = torch.zeros(1, dtype=torch.int64, device=device)
            quantiser.encode(hidden_1H, index_1, row_1R, torch.empty(1, device=device))

    @torch.inference_mode()
    def begin(self, out: PackedRows) -> None:
        """Before the first layer of a batch."""
        out.largest_BL.zero_()
        out.faintest_BL.fill_(torch.inf)

    @torch.inference_mode()
    def layer(
        self, place: int, hidden_BTH: torch.Tensor, index: DeviceIndex, out: PackedRows
    ) -> None:
        """Write the rows and bounds of captured layer `place` into `out`, on the current stream."""
        quantiser = self._hidden[place] if self._hidden else None
        _store(
            hidden_BTH,
            index.row_N,
            index.sequence_N,
            out.hidden_NKR[:, place],
            quantiser,
            place,
            out,
        )

    @torch.inference_mode()
    def last(self, last_BTH: torch.Tensor, index: DeviceIndex, out: PackedRows) -> None:
        """The same for the post-norm last state, where it is stored."""
        if not out.last_MR.shape[0]:
            return
        quantiser = self._last[0] if self._last else None
        place = out.hidden_NKR.shape[1]
        _store(
            last_BTH, index.teacher_M, index.teacher_sequence_M, out.last_MR, quantiser, place, out
        )


def _store(
    states_BTH: torch.Tensor,
    index_N: torch.Tensor,
    sequence_N: torch.Tensor,
    rows_NR: torch.Tensor,
    quantiser: Quantiser | None,
    place: int,
    out: PackedRows,
) -> None:
    """Rows `index_N` of the states into `rows_NR`, and their bounds into column `place`.

    bf16: fp32 states are rounded to the nearest, ties to even: the bits of `store.bf16.bf16_bits`.
    """
    states_MH = states_BTH.flatten(0, 1)
    if quantiser is None:
        bits_NH = rows_NR.view(torch.bfloat16)
        bits_NH.copy_(states_MH.index_select(0, index_N))
        largest_N = bits_NH.abs().amax(dim=1).float()
        # a NaN would make the order of the reduction matter
        largest_N = torch.where(torch.isfinite(largest_N), largest_N, torch.inf)
    else:
        largest_N = torch.empty(len(index_N), device=states_MH.device)
        quantiser.encode(states_MH, index_N, rows_NR, largest_N)
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
