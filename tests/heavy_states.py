"""Made-up hidden states like those of real targets: heavy-tailed, massive channels, sinks."""

from __future__ import annotations

import numpy as np

HIDDEN = 192
MASSIVE = [5, 17, 80, 150]


def states(num_rows=400, seed=0):
    """Heavy-tailed channels with a mean, four massive ones, and sinks in the first rows."""
    random = np.random.default_rng(seed)
    channels = np.random.default_rng(7)
    scale_H, mean_H = channels.lognormal(sigma=0.7, size=HIDDEN), channels.normal(size=HIDDEN)
    rows_NH = (random.standard_t(6, (num_rows, HIDDEN)) + mean_H) * scale_H
    rows_NH[:, MASSIVE] *= 40
    rows_NH[:4, 17] = 25000
    return rows_NH.astype(np.float32)


def layers(num=2):
    return np.stack([states(seed=seed) for seed in range(num)], axis=1)
