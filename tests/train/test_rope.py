"""Rotary positions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from dflash_pipeline.train.rope import Rotary, inverse_frequencies, rotate

SCALINGS: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 4.0},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    {
        "rope_type": "yarn",
        "factor": 40.0,
        "mscale": 0.707,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
    },
]


@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda scaling: scaling["rope_type"])
def test_scalings_equal_those_of_transformers(scaling: dict[str, Any]) -> None:
    config = LlamaConfig(
        hidden_size=256,
        num_attention_heads=2,
        head_dim=128,
        max_position_embeddings=131072,
        rope_parameters={"rope_theta": 500000.0, **scaling},
    )
    wanted, wanted_scale = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, torch.device("cpu"))
    frequency, scale = inverse_frequencies(128, 500000.0, scaling, 131072)
    torch.testing.assert_close(frequency, wanted, rtol=1e-6, atol=0)
    assert scale == pytest.approx(wanted_scale)


def test_an_unknown_scaling_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="'longrope' is not known"):
        inverse_frequencies(128, 1e4, {"rope_type": "longrope"}, 4096)


def test_a_cast_to_bf16_leaves_the_frequencies_as_they_were() -> None:
    rotary = Rotary(128, 1e6, None, 40960)
    exact = rotary.frequency.clone()
    rotary.to(torch.bfloat16)
    assert rotary.frequency.dtype == torch.float32
    assert torch.equal(rotary.frequency, exact)


def test_a_product_of_turned_vectors_depends_on_their_distance_alone() -> None:
    rotary = Rotary(8, 1e4, None, 64)
    query, key = torch.randn(2, 1, 1, 8, dtype=torch.float64)
    products = []
    for first in (0, 11):
        positions = torch.tensor([first + 5]), torch.tensor([first])
        turned = [
            rotate(state, rotary(position, torch.float64))
            for state, position in zip((query, key), positions, strict=True)
        ]
        products.append(float((turned[0] * turned[1]).sum()))
    assert products[0] == pytest.approx(products[1], abs=1e-5)
