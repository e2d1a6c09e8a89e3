"""The embedding and the head, found by name and shape in safetensors files."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from dflash_pipeline.configs.errors import UsageError

EMBEDDING_NAMES = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight")
# of the language model: towers for pictures and drafting modules have other names
_DECODER_LAYER = re.compile(
    r"((?:(?:model|language_model|model\.language_model|language_model\.model)\.)?layers|"
    r"(?:transformer\.)?h)\.(\d+)\."
)
HEAD_NAMES = ("lm_head.weight", "embed_out.weight", "output.weight")


def embedding_and_head(
    name: str, paths: Sequence[Path], shape: tuple[int, int], is_tied: bool
) -> tuple[NDArray[np.uint16], NDArray[np.uint16] | None]:
    """Raw bf16 bits uint16 [V, H] of the embedding and of the head, None for a tied one.

    Other floating types are rounded to bf16. Raises ValueError, naming the target `name`, when a
    tensor of `shape` cannot be found, or when the head has a bias: a drafter's head has no place
    for one.
    """
    embeddings, heads, others = [], [], list[str]()
    for path, key, found_shape in _tensors(paths):
        if key.endswith("lm_head.bias"):
            raise ValueError(f"target {name}: its head has a bias ({key}), which is not supported")
        is_embedding = key.endswith(EMBEDDING_NAMES)
        is_head = key in HEAD_NAMES or key.endswith(".lm_head.weight")
        if found_shape != shape:
            others += [f"{key} {list(found_shape)}"] if is_embedding or is_head else []
        elif is_embedding:
            embeddings.append((path, key))
        elif is_head:
            heads.append((path, key))
    of_others = f"; of other shapes: {', '.join(others)}" if others else ""
    if len(embeddings) != 1:
        raise ValueError(
            f"target {name}: {len(embeddings)} tensors named like an embedding have the shape "
            f"{list(shape)} of its config.json: {[key for _, key in embeddings]}; expected one of "
            f"{EMBEDDING_NAMES}{of_others}"
        )
    embed_VH = _bf16_bits(*embeddings[0])
    if is_tied:
        return embed_VH, None
    if len(heads) != 1:
        raise ValueError(
            f"target {name} has a head of its own (tie_word_embeddings is false), but "
            f"{len(heads)} tensors {HEAD_NAMES} have shape {list(shape)}: "
            f"{[key for _, key in heads]}{of_others}"
        )
    return embed_VH, _bf16_bits(*heads[0])


def check(name: str, paths: Sequence[Path], num_layers: int, num_further: int) -> None:
    """Raise UsageError, naming the target `name`, for a file that no safetensors reader opens, and
    for other decoder layers than the `num_layers` of its configuration: a model of the first few
    would load without a word.

    num_further: layers behind them that draft (multi-token prediction) and may be there.
    """
    found: dict[str, set[int]] = {}
    for path in paths:
        try:
            with safe_open(path, framework="pt") as tensors:
                for key in tensors.keys():  # noqa: SIM118, it is no dict
                    if layer := _DECODER_LAYER.match(key):
                        found.setdefault(layer[1], set()).add(int(layer[2]))
        except SafetensorError as error:
            raise UsageError(
                f"target {name}: {path} is damaged or no safetensors file ({error}): fetch it again"
            ) from error
    for prefix, layer_ids in found.items():
        lacking = sorted(set(range(num_layers)) - layer_ids)
        beyond = sorted(one for one in layer_ids if one >= num_layers + num_further)
        if lacking or beyond:
            which = f"lacks {prefix}.{lacking[0]}" if lacking else f"holds {prefix}.{beyond[-1]}"
            raise UsageError(
                f"target {name}: the checkpoint {which}, but its config.json tells of {num_layers} "
                "layers: they are not of one model, or a part of it was not fetched"
            )


def _tensors(paths: Sequence[Path]) -> Iterator[tuple[Path, str, tuple[int, ...]]]:
    """Each tensor's file, key and shape, from the headers alone."""
    for path in paths:
        with safe_open(path, framework="pt") as tensors:
            for key in sorted(tensors.keys()):
                yield path, key, tuple(tensors.get_slice(key).get_shape())


def _bf16_bits(path: Path, key: str) -> NDArray[np.uint16]:
    with safe_open(path, framework="pt") as tensors:
        tensor: torch.Tensor = tensors.get_tensor(key)
    if tensor.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ValueError(f"{path}: {key} is {tensor.dtype}; expected bfloat16, float16 or float32")
    bits: NDArray[np.uint16] = tensor.to(torch.bfloat16).contiguous().view(torch.uint16).numpy()
    return bits
