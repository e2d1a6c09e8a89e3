"""What `dflash eval` sets beside one another: the drafter, an untrained one and prompt lookup."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch

from dflash_pipeline.train.drafter import Drafter
from dflash_pipeline.train.loading import Checkpoint
from dflash_pipeline.train.report import Scored


def drafters(
    checkpoint: Checkpoint, seed: int, device: torch.device | str, dtype: torch.dtype
) -> tuple[Drafter, Drafter]:
    """The checkpoint's drafter, and one of the same shape with fresh weights."""
    trained, untrained = Drafter(checkpoint.shape), Drafter(checkpoint.shape)
    trained.load_state_dict(checkpoint.tensors)
    untrained.initialise(seed)
    for drafter in (trained, untrained):
        drafter.to(device, dtype).requires_grad_(False)
    return trained, untrained


def tokens_by_domain(prompts: Sequence[Scored]) -> dict[str, int]:
    """New tokens of all answers."""
    tokens = defaultdict[str, int](int)
    for one in prompts:
        tokens[one.domain] += one.num_tokens
    return tokens
