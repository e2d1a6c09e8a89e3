"""Stored int8 or int4 rows -> features, where the rows are.

On CUDA one kernel, on the CPU numpy; both give the values of `store.quantise.decode`. The rotation
is undone, not folded into the weights that read the rows: `fc` is trained, and AdamW trains
otherwise in another basis; the frozen head reads the drafter's states as well and would be needed
twice. Nor would it pay: 49,152 tokens of six rows take the kernel 1.14 ms at int4 on an H200
(tests/bench/quantise.json), and the drafter's steps 122 ms for each 3,072 (tests/bench/step.json).

Letters: N rows, K layers, Z bytes of a stored row, H hidden, k kept channels.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from dflash_pipeline.store.quantise import Calibration, decode


class Dequantiser:
    """The calibrations of K layers that share a mode, on the device of their rows."""

    def __init__(self, calibrations: Sequence[Calibration], device: torch.device | str) -> None:
        forms = {(entry.mode, entry.row_bytes, entry.num_kept) for entry in calibrations}
        if len(forms) != 1:
            raise ValueError(f"layers of one array must be stored alike, found {sorted(forms)}")
        self._calibrations = list(calibrations)
        centres = [entry.centre_H.view(np.int16) for entry in calibrations]
        self.centre_KH = torch.from_numpy(np.stack(centres)).view(torch.bfloat16).to(device)
        self.kept_Kk = torch.from_numpy(np.stack([e.kept_k for e in calibrations])).to(device)

    @torch.no_grad()
    def decode(self, rows_NKZ: torch.Tensor, feature_NKH: torch.Tensor) -> None:
        """Write the features (bf16 or fp32) of the rows, on the current stream."""
        if not len(rows_NKZ):
            return
        if rows_NKZ.is_cuda:
            # triton has no build for each platform that has a CPU
            from dflash_pipeline.train.dequantise_kernel import launch_decode

            launch_decode(
                rows_NKZ, self.centre_KH, self.kept_Kk, feature_NKH, self._calibrations[0]
            )
            return
        for place, calibration in enumerate(self._calibrations):
            feature_NH = decode(rows_NKZ[:, place].numpy(), calibration)
            feature_NKH[:, place] = torch.from_numpy(feature_NH)
