"""A tiny batch through the whole path before anything large is made: each setting meets its code.

The drafter is a twin of the one to be trained, with its blocks, layer types, rotary scaling, loss
and optimizer, but a few numbers wide and on the CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from dflash_pipeline.configs.errors import UsageError
from dflash_pipeline.configs.memory import explained
from dflash_pipeline.configs.place import Place
from dflash_pipeline.configs.schema import CE_ALONE, Run
from dflash_pipeline.configs.scratch import scratch
from dflash_pipeline.store.reader import Store
from dflash_pipeline.train.anchors import Tokens, pack_blocks, slot_weights
from dflash_pipeline.train.clock import Clock
from dflash_pipeline.train.drafter import Drafter
from dflash_pipeline.train.export import write_zlab
from dflash_pipeline.train.feed import Batch
from dflash_pipeline.train.forward import EagerForward
from dflash_pipeline.train.group import Group
from dflash_pipeline.train.head import TargetHead
from dflash_pipeline.train.loading import read_checkpoint
from dflash_pipeline.train.metrics import Metrics
from dflash_pipeline.train.noise import Noise
from dflash_pipeline.train.optim import Optimizer
from dflash_pipeline.train.schedule import learning_rate
from dflash_pipeline.train.segments import ORDER_FILE
from dflash_pipeline.train.shape import DrafterShape
from dflash_pipeline.train.step import learn
from dflash_pipeline.train.teacher import Teacher, teacher_spans

# the narrowest that Triton's matrix product takes
_MIN_HEAD_DIM = 16
_WIDTH, _HEAD_DIM, _VOCABULARY, _NUM_TOKENS = 32, 16, 64, 24
LESS_MEMORY = (
    "lower train.batch_anchors, train.batch_tokens or drafter.block_size (activations and the "
    "feed's buffers), or loss.position_chunk (logits)"
)


def check_stores(run: Run, stores: Sequence[Store], is_resumed: bool) -> None:
    """UsageError for stores that cannot be trained on together, or not with these settings."""
    first, *others = stores
    for other in others:
        if found := _differences(first, other):
            raise UsageError(
                f"{first.path} and {other.path} cannot be trained together: {'; '.join(found)}"
                f"{_hint(first, other)}"
            )
    for place, store in enumerate(stores):
        for before in stores[:place]:
            if before.plan_hash == store.plan_hash:
                raise UsageError(
                    f"{before.path} and {store.path} are the same store: each of its samples would "
                    "count twice; name it once"
                )
    if run.loss.needs_last and not first.spec.has_last:
        raise UsageError(
            f"loss.kl is {run.loss.kl:g} and loss.tv {run.loss.tv:g}, but {first.path} holds no "
            "`last` states: capture again with --last-mode bf16, or train "
            f"with cross-entropy alone: {CE_ALONE}"
        )
    for store in stores:
        _check_rolling(run, store, is_resumed)
        if not store.is_sealed and not run.train.follow:
            raise UsageError(
                f"{store.path} is still being captured and --no-follow was given: wait for the "
                "capture to end, or leave --no-follow out"
            )


def _hint(first: Store, other: Store) -> str:
    """What to do about two stores that differ; the rows of one cannot be changed."""
    one, two = (replace(store.spec, calibration_hash="") for store in (first, other))
    if one == two and first.spec != other.spec:
        return f"; capture {other.path} again with --calibration-from {first.path}"
    return "; train on each alone, or capture one of them again with the settings of the other"


def _differences(first: Store, other: Store) -> list[str]:
    """What keeps two stores from being trained on together."""
    one, two = first.attributes, other.attributes
    found = first.spec.differences(other.spec)
    if one.mask_token_id != two.mask_token_id:
        found.append(f"mask token: {one.mask_token_id} and {two.mask_token_id}")
    if one.heldout_shares != two.heldout_shares:
        found.append(
            f"data.heldout: {one.heldout_shares} and {two.heldout_shares}, so that prompts held "
            "out in one may be trained on in the other; capture one of them again"
        )
    return found


def _check_rolling(run: Run, store: Store, is_resumed: bool) -> None:
    """UsageError where shards are gone, or will be before the run needs them again."""
    # a run that had drawn nothing yet is a new one to a store that has sent its rows away since
    has_drawn = is_resumed and (Path(run.train.out) / ORDER_FILE).exists()
    if store.num_released and not has_drawn:
        raise UsageError(
            f"{store.num_released} of {len(store.layout.shard_ids())} shards of {store.path} were "
            "released: the runs that followed its capture have used them, and a new run would "
            "train on the rest alone. Go on with one of those runs by --resume, or capture into "
            "another --store (with --consumers N if N runs shall use it, or without --quota)"
        )
    if store.is_rolling and not store.is_sealed and run.train.epochs != 1:
        raise UsageError(
            f"{store.path} is captured under a quota: each shard is deleted once it was trained "
            f"on, so train.epochs is {run.train.epochs} where it must be 1; give --epochs 1, or "
            "capture without --quota"
        )


def check_device(run: Run, shape: DrafterShape, place: Place) -> None:
    """UsageError for a drafter that FlexAttention has no kernel for."""
    if run.train.compile and place.kind == "cuda" and shape.head_dim < _MIN_HEAD_DIM:
        raise UsageError(
            f"the drafter's heads are {shape.head_dim} wide, compiled attention needs at least "
            f"{_MIN_HEAD_DIM}: set drafter.head_dim, or train.compile = false"
        )


def rehearse(run: Run, shape: DrafterShape, place: Place) -> None:
    """One step, an export and its reading back, with a twin of the drafter. ValueError where a
    loss or gradient is not finite, or the memory does not suffice."""
    doing, cpu = "a rehearsal of one small step", torch.device("cpu")
    with explained(torch, cpu, dict, lambda: doing, "activations", LESS_MEMORY):
        _rehearse(run, shape, place)


def _rehearse(run: Run, shape: DrafterShape, place: Place) -> None:
    twin = twin_shape(shape)
    drafter = Drafter(twin)
    drafter.initialise(run.train.seed)
    generator = torch.Generator().manual_seed(0)
    head = TargetHead(torch.randn(_VOCABULARY, _WIDTH, generator=generator), None, twin)
    group = Group(replace(place, rank=0, world=1, kind="cpu", device="cpu"), run.train.timeout_s)
    optimizer = Optimizer(
        drafter.named_parameters(), run.optim, group, run.train.log_every, torch.float32
    )
    metrics = Metrics(twin.block_size, "cpu")
    batch = _batch(run, twin, generator)
    Noise(run.train, 0, torch.device("cpu")).add(batch.feature_NKH, 0, 0)
    clock = Clock(torch.device("cpu"))
    optimizer.expect_last()
    learn(batch, EagerForward(drafter), head, run.loss, optimizer, metrics, clock)
    optimizer.sum_up(wants_stop=False)
    optimizer.step(learning_rate(0, 1, run.optim))
    health = optimizer.health(optimizer.vector())
    if health.num_bad:
        raise ValueError(
            "a rehearsal with random numbers gave a loss or gradient that is not finite: "
            "check optim, loss and drafter settings"
        )
    with scratch("rehearsal") as folder:
        path = folder / "step"
        write_zlab(path, twin, optimizer.masters(), {"template_args": "{}"})
        read_checkpoint(path)


def twin_shape(shape: DrafterShape) -> DrafterShape:
    """A few numbers wide, with one layer of each type."""
    layer_types = tuple(dict.fromkeys(shape.layer_types))
    return replace(
        shape,
        hidden_size=_WIDTH,
        intermediate_size=_WIDTH,
        num_layers=len(layer_types),
        layer_types=layer_types,
        num_heads=2,
        num_kv_heads=1,
        head_dim=_HEAD_DIM,
        vocab_size=_VOCABULARY,
        mask_token_id=_VOCABULARY - 1,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )


def _batch(run: Run, shape: DrafterShape, generator: torch.Generator) -> Batch:
    """Two blocks of one made-up document."""
    blocks = pack_blocks(
        [Tokens(1, np.arange(_NUM_TOKENS), np.ones(_NUM_TOKENS, np.uint8))],
        quota=2,
        seed=run.train.seed,
        epoch=0,
        block_size=shape.block_size,
        weight_S=slot_weights(shape.block_size, run.loss.gamma),
        last_rows="all",
    )
    size = (_NUM_TOKENS, len(shape.layer_ids), _WIDTH)
    teacher = Teacher(
        state_UH=torch.randn(size[0], _WIDTH, generator=generator),
        index_R=torch.from_numpy(blocks.teacher_R),
        spans=teacher_spans(blocks.teacher_R, run.loss.position_chunk),
    )
    return Batch(
        feature_NKH=torch.randn(size, generator=generator),
        position_N=torch.from_numpy(blocks.position_N),
        anchor_A=torch.from_numpy(blocks.anchor_A).to(torch.int32),
        start_A=torch.from_numpy(blocks.start_A).to(torch.int32),
        token_A=torch.from_numpy(blocks.token_A),
        row_R=torch.from_numpy(blocks.row_R),
        slot_R=torch.from_numpy(blocks.slot_R),
        label_R=torch.from_numpy(blocks.label_R),
        weight_R=torch.from_numpy(blocks.weight_R),
        teacher=teacher if run.loss.needs_last else None,
        num_blocks=len(blocks.anchor_A),
        samples=np.zeros(1, np.int64),
    )
