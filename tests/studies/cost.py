"""What the study costs on H200s, before it is run: operations, bytes, launches, seconds.

Measured on one H200 (tests/bench/real_target.json) are the rates of single processes; how they
share a GPU is assumed, and every line says which it is. Assumed is that kernels of several
processes take turns: a GPU is busy for the sum of their device times, and none is faster than
alone.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from dflash_pipeline.store.rows import row_bytes
from dflash_pipeline.train.floor import H200_FLOP_PER_S, StepSize, step_flop
from studies.arms import MODES, later_arms, objective_arms
from studies.sizes import Size

MEASURED = Path(__file__).parents[1] / "bench" / "real_target.json"
# rows of training and of held-out prompts that stand in the shared files
TRAIN_PROMPTS, EVAL_PROMPTS = 3496, 260
# assumed: small products reach so much of the GPU's best rate (8,192 rows of a hidden size of 576)
EFFICIENCY = 0.25
# assumed: a step of decoding a batch of 768 with its cache of up to 700 tokens, device time
DECODE_STEP_S = 0.025
# assumed: one process a slot at a time, with imports, rehearsal and compiling
START_S = 30.0
# assumed: a replayed answer takes two passes of the drafter, each as slow to launch as a forward
REPLAY_S = 0.012
SLOTS = 8


@dataclass(frozen=True, slots=True)
class Dimensions:
    """Of the drafter, as `train/floor.py` reads them."""

    hidden_size: int = 576
    num_heads: int = 9
    num_kv_heads: int = 3
    head_dim: int = 64
    intermediate_size: int = 1536
    num_layers: int = 3
    vocab_size: int = 49152
    layer_ids: tuple[int, ...] = (1, 8, 14, 20, 27)


@dataclass(frozen=True, slots=True)
class Cost:
    """One stage on so many GPUs."""

    name: str
    seconds: float
    how: str


def costs(size: Size, num_seeds: int, num_gpus: int) -> list[Cost]:
    """Each stage of the full study."""
    measured = json.loads(MEASURED.read_text(encoding="utf-8"))["one_gpu"]
    per_answer = measured["generate"]["tokens"] / measured["generate"]["answers"]
    per_sample = measured["capture"]["tokens"] / measured["capture"]["samples"]
    answers = TRAIN_PROMPTS * (1 + size.samples)
    held_out = EVAL_PROMPTS * (1 + size.eval_samples)
    tokens = (answers + held_out) * per_answer
    new_tokens, batch = (
        _number(size, "generate.max_new_tokens"),
        _number(size, "generate.batch_size"),
    )
    rounds = (answers + held_out) / batch
    decode_s = rounds * new_tokens * DECODE_STEP_S / num_gpus + START_S
    context = answers * per_sample
    modes = [mode for mode in MODES if mode != "bf16"]
    store_bytes = store_sizes(size)
    capture_s = context / measured["capture"]["tokens_per_s"]
    # three captures of the second round share the GPUs
    stores_s = (capture_s + START_S) + (capture_s * len(modes) / num_gpus + START_S)
    anchors, batch_anchors = (
        _number(size, f"train.{name}") for name in ("anchors_per_sample", "batch_anchors")
    )
    steps = _number(size, "train.epochs") * answers * anchors / batch_anchors
    flop = step_flop(Dimensions(), _step_size(size, per_sample))
    device_s = flop.total / H200_FLOP_PER_S / EFFICIENCY
    alone_s = 1 / measured["train"]["steps_per_s"]
    runs = num_seeds * (len(objective_arms((0,))) + 1)
    runs += sum(len(arm.seeds) for arm in later_arms("ce-kl-gamma", tuple(range(num_seeds))))
    a_step_s = max(device_s, alone_s / SLOTS) / num_gpus
    train_s = runs * (steps * a_step_s + START_S / SLOTS / num_gpus)
    score_s = runs * held_out * REPLAY_S / SLOTS / num_gpus + START_S
    return [
        Cost(
            "data",
            decode_s,
            f"{answers + held_out:,.0f} answers of {per_answer:.0f} tokens (measured) are "
            f"{tokens / 1e6:.1f} M; {rounds:.0f} batches of {new_tokens} steps, "
            f"{DECODE_STEP_S * 1e3:.0f} ms each (assumed)",
        ),
        Cost(
            "store",
            stores_s,
            f"{context / 1e6:.1f} M tokens at {measured['capture']['tokens_per_s']:,.0f} a second "
            f"(measured) {1 + len(modes)} times; GB "
            + ", ".join(f"{name} {value / 1e9:.1f}" for name, value in store_bytes.items()),
        ),
        Cost(
            "arms",
            train_s,
            f"{runs} runs of {steps:,.0f} steps of {batch_anchors:,} blocks: "
            f"{flop.total / 1e12:.2f} TFLOP a step, {device_s * 1e3:.1f} ms of the device at "
            f"{EFFICIENCY:.0%} of its rate (assumed), {alone_s * 1e3:.0f} ms to launch (measured, "
            f"one process): {SLOTS} share a GPU",
        ),
        Cost(
            "score",
            score_s,
            f"{runs} runs x {held_out:,} answers x {REPLAY_S * 1e3:.0f} ms (assumed), "
            f"{SLOTS} at once",
        ),
    ]


def store_sizes(size: Size) -> dict[str, float]:
    """Bytes of each store of the full study, without the held-out answers'."""
    measured = json.loads(MEASURED.read_text(encoding="utf-8"))["one_gpu"]
    answers = TRAIN_PROMPTS * (1 + size.samples)
    context = answers * measured["capture"]["tokens"] / measured["capture"]["samples"]
    generated = answers * measured["generate"]["tokens"] / measured["generate"]["answers"]
    return {name: _bytes(context, generated, name) for name in MODES}


def lines(size: Size, num_seeds: int, num_gpus: int) -> list[str]:
    """For people; only the full size was made for this estimate."""
    if size.preset != "smollm2":
        return [f"the estimate is of the preset smollm2, not of {size.preset}"]
    found = costs(size, num_seeds, num_gpus)
    told = [f"{one.name:6} {one.seconds:5.0f} s  {one.how}" for one in found]
    total = sum(one.seconds for one in found)
    told.append(f"disk   {sum(store_sizes(size).values()) / 1e9:5.0f} GB of stores (computed)")
    return [*told, f"all    {total:5.0f} s on {num_gpus} GPU{'s' * (num_gpus > 1)}, not measured"]


def _number(size: Size, key: str) -> int:
    value = size.settings[key]
    assert isinstance(value, int)
    return value


def _bytes(num_tokens: float, num_teachers: float, mode: str) -> float:
    dimensions, kept = Dimensions(), MODES[mode]
    hidden = len(dimensions.layer_ids) * row_bytes(kept.hidden, dimensions.hidden_size)
    last = row_bytes(kept.last, dimensions.hidden_size)
    return num_tokens * hidden + num_teachers * last


def _step_size(size: Size, per_sample: float) -> StepSize:
    blocks, slots = _number(size, "train.batch_anchors"), _number(size, "drafter.block_size")
    context = round(blocks / _number(size, "train.anchors_per_sample") * per_sample)
    return StepSize(
        num_context=context,
        num_rows=blocks * slots,
        num_visible=round(blocks * slots * (per_sample / 2 + slots)),
        num_scored=blocks * (slots - 1),
        num_teachers=min(blocks * (slots - 1), context),
    )
