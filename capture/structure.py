"""A causal language model's parts, told by their structure: decoder layers and final norm."""

from __future__ import annotations

from typing import Any

from torch import nn

NORM_NAMES = ("norm", "final_layernorm", "final_layer_norm", "ln_f", "final_norm")


def decoder_of(model: nn.Module, num_layers: int) -> tuple[nn.Module, nn.ModuleList]:
    """The text model and its decoder layers: the one list of `num_layers` beside the embedding.

    ValueError where there is another number of such lists.
    """
    # not annotated by transformers
    parts: Any = model
    embedding = parts.get_input_embeddings()
    found = [
        (module, child)
        for module in model.modules()
        if any(child is embedding for child in module.children())
        for child in module.children()
        if isinstance(child, nn.ModuleList) and len(child) == num_layers
    ]
    if len(found) != 1:
        raise ValueError(
            f"{type(model).__name__}: expected one list of {num_layers} decoder layers beside its "
            f"embedding, found {len(found)}; this family is not supported"
        )
    return found[0]


def final_norm_of(backbone: nn.Module) -> nn.Module:
    """The norm behind the last layer. ValueError where none has a known name."""
    for name in NORM_NAMES:
        norm = getattr(backbone, name, None)
        if isinstance(norm, nn.Module):
            return norm
    raise ValueError(f"{type(backbone).__name__}: no final norm under one of {NORM_NAMES}")
