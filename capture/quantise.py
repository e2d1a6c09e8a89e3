"""States of a layer -> stored int8 or int4 rows without padding, where the states are.

On CUDA one kernel gathers, quantises and bounds, to be started right after the layer's hook; on the
CPU numpy does the same. Both write the bytes of `store.quantise.encode`.

Letters: M places of a padded batch, N packed rows, R bytes of a row, H hidden.
"""

from __future__ import annotations

import numpy as np
import torch

from dflash_pipeline.store.quantise import LARGEST, Calibration, encode


class Quantiser:
    """One layer's calibration, on the device of its states."""

    def __init__(self, calibration: Calibration, device: torch.device | str) -> None:
        self.calibration = calibration
        centre_H = torch.from_numpy(calibration.centre_H.view(np.int16)).view(torch.bfloat16)
        self.centre_H = centre_H.to(device)
        self.inlier_H = torch.from_numpy(calibration.inlier_H.view(np.uint8)).to(device)
        self.kept_k = torch.from_numpy(calibration.kept_k).to(device)

    @property
    def row_bytes(self) -> int:
        """R."""
        return self.calibration.row_bytes

    @torch.inference_mode()
    def encode(
        self,
        hidden_MH: torch.Tensor,
        index_N: torch.Tensor,
        rows_NR: torch.Tensor,
        largest_N: torch.Tensor,
    ) -> None:
        """Write the rows at `index_N` of `hidden_MH` (bf16 or fp32), on the current stream.

        `rows_NR` (uint8) and `largest_N` (fp32) may be strided views, such as one layer of
        [N, K, R]. `largest_N` is each row's largest |x|: 0 means a row of zeros, and infinity one
        with a value that is not finite (or beyond 2**100), which is stored as 0.
        """
        if not len(index_N):
            return
        if hidden_MH.is_cuda:
            # triton has no build for each platform that has a CPU
            from dflash_pipeline.capture.quantise_kernel import launch_encode

            launch_encode(
                hidden_MH,
                index_N,
                self.centre_H,
                self.inlier_H,
                self.kept_k,
                rows_NR,
                largest_N,
                self.calibration,
            )
            return
        states_NH = hidden_MH.index_select(0, index_N)
        values = (
            states_NH.view(torch.int16).numpy().view(np.uint16)
            if states_NH.dtype == torch.bfloat16
            else states_NH.float().numpy()
        )
        rows_NR.copy_(torch.from_numpy(encode(values, self.calibration)))
        magnitude_NH = states_NH.abs().float()
        is_storable_NH = magnitude_NH <= LARGEST
        largest_N.copy_(torch.where(is_storable_NH, magnitude_NH, torch.inf).amax(dim=1))
