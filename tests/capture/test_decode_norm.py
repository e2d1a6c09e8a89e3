"""Norms that torch has in one kernel are computed there, and no others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from dflash_pipeline.capture.decode_norm import fused_norm, fused_norms, is_plain
from tiny_targets import EVERY_FAMILY

Tokens = Callable[[PreTrainedModel], list[list[int]]]
DTYPES = (torch.float32, torch.bfloat16)


class PlainNorm(nn.Module):
    """As Llama writes it."""

    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weight = nn.Parameter(torch.rand(size, generator=generator) + 0.5)
        self.variance_epsilon = epsilon

    def normed(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden.float()
        return hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.weight * self.normed(hidden).to(hidden.dtype)


class OnePlusNorm(PlainNorm):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return ((1 + self.weight.float()) * self.normed(hidden)).to(hidden.dtype)


class GatedNorm(PlainNorm):
    def forward(self, hidden: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        normed = super().forward(hidden)
        return normed if gate is None else normed * gate


class CentredNorm(PlainNorm):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden - hidden.mean(-1, keepdim=True))


class OtherEpsilonNorm(PlainNorm):
    def normed(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden.float()
        return hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + 1e-5)


class WideNorm(PlainNorm):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden).float() * 1.0


class PlainFilter(PlainNorm):
    """A norm that is not called one."""


@pytest.mark.parametrize("dtype", DTYPES)
def test_only_a_norm_that_gives_the_same_is_taken(dtype: torch.dtype) -> None:
    assert is_plain(PlainNorm(48, 1e-6).to(dtype))
    for kind in (OnePlusNorm, GatedNorm, CentredNorm, OtherEpsilonNorm, PlainFilter):
        assert not is_plain(kind(48, 1e-6).to(dtype)), kind
    assert not is_plain(WideNorm(48, 1e-6).bfloat16())
    for module in (nn.LayerNorm(48), nn.LayerNorm(48, bias=False), nn.Linear(4, 4, bias=False)):
        assert not is_plain(module.to(dtype))
    hooked = PlainNorm(48, 1e-6).to(dtype)
    vars(hooked)["forward"] = hooked.forward
    assert not is_plain(hooked)


def test_states_of_another_type_than_the_weights_are_left_to_the_module() -> None:
    """A target that keeps its norms in fp32 has the type of its states changed by them."""
    model = nn.Sequential(PlainNorm(48, 1e-6))
    hidden = torch.randn(3, 48).bfloat16()
    wanted = model(hidden)
    with fused_norms(model):
        assert "forward" in vars(model[0])
        found = model(hidden)
    assert found.dtype == wanted.dtype
    assert torch.equal(found, wanted)


class InterruptedNorm(PlainNorm):
    """A signal arrives where it would be replaced."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "forward":
            raise KeyboardInterrupt
        super().__setattr__(name, value)


def test_norms_are_back_where_a_signal_came_while_they_were_replaced() -> None:
    model = nn.Sequential(PlainNorm(48, 1e-6), InterruptedNorm(48, 1e-6))
    with pytest.raises(KeyboardInterrupt), fused_norms(model):
        pass
    assert not any("forward" in vars(one) for one in model)


def check_error(device: str) -> None:
    """Its error to fp64 in bf16 against that of the norm as it was written."""
    norm = PlainNorm(576, 1e-5).bfloat16().to(device)
    hidden = torch.randn((64, 576), generator=torch.Generator().manual_seed(1))
    hidden = hidden.to(device, torch.bfloat16)
    exact = hidden.double() * torch.rsqrt(hidden.double().pow(2).mean(-1, keepdim=True) + 1e-5)
    truth = exact * norm.weight.double()
    budget = (norm(hidden) - truth).abs().max()
    assert (fused_norm(norm, hidden) - truth).abs().max() <= budget


def test_in_bf16_it_errs_no_more_than_the_norm_as_written() -> None:
    check_error("cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_in_bf16_it_errs_no_more_than_the_norm_as_written() -> None:
    check_error("cuda")


@pytest.mark.parametrize("family", EVERY_FAMILY)
def test_each_family_answers_as_before_and_has_its_own_norms_back(
    family: str, make_model: Callable[..., PreTrainedModel], greedy_tokens: Tokens
) -> None:
    model = make_model(family)
    wanted = greedy_tokens(model)
    norms = [one for one in model.modules() if "Norm" in type(one).__name__]
    with fused_norms(model):
        num_fused = sum("forward" in vars(one) for one in norms)
        assert greedy_tokens(model) == wanted
    # these multiply by 1 + weight
    assert bool(num_fused) != family.startswith(("gemma3", "qwen3_5"))
    assert not any("forward" in vars(one) for one in norms)
    with pytest.raises(KeyboardInterrupt), fused_norms(model):
        raise KeyboardInterrupt
    assert not any("forward" in vars(one) for one in norms)
