"""Tokens are the largest scores, or draws from their softmax that depend on nothing else.

Run as a program, this file compares kernel and reference under TRITON_INTERPRET=1: the variable
must be there before Triton is imported, which other tests of this process may already have done.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from dflash_pipeline.capture import draw
from dflash_pipeline.capture.draw import Draw, are_numbers, chosen_reference, gumbel
from dflash_pipeline.configs.schema import GenerateConfig

CPU = torch.device("cpu")
# one token, less than a tile, a tile and a bit of the next
SIZES = (1, 272, 4099)
TEMPERATURES = (0.0, 0.7)


def random_logits(num_rows: int, vocab_size: int, dtype: torch.dtype) -> torch.Tensor:
    """Of a dozen values, so that many are equal; the last three rows are odd ones."""
    generator = torch.Generator().manual_seed(vocab_size)
    logits_BV = torch.randn((num_rows, vocab_size), generator=generator)
    logits_BV = (2 * logits_BV).round().to(dtype)
    logits_BV[0, : vocab_size // 2] = -torch.inf
    logits_BV[-3] = -torch.inf
    logits_BV[-2, vocab_size // 2] = torch.nan
    logits_BV[-1, vocab_size - 1] = torch.inf
    return logits_BV


def random_seeds(num_rows: int) -> torch.Tensor:
    # negative ones too
    bounds = -(1 << 63), (1 << 63) - 1
    return torch.randint(*bounds, (num_rows,), generator=torch.Generator().manual_seed(0))


def compare(device: str, vocab_size: int, dtype: torch.dtype, temperature: float) -> None:
    """The kernel's tokens against the reference's on the CPU."""
    from dflash_pipeline.capture.draw_kernel import launch_draw

    logits_BV, seed_B = random_logits(7, vocab_size, dtype), random_seeds(7)
    for step in (0, 300):
        if step and device == "cuda":
            # the interpreter's maximum warns of nothing but NaNs
            logits_BV[-3] = torch.nan
        # rows that do not touch, as one position of several gives them
        wide = torch.full((7, 2, vocab_size), torch.nan, dtype=dtype, device=device)
        wide[:, 1] = logits_BV.to(device)
        found_B, found_good_B = launch_draw(wide[:, 1], seed_B.to(device), step, temperature)
        wanted_B, good_B = chosen_reference(logits_BV, seed_B, step, temperature)
        case = f"V {vocab_size} {dtype} temperature {temperature} step {step}"
        assert good_B.tolist() == [True] * 4 + [False] * 3, case
        assert found_good_B.tolist() == good_B.tolist(), case
        assert found_B[good_B.to(device)].tolist() == wanted_B[good_B].tolist(), case
        # each goes into the target, which reads its embedding
        assert 0 <= int(found_B.min()) <= int(found_B.max()) < vocab_size, case


def test_the_noise_draws_from_the_softmax() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0])
    seeds = list(range(20_000))
    drawn = (logits + gumbel(seeds, 3, 4, CPU)).argmax(-1)
    share = np.bincount(drawn.numpy(), minlength=4) / len(seeds)
    assert np.abs(share - torch.softmax(logits, 0).numpy()).max() < 0.01
    again = gumbel([7], 3, 4, CPU)
    assert torch.equal(again[0], gumbel(seeds, 3, 4, CPU)[7])


def test_the_noise_is_what_answers_were_drawn_with_before() -> None:
    """Answers of one file may come from two releases."""
    found = gumbel([0, -1, 1 << 62], 5, 3, CPU)
    wanted = [
        [-1.046032, -0.045917, 0.73028],
        [2.59002, -0.679815, -0.173982],
        [1.164912, -0.866194, 1.733478],
    ]
    torch.testing.assert_close(found, torch.tensor(wanted), rtol=1e-6, atol=1e-6)


def test_no_noise_is_infinite() -> None:
    """One of 2**24 numbers rounds to 1; its token would be drawn whatever its score."""
    for seed, token in ((578, 12421), (1053, 15988), (1130, 16806)):
        noise_V = gumbel([seed], 0, 1 << 15, CPU)[0]
        assert noise_V.isfinite().all()
        assert int(noise_V.argmax()) == token
        # as large as fp32 can say
        assert float(noise_V[token]) == pytest.approx(24 * math.log(2))


@pytest.mark.parametrize("cuts", [{}, {"top_k": 5}, {"top_p": 0.8}, {"top_k": 9, "top_p": 0.9}])
@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_scores_are_cut_as_transformers_cuts_them(temperature: float, cuts: dict[str, Any]) -> None:
    logits_BV = torch.randn((50, 40), generator=torch.Generator().manual_seed(0))
    seeds = list(range(50))
    choice = Draw(GenerateConfig(temperature=temperature, **cuts), seeds)
    warpers = LogitsProcessorList()
    if temperature:
        warpers.append(TemperatureLogitsWarper(temperature))
        if "top_k" in cuts:
            warpers.append(TopKLogitsWarper(cuts["top_k"]))
        if "top_p" in cuts:
            warpers.append(TopPLogitsWarper(cuts["top_p"]))
    for step in range(3):
        token_B, is_number_B = choice.choose(logits_BV.clone(), step)
        scores_BV = warpers(None, logits_BV.clone())
        noise_BV = gumbel(seeds, step, 40, CPU) if temperature else torch.zeros(50, 40)
        assert token_B.tolist() == (scores_BV + noise_BV).argmax(1).tolist()
        assert is_number_B.all()
    index_B = torch.tensor([3, 4, 9])
    choice.keep(index_B)
    kept_B, _ = choice.choose(logits_BV[index_B], 2)
    assert kept_B.tolist() == token_B[index_B].tolist()


def test_rows_without_numbers_are_told() -> None:
    logits_BV = random_logits(7, 272, torch.bfloat16)
    for cuts in ({}, {"top_k": 5}):
        choice = Draw(GenerateConfig(temperature=0.5, **cuts), range(7))
        assert choice.choose(logits_BV, 0)[1].tolist() == [True] * 4 + [False] * 3
    assert are_numbers(logits_BV.float()).tolist() == [True] * 4 + [False] * 3


def test_the_kernel_chooses_the_tokens_of_the_reference_in_the_interpreter() -> None:
    pytest.importorskip("triton", reason="triton has no build for this platform")
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-W", "error", __file__], check=True, env=environment)


@pytest.mark.parametrize("is_sampled", [True, False])
def test_the_kernel_compiles_for_hopper_without_fused_or_rough_arithmetic(
    is_sampled: bool, ptx_for_hopper: Callable[..., str]
) -> None:
    from dflash_pipeline.capture import draw_kernel

    code = ptx_for_hopper(
        draw_kernel.draw_kernel,
        {
            "logits_BV": "*bf16",
            "logits_stride": "i32",
            "seed_B": "*i64",
            "step": "i32",
            "temperature": "fp32",
            "score_BS": "*fp32",
            "token_BS": "*i64",
            "largest_BS": "*fp32",
        },
        {"V": 49152, "S": 12, "X": draw_kernel.TILE, "IS_SAMPLED": is_sampled},
        num_warps=draw_kernel.NUM_WARPS,
        fused=False,
    )
    assert ("div.rn.f32" in code) == is_sampled
    # the accurate logarithm's own steps may flush subnormals, which it is not given
    for rough in ("lg2.approx", "div.full", "div.approx", "rcp.approx"):
        assert rough not in code


def test_a_gpu_gets_the_kernel_and_a_cpu_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="triton has no build for this platform")
    from dflash_pipeline.capture import draw_kernel

    monkeypatch.setattr(draw_kernel, "launch_draw", lambda *_inputs: ("kernel", "kernel"))

    class OnGpu:
        is_cuda = True

    seed_B = torch.zeros(2, dtype=torch.int64)
    on_gpu: Any = OnGpu()
    assert draw.chosen(on_gpu, seed_B, 0, 1.0) == ("kernel", "kernel")
    assert draw.chosen(torch.eye(2), seed_B, 0, 0.0)[0].tolist() == [0, 1]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("vocab_size", [*SIZES, 49152, 151936])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_kernel_chooses_the_tokens_of_the_reference_on_the_gpu(
    dtype: torch.dtype, vocab_size: int, temperature: float
) -> None:
    compare("cuda", vocab_size, dtype, temperature)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for size in SIZES:
        for heat in TEMPERATURES:
            compare("cpu", size, torch.float32, heat)
    # the interpreter takes bf16 as well
    compare("cpu", 272, torch.bfloat16, 0.7)
