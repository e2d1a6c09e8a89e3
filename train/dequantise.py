"""Stored int8 or int4 rows -> features, where the rows are; and the head in their rotated basis.

On CUDA one kernel, on the CPU numpy; both give the values of `store.quantise.decode`.

Letters: N rows, K layers, Z bytes of a stored row, H hidden, k kept channels, O outputs.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from dflash_pipeline.store.quantise import Calibration, decode, decode_rotated


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
        self._decode(rows_NKZ, feature_NKH, None)

    @torch.no_grad()
    def decode_rotated(
        self, rows_NKZ: torch.Tensor, rotated_NKH: torch.Tensor, kept_NKk: torch.Tensor
    ) -> None:
        """Write the rotated inliers and the kept values, for weights that `fold` returned."""
        self._decode(rows_NKZ, rotated_NKH, kept_NKk)

    def _decode(
        self, rows_NKZ: torch.Tensor, feature_NKH: torch.Tensor, kept_NKk: torch.Tensor | None
    ) -> None:
        if not len(rows_NKZ):
            return
        if rows_NKZ.is_cuda:
            # triton has no build for each platform that has a CPU
            from dflash_pipeline.train.dequantise_kernel import launch_decode

            launch_decode(
                rows_NKZ,
                self.centre_KH,
                self.kept_Kk,
                feature_NKH,
                kept_NKk,
                self._calibrations[0],
            )
            return
        for place, calibration in enumerate(self._calibrations):
            rows_NZ = rows_NKZ[:, place].numpy()
            if kept_NKk is None:
                feature_NKH[:, place] = torch.from_numpy(decode(rows_NZ, calibration))
                continue
            rotated_NH, kept_Nk = decode_rotated(rows_NZ, calibration)
            feature_NKH[:, place] = torch.from_numpy(rotated_NH)
            kept_NKk[:, place] = torch.from_numpy(kept_Nk)


@torch.no_grad()
def fold(
    weight_OH: torch.Tensor, calibration: Calibration
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`store.quantise.fold` where the weight is, for a large frozen one: (W', K, b).

    W' and K keep the weight's type, b [O] is fp32: W x = W' y + K kept + b.
    """
    device, block = weight_OH.device, calibration.block
    inlier_H = torch.from_numpy(calibration.inlier_H).to(device)
    centre_H = torch.from_numpy(calibration.centre_H.view(np.int16)).view(torch.bfloat16)
    inlier_OH = torch.where(inlier_H, weight_OH, 0).float()
    bias_O = inlier_OH @ centre_H.float().to(device)
    rotation = torch.ones(1, 1, device=device)
    while len(rotation) < block:
        rotation = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], device=device), rotation)
    blocks = inlier_OH.view(len(inlier_OH), -1, block) @ (rotation * calibration.decode_factor)
    kept_Ok = weight_OH[:, torch.from_numpy(calibration.kept_k).long().to(device)]
    return blocks.flatten(1).to(weight_OH.dtype), kept_Ok, bias_O
