"""Which samples a step draws: a pure function of the plan, the seed and the place in the epoch.

An epoch is one segment, or, while shards are still being captured, several (`train/follow.py`).
The samples of a segment are shuffled and packed into batches of a fixed budget of blocks and
tokens; a step takes the next world x accumulate batches. World size only decides who takes which,
so a run that goes on with another number of ranks still meets each sample once an epoch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dflash_pipeline.configs.errors import UsageError
from dflash_pipeline.configs.schema import TrainConfig
from dflash_pipeline.configs.shares import StoreShare
from dflash_pipeline.store.spec import ShardId
from dflash_pipeline.store.table import TRAIN, SampleTable
from dflash_pipeline.train.hashing import hashed
from dflash_pipeline.train.selection import kept_samples

Ints = npt.NDArray[np.int64]

# batches that are filled at the same time: enough to pair long samples with short ones
_OPEN_BATCHES = 8
_SHARE_SALT = 1


@dataclass(frozen=True, slots=True)
class Catalog:
    """The trainable samples of all stores, in store order, then plan order."""

    store_C: Ints
    """Which store."""
    sample_C: Ints
    """Number of the sample in its store."""
    sample_id_C: npt.NDArray[np.uint64]
    num_tokens_C: Ints
    num_anchors_C: Ints
    """Blocks drawn from it."""
    shard_C: Ints
    """Bucket and shard as one number, see `shard_number`."""
    shares: tuple[float, ...]

    def __len__(self) -> int:
        return len(self.store_C)


def shard_number(shard_id: ShardId) -> int:
    """A shard of one store as one number."""
    return (shard_id.bucket << 32) | shard_id.shard


def catalog(
    tables: Sequence[SampleTable], stores: Sequence[StoreShare], config: TrainConfig
) -> Catalog:
    """Samples of the training split that have an anchor and are not dropped.

    UsageError if one fits no batch, or none is left.
    """
    most = min(config.anchors_per_sample, config.batch_anchors)
    chosen = [
        np.flatnonzero((table.split == TRAIN) & (table.num_anchors > 0) & kept_N).astype(np.int64)
        for table, kept_N in zip(tables, kept_samples(tables, config), strict=True)
    ]
    if not sum(map(len, chosen)):
        paths = ", ".join(store.path for store in stores)
        if not any((table.split == TRAIN).any() for table in tables):
            raise UsageError(
                f"{paths}: every sample is held out (data.heldout), none is left to train on: "
                "capture with a smaller share, or evaluate on them"
            )
        left = " that is not dropped" if config.drop_domains or config.drop_samples else ""
        raise UsageError(f"{paths}: no training sample{left} has two supervised tokens in a row")
    pairs = list(zip(tables, chosen, strict=True))
    made = Catalog(
        store_C=np.repeat(np.arange(len(tables)), [len(samples) for samples in chosen]),
        sample_C=np.concatenate(chosen),
        sample_id_C=np.concatenate([table.sample_id[samples] for table, samples in pairs]),
        num_tokens_C=_joined(table.num_tokens[samples] for table, samples in pairs),
        num_anchors_C=np.minimum(
            _joined(table.num_anchors[samples] for table, samples in pairs), most
        ),
        shard_C=_joined(
            (table.bucket[samples].astype(np.int64) << 32) | table.shard[samples]
            for table, samples in pairs
        ),
        shares=tuple(store.share for store in stores),
    )
    longest = int(made.num_tokens_C.max())
    if longest > config.batch_tokens:
        raise UsageError(
            f"a sample has {longest} tokens, train.batch_tokens is {config.batch_tokens}: "
            f"set train.batch_tokens to at least {longest}"
        )
    return made


def _joined(columns: Iterable[npt.NDArray[np.integer]]) -> Ints:
    return np.concatenate(list(columns)).astype(np.int64)


def segment_batches(
    samples: Catalog, candidates: Ints, seed: int, epoch: int, batch_tokens: int, batch_anchors: int
) -> list[Ints]:
    """The batches of a segment whose samples are `candidates` (places in the catalog), in order."""
    drawn = _share(samples, candidates, seed, epoch)
    lot = hashed(seed, epoch, samples.store_C[drawn], samples.sample_id_C[drawn])
    shuffled = drawn[np.argsort(lot, kind="stable")]
    return _packed(samples, shuffled, batch_tokens, batch_anchors)


def _share(samples: Catalog, candidates: Ints, seed: int, epoch: int) -> Ints:
    """Of each store its share, chosen anew each epoch."""
    parts = []
    for store, share in enumerate(samples.shares):
        own = candidates[samples.store_C[candidates] == store]
        if share < 1:
            lot = hashed(_SHARE_SALT, seed, epoch, store, samples.sample_id_C[own])
            own = own[np.argsort(lot, kind="stable")[: math.ceil(share * len(own))]]
        parts.append(own)
    return np.concatenate(parts)


def _packed(samples: Catalog, shuffled: Ints, batch_tokens: int, batch_anchors: int) -> list[Ints]:
    """First fit into a few open batches; the oldest is closed when another has to be opened."""
    tokens, anchors = samples.num_tokens_C.tolist(), samples.num_anchors_C.tolist()
    done: list[Ints] = []
    # [free tokens, free blocks, members]
    filling: list[tuple[int, int, list[int]]] = []
    for sample in shuffled.tolist():
        need_tokens, need_anchors = tokens[sample], anchors[sample]
        for index, (free_tokens, free_anchors, members) in enumerate(filling):
            if need_tokens <= free_tokens and need_anchors <= free_anchors:
                members.append(sample)
                left = (free_tokens - need_tokens, free_anchors - need_anchors, members)
                filling[index] = left
                break
        else:
            if len(filling) == _OPEN_BATCHES:
                done.append(np.array(filling.pop(0)[2], np.int64))
            filling.append((batch_tokens - need_tokens, batch_anchors - need_anchors, [sample]))
    done.extend(np.array(members, np.int64) for _, _, members in filling)
    return done


@dataclass(frozen=True, slots=True)
class Position:
    """Where a run is: the next batch to draw. The same for every rank and any world size."""

    epoch: int
    segment: int
    batch: int


def steps_of(num_batches: int, world: int, accumulate: int) -> int:
    """Optimizer steps of so many batches; the last may be short, a rank may then have none."""
    return math.ceil(num_batches / (world * accumulate))


def rank_batches(
    batches: Sequence[Ints], first: int, rank: int, world: int, accumulate: int
) -> list[Ints]:
    """A rank's part of the step that begins at batch `first`."""
    window = batches[first : first + world * accumulate]
    return list(window[rank::world])


def planned_steps(samples: Catalog, config: TrainConfig, world: int) -> int:
    """All steps of the run, from the plan: what is committed by now does not change it."""
    every = np.arange(len(samples), dtype=np.int64)
    batches = segment_batches(
        samples, every, config.seed, 0, config.batch_tokens, config.batch_anchors
    )
    steps = config.epochs * steps_of(len(batches), world, config.accumulate)
    return min(steps, config.max_steps) if config.max_steps else steps
