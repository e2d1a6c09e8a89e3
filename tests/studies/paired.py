"""Paired differences of acceptance between two arms, with intervals, and what follows from them.

A pair is one seed: both arms have drawn the same weights, order and anchors. An interval holds two
sources of chance: which prompts were asked (bootstrap; all answers of a prompt are drawn together,
the same draw for both arms and every seed) and which seed was trained (variance of the seeds'
differences over their number). Each has a half width by Student's t at its own degrees of freedom,
and the squares of both add up. Simulated with three seeds that differ more than prompts do, this
holds the truth in 97 %; with the degrees of freedom of Welch and Satterthwaite instead it was 94 %
(two seeds: 89 %), as a spread of few seeds is by chance too small and then believed.

Letters: P prompts, S seeds, R resamples.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from studies.sizes import prompt_of

Floats = npt.NDArray[np.float64]
NUM_RESAMPLES = 2000
BOUND = 0.015
"""Largest loss of tau, as a share, that a smaller store mode may have at 95 %."""


@dataclass(frozen=True, slots=True)
class Score:
    """Replay of one trained drafter: kept tokens and cycles of each answer, by its key."""

    arm: str
    seed: int
    data: str
    """Fingerprint of what it was trained on."""
    kept: Mapping[str, int]
    cycles: Mapping[str, int]
    domain: Mapping[str, str]

    def tau(self, keys: Sequence[str]) -> float:
        """Pooled over the cycles of these answers; 0 where there is none."""
        cycles = sum(self.cycles[key] for key in keys)
        return sum(self.kept[key] for key in keys) / cycles if cycles else 0.0


@dataclass(frozen=True, slots=True)
class Difference:
    """Arm less base, as a share of the base's tau, or absolute."""

    mean: float
    low: float
    high: float
    by_seed: tuple[float, ...]
    num_prompts: int
    is_of_prompts_alone: bool
    """One seed: the interval does not hold what another seed would change."""


class Unpaired(ValueError):
    """Two arms that cannot be compared."""


def paired(
    arm: Sequence[Score], base: Sequence[Score], same_data: bool = True
) -> list[tuple[Score, Score]]:
    """The scores of both arms, seed by seed.

    Unpaired unless both have the same seeds, once each, scored on the same answers, and (with
    `same_data`) trained on the same ones.
    """
    names = [scores[0].arm if scores else "an arm without scores" for scores in (arm, base)]
    seeds = [sorted(score.seed for score in scores) for scores in (arm, base)]
    if seeds[0] != seeds[1] or not seeds[0] or len(set(seeds[0])) != len(seeds[0]):
        raise Unpaired(
            f"{names[0]} has seeds {seeds[0]}, {names[1]} has {seeds[1]}: train and score each "
            "seed once in both"
        )
    by_seed = {score.seed: score for score in base}
    pairs = [(score, by_seed[score.seed]) for score in sorted(arm, key=lambda one: one.seed)]
    for one, other in pairs:
        if one.kept.keys() != other.kept.keys():
            only = one.kept.keys() ^ other.kept.keys()
            raise Unpaired(
                f"{names[0]} and {names[1]}, seed {one.seed}: {len(only)} answers are scored in "
                f"one alone, {min(only)} for one; score both on the same held-out store"
            )
        if same_data and one.data != other.data:
            raise Unpaired(
                f"{names[0]} and {names[1]}, seed {one.seed}, were trained on different data "
                f"({one.data} and {other.data}): capture both stores from the same answers"
            )
    return pairs


def relative(
    arm: Sequence[Score], base: Sequence[Score], keys: Sequence[str], seed: int = 0
) -> Difference:
    """tau of `arm` over that of `base` less 1, mean over seeds, with its 95 % interval.

    Unpaired as `paired` says, or without a cycle in `keys`.
    """
    pairs = paired(arm, base)
    prompts = sorted({prompt_of(key) for key in keys})
    place = {prompt: number for number, prompt in enumerate(prompts)}
    counts_SP4 = np.zeros((len(pairs), len(prompts), 4))
    for number, (one, other) in enumerate(pairs):
        for key in keys:
            row = counts_SP4[number, place[prompt_of(key)]]
            row += (one.kept[key], one.cycles[key], other.kept[key], other.cycles[key])
    if not prompts or (counts_SP4.sum(1)[:, (1, 3)] == 0).any():
        raise Unpaired("no cycle among these answers: nothing can be compared")
    by_seed_S = _ratio(counts_SP4.sum(1))
    random = np.random.default_rng(seed)
    drawn_RP = random.multinomial(
        len(prompts), np.full(len(prompts), 1 / len(prompts)), NUM_RESAMPLES
    ).astype(np.float64)
    resampled_SR4 = np.einsum("rp,spc->src", drawn_RP, counts_SP4)
    mean_R = _ratio(resampled_SR4).mean(0)
    low, high = interval(
        float(by_seed_S.mean()), by_seed_S, float(np.nanvar(mean_R, ddof=1)), len(prompts)
    )
    return Difference(
        mean=float(by_seed_S.mean()),
        low=low,
        high=high,
        by_seed=tuple(by_seed_S.tolist()),
        num_prompts=len(prompts),
        is_of_prompts_alone=len(pairs) == 1,
    )


def _ratio(counts: Floats) -> Floats:
    """[..., 4] of kept, cycles of the arm, kept, cycles of the base -> tau over tau, less 1."""
    with np.errstate(invalid="ignore", divide="ignore"):
        found: Floats = counts[..., 0] / counts[..., 1] / (counts[..., 2] / counts[..., 3]) - 1
    return found


def interval(
    mean: float, by_seed_S: Floats, prompt_variance: float, num_prompts: int
) -> tuple[float, float]:
    """95 % at least, two-sided, of a mean whose variance has two parts."""
    num_seeds = len(by_seed_S)
    square = prompt_variance * t_quantile(0.975, max(num_prompts - 1, 1)) ** 2
    if num_seeds > 1:
        spread = float(by_seed_S.var(ddof=1)) / num_seeds
        square += spread * t_quantile(0.975, num_seeds - 1) ** 2
    return mean - math.sqrt(square), mean + math.sqrt(square)


def t_quantile(probability: float, freedom: float) -> float:
    """Quantile of Student's t for `probability` in (0.5, 1), by bisection over its integral."""
    low, high = 0.0, 1.0
    while _t_mass(high, freedom) < probability - 0.5:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (
            (middle, high) if _t_mass(middle, freedom) < probability - 0.5 else (low, middle)
        )
    return (low + high) / 2


def _t_mass(end: float, freedom: float) -> float:
    """Probability between 0 and `end`. With t = sqrt(freedom) tan(a) the density is cos(a)^(freedom
    - 1): smooth and bounded, so that Simpson's rule serves any freedom."""
    log_scale = math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2) - math.log(math.pi) / 2
    angles = np.linspace(0.0, math.atan(end / math.sqrt(freedom)), 2001)
    values = np.exp(log_scale + (freedom - 1) * np.log(np.cos(angles)))
    step = angles[1] - angles[0]
    total = values[0] + values[-1] + 4 * values[1:-1:2].sum() + 2 * values[2:-1:2].sum()
    return float(total * step / 3)


def best_arm(taus: Mapping[str, float]) -> str:
    """The arm with the largest tau; of equals the first by name."""
    if not taus:
        raise ValueError("no arm was scored: there is no best one")
    return max(sorted(taus), key=lambda name: taus[name])


def smallest_mode(
    bytes_per_token: Mapping[str, float], losses: Mapping[str, Difference], base: str
) -> str:
    """The mode of the fewest bytes whose loss of tau is at most BOUND at 95 %; else the base.

    A loss is a negative difference: its upper bound is minus the interval's lower end. An arm of a
    single seed decides nothing.
    """
    allowed = [base]
    for mode, found in losses.items():
        if not found.is_of_prompts_alone and -found.low <= BOUND:
            allowed.append(mode)
    return min(allowed, key=lambda mode: (bytes_per_token[mode], mode))
