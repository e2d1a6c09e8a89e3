"""Noise on the features."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from torch import Tensor

from dflash_pipeline.configs.schema import TrainConfig
from dflash_pipeline.train.noise import Noise

Kind = Literal["gaussian", "uniform"]


def _feature() -> Tensor:
    """Two layers, the second a hundred times the first, and one row a thousand times the others."""
    feature_NKH = torch.randn(400, 2, 64, generator=torch.Generator().manual_seed(0))
    feature_NKH[:, 1] *= 100
    feature_NKH[7] *= 1000
    return feature_NKH


def _noisy(config: TrainConfig, rank: int = 0, step: int = 3, number: int = 0) -> Tensor:
    feature_NKH = _feature()
    Noise(config, rank, torch.device("cpu")).add(feature_NKH, step, number)
    return feature_NKH


def test_no_noise_is_added_by_default() -> None:
    assert torch.equal(_noisy(TrainConfig()), _feature())


@pytest.mark.parametrize("kind", ["gaussian", "uniform"])
def test_std_is_the_standard_deviation_of_either_distribution(kind: Kind) -> None:
    config = TrainConfig(noise=kind, noise_std=0.5, noise_scale="absolute")
    noise = (_noisy(config) - _feature()).flatten()
    # the row of a thousand rounds its noise
    assert float(noise.std()) == pytest.approx(0.5, rel=0.02)
    assert float(noise.mean()) == pytest.approx(0.0, abs=0.01)
    widest = float(noise.abs().max())
    assert (widest <= 0.5 * 3**0.5 * 1.01) == (kind == "uniform")


@pytest.mark.parametrize("kind", ["gaussian", "uniform"])
def test_relative_noise_follows_each_row_of_each_layer(kind: Kind) -> None:
    config = TrainConfig(noise=kind, noise_std=0.05)
    before = _feature()
    relative_NK = (_noisy(config) - before).square().mean(-1).sqrt()
    relative_NK /= before.square().mean(-1).sqrt()
    assert relative_NK.mean(0).tolist() == pytest.approx([0.05, 0.05], rel=0.02)
    assert float(relative_NK.min()) > 0.03
    assert float(relative_NK.max()) < 0.07


def test_noise_is_a_function_of_seed_step_rank_and_batch_alone() -> None:
    config = TrainConfig(noise_std=0.1)
    assert torch.equal(_noisy(config), _noisy(config))
    others = [
        _noisy(config, rank=1),
        _noisy(config, step=4),
        _noisy(config, number=1),
        _noisy(TrainConfig(noise_std=0.1, seed=1)),
    ]
    for other in others:
        assert not torch.equal(other, _noisy(config))
    # neither drawn from torch's own generator nor moving it
    before = torch.get_rng_state()
    _noisy(config)
    assert torch.equal(before, torch.get_rng_state())


def test_noise_keeps_the_features_type() -> None:
    feature_NKH = _feature().bfloat16()
    Noise(TrainConfig(noise_std=0.1), 0, torch.device("cpu")).add(feature_NKH, 0, 0)
    assert feature_NKH.dtype == torch.bfloat16
    assert not torch.equal(feature_NKH, _feature().bfloat16())
