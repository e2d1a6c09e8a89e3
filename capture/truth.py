"""What the target itself gives for one sample: alone, without padding, through the whole causal
language model and its own `output_hidden_states` - another path than the capture's hooks.

Letters: T tokens, H hidden, V vocabulary.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from dflash_pipeline.capture.target import Target

SWAY = 2.0**-8
"""Largest relative error of rounding to bf16."""


@dataclass(frozen=True, slots=True, eq=False)
class Truth:
    """One sample computed alone."""

    states: list[torch.Tensor]
    """[T, H] each: the embedding, then every layer's own output, all before the final norm."""
    last_TH: torch.Tensor
    """After the final norm."""
    logits_TV: torch.Tensor


@torch.inference_mode()
def compute(target: Target, ids_T: NDArray[np.uint32]) -> Truth:
    """ValueError for a family whose states are not one a layer around one final norm."""
    raw: list[torch.Tensor] = []
    hook = target.norm.register_forward_pre_hook(lambda _norm, inputs: raw.append(inputs[0]))
    try:
        ids_1T = torch.from_numpy(ids_T.astype(np.int64))[None].to(target.device)
        output = target.model(input_ids=ids_1T, use_cache=False, output_hidden_states=True)
    finally:
        hook.remove()
    states = output.hidden_states
    if len(raw) != 1 or len(states) != len(target.layers) + 1:
        raise ValueError(
            f"the gate does not know this family: {len(states)} hidden states for "
            f"{len(target.layers)} layers, {len(raw)} final norms"
        )
    # HF's last one is after the norm; the raw output of the last layer is what the norm got
    own = [*states[:-1], raw[0], states[-1], output.logits]
    *inner, last_TH, logits_TV = (state[0].to(target.device) for state in own)
    return Truth(inner, last_TH, logits_TV)


def swayed(target: Target, ids_T: NDArray[np.uint32]) -> Truth:
    """The same, the output of each layer and of each of its products moved by up to a rounding of
    bf16: how far apart rounding alone brings two right computations of a target.

    Other kernels round at other places within a layer. Of 36 layers of Qwen3's kind with random
    weights, compiled ones came to 0.076 of the plain ones' states, these to 0.085, and where
    queries and keys are larger to 0.69 both; plain ones in batches of eight to 0.028 and 0.062.
    """
    rounding = [
        module
        for layer in target.layers
        for module in layer.modules()
        if module is layer or isinstance(module, nn.Linear)
    ]
    with contextlib.ExitStack() as stack:
        for place, module in enumerate(rounding):
            stack.enter_context(_swaying(module, place))
        return compute(target, ids_T)


@contextlib.contextmanager
def _swaying(module: nn.Module, seed: int) -> Iterator[None]:
    def sway(_module: nn.Module, _inputs: Any, output: Any) -> Any:
        hidden = output[0] if isinstance(output, tuple) else output
        drawing = torch.Generator(hidden.device).manual_seed(seed)
        share = torch.empty(hidden.shape, dtype=torch.float32, device=hidden.device)
        share.uniform_(1 - SWAY, 1 + SWAY, generator=drawing)
        moved = (hidden.float() * share).to(hidden.dtype)
        return (moved, *output[1:]) if isinstance(output, tuple) else moved

    # before the hooks that collect states, which are there already
    hook = module.register_forward_hook(sway, prepend=True)
    try:
        yield
    finally:
        hook.remove()
