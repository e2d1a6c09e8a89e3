"""Intervals by bootstrap over prompts: prompts are drawn again, the cycles of one stay together.

Cycles of one answer resemble one another, so they are not drawn apart from it. Letters: N prompts,
R resamples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dflash_pipeline.train.hashing import hashed
from dflash_pipeline.train.tally import Tally

Floats = npt.NDArray[np.float64]
Places = npt.NDArray[np.int64]
NUM_RESAMPLES = 2000
# prompts that are drawn at a time: memory stays small for any number of them
_MOST_PLACES = 1 << 21
_TAILS = (0.025, 0.975)


class Interval(NamedTuple):
    """95 %, by percentiles of the resamples."""

    low: float
    high: float


class Counts(NamedTuple):
    """Of each of N prompts with at least one cycle."""

    kept_N: Floats
    cycles_N: Floats


def counts(tallies: Sequence[Tally]) -> Counts:
    """`tallies`: one a prompt; those without a cycle count for nothing."""
    found = [(tally.num_kept, tally.num_cycles) for tally in tallies if tally.num_cycles]
    table = np.array(found, np.float64).reshape(-1, 2)
    return Counts(table[:, 0], table[:, 1])


def pooled_tau(counted: Counts, seed: int) -> Interval:
    """Of kept tokens over cycles, both summed over all prompts."""
    return _interval(len(counted.kept_N), seed, lambda place_RN: _pooled(counted, place_RN))


def tau_per_prompt(counted: Counts, seed: int) -> Interval:
    """Of the mean of each prompt's own tau."""
    taus_N = counted.kept_N / counted.cycles_N
    return _interval(len(taus_N), seed, lambda place_RN: taus_N[place_RN].mean(-1))


def pooled_difference(one: Counts, other: Counts, seed: int) -> Interval:
    """Of one's pooled tau less the other's, both on the same prompts in each resample."""
    return _interval(
        len(one.kept_N),
        seed,
        lambda place_RN: _pooled(one, place_RN) - _pooled(other, place_RN),
    )


def _pooled(counted: Counts, place_RN: Places) -> Floats:
    kept_R: Floats = counted.kept_N[place_RN].sum(-1)
    cycles_R: Floats = counted.cycles_N[place_RN].sum(-1)
    return kept_R / cycles_R


def _interval(num_prompts: int, seed: int, statistic: Callable[[Places], Floats]) -> Interval:
    """Of what `statistic` makes of each resample's prompts; 0 to 0 without prompts."""
    if num_prompts == 0:
        return Interval(0.0, 0.0)
    parts, step = [], max(1, _MOST_PLACES // num_prompts)
    for begin in range(0, NUM_RESAMPLES, step):
        resample_R1 = np.arange(begin, min(begin + step, NUM_RESAMPLES))[:, None]
        word_RN = hashed(seed, resample_R1, np.arange(num_prompts)[None])
        parts.append(statistic((word_RN % np.uint64(num_prompts)).astype(np.int64)))
    low, high = np.quantile(np.concatenate(parts), _TAILS)
    return Interval(float(low), float(high))
