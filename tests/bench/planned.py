"""Random targets of known shapes, and stores that are planned for them and hold no row yet."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from dflash_pipeline.capture.batches import plan
from dflash_pipeline.capture.shapes import Shape
from dflash_pipeline.capture.target import Target
from dflash_pipeline.configs.schema import CaptureConfig
from dflash_pipeline.store.bf16 import bf16_bits
from dflash_pipeline.store.build import StoreBuilder, estimate_bytes, plan_lock
from dflash_pipeline.store.reader import Store
from dflash_pipeline.store.rows import row_bytes
from dflash_pipeline.store.spec import CHUNK_ROWS, FORMAT, Attributes, Layout, StoreSpec
from dflash_pipeline.store.table import build_table, hash64

SEED = 0
PEAK_FLOPS = 790e12
"""Of an H200, bf16 dense."""
CAPTURED = 2
"""Times `num_tokens`: two shards are not timed, and the last one is finished."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """A target, the lengths of its data, and how much of them is captured."""

    hidden: int
    middle: int
    layers: int
    heads: int
    keys: int
    head_dim: int
    vocabulary: int
    layer_ids: tuple[int, ...]
    num_tokens: int
    """Captured by each way."""
    linear_every: int = 0
    """All layers but every so-manieth are linear attention; 0: none is."""
    mean: int = 951
    longest: int = 4096
    num_samples: int = 20_000
    token_budget: int = 49152
    pad_multiple: int = CaptureConfig().pad_multiple
    shard_bytes: int = 1 << 30
    mixed_tokens: int = 1024
    """Of a batch of mixed shape, at most."""

    @property
    def is_softmax(self) -> list[bool]:
        """Of each layer, whether its attention grows with the square of the length."""
        every = self.linear_every or 1
        return [layer % every == every - 1 for layer in range(self.layers)]


_TINY = Sizes(
    hidden=64,
    middle=96,
    layers=8,
    heads=4,
    keys=2,
    head_dim=16,
    vocabulary=512,
    layer_ids=(1, 3, 5),
    num_tokens=9_000,
    mean=60,
    longest=256,
    num_samples=400,
    token_budget=2048,
    pad_multiple=16,
    shard_bytes=1 << 17,
    mixed_tokens=128,
)
SIZES = {
    "8b": Sizes(
        hidden=4096,
        middle=12288,
        layers=36,
        heads=32,
        keys=8,
        head_dim=128,
        vocabulary=151936,
        layer_ids=(1, 9, 17, 25, 33),
        num_tokens=400_000,
    ),
    "0.6b": Sizes(
        hidden=1024,
        middle=3072,
        layers=28,
        heads=16,
        keys=8,
        head_dim=128,
        vocabulary=151936,
        layer_ids=(1, 7, 13, 19, 25),
        num_tokens=1_000_000,
        shard_bytes=1 << 28,
    ),
    # Qwen3.5-27B: 48 layers of linear attention, 16 of softmax
    "27b": Sizes(
        hidden=5120,
        middle=17408,
        layers=64,
        heads=24,
        keys=4,
        head_dim=256,
        vocabulary=248320,
        layer_ids=(1, 16, 31, 46, 61),
        linear_every=4,
        num_tokens=50_000,
        shard_bytes=1 << 28,
        token_budget=16384,
        num_samples=5_000,
    ),
    "tiny": _TINY,
    "tiny hybrid": replace(_TINY, linear_every=4, num_tokens=2_000, num_samples=100),
}


def random_target(sizes: Sizes, device: torch.device) -> Target:
    """Random weights of the shape, made on the device."""
    values: dict[str, Any] = {
        "vocab_size": sizes.vocabulary,
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.middle,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.keys,
        "head_dim": sizes.head_dim,
        "max_position_embeddings": 2 * sizes.longest,
        "tie_word_embeddings": False,
    }
    if sizes.linear_every:
        kinds = ["full_attention" if soft else "linear_attention" for soft in sizes.is_softmax]
        size = min(128, sizes.head_dim)
        values |= {
            "layer_types": kinds,
            "linear_num_key_heads": 16 if sizes.hidden > 1024 else 2,
            "linear_num_value_heads": 48 if sizes.hidden > 1024 else 4,
            "linear_key_head_dim": size,
            "linear_value_head_dim": size,
        }
    kind = transformers.Qwen3_5TextConfig if sizes.linear_every else transformers.Qwen3Config
    torch.manual_seed(SEED)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with device:
        model = transformers.AutoModelForCausalLM.from_config(kind(**values), dtype=dtype)
    # all-ones norms would hide a norm done twice from the gate
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return Target(model, sizes.layer_ids)


def floor_s(sizes: Sizes, target: Target, shapes: list[Shape]) -> float:
    """Seconds that batches of these shapes take at the peak: matrices of the layers over each
    place, and causal attention of the softmax layers (2 x 2 x heads x width / 2 each pair)."""
    linears = (one for one in target.layers.modules() if isinstance(one, torch.nn.Linear))
    num_weights = sum(one.weight.numel() for one in linears)
    places = sum(count * width for count, width in shapes)
    pairs = sum(count * width * (width + 1) / 2 for count, width in shapes)
    attention = 4 * sizes.heads * sizes.head_dim * sum(sizes.is_softmax) * pairs
    return (2 * num_weights * places + attention) / PEAK_FLOPS


def lengths(sizes: Sizes) -> np.ndarray:
    """Lognormal lengths, sigma 0.8."""
    random = np.random.default_rng(SEED)
    drawn = random.lognormal(np.log(sizes.mean) - 0.32, 0.8, sizes.num_samples)
    return np.clip(drawn, 8, sizes.longest).astype(np.int64)


def planned_store(sizes: Sizes, path: Path, mode: str) -> Store:
    """A store of random tokens, nothing captured yet; `mode` of hidden and last."""
    num_tokens_M = lengths(sizes)
    config = CaptureConfig()
    token_bytes = len(sizes.layer_ids) * row_bytes(mode, sizes.hidden)
    found = plan(
        num_tokens_M,
        num_buckets=config.num_buckets,
        token_budget=sizes.token_budget,
        pad_multiple=sizes.pad_multiple,
        shard_rows=-(-sizes.shard_bytes // token_bytes),
        seed=SEED,
    )
    spec = StoreSpec(
        format=FORMAT,
        target_id="random",
        target_hash="",
        target_dtype="bf16",
        quantisation="",
        layer_ids=sizes.layer_ids,
        num_target_layers=sizes.layers,
        hidden_size=sizes.hidden,
        vocab_size=sizes.vocabulary,
        hidden_mode=mode,
        last_mode=mode,
        last_rows="teacher",
        calibration_hash="",
        tokenizer_hash="",
        template_hash="",
        template_args="{}",
        max_len=sizes.longest,
        overlong="truncate",
    )
    layout = Layout(
        rows_per_shard=-(-found.num_rows_per_shard_max // CHUNK_ROWS) * CHUNK_ROWS,
        chunk_rows=CHUNK_ROWS,
        token_budget=sizes.token_budget,
        pad_multiple=sizes.pad_multiple,
        bucket_bounds=found.bucket_bounds,
        num_shards=found.num_shards,
        num_samples_per_shard_max=found.num_samples_per_shard_max,
        seed=SEED,
    )
    ordered_M = num_tokens_M[found.order_M]
    # the first third is the prompt, whose rows need no last state
    num_teacher_M = ordered_M - np.maximum(ordered_M // 3, 1)
    zeros_M = np.zeros_like(ordered_M)
    columns = {
        "source": zeros_M,
        "source_row": found.order_M,
        "domain": zeros_M,
        "split": zeros_M,
        "num_tokens": ordered_M,
        "num_teacher": num_teacher_M,
        "num_anchors": num_teacher_M - 1,
        "token_hash": np.array([hash64(str(i).encode()) for i in found.order_M], np.uint64),
        "bucket": found.bucket_M,
        "shard": found.shard_M,
        "batch": found.batch_M,
    }
    keys = [f"sample-{i}" for i in found.order_M]
    table = build_table(keys, columns, layout, [""], ["random"])
    attributes = Attributes(data_hash="", mask_token_id=0, dropped={}, run={})
    random = np.random.default_rng(SEED)
    # of the whole plan, what is captured at most: the rest needs no room
    whole = estimate_bytes(spec, layout, table)
    num_tokens = int(ordered_M.sum())
    captured = whole * min(CAPTURED * sizes.num_tokens, num_tokens) // num_tokens
    with (
        plan_lock(path, wait_s=10),
        StoreBuilder(
            path, spec, layout, table, attributes, 0, elsewhere_bytes=whole - captured
        ) as builder,
    ):
        # nobody trains from it
        embed_VH = bf16_bits(np.ones((sizes.vocabulary, sizes.hidden), np.float32))
        builder.write_target(embed_VH, None, {"config.json": b"{}"})
        for shard_id in layout.shard_ids():
            own_M = ordered_M[table.of_shard(shard_id)]
            masks = [np.arange(length) >= max(length // 3, 1) for length in own_M]
            ids_N = random.integers(0, sizes.vocabulary, int(own_M.sum()))
            builder.write_tokens(
                shard_id, ids_N.astype(np.uint32), np.concatenate(masks).astype(np.uint8)
            )
        return builder.publish()
