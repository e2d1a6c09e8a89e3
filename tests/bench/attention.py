"""FlexAttention by the sizes of its tiles: one layer of the headline's step, forward and backward.

    python tests/bench/attention.py [--tiny]

First what torch chooses, then other choices for the forward pass, then for the backward pass, each
compiled anew (about four seconds), its gradients held against those of the first. Medians of 20
over rotated inputs, by CUDA events; a choice that does not fit the card is said not to. Writes
step.json into $OUT where that is set. About two minutes on one H200; `--tiny`: on a CPU, where
FlexAttention has no tiles, to see that it runs.
"""

from __future__ import annotations

import sys
from typing import Any
from unittest.mock import patch

import torch
from step import FULL_SIZES, TINY_SIZES, Bench, compiled_flex, layer_attention, relative

from dflash_pipeline.train import mask

# queries x keys, stages, warps
FORWARD = ((128, 64, 4, 8), (64, 64, 3, 4))
# queries x keys for the gradients of keys and values, then of queries; stages, warps
BACKWARD = (
    (64, 128, 128, 64, 3, 8),
    (32, 64, 64, 32, 4, 4),
    (32, 64, 64, 32, 3, 4),
    (32, 64, 64, 32, 5, 4),
    (32, 64, 64, 32, 2, 4),
    (32, 64, 64, 64, 3, 4),
    (16, 64, 64, 16, 5, 4),
    (32, 128, 64, 32, 4, 4),
    (32, 64, 128, 32, 4, 4),
)


def choices() -> list[tuple[str, dict[str, Any]]]:
    """Each with the options that it is for FlexAttention."""
    found: list[tuple[str, dict[str, Any]]] = [
        ("as torch chooses", {}),
        ("copies by TMA forward", {"fwd_USE_TMA": True}),
    ]
    both = (
        ("fwd", ("BLOCK_M", "BLOCK_N"), FORWARD),
        ("bwd", ("BLOCK_M1", "BLOCK_N1", "BLOCK_M2", "BLOCK_N2"), BACKWARD),
    )
    for prefix, tiles, several in both:
        for values in several:
            names = (*tiles, "num_stages", "num_warps")
            options = {f"{prefix}_{name}": one for name, one in zip(names, values, strict=True)}
            found.append((f"{prefix} {values}", options))
    return found


def main() -> None:
    bench = Bench(TINY_SIZES if "--tiny" in sys.argv else FULL_SIZES, 0.0)
    wanted = None
    for name, options in choices():
        compiled_flex.cache_clear()
        torch._dynamo.reset()
        torch.manual_seed(0)
        told = mask._kernel_options(0, torch.bfloat16, False) | options
        with patch.object(mask, "_kernel_options", lambda *_, told=told: told):
            forward, both = layer_attention(bench)
            try:
                found = [grad.float() for grad in both(0)]
                wanted = wanted or found
                error = max(relative(*pair) for pair in zip(found, wanted, strict=True))
                forward_ms, both_ms = bench.ms(forward), bench.ms(both)
            except Exception as failed:
                bench.tell(name, error=f"{type(failed).__name__}: {failed}"[:200])
                continue
        bench.tell(name, forward_ms=forward_ms, both_ms=both_ms, gradient_error=error)


if __name__ == "__main__":
    main()
