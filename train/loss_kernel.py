"""Triton: logits of drafted rows -> their losses and the gradient of their logits.

One program a row, two passes over the vocabulary: online statistics, then the gradient. Each pass
begins where the one before it ended: what was read last is still in the device's cache.

Letters: R drafted rows, P of one chunk, V vocabulary, C teacher rows that are held, F statistics.
"""

# mypy: allow-untyped-decorators

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from dflash_pipeline.configs.schema import LossConfig

# values that a program has in hand at a time, how many of them a warp has (four a thread, which are
# loaded as one), and tiles on their way. For 1,280 rows of 151,936 logits on an H200: alone 0.48
# ms, with teacher rows 0.62 (0.49 and 0.65 with STAGES 1; tests/bench/step.json)
TILE = 2048
WARP_VALUES = 128
STAGES = 4
LOG2_E = tl.constexpr(1.4426950408889634)
# the logit of a token beyond the vocabulary: infinity times a weight of 0 would be no number. Far
# below all logits, and a power of two: its products are exact, so that `_power` makes 1 of two that
# are equal at any temperature
NOWHERE = tl.constexpr(-(2.0**64))


@triton.jit
def _tokens(first: tl.tensor, TILE: tl.constexpr) -> tl.tensor:
    """first ... first + TILE - 1 as [TILE / 4, 4]: each row is one thread's."""
    return first + 4 * tl.arange(0, TILE // 4)[:, None] + tl.arange(0, 4)[None, :]


@triton.jit
def _logits(
    row: tl.tensor,
    token: tl.tensor,
    V: tl.constexpr,
    MULTIPLIER: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    EVICTION: tl.constexpr,
) -> tl.tensor:
    """Those of a row: output scale, then c tanh(z / c). IS_WHOLE: no token is beyond V."""
    if IS_WHOLE:
        raw = tl.load(row + token, eviction_policy=EVICTION)
    else:
        raw = tl.load(row + token, mask=token < V, other=0.0, eviction_policy=EVICTION)
    logits = raw * MULTIPLIER
    if SOFT_CAP > 0:
        # from exp(-2 |x|), which never overflows
        shrunk = tl.exp(tl.abs(logits) * (-2.0 / SOFT_CAP))
        size = SOFT_CAP * (1 - shrunk) / (1 + shrunk)
        logits = tl.where(logits < 0, -size, size)
    if not IS_WHOLE:
        logits = tl.where(token < V, logits, NOWHERE)
    return logits


@triton.jit
def _power(logits: tl.tensor, top: tl.tensor, TEMPERATURE: tl.constexpr) -> tl.tensor:
    """exp((logits - top) / T) by one fused multiplication and addition and a power of two. The
    top's product is rounded before: all that is relative to it is off by the same factor."""
    SCALE: tl.constexpr = LOG2_E / TEMPERATURE
    return tl.math.exp2(tl.fma(logits, SCALE, -(top * SCALE)))


@triton.jit
def _decay(before: tl.tensor, top: tl.tensor, TEMPERATURE: tl.constexpr) -> tl.tensor:
    """exp((before - top) / T), exactly 1 while the top stays: it multiplies at every tile."""
    return tl.math.exp2((before - top) * (LOG2_E / TEMPERATURE))


@triton.jit(
    do_not_specialize=["first_row", "num_held", "num_rows"],
    do_not_specialize_on_alignment=["label_R", "index_R", "stats_FR"],
)
def score_kernel(
    logits_PV: tl.tensor,
    target_CV: tl.tensor,
    gradient_PV: tl.tensor,
    label_R: tl.tensor,
    index_R: tl.tensor,
    stats_FR: tl.tensor,
    first_row: tl.tensor,
    num_held: tl.tensor,
    num_rows: tl.tensor,
    V: tl.constexpr,
    CE: tl.constexpr,
    KL: tl.constexpr,
    TV: tl.constexpr,
    CAP: tl.constexpr,
    TEMPERATURE: tl.constexpr,
    MULTIPLIER: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    """Row first_row + `program_id(0)`; teacher row u is row u modulo `num_held` of
    `target_CV`.

    `stats_FR`: correct, ce, kl, entropy, overlap; F such rows of R numbers.

    KL and TV 0: neither `target_CV` nor `index_R` is read. Entropy, overlap and TV are those at
    temperature 1. The gradient is that of the row's loss, not weighed.
    """
    HAS_TARGET: tl.constexpr = KL + TV > 0
    IS_HOT: tl.constexpr = HAS_TARGET and TEMPERATURE != 1
    # whole tiles, and the last tile's first token
    WHOLE: tl.constexpr = V // TILE * TILE
    LAST: tl.constexpr = (V - 1) // TILE * TILE
    LANES: tl.constexpr = TILE // 4
    place = tl.program_id(0).to(tl.int64)
    row = place + first_row
    label = tl.load(label_R + row).to(tl.int32)
    logit = logits_PV + place * V
    gradient = gradient_PV + place * V
    target = target_CV
    if HAS_TARGET:
        target += (tl.load(index_R + row) % num_held).to(tl.int64) * V
    # a lane is four tokens of each tile and keeps their statistics, of exp(z - the largest it has
    # met): one reduction a row instead of one a tile. `z` and `t` name drafter and target, `hot`
    # what is at the temperature
    top_z = tl.full((LANES,), NOWHERE, tl.float32)
    sum_z = tl.zeros((LANES,), tl.float32)
    mean_z = tl.zeros((LANES,), tl.float32)
    hot_z = tl.zeros((LANES,), tl.float32)
    top_first = tl.zeros((LANES,), tl.int32)
    top_t = tl.full((LANES,), NOWHERE, tl.float32)
    sum_t = tl.zeros((LANES,), tl.float32)
    hot_t = tl.zeros((LANES,), tl.float32)
    gap_t = tl.zeros((LANES,), tl.float32)
    for part in tl.static_range(2):
        # only the last tile may reach beyond V: the others go without a mask
        for first in tl.range(
            0 if part == 0 else WHOLE, WHOLE if part == 0 else V, TILE, num_stages=STAGES
        ):
            token = _tokens(first, TILE)
            z = _logits(logit, token, V, MULTIPLIER, SOFT_CAP, part == 0, "")
            top = tl.maximum(top_z, tl.max(z, axis=1))
            old, new = _decay(top_z, top, 1.0), _power(z, top[:, None], 1.0)
            sum_z = sum_z * old + tl.sum(new, axis=1)
            mean_z = mean_z * old + tl.sum(new * z, axis=1)
            if IS_HOT:
                hot_z = hot_z * _decay(top_z, top, TEMPERATURE)
                hot_z += tl.sum(_power(z, top[:, None], TEMPERATURE), axis=1)
            top_first = tl.where(top > top_z, first, top_first)
            top_z = top
            if HAS_TARGET:
                t = _logits(target, token, V, MULTIPLIER, SOFT_CAP, part == 0, "")
                top = tl.maximum(top_t, tl.max(t, axis=1))
                old, new = _decay(top_t, top, 1.0), _power(t, top[:, None], 1.0)
                sum_t = sum_t * old + tl.sum(new, axis=1)
                if IS_HOT:
                    old = _decay(top_t, top, TEMPERATURE)
                    new = _power(t, top[:, None], TEMPERATURE)
                    hot_t = hot_t * old + tl.sum(new, axis=1)
                gap_t = gap_t * old + tl.sum(new * (t - z), axis=1)
                top_t = top
    largest_z = tl.max(top_z, axis=0)
    share = tl.exp(top_z - largest_z)
    norm_z = tl.sum(sum_z * share, axis=0)
    log_z = largest_z + tl.log(norm_z)
    entropy = log_z - tl.sum(mean_z * share, axis=0) / norm_z
    at_label = tl.sum(_logits(logit, label + tl.arange(0, 1), V, MULTIPLIER, SOFT_CAP, True, ""))
    # the first of equals, as argmax has it: each thread's is in the tile that raised its largest
    token = _tokens(top_first[:, None], TILE)
    z = _logits(logit, token, V, MULTIPLIER, SOFT_CAP, False, "")
    best = tl.min(tl.min(tl.where(z == largest_z, token, V), axis=1), axis=0)
    correct = tl.where(best == label, 1.0, 0.0)
    # T log sum exp(z / T)
    log_hot_z = log_z
    log_t = 0.0
    log_hot_t = 0.0
    kl = 0.0
    if HAS_TARGET:
        if IS_HOT:
            share = tl.exp((top_z - largest_z) / TEMPERATURE)
            norm_z = tl.sum(hot_z * share, axis=0)
            log_hot_z = largest_z + TEMPERATURE * tl.log(norm_z)
        largest_t = tl.max(top_t, axis=0)
        share = tl.exp(top_t - largest_t)
        norm_t = tl.sum(sum_t * share, axis=0)
        log_t = largest_t + tl.log(norm_t)
        log_hot_t = log_t
        if IS_HOT:
            share = tl.exp((top_t - largest_t) / TEMPERATURE)
            norm_t = tl.sum(hot_t * share, axis=0)
            log_hot_t = largest_t + TEMPERATURE * tl.log(norm_t)
        # sum of p (log p - log q), with p and q at the temperature
        gap = tl.sum(gap_t * share, axis=0) / norm_t
        kl = (gap - log_hot_t + log_hot_z) / TEMPERATURE
    # the drafter's chance of those tokens that it gives no more than the target does
    mass_below = 0.0
    if TV > 0:
        below = tl.zeros((LANES,), tl.float32)
        for at in range(0, V, TILE):
            token = _tokens(LAST - at, TILE)
            z = _logits(logit, token, V, MULTIPLIER, SOFT_CAP, False, "")
            t = _logits(target, token, V, MULTIPLIER, SOFT_CAP, False, "")
            q, p = _power(z, log_z, 1.0), _power(t, log_t, 1.0)
            below += tl.sum(tl.where(q <= p, q, 0.0), axis=1)
        mass_below = tl.sum(below, axis=0)
    overlap = tl.zeros((LANES,), tl.float32)
    offset = _tokens(0, TILE)
    IS_BACKWARD: tl.constexpr = TV == 0
    for part in tl.static_range(2):
        for at in tl.range(
            0 if part == 0 else WHOLE, WHOLE if part == 0 else V, TILE, num_stages=STAGES
        ):
            first = WHOLE - TILE - at if part == 0 and IS_BACKWARD else at
            token = first + offset
            # neither logits nor gradient are wanted again: they make room for rows that are
            z = _logits(logit, token, V, MULTIPLIER, SOFT_CAP, part == 0, "evict_first")
            q = _power(z, log_z, 1.0)
            slope = CE * q - tl.where(offset == label - first, CE, 0.0)
            if CAP > 0:
                slope -= CAP * correct * q * (z - log_z + entropy)
            if HAS_TARGET:
                t = _logits(target, token, V, MULTIPLIER, SOFT_CAP, part == 0, "")
                p = _power(t, log_t, 1.0)
                overlap += tl.sum(tl.minimum(p, q), axis=1)
                if TV > 0:
                    slope += TV * q * (mass_below - tl.where(q <= p, 1.0, 0.0))
                if IS_HOT:
                    q = _power(z, log_hot_z, TEMPERATURE)
                    p = _power(t, log_hot_t, TEMPERATURE)
                if KL > 0:
                    slope += (KL * TEMPERATURE) * (q - p)
            if SOFT_CAP > 0:
                slope *= 1 - (z / SOFT_CAP) * (z / SOFT_CAP)
            rounded = (slope * MULTIPLIER).to(gradient.dtype.element_ty)
            if part == 0:
                tl.store(gradient + token, rounded, eviction_policy="evict_first")
            else:
                tl.store(gradient + token, rounded, mask=token < V, eviction_policy="evict_first")
    stats = stats_FR + row
    tl.store(stats, correct)
    tl.store(stats + num_rows, log_z - at_label)
    tl.store(stats + 2 * num_rows, kl)
    tl.store(stats + 3 * num_rows, entropy)
    tl.store(stats + 4 * num_rows, tl.sum(overlap, axis=0))


def score_rows(
    logits_PV: torch.Tensor,
    target_CV: torch.Tensor | None,
    gradient_PV: torch.Tensor,
    label_R: torch.Tensor,
    index_R: torch.Tensor | None,
    stats_FR: torch.Tensor,
    first_row: int,
    constants: dict[str, Any],
) -> None:
    """Score rows first_row ... first_row + P - 1 on the current stream.

    Logits are raw (neither scaled nor capped), fp32; all is contiguous. Writes `gradient_PV` and
    the rows' columns of `stats_FR` [F, R].
    """
    score_kernel[(len(logits_PV),)](
        logits_PV,
        logits_PV if target_CV is None else target_CV,
        gradient_PV,
        label_R,
        label_R if index_R is None else index_R,
        stats_FR,
        first_row,
        1 if target_CV is None else len(target_CV),
        stats_FR.shape[1],
        **constants,
        num_warps=constants["TILE"] // WARP_VALUES,
        # said aloud: its default differs between versions of Triton
        enable_fp_fusion=True,
    )


def score_constants(
    vocab_size: int, config: LossConfig, multiplier: float, soft_cap: float
) -> dict[str, Any]:
    """The kernel's compile-time arguments: fixed for a run."""
    return {
        "V": vocab_size,
        "CE": float(config.ce),
        "KL": float(config.kl),
        "TV": float(config.tv),
        "CAP": float(config.cap_lambda),
        "TEMPERATURE": float(config.temperature),
        "MULTIPLIER": float(multiplier),
        "SOFT_CAP": float(soft_cap),
        "TILE": TILE,
        "STAGES": STAGES,
    }
