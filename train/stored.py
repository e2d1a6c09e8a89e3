"""Stored rows of any mode -> features of the compute type, on the device that the rows are on.

Letters: N rows, K captured layers, H hidden, Z bytes of a stored row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from dflash_pipeline.store.quantise import Calibration
from dflash_pipeline.store.reader import Store
from dflash_pipeline.train.dequantise import Dequantiser


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

        bf16 rows read in bf16 are given as a view of `rows_NKZ`. Rows of zero bytes, which int8 and
        int4 read as the layer's centre, are no stored rows: what comes out for them is finite.
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
