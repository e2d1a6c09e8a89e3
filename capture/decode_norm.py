"""RMS norms in one kernel while a target answers.

transformers writes a norm as six to eight operations, with types changed on the way; at one token a
row each of them is nothing but its launch, and together they are a third of all that a step of a
Llama launches. torch has the same in one kernel on a GPU, rounded once where they round twice.
Trap: a norm that multiplies by 1 + weight, or has a gate, is another one; each is tried first.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn
from torch.nn import functional

# what the epsilon is called
_EPSILONS = ("variance_epsilon", "eps")
# of the tried rows: one whose mean square is of the epsilon's size tells one epsilon from another
_SCALES = (1.0, 1e-3, 30.0)


@contextmanager
def fused_norms(model: nn.Module) -> Iterator[None]:
    """Within it the model's plain RMS norms are torch's; all others stay as they are."""
    found = [module for module in model.modules() if is_plain(module)]
    try:
        for module in found:
            # of this one module: its class may be another target's too
            module.forward = partial(normed, module, module.forward)
        yield
    finally:
        for module in found:
            vars(module).pop("forward", None)


def normed(
    module: nn.Module, plain: Callable[[torch.Tensor], torch.Tensor], hidden: torch.Tensor
) -> torch.Tensor:
    """The fused one, or for states of another type than the weights' the module's own."""
    is_alike = hidden.dtype == module.weight.dtype
    return fused_norm(module, hidden) if is_alike else plain(hidden)


def fused_norm(module: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    """x / sqrt(mean(x^2) + epsilon) * weight over the last dimension, computed in fp32."""
    weight = module.weight
    assert isinstance(weight, torch.Tensor)
    return functional.rms_norm(hidden, weight.shape, weight, _epsilon(module))


@torch.inference_mode()
def is_plain(module: nn.Module) -> bool:
    """Whether a module is the norm that `fused_norm` computes, up to a rounding of its weights'
    type: by what it gives, not by its name."""
    names = [name for name, _ in module.named_parameters()]
    if names != ["weight"] or "Norm" not in type(module).__name__ or _epsilon(module) is None:
        return False
    weight = module.weight
    # accelerate's hook of a target that is spread sits where ours would
    if not isinstance(weight, torch.Tensor) or weight.ndim != 1 or "forward" in vars(module):
        return False
    if len(inspect.signature(module.forward).parameters) != 1:
        return False
    generator = torch.Generator().manual_seed(0)
    tried = torch.randn((len(_SCALES), len(weight)), generator=generator)
    tried = (tried * torch.tensor(_SCALES)[:, None]).to(weight.device, weight.dtype)
    wanted, found = module(tried), fused_norm(module, tried)
    # two roundings against one, each by half of the type's epsilon, and sums in another order
    budget = 4 * torch.finfo(weight.dtype).eps * wanted.abs().float()
    return bool((found.dtype == wanted.dtype) and ((found - wanted).abs() <= budget).all())


def _epsilon(module: nn.Module) -> float | None:
    found = (getattr(module, name, None) for name in _EPSILONS)
    return next((value for value in found if isinstance(value, float)), None)
