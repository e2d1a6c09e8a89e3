"""Whether a drafter, a target and a store belong together; if not, an error with a way out."""

from __future__ import annotations

from collections.abc import Set

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dflash_pipeline.configs.errors import UsageError
from dflash_pipeline.store import Store
from dflash_pipeline.store.runlog import RunLog
from dflash_pipeline.train.loading import Checkpoint
from dflash_pipeline.train.remembered import embedding_hash
from dflash_pipeline.train.shape import DrafterShape


def check_layers(shape: DrafterShape, store: Store) -> None:
    """Raise UsageError unless the store holds every layer that the drafter reads."""
    if missing := sorted(set(shape.layer_ids) - set(store.spec.layer_ids)):
        raise UsageError(
            f"the drafter reads layers {missing}, store {store.path} holds {store.spec.layer_ids}"
        )


def check_fits(
    checkpoint: Checkpoint,
    num_target_layers: int,
    hidden_size: int,
    vocab_size: int,
    reserved_ids: Set[int],
) -> None:
    """Raise UsageError unless the drafter was made for a target of these dimensions."""
    shape = checkpoint.shape
    pairs = [
        ("hidden size", shape.hidden_size, hidden_size),
        ("vocabulary", shape.vocab_size, vocab_size),
    ]
    # the speculators layout of others does not say how many layers its target has
    if checkpoint.layout == "zlab":
        pairs.append(("number of target layers", shape.num_target_layers, num_target_layers))
    problems = [
        f"{name} {mine}, the target's is {theirs}" for name, mine, theirs in pairs if mine != theirs
    ]
    if max(shape.layer_ids) > num_target_layers - 2:
        problems.append(f"layers {shape.layer_ids}, the target has {num_target_layers}")
    if shape.mask_token_id in reserved_ids:
        problems.append(f"mask token {shape.mask_token_id}, an end or padding token of the target")
    if problems:
        listed = "; it has ".join(problems)
        raise UsageError(f"drafter {checkpoint.path} does not fit the target: it has {listed}")


def say_if_foreign(
    checkpoint: Checkpoint, embed_bits_VH: npt.NDArray[np.uint16], whose: str, log: RunLog
) -> None:
    """Say that a drafter was made for another target; measuring how it fares there is no fault."""
    expected = checkpoint.trained_on.get("embedding_hash")
    if expected is not None and expected != embedding_hash(embed_bits_VH):
        log.say(
            f"the drafter was trained for target {checkpoint.trained_on.get('target_id')}, {whose} "
            "has another embedding: tau is that of a drafter for another model"
        )


def bf16_bits(matrix_VH: Tensor) -> npt.NDArray[np.uint16]:
    """The bits of a matrix as a store holds them, on the CPU."""
    bits: npt.NDArray[np.int16] = matrix_VH.bfloat16().cpu().view(torch.int16).numpy()
    return bits.view(np.uint16)
