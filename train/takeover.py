"""A drafter that begins with the weights of another: `--init-from`, and what it compares."""

from __future__ import annotations

from dataclasses import fields

import torch

from dflash_pipeline.configs.errors import UsageError
from dflash_pipeline.train.drafter import Drafter
from dflash_pipeline.train.loading import read_checkpoint
from dflash_pipeline.train.rope import inverse_frequencies
from dflash_pipeline.train.shape import DrafterShape

# of a drafter's shape, what weights that were learned under another value can be used with: blocks
# of another length may be what the run is for, and RoPE is compared by its frequencies
_NOT_LEARNED = {
    "block_size",
    "rope_scaling",
    "max_position_embeddings",
    "init_std",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
}


def take_over(drafter: Drafter, path: str) -> None:
    """Weights of another checkpoint. UsageError unless it is a drafter of the same arithmetic."""
    found = read_checkpoint(path)
    names = [one.name for one in fields(DrafterShape) if one.name not in _NOT_LEARNED]
    # the speculators layout of others does not say how many layers its target has
    if found.layout != "zlab":
        names.remove("num_target_layers")
    wrong = [
        f"{name} {getattr(found.shape, name)}, wanted {getattr(drafter.shape, name)}"
        for name in names
        if getattr(found.shape, name) != getattr(drafter.shape, name)
    ]
    # the numbers that they follow from are named above
    if not wrong and not _turns_alike(found.shape, drafter.shape):
        mine, theirs = drafter.shape.rope_scaling, found.shape.rope_scaling
        wrong.append(f"rope_scaling {theirs}, wanted {mine}")
    wanted = {name: tuple(tensor.shape) for name, tensor in drafter.named_parameters()}
    sizes = {name: tuple(tensor.shape) for name, tensor in found.tensors.items()}
    wrong += [
        f"{name} {sizes.get(name, 'missing')}, wanted {wanted.get(name, 'absent')}"
        for name in sorted(wanted.keys() | sizes.keys())
        if wanted.get(name) != sizes.get(name)
    ]
    if wrong:
        raise UsageError(
            f"{path} is another drafter than the one configured ({'; '.join(wrong[:6])}): set "
            "drafter.* to its shape, or begin without --init-from"
        )
    drafter.load_state_dict(found.tensors)


def _turns_alike(one: DrafterShape, other: DrafterShape) -> bool:
    """Whether both have the same rotary frequencies, whatever words state their scaling."""
    (first, scale), (second, other_scale) = (
        inverse_frequencies(
            shape.head_dim, shape.rope_theta, shape.rope_scaling, shape.max_position_embeddings
        )
        for shape in (one, other)
    )
    return scale == other_scale and torch.equal(first, second)
