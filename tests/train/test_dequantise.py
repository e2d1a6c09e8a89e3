"""The decode kernel against numpy, bit for bit, in Triton's interpreter; and its CUDA code.

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

from dflash_pipeline.store import quantise
from dflash_pipeline.store.bf16 import bf16_bits
from dflash_pipeline.store.quantise import GROUP_SIZES, MODES, Calibration, decode, encode
from dflash_pipeline.train.dequantise import Dequantiser

SIZES = (96, 576, 4096)


def stored(hidden_size, mode, num_rows, seed):
    """Rows uint8 [N, 2, Z] and the calibrations of both layers."""
    random = np.random.default_rng(seed)
    calibrations, layers = [], []
    for kept in ([3, 7, 50, 60], [0, 1, 50, hidden_size - 1]):
        rows_NH = random.standard_t(4, (num_rows, hidden_size)) * random.lognormal(size=hidden_size)
        rows_NH[:, [3, 50]] *= 300
        rows_NH[0] = 0
        rows_NH[1] *= 1e-35
        calibration = Calibration(
            mode=mode,
            hidden_size=hidden_size,
            group=GROUP_SIZES[mode],
            block=quantise.rotation_block(hidden_size),
            kept_k=np.array(kept, np.int32),
            centre_H=bf16_bits(np.median(rows_NH, axis=0).astype(np.float32)),
        )
        calibrations.append(calibration)
        layers.append(encode(rows_NH.astype(np.float32), calibration))
    return torch.from_numpy(np.stack(layers, axis=1)), calibrations


def poisoned(*shape, dtype, device="cpu"):
    return torch.full(shape, torch.nan, dtype=dtype, device=device)


def compare(hidden_size, mode, dtype, seed, num_rows, device):
    """Kernel against numpy on `device`."""
    from dflash_pipeline.train.dequantise_kernel import launch_decode

    rows_NKZ, calibrations = stored(hidden_size, mode, num_rows, seed)
    truth, found = Dequantiser(calibrations, "cpu"), Dequantiser(calibrations, device)
    case = f"H {hidden_size} {mode} {dtype} seed {seed}"
    expected = poisoned(num_rows, 2, hidden_size, dtype=dtype)
    output = poisoned(num_rows, 2, hidden_size, dtype=dtype, device=device)
    truth.decode(rows_NKZ, expected)
    launch_decode(rows_NKZ.to(device), found.centre_KH, found.kept_Kk, output, calibrations[0])
    assert not output.isnan().any(), case
    assert torch.equal(output.cpu(), expected), case


@pytest.mark.parametrize("mode", MODES)
def test_the_cpu_path_gives_the_values_of_the_store(mode):
    rows_NKZ, calibrations = stored(96, mode, 9, 0)
    feature_NKH = poisoned(9, 2, 96, dtype=torch.bfloat16)
    Dequantiser(calibrations, "cpu").decode(rows_NKZ, feature_NKH)
    for place, calibration in enumerate(calibrations):
        expected_NH = torch.from_numpy(decode(rows_NKZ[:, place].numpy(), calibration))
        assert torch.equal(feature_NKH[:, place], expected_NH.bfloat16())


def test_layers_of_one_array_must_be_stored_alike():
    _, int8 = stored(96, "int8", 3, 0)
    _, int4 = stored(96, "int4", 3, 0)
    with pytest.raises(ValueError, match="stored alike"):
        Dequantiser([int8[0], int4[0]], "cpu")


def test_the_kernel_gives_the_values_of_numpy_in_the_interpreter():
    pytest.importorskip("triton", reason="triton has no build for this platform")
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-W", "error", __file__], check=True, env=environment)


@pytest.mark.parametrize(
    ("mode", "hidden_size", "bits"),
    [("int8", 576, 32), ("int4", 4096, 16), ("int4", 576, 16)],
)
def test_the_kernel_compiles_for_hopper_without_fused_arithmetic(
    mode, hidden_size, bits, ptx_for_hopper
):
    from dflash_pipeline.train import dequantise_kernel

    _, calibrations = stored(hidden_size, mode, 3, 0)
    constants = dequantise_kernel.decode_constants(calibrations[0])
    kinds = {
        "rows_NKZ": "*u8",
        "centre_KH": "*i16",
        "kept_Kk": "*i32",
        "feature_NKH": "*i16" if bits == 16 else "*fp32",
        "num_layers": "i32",
    }
    code = ptx_for_hopper(
        dequantise_kernel.decode_kernel,
        kinds,
        constants,
        num_warps=dequantise_kernel.num_warps(constants["P"]),
        fused=False,
    )
    for rough in ("fma.rn.f32", "div.", ".ftz"):
        assert rough not in code


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("hidden_size", SIZES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_kernel_gives_the_values_of_numpy_on_the_gpu(mode, hidden_size, dtype):
    for seed in range(4):
        compare(hidden_size, mode, dtype, seed, 300, "cuda")


if __name__ == "__main__":
    torch.set_num_threads(1)
    for mode in MODES:
        compare(96, mode, torch.float32, 0, 4, "cpu")
        compare(576, mode, torch.float32, 1, 2, "cpu")
        compare(4096, mode, torch.bfloat16, 2, 2, "cpu")
