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

# values that a program has in hand at a time, and how many of them a warp has. For 1,920 rows of
# 151,936 logits on an H200: alone 0.71 ms (0.74 with 1,024 and 256), with teacher rows 1.12 ms
# (1.17)
TILE = 2048
WARP_VALUES = 128


@triton.jit
def _finish(raw: tl.tensor, MULTIPLIER: tl.constexpr, SOFT_CAP: tl.constexpr) -> tl.tensor:
    """Output scale, then c tanh(z / c)."""
    scaled = raw * MULTIPLIER
    if SOFT_CAP > 0:
        # from exp(-2 |x|), which never overflows
        shrunk = tl.exp(tl.abs(scaled) * (-2.0 / SOFT_CAP))
        size = SOFT_CAP * (1 - shrunk) / (1 + shrunk)
        scaled = tl.where(scaled < 0, -size, size)
    return scaled


@triton.jit
def _weights(new: tl.tensor, top: tl.tensor, TEMPERATURE: tl.constexpr) -> Any:
    """What the sum so far and a new term are multiplied by when sums are relative to the top."""
    # one of the two is 1, so one exponential serves both
    step = tl.exp(tl.abs(new - top) * (-1.0 / TEMPERATURE))
    is_larger = new > top
    return tl.where(is_larger, step, 1.0), tl.where(is_larger, 1.0, step)


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
) -> None:
    """Row first_row + `program_id(0)`; teacher row u is row u modulo `num_held` of
    `target_CV`.

    `stats_FR`: correct, ce, kl, entropy, overlap; F such rows of R numbers.

    KL and TV 0: neither `target_CV` nor `index_R` is read. Entropy, overlap and TV are those at
    temperature 1. The gradient is that of the row's loss, not weighed.
    """
    HAS_TARGET: tl.constexpr = KL + TV > 0
    LAST: tl.constexpr = (V - 1) // TILE * TILE
    place = tl.program_id(0).to(tl.int64)
    row = place + first_row
    label = tl.load(label_R + row)
    logit = logits_PV + place * V
    gradient = gradient_PV + place * V
    target = target_CV
    if HAS_TARGET:
        target += (tl.load(index_R + row) % num_held).to(tl.int64) * V
    lane = tl.arange(0, TILE)
    # each lane keeps its own statistics: one reduction a row instead of one a tile. Sums are of
    # exp(z - top); `z` and `t` name drafter and target, `hot` what is at the temperature
    top_z = tl.full((TILE,), -1.0e30, tl.float32)
    sum_z = tl.zeros((TILE,), tl.float32)
    mean_z = tl.zeros((TILE,), tl.float32)
    hot_z = tl.zeros((TILE,), tl.float32)
    likeliest = tl.zeros((TILE,), tl.int32)
    top_t = tl.full((TILE,), -1.0e30, tl.float32)
    sum_t = tl.zeros((TILE,), tl.float32)
    hot_t = tl.zeros((TILE,), tl.float32)
    mean_t = tl.zeros((TILE,), tl.float32)
    cross = tl.zeros((TILE,), tl.float32)
    for first in range(0, V, TILE):
        token = first + lane
        inside = token < V
        z = _finish(tl.load(logit + token, mask=inside, other=0.0), MULTIPLIER, SOFT_CAP)
        shown_z = tl.where(inside, z, float("-inf"))
        old, new = _weights(shown_z, top_z, 1.0)
        sum_z = sum_z * old + new
        mean_z = mean_z * old + new * z
        likeliest = tl.where(shown_z > top_z, token, likeliest)
        if HAS_TARGET:
            if TEMPERATURE != 1:
                old, new = _weights(shown_z, top_z, TEMPERATURE)
                hot_z = hot_z * old + new
            t = _finish(tl.load(target + token, mask=inside, other=0.0), MULTIPLIER, SOFT_CAP)
            shown_t = tl.where(inside, t, float("-inf"))
            old, new = _weights(shown_t, top_t, 1.0)
            sum_t = sum_t * old + new
            if TEMPERATURE != 1:
                old, new = _weights(shown_t, top_t, TEMPERATURE)
                hot_t = hot_t * old + new
            mean_t = mean_t * old + new * t
            cross = cross * old + new * z
            top_t = tl.maximum(top_t, shown_t)
        top_z = tl.maximum(top_z, shown_z)
    largest_z = tl.max(top_z, axis=0)
    share = tl.exp(top_z - largest_z)
    norm_z = tl.sum(sum_z * share, axis=0)
    log_z = largest_z + tl.log(norm_z)
    entropy = log_z - tl.sum(mean_z * share, axis=0) / norm_z
    at_label = _finish(tl.load(logit + label), MULTIPLIER, SOFT_CAP)
    # the first of equals, as argmax has it
    best = tl.min(tl.where(top_z == largest_z, likeliest, V), axis=0)
    correct = tl.where(best == label, 1.0, 0.0)
    log_hot_z = log_z
    log_t = 0.0
    log_hot_t = 0.0
    kl = 0.0
    if HAS_TARGET:
        if TEMPERATURE != 1:
            share = tl.exp((top_z - largest_z) / TEMPERATURE)
            norm_z = tl.sum(hot_z * share, axis=0)
            log_hot_z = largest_z / TEMPERATURE + tl.log(norm_z)
        largest_t = tl.max(top_t, axis=0)
        share = tl.exp(top_t - largest_t)
        norm_t = tl.sum(sum_t * share, axis=0)
        log_t = largest_t + tl.log(norm_t)
        log_hot_t = log_t
        if TEMPERATURE != 1:
            share = tl.exp((top_t - largest_t) / TEMPERATURE)
            norm_t = tl.sum(hot_t * share, axis=0)
            log_hot_t = largest_t / TEMPERATURE + tl.log(norm_t)
        # sum of p (log p - log q), with p and q at the temperature
        gap = tl.sum((mean_t - cross) * share, axis=0) / norm_t
        kl = gap / TEMPERATURE - log_hot_t + log_hot_z
    # the drafter's chance of those tokens that it gives no more than the target does
    mass_below = 0.0
    if TV > 0:
        below = tl.zeros((TILE,), tl.float32)
        for first in range(0, V, TILE):
            token = LAST - first + lane
            inside = token < V
            z = _finish(tl.load(logit + token, mask=inside, other=0.0), MULTIPLIER, SOFT_CAP)
            t = _finish(tl.load(target + token, mask=inside, other=0.0), MULTIPLIER, SOFT_CAP)
            q = tl.exp(z - log_z)
            p = tl.exp(t - log_t)
            below += tl.where(inside & (q <= p), q, 0.0)
        mass_below = tl.sum(below, axis=0)
    overlap = tl.zeros((TILE,), tl.float32)
    for first in range(0, V, TILE):
        token = (first if TV > 0 else LAST - first) + lane
        inside = token < V
        # neither logits nor gradient are wanted again: they make room for rows that are
        raw = tl.load(logit + token, mask=inside, other=0.0, eviction_policy="evict_first")
        z = _finish(raw, MULTIPLIER, SOFT_CAP)
        q = tl.exp(z - log_z)
        slope = CE * (q - tl.where(token == label, 1.0, 0.0))
        if CAP > 0:
            slope -= CAP * correct * q * (z - log_z + entropy)
        if HAS_TARGET:
            t = _finish(tl.load(target + token, mask=inside, other=0.0), MULTIPLIER, SOFT_CAP)
            p = tl.exp(t - log_t)
            overlap += tl.where(inside, tl.minimum(p, q), 0.0)
            if TV > 0:
                slope += TV * q * (mass_below - tl.where(q <= p, 1.0, 0.0))
            if TEMPERATURE != 1:
                q = tl.exp(z / TEMPERATURE - log_hot_z)
                p = tl.exp(t / TEMPERATURE - log_hot_t)
            if KL > 0:
                slope += (KL * TEMPERATURE) * (q - p)
        if SOFT_CAP > 0:
            slope *= 1 - (z / SOFT_CAP) * (z / SOFT_CAP)
        slope *= MULTIPLIER
        rounded = slope.to(gradient.dtype.element_ty)
        tl.store(gradient + token, rounded, mask=inside, eviction_policy="evict_first")
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
    }
