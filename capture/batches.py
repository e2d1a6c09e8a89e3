"""Lengths -> buckets, batches and shards: a pure function of the lengths and a few numbers.

A batch takes samples of one bucket that are next to each other in length, so it pads little; the
batches are then spread over the shards, so that any first shards are even in length. Nothing here
depends on how many GPUs capture. Letters: M samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Int = NDArray[np.int64]

# Not packed, several samples a row behind a block-diagonal mask. Of 20,000 conversations of
# lognormal length (mean 951, sigma 0.8, at most 4,096) 1.2 % of the places are padding, so
# packing could win 1.2 % at most. It needs an attention over documents; attention is 3.3 % of an
# 8B target's FLOP at these lengths, so one that takes 1.4 times the time of the kernel without a
# mask gives all of it back, and recurrent layers would have to be reset within a row. Nearly all
# of the padding is the rounding up to capture.pad_multiple: 3.4 % at 64 tokens, 1.2 % at 16.


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """Samples in plan order: `order_M` are places in the input, the other columns follow it."""

    order_M: Int
    bucket_M: Int
    shard_M: Int
    """Within its bucket."""
    batch_M: Int
    """Within its shard."""
    bucket_bounds: tuple[int, ...]
    """Longest sample of each bucket, in tokens, ascending."""
    num_shards: tuple[int, ...]
    num_samples_per_shard_max: tuple[int, ...]
    num_batches: int
    num_rows_per_shard_max: int
    num_padded_tokens: int
    """Tokens of all batches with their padding."""


def plan(
    num_tokens_M: Int,
    *,
    num_buckets: int,
    token_budget: int,
    pad_multiple: int,
    shard_rows: int,
    seed: int,
) -> Plan:
    """Arrange samples of the given lengths.

    A shard is the fewest whole batches that hold `shard_rows` rows; the last one of a bucket may
    be shorter. Raises ValueError without samples or when the longest one exceeds the budget.
    """
    if len(num_tokens_M) == 0:
        raise ValueError("nothing to capture: no sample is left")
    longest = int(_padded(num_tokens_M, pad_multiple).max())
    if longest > token_budget:
        raise ValueError(
            f"the longest sample pads to {longest} tokens, capture.token_budget is "
            f"{token_budget}: raise it or lower data.max_len"
        )
    bounds = bucket_bounds(num_tokens_M, num_buckets, pad_multiple)
    bucket_M = np.searchsorted(np.array(bounds), num_tokens_M)
    parts: list[tuple[Int, Int, Int, Int]] = []
    num_shards, widths = [], []
    num_batches = num_rows_max = num_padded = 0
    for bucket in range(len(bounds)):
        members = np.flatnonzero(bucket_M == bucket)
        members = members[np.argsort(num_tokens_M[members], kind="stable")]
        padded = _padded(num_tokens_M[members], pad_multiple)
        cuts = _batches(padded, token_budget)
        num_batches += len(cuts)
        num_padded += sum((end - begin) * int(padded[end - 1]) for begin, end in cuts)
        shuffled = [members[slice(*cuts[place])] for place in _spread(len(cuts), seed, bucket)]
        shards = _shards([int(num_tokens_M[batch].sum()) for batch in shuffled], shard_rows)
        num_shards.append(len(shards))
        width = 1
        for shard, (first, after) in enumerate(shards):
            batches = shuffled[first:after]
            samples = np.concatenate(batches)
            width = max(width, len(samples))
            num_rows_max = max(num_rows_max, int(num_tokens_M[samples].sum()))
            places = np.repeat(np.arange(len(batches)), [len(batch) for batch in batches])
            parts.append(
                (samples, np.full_like(samples, bucket), np.full_like(samples, shard), places)
            )
        widths.append(width)
    order_M, bucket_M, shard_M, batch_M = (
        np.concatenate(part) for part in zip(*parts, strict=True)
    )
    return Plan(
        order_M=order_M,
        bucket_M=bucket_M,
        shard_M=shard_M,
        batch_M=batch_M,
        bucket_bounds=bounds,
        num_shards=tuple(num_shards),
        num_samples_per_shard_max=tuple(widths),
        num_batches=num_batches,
        num_rows_per_shard_max=num_rows_max,
        num_padded_tokens=num_padded,
    )


def bucket_bounds(num_tokens_M: Int, num_buckets: int, pad_multiple: int) -> tuple[int, ...]:
    """Longest length of each of at most `num_buckets` buckets, none of them empty.

    Chosen so that the tokens of all samples, each padded to its bucket's bound, are fewest:
    dynamic programming over the lengths that occur, rounded up to `pad_multiple`.
    """
    level_L, count_L = np.unique(_padded(num_tokens_M, pad_multiple), return_counts=True)
    num_levels = len(level_L)
    num_below = np.concatenate([[0], np.cumsum(count_L)])
    # least tokens of the first j levels, j = 0..L, with the buckets so far
    least = np.concatenate([[0], level_L * num_below[1:]])
    choices = [np.zeros(num_levels + 1, dtype=np.int64)]
    for _ in range(1, min(num_buckets, num_levels)):
        better, choice = least.copy(), np.zeros(num_levels + 1, dtype=np.int64)
        for end in range(1, num_levels + 1):
            # the last bucket takes the levels [begin, end), all padded to the longest of them
            total = least[:end] + level_L[end - 1] * (num_below[end] - num_below[:end])
            choice[end] = np.argmin(total)
            better[end] = total[choice[end]]
        least = better
        choices.append(choice)
    bounds, end = [], num_levels
    for choice in reversed(choices):
        if end > 0:
            bounds.append(int(level_L[end - 1]))
            end = int(choice[end])
    return tuple(reversed(bounds))


def _padded(num_tokens: Int, pad_multiple: int) -> Int:
    return -(-num_tokens // pad_multiple) * pad_multiple


def _batches(padded: Int, token_budget: int) -> list[tuple[int, int]]:
    """[begin, end) of each batch of ascending lengths: as many sequences as the budget holds."""
    cuts, begin = [], 0
    while begin < len(padded):
        most = min(len(padded) - begin, token_budget // int(padded[begin]))
        # ascending lengths: a batch costs its number of sequences times its last one's length
        cost = padded[begin : begin + most] * np.arange(1, most + 1)
        end = begin + int(np.searchsorted(cost, token_budget, side="right"))
        cuts.append((begin, end))
        begin = end
    return cuts


def _shards(batch_rows: Sequence[int], shard_rows: int) -> list[tuple[int, int]]:
    """[first, after) batches of each shard: the fewest that reach `shard_rows`."""
    shards, first, rows = [], 0, 0
    for place, num_rows in enumerate(batch_rows):
        rows += num_rows
        if rows >= shard_rows or place == len(batch_rows) - 1:
            shards.append((first, place + 1))
            first, rows = place + 1, 0
    return shards


def _spread(count: int, seed: int, bucket: int) -> Int:
    """An order of `count` batches, which ascend in length: any prefix of it is even in length.

    By the fractional parts of i * golden ratio + offset: less uneven than a random order, which at
    30 batches doubles the share of the shortest samples in the first tenth. The seed moves the
    offset. Whole numbers only: numpy's generators may change with a release.
    """
    golden = 0x9E3779B97F4A7C15
    offset = (seed * 0xBF58476D1CE4E5B9 + (bucket + 1) * 0x94D049BB133111EB) % (1 << 64)
    place = np.arange(count, dtype=np.uint64) * np.uint64(golden) + np.uint64(offset)
    return np.argsort(place, kind="stable")
