"""One new token is rotated in one kernel, bit for bit as by the family's own function.

Run as a program, this file compares kernel and reference under TRITON_INTERPRET=1: the variable
must be there before Triton is imported, which other tests of this process may already have done.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from dflash_pipeline.capture.decode_rope import (
    can_fuse,
    fused_rope,
    rotated,
    rotated_reference,
    turns_halves,
)
from tiny_targets import EVERY_FAMILY

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
# heads, key heads, head dimension: of SmolLM2, of Qwen3 8B, of odd sizes
SHAPES = ((9, 3, 64), (32, 8, 128), (5, 7, 12))
NAME = "apply_rotary_pos_emb"


def inputs(num_heads: int, num_groups: int, size: int, dtype: torch.dtype) -> Inputs:
    """As attention has them: a projection's output seen by heads, cosines of fp32 rounded."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((4, 1, num_heads, size), (4, 1, num_groups, size))
    query, key = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    angle_B1X = torch.tensor([0, 3, 700, 90])[:, None, None] / 1e4 ** (torch.arange(size // 2) / 9)
    angle_B1D = torch.cat((angle_B1X, angle_B1X), dim=-1)
    return (
        query.transpose(1, 2),
        key.transpose(1, 2),
        angle_B1D.cos().to(dtype),
        angle_B1D.sin().to(dtype),
    )


def compare(device: str, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    """The kernel against the reference, bit for bit."""
    from dflash_pipeline.capture.rope_kernel import launch_rotate

    tensors = inputs(*shape, dtype)
    assert can_fuse(*tensors)
    found = launch_rotate(*(one.to(device) for one in tensors))
    for one, wanted in zip(found, rotated_reference(*tensors), strict=True):
        assert one.is_contiguous()
        assert torch.equal(one.cpu(), wanted), f"{shape} {dtype}"


def test_the_reference_turns_pairs_by_their_angle() -> None:
    query, key, cos, sin = inputs(2, 1, 12, torch.float32)
    found, _ = rotated_reference(query.double(), key.double(), cos.double(), sin.double())
    whole = torch.complex(query[..., :6].double(), query[..., 6:].double())
    turn = torch.complex(cos[:, None, :, :6].double(), sin[:, None, :, :6].double())
    wanted = torch.cat(((whole * turn).real, (whole * turn).imag), dim=-1)
    torch.testing.assert_close(found, wanted)


def file_of(model: nn.Module) -> ModuleType:
    """The one that has the family's function."""
    files = {sys.modules[type(module).__module__] for module in model.modules()}
    return next(file for file in files if hasattr(file, NAME))


@pytest.mark.parametrize("family", EVERY_FAMILY)
def test_each_family_is_tried_and_has_its_function_back(
    family: str, make_model: Callable[..., PreTrainedModel]
) -> None:
    model = make_model(family)
    file = file_of(model)
    plain = getattr(file, NAME)
    with fused_rope(model):
        is_taken = getattr(file, NAME) is not plain
    # it has only one half of the cosines
    assert is_taken == (family != "gpt_oss")
    assert getattr(file, NAME) is plain
    with pytest.raises(KeyboardInterrupt), fused_rope(model):
        raise KeyboardInterrupt
    assert getattr(file, NAME) is plain
    assert turns_halves(plain) == is_taken


def test_only_what_gives_the_same_bits_is_taken() -> None:
    assert turns_halves(rotated_reference)
    assert not turns_halves(lambda q, k, cos, sin: rotated_reference(q, k, sin, cos))
    assert not turns_halves(lambda q, k, cos, sin: (rotated_reference(q, k, cos, sin)[0], k))
    assert not turns_halves(lambda q, k: (q, k))


def test_what_rounds_once_is_left_alone() -> None:
    """As ModernBERT and HunYuan-VL do: in fp32 nothing tells it from the reference."""

    def rotate(*inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        query, key = rotated_reference(*(one.float() for one in inputs))
        return query.to(inputs[0].dtype), key.to(inputs[1].dtype)

    assert not turns_halves(rotate)


class OnGpu(torch.Tensor):
    """Says that it is there."""

    is_cuda = True


def test_a_gpu_gets_the_kernel_for_one_token_and_all_else_the_familys_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("triton", reason="triton has no build for this platform")
    from dflash_pipeline.capture import rope_kernel

    kernel: Any = ("kernel", "kernel")
    monkeypatch.setattr(rope_kernel, "launch_rotate", lambda *_inputs: kernel)
    plain: Any = lambda *_inputs, **_settings: ("plain", "plain")  # noqa: E731
    query, key, cos, sin = inputs(9, 3, 64, torch.bfloat16)
    on_gpu = query.as_subclass(OnGpu)
    assert rotated(plain, on_gpu, key, cos, sin) == kernel
    assert rotated(plain, query, key, cos, sin) == ("plain", "plain")
    assert rotated(plain, on_gpu, key, cos, sin, 1) == ("plain", "plain")
    assert rotated(plain, on_gpu, key, cos, sin, unsqueeze_dim=1) == ("plain", "plain")
    for others in (
        (query.expand(-1, -1, 2, -1), key.expand(-1, -1, 2, -1), cos, sin),
        (query, key, cos[..., :32], sin[..., :32]),
        (query, key, cos[:1], sin[:1]),
        (query, key, cos.float(), sin.float()),
        (query, key[..., :32], cos, sin),
        (query, key[:, :, :, ::2], cos, sin),
    ):
        assert not can_fuse(*others)


def test_the_kernel_gives_the_bits_of_the_reference_in_the_interpreter() -> None:
    pytest.importorskip("triton", reason="triton has no build for this platform")
    # the helpers of the tests are found by pytest's path alone
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-W", "error", __file__], check=True, env=environment)


def test_the_kernel_compiles_for_hopper_without_fused_arithmetic(
    ptx_for_hopper: Callable[..., str],
) -> None:
    from dflash_pipeline.capture import rope_kernel

    pointers = ("query", "key", "cos_BD", "sin_BD", "turned_query", "turned_key")
    names = [name for name in rope_kernel.rotate_kernel.arg_names if len(name) > 1]
    code = ptx_for_hopper(
        rope_kernel.rotate_kernel,
        {name: "*bf16" if name in pointers else "i32" for name in names},
        {"H": 9, "G": 3, "D": 64, "P": 16, "X": 32},
        num_warps=rope_kernel.NUM_WARPS,
        fused=False,
    )
    assert "fma.rn.f32" not in code


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_kernel_gives_the_bits_of_the_reference_on_the_gpu(
    dtype: torch.dtype, shape: tuple[int, int, int]
) -> None:
    compare("cuda", shape, dtype)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for sizes in SHAPES:
        compare("cpu", sizes, torch.float32)
        # the interpreter does not round to bf16, it cuts
        compare("cpu", sizes, torch.float16)
