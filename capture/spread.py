"""A target over several GPUs, layer after layer: transformers' device map, chosen by structure.

The GPUs compute one after another, so this is for targets that one GPU cannot hold, not for speed.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

from dflash_pipeline.capture.structure import decoder_of
from dflash_pipeline.configs.errors import UsageError

# not annotated by transformers
_loader: Any = AutoModelForCausalLM


def spread_devices(device: torch.device | str, num_gpus: int) -> list[torch.device]:
    """The devices of one target, in order: the first GPUs that the process sees; states are given
    on the last."""
    first = torch.device(device)
    if num_gpus == 1 or first.type != "cuda":
        return [first] * num_gpus
    return [torch.device("cuda", number) for number in range(num_gpus)]


def device_map(
    config: PretrainedConfig, devices: list[torch.device], *, trust_remote_code: bool
) -> dict[str, torch.device]:
    """Module name -> device: as many layers on each, the embedding first, norm and head last.

    UsageError for more devices than layers, or without accelerate, which does the moving.
    """
    if importlib.util.find_spec("accelerate") is None:
        raise UsageError(
            "--gpus-per-target needs accelerate, which transformers moves tensors between GPUs "
            "with: pip install -e '.[spread]'"
        )
    with torch.device("meta"):
        model = _loader.from_config(config, trust_remote_code=trust_remote_code)
    num_layers = config.get_text_config(decoder=True).num_hidden_layers
    if len(devices) > num_layers:
        raise UsageError(
            f"--gpus-per-target {len(devices)}: the target has {num_layers} layers, use fewer GPUs"
        )
    try:
        _, layers = decoder_of(model, num_layers)
    except ValueError as error:
        raise UsageError(f"--gpus-per-target: {error}") from error
    embedding = model.get_input_embeddings()
    names = {module: name for name, module in model.named_modules()}
    placed = {
        f"{names[layers]}.{layer}": devices[layer * len(devices) // num_layers]
        for layer in range(num_layers)
    }
    # a tied head is the embedding, and the last states go to the head
    is_tied = bool(config.tie_word_embeddings)
    placed[names[embedding]] = devices[-1] if is_tied else devices[0]
    above = _above(names[layers], names[embedding])
    for module, name in names.items():
        parent = name.rpartition(".")[0]
        if name and parent in above and name not in above and module is not layers:
            placed.setdefault(name, devices[-1])
    return placed


def _above(*inner: str) -> set[str]:
    """The names of the modules that hold these; the whole model is ""."""
    found = {""}
    for name in inner:
        parts = name.split(".")
        found.update(".".join(parts[:count]) for count in range(1, len(parts)))
    return found


def spread_text(placed: dict[str, torch.device]) -> str:
    """What runs where, in one line."""
    layers: dict[str, list[int]] = {}
    for name, device in placed.items():
        last = name.rpartition(".")[2]
        if last.isdecimal():
            layers.setdefault(str(device), []).append(int(last))
    parts = [f"layers {min(ids)} to {max(ids)} on {device}" for device, ids in layers.items()]
    return f"spread by transformers' device map: {', '.join(parts)}"
