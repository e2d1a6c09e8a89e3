"""AdamW over fp32 masters."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from dflash_pipeline.configs.place import Place
from dflash_pipeline.configs.schema import OptimConfig
from dflash_pipeline.train.finite import first_not_finite
from dflash_pipeline.train.group import Group
from dflash_pipeline.train.optim import Optimizer

FINE = torch.zeros((), dtype=torch.float64)


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7, bias=False), nn.LayerNorm(7, bias=False))


@pytest.fixture
def optimizer_of(place: Place) -> Callable[..., Optimizer]:
    def make(
        model: nn.Module, config: OptimConfig, dtype: torch.dtype = torch.float32
    ) -> Optimizer:
        return Optimizer(model.named_parameters(), config, Group(place, 5.0), 10, dtype)

    return make


def _loss(model: nn.Module, seed: int) -> Tensor:
    """Unlike channels: normed rows are all of one length, so that their plain squares would add up
    to a constant, whose gradient is rounding noise."""
    rows = torch.randn(4, 5, generator=torch.Generator().manual_seed(seed))
    mixed = model(rows.to(next(model.parameters()).dtype))
    return (mixed * torch.linspace(0.5, 1.5, mixed.shape[-1])).square().sum().float()


@pytest.mark.parametrize("clip", [0.0, 0.05, 1.0])
def test_steps_equal_torchs_adamw_on_the_mean_of_the_window(
    clip: float, optimizer_of: Callable[..., Optimizer]
) -> None:
    """Clipped never, always, or in some steps: of a longer, a shorter and a longer gradient."""
    ours, theirs = _model(), _model()
    config = OptimConfig(clip=clip, weight_decay=0.1)
    optimizer = optimizer_of(ours, config)
    groups = [
        {"params": [theirs[0].weight], "weight_decay": 0.1},
        {"params": [theirs[1].weight], "weight_decay": 0.0},
    ]
    plain = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95), eps=1e-8)
    norms = []
    for step, factor in enumerate((1.0, 0.01, 2.0, 0.02)):
        # two batches of sums with weights 3 and 5: one division by 8
        for part, weight in ((0, 3.0), (1, 5.0)):
            loss = factor * _loss(ours, 10 * step + part)
            loss.backward()
            optimizer.add(loss.detach(), torch.tensor(weight), FINE)
        optimizer.sum_up(wants_stop=False)
        optimizer.step(0.01)
        plain.zero_grad()
        (factor * (_loss(theirs, 10 * step) + _loss(theirs, 10 * step + 1)) / 8).backward()
        norms.append(float(nn.utils.clip_grad_norm_(theirs.parameters(), clip or 1e9)))
        plain.step()
    assert [norm > 1 for norm in norms] == [True, False, True, False]
    for one, two in zip(ours.parameters(), theirs.parameters(), strict=True):
        # torch adds 1e-6 to the norm that it clips by
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)


def test_a_parameter_that_no_batch_of_a_window_reaches_has_no_gradient_left_from_before(
    optimizer_of: Callable[..., Optimizer],
) -> None:
    model, plain = _model(), _model()
    optimizer = optimizer_of(model, OptimConfig(clip=0.0))
    theirs = torch.optim.AdamW(plain.parameters(), lr=0.01, betas=(0.9, 0.95), weight_decay=0.0)
    for reaches_all in (True, False, True):
        for one in (model, plain):
            loss = _loss(one, 0) if reaches_all else _loss(nn.Sequential(one[0]), 0)
            loss.backward()
            if one is model:
                optimizer.add(loss.detach(), torch.tensor(1.0), FINE)
        optimizer.sum_up(wants_stop=False)
        optimizer.step(0.01)
        theirs.step()
        theirs.zero_grad(set_to_none=False)
    for ours, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_step_changes_nothing_and_is_counted(
    bad: float, optimizer_of: Callable[..., Optimizer]
) -> None:
    model = _model()
    optimizer = optimizer_of(model, OptimConfig())

    def step(factor: float, where: Tensor = FINE) -> None:
        loss = _loss(model, 0) * factor
        loss.backward()
        optimizer.add(loss.detach(), torch.tensor(2.0), where)
        optimizer.sum_up(wants_stop=False)
        optimizer.step(0.01)

    step(1.0)
    before = {name: tensor.clone() for name, tensor in optimizer.state().items()}
    step(bad)
    after = optimizer.state()
    del before["counts"], after["counts"]
    assert all(torch.equal(before[name], after[name]) for name in before)
    step(bad, first_not_finite(torch.tensor([1.0, bad]), torch.ones(1)))
    step(1.0)
    assert all(bool(parameter.isfinite().all()) for parameter in model.parameters())
    health = optimizer.health(optimizer.vector())
    assert (health.num_bad, health.longest_streak) == (2, 2)
    # the first was told of nothing that was bad before its gradient
    assert health.first_bad == ("", "the gradient", "the stored features", "")
    assert optimizer.health(optimizer.vector()).longest_streak == 0


def test_steps_too_small_for_bf16_add_up_in_the_masters(
    optimizer_of: Callable[..., Optimizer],
) -> None:
    model = _model()
    optimizer = optimizer_of(model, OptimConfig(), torch.bfloat16)
    first = optimizer.masters()["0.weight"].clone()
    rounded = model[0].weight.detach().clone()
    for _ in range(200):
        loss = _loss(model, 0)
        loss.backward()
        optimizer.add(loss.detach(), torch.tensor(1.0), FINE)
        optimizer.sum_up(wants_stop=False)
        optimizer.step(1e-5)
    assert model[0].weight.dtype == torch.bfloat16
    assert model[0].weight.grad is None
    moved = (optimizer.masters()["0.weight"] - first).abs().mean()
    assert float(moved) > 4e-4
    assert not torch.equal(model[0].weight, rounded)


def test_state_goes_on_bit_by_bit(optimizer_of: Callable[..., Optimizer]) -> None:
    def run(optimizer: Optimizer, model: nn.Module, steps: range) -> None:
        for step in steps:
            loss = _loss(model, step)
            loss.backward()
            optimizer.add(loss.detach(), torch.tensor(2.0), FINE)
            optimizer.sum_up(wants_stop=False)
            optimizer.step(0.01)

    whole, half, rest = _model(), _model(), _model()
    one = optimizer_of(whole, OptimConfig())
    run(one, whole, range(6))
    two = optimizer_of(half, OptimConfig())
    run(two, half, range(3))
    kept = {name: tensor.clone() for name, tensor in two.state().items()}
    three = optimizer_of(rest, OptimConfig())
    three.load(kept)
    run(three, rest, range(3, 6))
    for name, tensor in one.state().items():
        assert torch.equal(tensor, three.state()[name]), name
