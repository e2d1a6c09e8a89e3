"""The encode kernel against numpy, bit for bit, in Triton's interpreter; and its CUDA code.

Run as a program, this file compares kernel and numpy under TRITON_INTERPRET=1: the variable must
be there before Triton is imported, which other tests of this process may already have done.
"""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from dflash_pipeline.capture.quantise import Quantiser
from dflash_pipeline.store.bf16 import bf16_bits
from dflash_pipeline.store.quantise import (
    GROUP_SIZES,
    MODES,
    Calibration,
    encode,
    rotation_block,
    row_bytes,
)

SIZES = (96, 576, 4096)


def states(hidden_size, num_rows, seed):
    """Heavy tails and massive channels; then rows that a kernel may trip over."""
    random = np.random.default_rng(seed)
    rows_MH = random.standard_t(4, (num_rows, hidden_size)) * random.lognormal(size=hidden_size)
    rows_MH[:, [3, 50]] *= 300
    rows_MH[0] = 0
    rows_MH[1] *= 1e-35
    rows_MH[2] *= 1e-41
    rows_MH[3, [3, 9]] = np.nan
    rows_MH[4, [50, 60]] = np.inf, -np.inf
    rows_MH[5] *= 1e24
    rows_MH[6, :32] = 0
    rows_MH[7] = np.arange(hidden_size) % 2
    return rows_MH.astype(np.float32)


def calibration_of(rows_MH, mode):
    hidden_size = rows_MH.shape[1]
    return Calibration(
        mode=mode,
        hidden_size=hidden_size,
        group=GROUP_SIZES[mode],
        block=rotation_block(hidden_size),
        kept_k=np.array([3, 9, 50, hidden_size - 1], np.int32),
        centre_H=bf16_bits(np.median(rows_MH[8:], axis=0).astype(np.float32)),
    )


def buffers(num_rows, mode, hidden_size, device="cpu"):
    """One layer of three in poisoned rows and bounds."""
    size_bytes = row_bytes(mode, hidden_size, 4)
    rows_NKR = torch.full((num_rows, 3, size_bytes), 0xFF, dtype=torch.uint8, device=device)
    largest_NK = torch.full((num_rows, 3), torch.nan, device=device)
    return rows_NKR, largest_NK


def compare(hidden_size, mode, dtype, seed, num_rows, device):
    """Kernel against numpy on `device`; neighbouring layers must keep their poison."""
    from dflash_pipeline.capture.quantise_kernel import launch_encode

    rows_MH = states(hidden_size, max(10, num_rows), seed)
    calibration = calibration_of(rows_MH, mode)
    hidden_MH = torch.from_numpy(rows_MH).to(dtype)
    index_N = torch.from_numpy(np.random.default_rng(seed).permutation(len(rows_MH))[:num_rows])
    expected_NKR, expected_NK = buffers(num_rows, mode, hidden_size)
    Quantiser(calibration, "cpu").encode(hidden_MH, index_N, expected_NKR[:, 1], expected_NK[:, 1])
    found_NKR, found_NK = buffers(num_rows, mode, hidden_size, device)
    quantiser = Quantiser(calibration, device)
    launch_encode(
        hidden_MH.to(device),
        index_N.to(device),
        quantiser.centre_H,
        quantiser.inlier_H,
        quantiser.kept_k,
        found_NKR[:, 1],
        found_NK[:, 1],
        calibration,
    )
    case = f"H {hidden_size} {mode} {dtype} seed {seed}"
    assert torch.equal(found_NKR.cpu(), expected_NKR), case
    assert torch.equal(found_NK.cpu().nan_to_num(-1), expected_NK.nan_to_num(-1)), case


def test_the_cpu_path_gathers_quantises_and_bounds():
    rows_MH = states(96, 12, 0)
    calibration = calibration_of(rows_MH, "int4")
    index_N = torch.tensor([8, 0, 3, 4, 11])
    rows_NKR, largest_NK = buffers(5, "int4", 96)
    quantiser = Quantiser(calibration, "cpu")
    assert quantiser.row_bytes == rows_NKR.shape[2]
    hidden_MH = torch.from_numpy(rows_MH).bfloat16()
    quantiser.encode(hidden_MH, index_N, rows_NKR[:, 2], largest_NK[:, 2])
    expected_NR = encode(hidden_MH.float().numpy()[index_N], calibration)
    assert np.array_equal(rows_NKR[:, 2].numpy(), expected_NR)
    assert (rows_NKR[:, :2] == 0xFF).all()
    largest_N = hidden_MH[index_N].abs().amax(1).float()
    assert largest_NK[[0, 4], 2].tolist() == largest_N[[0, 4]].tolist()
    assert largest_NK[1, 2] == 0
    assert largest_NK[[2, 3], 2].isinf().all()


def test_no_rows_are_no_work():
    calibration = calibration_of(states(96, 12, 0), "int8")
    rows_NKR, largest_NK = buffers(0, "int8", 96)
    Quantiser(calibration, "cpu").encode(
        torch.zeros(3, 96), torch.zeros(0, dtype=torch.int64), rows_NKR[:, 0], largest_NK[:, 0]
    )


def test_the_kernel_writes_the_bytes_of_numpy_in_the_interpreter():
    pytest.importorskip("triton", reason="triton has no build for this platform")
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-W", "error", __file__], check=True, env=environment)


@pytest.mark.parametrize(("mode", "hidden_size", "bits"), [("int8", 576, 32), ("int4", 4096, 16)])
def test_the_kernel_compiles_for_hopper_without_fused_or_rough_arithmetic(
    mode, hidden_size, bits, ptx_for_hopper
):
    from dflash_pipeline.capture import quantise_kernel

    constants = quantise_kernel.encode_constants(calibration_of(states(hidden_size, 10, 0), mode))
    kinds = {
        "hidden_MH": "*i16" if bits == 16 else "*fp32",
        "hidden_stride": "i32",
        "index_N": "*i64",
        "centre_H": "*i16",
        "inlier_H": "*u8",
        "kept_k": "*i32",
        "rows_NR": "*u8",
        "rows_stride": "i32",
        "largest_N": "*fp32",
        "largest_stride": "i32",
    }
    code = ptx_for_hopper(
        quantise_kernel.encode_kernel,
        kinds,
        constants,
        num_warps=quantise_kernel.num_warps(constants["P"]),
        fused=False,
    )
    assert "div.rn.f32" in code
    for rough in ("fma.rn.f32", "div.full", "div.approx", "rcp.approx", ".ftz"):
        assert rough not in code


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("hidden_size", SIZES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_kernel_writes_the_bytes_of_numpy_on_the_gpu(mode, hidden_size, dtype):
    for seed in range(4):
        compare(hidden_size, mode, dtype, seed, 300, "cuda")


if __name__ == "__main__":
    torch.set_num_threads(1)
    for mode in MODES:
        # the smallest size meets each of the odd rows
        compare(96, mode, torch.bfloat16, 0, 10, "cpu")
        compare(96, mode, torch.float32, 1, 10, "cpu")
        compare(576, mode, torch.float32, 2, 3, "cpu")
        compare(4096, mode, torch.bfloat16, 3, 2, "cpu")
