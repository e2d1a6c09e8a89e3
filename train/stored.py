"""Stored rows of any mode -> features of the compute type, on the device that the rows are on.

Letters: N rows, B samples, K captured layers, H hidden, Z bytes of a stored row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dflash_pipeline.store.bf16 import bf16_bits, bf16_to_float32
from dflash_pipeline.store.quantise import Calibration
from dflash_pipeline.store.reader import Store
from dflash_pipeline.train.dequantise import Dequantiser

# a decoded value lies beyond the largest that was stored by the error of a row at most: of int4
# 1.07 / 16 of a rotated value, of which up to 64 of 64 times the size of a value add up
_SLACK = {"bf16": 1.0, "int8": 6.0, "int4": 6.0}


class UnusableRows(ValueError):
    """Rows of a sample are damaged: no capture commits such."""


class StoredRows:
    """How the rows of one array are read, perhaps of some of its layers only."""

    def __init__(
        self,
        calibrations: Sequence[Calibration],
        columns: Sequence[int] | None,
        device: torch.device | str,
    ) -> None:
        """`calibrations`: one for each layer that is read; none: the rows are bf16. `columns`:
        places of these layers in the array; None: all of them, in its order."""
        self._dequantiser = Dequantiser(calibrations, device) if calibrations else None
        self._hidden_size = calibrations[0].hidden_size if calibrations else 0
        self._columns = None if columns is None else torch.tensor(columns, device=device)

    @classmethod
    def hidden(cls, store: Store, layer_ids: Sequence[int], device: torch.device | str) -> Self:
        """Of the captured layers `layer_ids`, in this order."""
        spec, calibrations = store.spec, store.calibration.hidden
        columns = [spec.layer_ids.index(layer_id) for layer_id in layer_ids]
        is_all = columns == list(range(len(spec.layer_ids)))
        chosen = [calibrations[column] for column in columns] if calibrations else []
        return cls(chosen, None if is_all else columns, device)

    @classmethod
    def last(cls, store: Store, device: torch.device | str) -> Self:
        """Of the post-norm last state, as an array of one layer."""
        return cls(store.calibration.last, None, device)

    @torch.no_grad()
    def decode(self, rows_NKZ: Tensor, dtype: torch.dtype) -> Tensor:
        """Features [N, K, H] of contiguous uint8 rows, on the current stream.

        bf16 rows read in bf16 are given as a view of `rows_NKZ`.
        """
        if self._columns is not None:
            # as bytes: fewer of them than of what they decode to
            rows_NKZ = rows_NKZ.index_select(1, self._columns)
        if self._dequantiser is None:
            return rows_NKZ.view(torch.bfloat16).to(dtype)
        size = (*rows_NKZ.shape[:2], self._hidden_size)
        feature_NKH = torch.empty(size, dtype=dtype, device=rows_NKZ.device)
        self._dequantiser.decode(rows_NKZ, feature_NKH)
        return feature_NKH


def unusable(
    store: Store,
    samples: Sequence[int],
    lengths: Sequence[int],
    layer_ids: Sequence[int],
    rows_NKZ: Tensor,
    feature_NKH: Tensor,
) -> dict[int, UnusableRows]:
    """Which samples have a row that is not finite, empty, or beyond all that the capture of its
    shard saw: what `dflash verify --deep` finds too, without its checksums.

    `rows_NKZ`: the stored rows of all samples, one after another, as bytes; `feature_NKH`: what
    `StoredRows.hidden` of these layers made of them, of which it may have read a part. Waits for
    the device once.
    """
    columns = [store.spec.layer_ids.index(layer_id) for layer_id in layer_ids]
    slack = np.float32(_SLACK[store.spec.hidden_mode])
    amax_BK = np.stack([_amax(store, index)[columns] for index in samples])
    bound_BK = amax_BK * slack
    if store.calibration.hidden:
        centres = [store.calibration.hidden[column].centre_H for column in columns]
        # what is rotated is x - centre
        bound_BK += slack * np.abs(bf16_to_float32(np.stack(centres))).max(1)
    bound_NK = torch.from_numpy(np.repeat(bound_BK, lengths, axis=0)).to(feature_NKH.device)
    peak_NK = feature_NKH.abs().amax(-1).float()
    is_empty_NK = (peak_NK == 0) | (rows_NKZ[:, columns].amax(-1) == 0)
    # written so that NaN is beyond every bound
    is_bad_NK = ~(peak_NK <= bound_NK) | is_empty_NK
    found: dict[int, UnusableRows] = {}
    end_B = np.cumsum(lengths)
    for row, column in is_bad_NK.nonzero().tolist():
        number = int(np.searchsorted(end_B, row, side="right"))
        index, position = samples[number], row - int(end_B[number]) + lengths[number]
        if index in found:
            continue
        peak, largest = float(peak_NK[row, column]), float(amax_BK[number, column])
        what = f"a value of {peak:g}, where its capture saw {largest:g} at most,"
        if not np.isfinite(peak):
            what = "NaN or Inf"
        elif is_empty_NK[row, column]:
            what = "an all-zero row"
        found[index] = UnusableRows(
            f"sample {index} ({store.table.key(index)}, shard {store.table.shard_id(index)} of "
            f"{store.path}) has {what} at token {position} of layer {layer_ids[column]}: its tau "
            f"would be of damaged rows. dflash verify --deep {store.path} names all that is "
            "damaged, --repair has it captured again"
        )
    return found


def _amax(store: Store, index: int) -> npt.NDArray[np.float32]:
    """The largest value of each layer that the capture of a sample's shard saw."""
    record = store.commit_of(store.table.shard_id(index))
    assert record is not None, "its rows were read"
    return bf16_to_float32(bf16_bits(np.asarray(record.amax)))
