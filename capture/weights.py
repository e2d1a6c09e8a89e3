"""The embedding and the head, found by name and shape in safetensors files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from dflash_pipeline.configs.errors import UsageError

EMBEDDING_NAMES = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight")
HEAD_NAMES = ("lm_head.weight", "embed_out.weight", "output.weight")


def embedding_and_head(
    name: str, paths: Sequence[Path], shape: tuple[int, int], is_tied: bool
) -> tuple[NDArray[np.uint16], NDArray[np.uint16] | None]:
    """Raw bf16 bits uint16 [V, H] of the embedding and of the head, None for a tied one.

    Other floating types are rounded to bf16. Raises ValueError, naming the target `name`, when a
    tensor of `shape` cannot be found, or when the head has a bias: a drafter's head has no place
    for one.
    """
    embeddings, heads = [], []
    for path, key, found_shape in _tensors(paths):
        if key.endswith("lm_head.bias"):
            raise ValueError(f"target {name}: its head has a bias ({key}), which is not supported")
        if found_shape != shape:
            continue
        if key.endswith(EMBEDDING_NAMES):
            embeddings.append((path, key))
        elif key in HEAD_NAMES or key.endswith(".lm_head.weight"):
            heads.append((path, key))
    if len(embeddings) != 1:
        raise ValueError(
            f"target {name}: {len(embeddings)} tensors named like an embedding have shape "
            f"{shape}: {[key for _, key in embeddings]}; expected one of {EMBEDDING_NAMES}"
        )
    embed_VH = _bf16_bits(*embeddings[0])
    if is_tied:
        return embed_VH, None
    if len(heads) != 1:
        raise ValueError(
            f"target {name} has a head of its own (tie_word_embeddings is false), but "
            f"{len(heads)} tensors {HEAD_NAMES} have shape {shape}: {[key for _, key in heads]}"
        )
    return embed_VH, _bf16_bits(*heads[0])


def check(name: str, paths: Sequence[Path]) -> None:
    """Raise UsageError, naming the target `name`, for a file that no safetensors reader opens."""
    for path in paths:
        try:
            with safe_open(path, framework="pt"):
                pass
        except SafetensorError as error:
            raise UsageError(
                f"target {name}: {path} is damaged or no safetensors file ({error}): fetch it again"
            ) from error


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
