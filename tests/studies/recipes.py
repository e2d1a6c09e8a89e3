"""The README's plans for large targets: bytes, GPU hours and lines, from what was measured.

Measured (tests/bench/step.json, one H200): a training step of the drafter of Qwen3-8B, optimizer
included, and by how much it exceeds its floor. All else follows by arithmetic and is no reading:
the drafter of another target by its own floor and that excess; a capture by the least that its
forward pass can take at the GPU's best rate, as no capture of such a target was measured.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_pipeline.configs.load import load
from dflash_pipeline.store.rows import row_bytes
from dflash_pipeline.train.floor import H200_FLOP_PER_S, StepSize, step_flop

STEP_JSON = Path(__file__).parents[1] / "bench" / "step.json"
TIERS = (10_000, 100_000, 1_000_000)
# assumed of a sample, prompt and answer together
SAMPLE_TOKENS = 1000
EPOCHS = 6
MODES = {"bf16": ("bf16", "bf16"), "int8": ("int8", "int8"), "int4": ("int4", "int8")}
# of the measured step
CONTEXT, ANCHORS, BLOCK = 3072, 512, 16
HOUR_S = 3600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """What a plan needs to know of a target; `num_parameters` are its layers' alone."""

    preset: str
    hidden_size: int
    vocab_size: int
    num_parameters: float
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    num_layers: int = 5
    layer_ids: tuple[int, ...] = (0, 1, 2, 3, 4)
    """As many as are captured; `train/floor.py` counts them."""


# 36 layers of 2 x 4096 x 128 x (32 + 8) + 3 x 4096 x 12288
QWEN3_8B = Target(
    preset="qwen3-8b",
    hidden_size=4096,
    vocab_size=151936,
    num_parameters=36 * (4096 * 128 * (2 * 32 + 2 * 8) + 3 * 4096 * 12288),
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    intermediate_size=12288,
)
# by its name, less embedding and head
QWEN36_27B = Target(
    preset="qwen3.6-27b",
    hidden_size=5120,
    vocab_size=248320,
    num_parameters=27e9 - 2 * 248320 * 5120,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    intermediate_size=17408,
)


STEP = "step with optimizer, a batch of two"


def measured_step_s() -> float:
    """Seconds of 8,192 drafted rows of Qwen3-8B's drafter, with the optimizer's part; half of the
    loss is KL, the default's work: CE beside it costs nothing more."""
    return float(_figure(STEP)["ms"]) / 1e3


def step_objective() -> str:
    """What that step's loss was."""
    return str(_figure(STEP)["objective"])


def kl_s() -> float:
    """What a step takes less where its loss is CE alone, which has no teacher rows to project."""
    return float(_figure("step 8B KL+CE")["ms"] - _figure("step 8B CE")["ms"]) / 1e3


def _figure(name: str) -> dict[str, Any]:
    figures = json.loads(STEP_JSON.read_text(encoding="utf-8"))["figures"]
    return next(dict(one) for one in figures if one["name"] == name)


def floor_s(target: Target) -> float:
    """The least that a step of the measured size can take."""
    size = StepSize(
        num_context=CONTEXT,
        num_rows=ANCHORS * BLOCK,
        num_visible=ANCHORS * BLOCK * (CONTEXT // 2 + BLOCK),
        num_scored=ANCHORS * (BLOCK - 1),
        # nearly every position is what some block's slot is taught by
        num_teachers=CONTEXT,
    )
    return step_flop(target, size).total / H200_FLOP_PER_S


def step_s(target: Target) -> float:
    """Of this target's drafter: measured for Qwen3-8B, for others in proportion to their floor."""
    return measured_step_s() * floor_s(target) / floor_s(QWEN3_8B)


def bytes_per_token(target: Target, mode: str) -> int:
    """Of a store that keeps `last` for every token, which is more than is needed."""
    hidden, last = MODES[mode]
    features = len(target.layer_ids) * row_bytes(hidden, target.hidden_size)
    return features + row_bytes(last, target.hidden_size)


def capture_hours(target: Target, samples: int) -> float:
    """GPU hours of the products of one forward pass without attention, at the GPU's best rate."""
    return samples * SAMPLE_TOKENS * 2 * target.num_parameters / H200_FLOP_PER_S / HOUR_S


def train_hours(target: Target, samples: int) -> float:
    """GPU hours of EPOCHS epochs, ANCHORS blocks a sample."""
    return samples * EPOCHS * step_s(target) / HOUR_S


def table(target: Target) -> list[str]:
    """Rows of markdown, a tier each."""
    block = load(target.preset, (), {}).drafter.block_size
    assert block == BLOCK, f"{target.preset}: blocks of {block}, the step measured is of {BLOCK}"
    lines = []
    for samples in TIERS:
        stores = " / ".join(
            _tb(samples * SAMPLE_TOKENS * bytes_per_token(target, mode)) for mode in MODES
        )
        cells = [
            f"{samples:,}",
            f"{samples * SAMPLE_TOKENS / 1e6:,.0f} M",
            stores,
            _hours(capture_hours(target, samples)),
            _hours(train_hours(target, samples)),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _tb(size_bytes: float) -> str:
    return f"{size_bytes / 1e12:.2g}" if size_bytes < 1e12 else f"{size_bytes / 1e12:.1f}"


def _hours(hours: float) -> str:
    return f"{hours:.2g}" if hours < 10 else f"{hours:,.0f}"
