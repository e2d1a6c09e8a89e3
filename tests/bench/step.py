"""The training step on a GPU: first that it computes the right thing, then how long it takes.

    python tests/bench/step.py [--tiny] [--only check,loss] [--limit 200]

Parts: check, ceilings, loss, mask, step, small (the 4B drafter), wide (the 27B drafter), kernel,
eager. Prints a line for each figure and writes step.json into $OUT where that is set. Times are
medians of 20 over rotated inputs, by CUDA events. Floors are `train.floor`'s; "of floor" is floor
over measured. A part that would begin after `--limit` seconds is left out, and said to be. `--tiny`
runs every part with small sizes, on a CPU too; with TRITON_INTERPRET=1 the loss's kernel included
(a minute for `--only check,kernel`).
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import flex_attention as flex

from dflash_pipeline.configs.schema import LossConfig, OptimConfig
from dflash_pipeline.train import loss as loss_module
from dflash_pipeline.train import teacher as teacher_module
from dflash_pipeline.train.anchors import Tokens, pack_blocks, slot_weights
from dflash_pipeline.train.clock import Clock
from dflash_pipeline.train.drafter import Attend, Drafter
from dflash_pipeline.train.feed import Batch
from dflash_pipeline.train.floor import H200_FLOP_PER_S, StepSize, loss_flop, step_flop
from dflash_pipeline.train.forward import CompiledForward, EagerForward, Forward
from dflash_pipeline.train.head import TargetHead
from dflash_pipeline.train.loss import chunked_loss, reference_loss
from dflash_pipeline.train.mask import (
    TILE,
    FlexAttention,
    Visibility,
    dense_attend,
    flex_attend,
    grouped_attend,
    is_hopper,
)
from dflash_pipeline.train.metrics import Metrics
from dflash_pipeline.train.optim import Optimizer
from dflash_pipeline.train.shape import FULL, SLIDING, DrafterShape
from dflash_pipeline.train.step import learn, score
from dflash_pipeline.train.teacher import Teacher, teacher_spans

sys.path.append(str(Path(__file__).parents[1]))
from shapes import HEADLINE, wide_shape
from timing import median_ms, peak_gib
from waits import no_waits

CE = LossConfig(ce=1.0, kl=0.0, slot_weights="gamma")
KL = LossConfig(ce=0.5, kl=0.5, slot_weights="gamma")
OBJECTIVES = {"CE": CE, "KL+CE": KL}
GROUPS = (256, 512, 1024)


@dataclass(frozen=True)
class Sizes:
    """What is measured: the headline's shape, or one that a CPU can do."""

    drafter: DrafterShape
    small: DrafterShape
    wide: DrafterShape
    """Of the largest head."""
    num_context: int
    num_anchors: int
    product: int
    chunks: tuple[int, ...]
    num_timed: int


FULL_SIZES = Sizes(
    drafter=HEADLINE,
    small=wide_shape(2560, 9728, 32, 8, 128, 151936),
    # of Qwen3.5-27B and 3.6-27B
    wide=wide_shape(5120, 17408, 32, 8, 128, 248320),
    num_context=3072,
    num_anchors=512,
    product=8192,
    chunks=(1280, 1920, 2560),
    num_timed=20,
)
TINY_SIZES = Sizes(
    drafter=wide_shape(64, 96, 4, 2, 16, 1003),
    small=wide_shape(32, 64, 4, 2, 16, 1003),
    wide=wide_shape(32, 96, 4, 2, 16, 2048),
    num_context=128,
    num_anchors=16,
    product=64,
    chunks=(50, 100),
    num_timed=2,
)


class Bench:
    """Clock, device, and the figures so far."""

    def __init__(self, sizes: Sizes, limit_s: float) -> None:
        self.sizes = sizes
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.dtype = torch.bfloat16 if self.is_cuda else torch.float32
        self.figures: list[dict[str, Any]] = []
        self._limit_s = limit_s
        self._began = time.monotonic()

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._began

    def run(self, part: Callable[[Bench], None]) -> None:
        """One part, unless the time is over; a failure is a figure and does not end the others."""
        name = part.__name__
        if self.elapsed_s > self._limit_s:
            self.tell(name, error=f"left out: {self.elapsed_s:.0f} s are over")
            return
        begin = self.elapsed_s
        try:
            part(self)
        except Exception as error:
            self.tell(name, error=f"{type(error).__name__}: {error}"[:600])
        self.tell(f"part {name}", s=self.elapsed_s - begin, at_s=self.elapsed_s)
        if self.is_cuda:
            torch.cuda.empty_cache()

    def tell(self, figure: str, /, **numbers: Any) -> None:
        self.figures.append({"name": figure, **numbers})
        shown = (
            f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}"
            for key, value in numbers.items()
        )
        print(f"{figure:44} {', '.join(shown)}", flush=True)
        if os.environ.get("OUT"):
            result = {
                "device": torch.cuda.get_device_name() if self.is_cuda else "cpu",
                "torch": torch.__version__,
                "elapsed_s": self.elapsed_s,
                "figures": self.figures,
            }
            text = json.dumps(result, indent=1) + "\n"
            Path(os.environ["OUT"], "step.json").write_text(text)

    def random(self, *size: int, scale: float = 1.0) -> Tensor:
        drawn = torch.randn(size, device=self.device, dtype=self.dtype)
        return drawn if scale == 1.0 else drawn.mul_(scale)

    def ms(self, work: Callable[[int], object]) -> float:
        """Of `work(turn)`, the median; `turn` says which of the rotated inputs to take."""
        return median_ms(work, self.sizes.num_timed, self.is_cuda)

    def host_ms(self, work: Callable[[int], object]) -> float:
        """What the host needs to ask for `work`, the device idle before; the median."""
        spent = []
        for turn in range(-(-self.sizes.num_timed // 4)):
            if self.is_cuda:
                torch.cuda.synchronize()
            begin = time.perf_counter()
            work(turn)
            spent.append(time.perf_counter() - begin)
        return statistics.median(spent) * 1e3

    def peak_gib(self, work: Callable[[int], object]) -> float:
        """Memory of `work` above what was held before."""
        return peak_gib(work, self.is_cuda)


def relative(found: Tensor, wanted: Tensor) -> float:
    """|found - wanted| / |wanted|; NaN stays NaN."""
    wanted = wanted.detach().double()
    return float((found.detach().double() - wanted).norm() / wanted.norm())


def need(is_right: bool, text: str) -> None:
    if not is_right:
        raise ValueError(text)


# check


def check(bench: Bench) -> None:
    """Loss against fp64, attention against the dense mask in fp32."""
    shape = bench.sizes.drafter
    random_head = bench.random(shape.vocab_size, shape.hidden_size, scale=0.02)
    head = TargetHead(random_head, None, shape)
    exact_head = TargetHead(random_head.double(), None, shape)
    num_rows = 200
    for name, config in OBJECTIVES.items():
        chunk = replace(config, position_chunk=96)
        hidden_RH = bench.random(num_rows, shape.hidden_size, scale=2.0)
        state_UH = bench.random(70, shape.hidden_size, scale=2.0)
        index_R = np.arange(num_rows) * 70 // num_rows
        label_R = torch.randint(shape.vocab_size, (num_rows,), device=bench.device)
        weight_R = torch.rand(num_rows, device=bench.device) + 0.1
        spans = teacher_spans(index_R, 96)
        index = torch.from_numpy(index_R).to(bench.device)
        rows = hidden_RH.clone().requires_grad_()
        teacher = Teacher(state_UH, index, spans)
        loss_R, _ = chunked_loss(rows, head, label_R, teacher, chunk)
        total = (loss_R * weight_R).sum()
        total.backward()
        exact = hidden_RH.double().requires_grad_()
        teacher = Teacher(state_UH.double(), index, spans)
        truth = (reference_loss(exact, exact_head, label_R, teacher, chunk) * weight_R).sum()
        truth.backward()
        assert rows.grad is not None
        assert exact.grad is not None
        value, gradient = relative(total.detach(), truth.detach()), relative(rows.grad, exact.grad)
        bench.tell(f"check loss {name}", value_error=value, gradient_error=gradient)
        need(value < 1e-4 and gradient < 1e-2, f"the loss {name} is wrong")
    del exact_head
    for layer_type in (FULL, SLIDING):
        _check_attention(bench, layer_type)


def _fast_attend(visible: Visibility, layer_type: str) -> Attend:
    if not visible.anchor_A.is_cuda:
        return grouped_attend(visible, [layer_type])
    return flex_attend(
        {layer_type: visible.block_mask(layer_type)},
        compiled_flex(),
        on_hopper=is_hopper(visible.anchor_A.device),
    )


@functools.cache
def compiled_flex() -> FlexAttention:
    compiled: FlexAttention = torch.compile(flex.flex_attention, dynamic=True)
    return compiled


def _check_attention(bench: Bench, layer_type: str) -> None:
    tokens = 1024 if bench.is_cuda else 128
    num_blocks, shape = tokens // 16, bench.sizes.drafter
    # the step's own heads: then one compilation serves both
    heads, keys, width = shape.num_heads, shape.num_kv_heads, shape.head_dim
    start_D = torch.tensor([0, tokens // 5, tokens // 2], device=bench.device)
    anchor_A = torch.randperm(tokens - 16, device=bench.device)[:num_blocks].sort().values
    start_A = start_D[torch.searchsorted(start_D, anchor_A, right=True) - 1]
    visible = Visibility(anchor_A.int(), start_A.int(), tokens, 16, tokens // 4)
    dense = {layer_type: visible.dense(layer_type)}
    parts = [bench.random(num_blocks * 16, heads, width)]
    parts += [bench.random(rows, keys, width) for rows in (tokens, tokens, num_blocks * 16)]
    parts.append(bench.random(num_blocks * 16, keys, width))
    outer = bench.random(num_blocks * 16, heads, width)
    results = []
    for attend, dtype in (
        (_fast_attend(visible, layer_type), bench.dtype),
        (dense_attend(dense), torch.float32),
    ):
        inputs = [part.to(dtype).requires_grad_() for part in parts]
        query, *states = inputs
        mixed = attend(layer_type, query, (states[0], states[1]), (states[2], states[3]))
        results.append([mixed, *torch.autograd.grad(mixed, inputs, outer.to(dtype))])
    errors = [relative(*pair) for pair in zip(*results, strict=True)]
    bench.tell(f"check attention {layer_type}", largest_error=max(errors))
    need(max(errors) < 1e-2, f"attention is wrong on {layer_type}: {errors}")


# single parts


def ceilings(bench: Bench) -> None:
    """The rates that the step's products could have."""
    size = bench.sizes.product
    shape = bench.sizes.drafter
    hidden, vocab = shape.hidden_size, shape.vocab_size
    head_VH = bench.random(vocab, hidden)
    rows = bench.sizes.chunks[1]
    slope_PV = bench.random(rows, vocab)

    def product(name: str, left: Tensor, right: Tensor, is_wide: bool) -> None:
        wide = {"out_dtype": torch.float32} if is_wide and bench.is_cuda else {}
        ms = bench.ms(lambda _turn: torch.mm(left, right, **wide))
        flop = 2 * left.shape[0] * left.shape[1] * right.shape[1]
        bench.tell(f"product {name}", ms=ms, tflop_per_s=flop / ms / 1e9)

    product(f"{size}^3", bench.random(size, size), bench.random(size, size), False)
    num_rows = bench.sizes.num_anchors * 16
    up = bench.random(shape.intermediate_size, hidden)
    product("gate or up", bench.random(num_rows, hidden), up.t(), False)
    product("down", bench.random(num_rows, shape.intermediate_size), up, False)
    # a position chunk, and a group of teacher rows
    for scored in (*bench.sizes.chunks, *(GROUPS if bench.is_cuda else ())):
        product(f"head, {scored} rows", bench.random(scored, hidden), head_VH.t(), True)
    product(f"head back, {rows} rows", slope_PV, head_VH, False)
    # as the loss has it: bf16 in the front halves of fp32 rows
    spread_PV = slope_PV.new_empty(rows, 2 * vocab)[:, :vocab].copy_(slope_PV)
    product(f"head back, {rows} rows, spread", spread_PV, head_VH, False)


def loss(bench: Bench) -> None:
    """The loss alone, by chunk size and by how many teacher rows are projected at a time."""
    sizes = bench.sizes
    shape = sizes.drafter
    _loss_figures(bench, shape, sizes.chunks)
    if not bench.is_cuda:
        return

    for group in GROUPS:
        if group == teacher_module.GROUP_ROWS:
            continue
        with patch.object(teacher_module, "GROUP_ROWS", group):
            _loss_figures(bench, shape, sizes.chunks[:1], f", groups of {group}")
    _loss_figures(bench, sizes.small, sizes.chunks[1:2])
    _loss_figures(bench, sizes.wide, sizes.chunks[1:2])


def _loss_figures(
    bench: Bench, shape: DrafterShape, chunks: tuple[int, ...], note: str = ""
) -> None:
    hidden, vocab = shape.hidden_size, shape.vocab_size
    head = TargetHead(bench.random(vocab, hidden, scale=0.02), None, shape)
    for chunk, (name, objective) in itertools.product(chunks, OBJECTIVES.items()):
        config = replace(objective, position_chunk=chunk)
        batches = [_batch(bench, shape, config, seed, with_features=False) for seed in range(2)]
        rows = [bench.random(len(batch.row_R), hidden).requires_grad_() for batch in batches]

        def once(
            turn: int,
            batches: list[Batch] = batches,
            rows: list[Tensor] = rows,
            config: LossConfig = config,
        ) -> None:
            batch, row = batches[turn % 2], rows[turn % 2]
            loss_R, _ = chunked_loss(row, head, batch.label_R, batch.teacher, config)
            (loss_R * batch.weight_R).sum().backward()
            row.grad = None

        ms = bench.ms(once)
        teacher = batches[0].teacher
        num_teachers = 0 if teacher is None else len(teacher.state_UH)
        floor_ms = _floor_ms(loss_flop(shape, len(rows[0]), num_teachers))
        bench.tell(
            f"loss {name} V {vocab} H {hidden} chunk {chunk}{note}",
            ms=ms,
            times_floor=ms / floor_ms,
            rows=len(rows[0]),
            peak_gib=bench.peak_gib(once),
        )


def _floor_ms(flop: int) -> float:
    return flop / H200_FLOP_PER_S * 1e3


def mask(bench: Bench) -> None:
    """Building the mask, and attention over it in one layer."""
    shape, sizes = bench.sizes.drafter, bench.sizes
    seen = _seen(bench)
    ms = bench.ms(lambda turn: seen[turn % len(seen)].block_mask(FULL))
    bench.tell("mask build, eager", ms=ms)
    found = seen[0].block_mask(FULL)
    num_whole = 0 if found.full_kv_num_blocks is None else int(found.full_kv_num_blocks.sum())
    num_tiles = int(found.kv_num_blocks.sum()) + num_whole
    batch = _batch(bench, shape, CE, 0, with_features=False)
    useful = _num_visible(batch, shape) / (num_tiles * TILE**2)
    bench.tell("mask tiles", tiles=num_tiles, useful_share=useful)
    flop = step_flop(shape, _step_size(batch, shape, sizes.num_context))
    forward, both = layer_attention(bench)
    cost = flop.attention_forward // shape.num_layers
    works: list[tuple[str, Callable[[int], object]]]
    works = [("forward", forward), ("forward+backward", both)]
    for name, work in works:
        ms = bench.ms(work)
        bench.tell(f"attention of a layer, {name}", ms=ms, tflop_per_s=cost / ms / 1e9)
        cost += flop.attention_backward // shape.num_layers


def _seen(bench: Bench) -> list[Visibility]:
    shape = bench.sizes.drafter
    batches = [_batch(bench, shape, CE, seed, with_features=False) for seed in range(4)]
    return [_visibility(batch, shape, bench.sizes.num_context) for batch in batches]


def layer_attention(
    bench: Bench,
) -> tuple[Callable[[int], object], Callable[[int], Sequence[Tensor]]]:
    """Attention of one layer, as it is in a step: forward, and both ways; the latter's gradients
    are those of queries, keys and values."""
    shape, num_context = bench.sizes.drafter, bench.sizes.num_context
    num_rows = bench.sizes.num_anchors * shape.block_size
    heads, keys, width = shape.num_heads, shape.num_kv_heads, shape.head_dim
    inputs = [
        [
            bench.random(num_rows, heads, width),
            *(bench.random(num_context, keys, width) for _ in range(2)),
            *(bench.random(num_rows, keys, width) for _ in range(2)),
        ]
        for _ in range(2)
    ]
    outer = bench.random(num_rows, heads, width)
    attends = [_fast_attend(one, FULL) for one in _seen(bench)]

    def forward(turn: int) -> tuple[Tensor, list[Tensor]]:
        # with gradients, so that one compilation serves both
        leaves = [one.detach().requires_grad_() for one in inputs[turn % 2]]
        query, *states = leaves
        context, block = (states[0], states[1]), (states[2], states[3])
        return attends[turn % 4](FULL, query, context, block), leaves

    def both(turn: int) -> Sequence[Tensor]:
        return torch.autograd.grad(*forward(turn), outer)

    return forward, both


# the whole step


def _batch(
    bench: Bench, shape: DrafterShape, config: LossConfig, seed: int, *, with_features: bool
) -> Batch:
    """One document of random tokens, all of it supervised."""
    sizes, device = bench.sizes, bench.device
    random = np.random.default_rng(seed)
    ids_T = random.integers(0, shape.vocab_size, sizes.num_context)
    blocks = pack_blocks(
        [Tokens(seed, ids_T, np.ones(len(ids_T), np.uint8))],
        quota=sizes.num_anchors,
        seed=seed,
        epoch=0,
        block_size=shape.block_size,
        weight_S=slot_weights(shape.block_size, config.gamma),
        last_rows="all",
    )
    teacher = None
    if config.needs_last:
        unique_U, index_R = np.unique(blocks.teacher_R, return_inverse=True)
        teacher = Teacher(
            bench.random(len(unique_U), shape.hidden_size),
            torch.from_numpy(index_R).to(device),
            teacher_spans(index_R, config.position_chunk),
        )
    num_layers = len(shape.layer_ids) if with_features else 0

    def whole(values: Any) -> Tensor:
        return torch.from_numpy(values).to(device)

    return Batch(
        feature_NKH=bench.random(sizes.num_context, num_layers, shape.hidden_size),
        position_N=whole(blocks.position_N),
        anchor_A=whole(blocks.anchor_A).int(),
        start_A=whole(blocks.start_A).int(),
        token_A=whole(blocks.token_A),
        row_R=whole(blocks.row_R),
        slot_R=whole(blocks.slot_R),
        label_R=whole(blocks.label_R),
        weight_R=whole(blocks.weight_R),
        teacher=teacher,
        num_blocks=len(blocks.anchor_A),
        samples=np.zeros(1, np.int64),
    )


def _visibility(batch: Batch, shape: DrafterShape, num_context: int) -> Visibility:
    return Visibility(
        batch.anchor_A, batch.start_A, num_context, shape.block_size, shape.sliding_window
    )


def _num_visible(batch: Batch, shape: DrafterShape) -> int:
    context = int((batch.anchor_A - batch.start_A).sum())
    return (context + len(batch.anchor_A) * shape.block_size) * shape.block_size


def _step_size(batch: Batch, shape: DrafterShape, num_context: int) -> StepSize:
    return StepSize(
        num_context=num_context,
        num_rows=len(batch.anchor_A) * shape.block_size,
        num_visible=_num_visible(batch, shape),
        num_scored=len(batch.row_R),
        num_teachers=0 if batch.teacher is None else len(batch.teacher.state_UH),
    )


@dataclass(frozen=True)
class Model:
    drafter: Drafter
    forward: Forward
    head: TargetHead


def _model(bench: Bench, shape: DrafterShape, is_tied: bool) -> Model:
    with bench.device:
        drafter = Drafter(shape)
    for parameter in drafter.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=shape.init_std)
    embed_VH = bench.random(shape.vocab_size, shape.hidden_size, scale=0.02)
    head_VH = None if is_tied else bench.random(shape.vocab_size, shape.hidden_size, scale=0.02)
    drafter.to(bench.dtype)
    forward = CompiledForward(drafter) if bench.is_cuda else EagerForward(drafter)
    return Model(drafter, forward, TargetHead(embed_VH, head_VH, shape))


def _learn_bare(model: Model, batch: Batch, config: LossConfig) -> None:
    scored = score(batch, model.forward, model.head, config)
    (scored.loss_R * scored.weight_R).sum().backward()
    for parameter in model.drafter.parameters():
        parameter.grad = None


def _bare(
    bench: Bench,
    name: str,
    model: Model,
    config: LossConfig,
    *,
    is_profiled: bool = True,
) -> None:
    """Forward and backward."""
    shape = model.drafter.shape
    batches = [_batch(bench, shape, config, seed, with_features=True) for seed in range(3)]

    def once(turn: int) -> None:
        _learn_bare(model, batches[turn % 3], config)

    ms = bench.ms(once)
    size = _step_size(batches[0], shape, bench.sizes.num_context)
    floor_ms = _floor_ms(step_flop(shape, size).total)
    bench.tell(
        name,
        ms=ms,
        ms_per_1000_rows=ms / size.num_rows * 1e3,
        of_floor=floor_ms / ms,
        times_floor=ms / floor_ms,
        rows_per_s=size.num_rows / ms * 1e3,
        tokens_per_s=size.num_context / ms * 1e3,
        samples_per_s=1e3 / ms,
        host_ms=bench.host_ms(once),
        peak_gib=bench.peak_gib(once),
    )
    if is_profiled:
        _profile(bench, name, once)


def _profile(bench: Bench, name: str, once: Callable[[int], None]) -> None:
    """Where the GPU's time goes, by kind of kernel, and the largest that are neither product,
    attention nor loss."""
    known = torch.profiler.ProfilerActivity
    activity = known.CUDA if bench.is_cuda else known.CPU
    wanted = torch.autograd.DeviceType.CUDA if bench.is_cuda else torch.autograd.DeviceType.CPU
    with torch.profiler.profile(activities=[activity]) as profiler:
        once(0)
        if bench.is_cuda:
            torch.cuda.synchronize()
    kinds = {
        "products": ("nvjet", "gemm", "xmma", "cutlass"),
        "attention": ("flex", "triton_tem"),
        "loss": ("score_kernel",),
    }
    spent = dict.fromkeys([*kinds, "rest"], 0.0)
    rest = []
    for event in profiler.key_averages():
        if event.device_type != wanted:
            continue
        ms = event.self_device_time_total / 1e3
        kind = next(
            (kind for kind, words in kinds.items() if any(word in event.key for word in words)),
            "rest",
        )
        spent[kind] += ms
        if kind == "rest":
            rest.append((ms, event.count, event.key))
    bench.tell(f"profile {name}", **{f"{kind}_ms": ms for kind, ms in spent.items()})
    for ms, count, key in sorted(rest, reverse=True)[:10]:
        bench.tell("  rest", ms=ms, launches=count, kernel=key[:110])


class _Alone:
    """A group of one."""

    world = 1


def _with_optimizer(bench: Bench, bare: Model, model: Model, config: LossConfig) -> None:
    """Two batches an optimizer step, resident data; nothing may wait for the device. Set beside the
    bare step of the same minute, in turn: a card's clock sinks while it works."""
    drafter, shape = model.drafter, model.drafter.shape
    drafter.float()
    alone: Any = _Alone()
    optimizer = Optimizer(drafter.named_parameters(), OptimConfig(), alone, 100, bench.dtype)
    metrics, clock = Metrics(shape.block_size, bench.device), Clock(bench.device)
    batches = [_batch(bench, shape, config, seed, with_features=True) for seed in range(3)]

    def once(turn: int) -> None:
        for place in (turn, turn + 1):
            if place == turn + 1:
                optimizer.expect_last()
            learn(batches[place % 3], model.forward, model.head, config, optimizer, metrics, clock)
        optimizer.sum_up(wants_stop=False)
        optimizer.step(1e-5)

    def bare_once(turn: int) -> None:
        for place in (turn, turn + 1):
            _learn_bare(bare, batches[place % 3], config)

    bare_ms, ms = zip(
        *((bench.ms(bare_once) / 2, bench.ms(once) / 2) for _ in range(3)), strict=True
    )
    counters = torch._dynamo.utils.counters["stats"]
    num_graphs = counters["unique_graphs"]
    waits = "none"
    if bench.is_cuda:
        try:
            with no_waits():
                for turn in range(3):
                    once(turn)
        except RuntimeError as error:
            waits = str(error)[:200]
    health = optimizer.health(optimizer.vector().cpu())
    bench.tell(
        "step with optimizer, a batch of two",
        objective=next(name for name, one in OBJECTIVES.items() if one is config),
        ms=statistics.median(ms),
        times_bare=statistics.median(a / b for a, b in zip(ms, bare_ms, strict=True)),
        recompiled=counters["unique_graphs"] - num_graphs,
        waits=waits,
        bad_steps=health.num_bad,
        host_ms=bench.host_ms(once),
        peak_gib=bench.peak_gib(once),
    )
    _profile(bench, "step with optimizer", once)


def step(bench: Bench) -> None:
    """The headline: 8B drafter, forward and backward; then with the optimizer."""
    model = _model(bench, bench.sizes.drafter, is_tied=False)
    begin = bench.elapsed_s
    batch = _batch(bench, model.drafter.shape, CE, 0, with_features=True)
    score(batch, model.forward, model.head, CE).loss_R.sum().backward()
    bench.tell("compiling the drafter", s=bench.elapsed_s - begin)
    for name, config in OBJECTIVES.items():
        _bare(bench, f"step 8B {name}", model, config)
    _with_optimizer(bench, model, _model(bench, bench.sizes.drafter, is_tied=False), KL)


def small(bench: Bench) -> None:
    """The 4B drafter, whose target's head is its embedding."""
    model = _model(bench, bench.sizes.small, is_tied=True)
    for name, config in OBJECTIVES.items():
        _bare(bench, f"step 4B {name}", model, config)


def wide(bench: Bench) -> None:
    """The 27B drafter, over the largest vocabulary."""
    model = _model(bench, bench.sizes.wide, is_tied=False)
    for name, config in OBJECTIVES.items():
        _bare(bench, f"step 27B {name}", model, config)


def eager(bench: Bench) -> None:
    """The headline with `train.compile` off."""
    model = _model(bench, bench.sizes.drafter, is_tied=False)
    model = replace(model, forward=EagerForward(model.drafter))
    _bare(bench, "step 8B eager CE", model, CE, is_profiled=False)


def kernel(bench: Bench) -> None:
    """The loss's kernel alone, by tile, warps and tiles on their way."""
    if not loss_module._has_kernel(torch.empty(0, device=bench.device)):
        return
    from dflash_pipeline.train import loss_kernel

    shape = bench.sizes.drafter
    vocab, rows = shape.vocab_size, bench.sizes.chunks[0]
    teachers = rows * 2 // 5
    logits = [torch.randn(rows, vocab, device=bench.device) for _ in range(2)]
    target_CV = torch.randn(teachers, vocab, device=bench.device)
    slope_PV = torch.empty(rows, vocab, device=bench.device, dtype=bench.dtype)
    label_R = torch.randint(vocab, (rows,), device=bench.device)
    index_R = torch.arange(rows, device=bench.device) * teachers // rows
    stats_FR = torch.empty(5, rows, device=bench.device)
    default = loss_kernel.STAGES
    variants = [(2048, 128, stages) for stages in (1, 3, 4)]
    variants += [(1024, 128, default), (4096, 128, default), (2048, 256, default)]
    for (tile, warp_values, stages), (name, config) in itertools.product(
        variants, OBJECTIVES.items()
    ):
        has_teacher = config.needs_last
        constants = loss_kernel.score_constants(vocab, config, 1.0, 0.0)
        constants |= {"TILE": tile, "STAGES": stages}

        def once(
            turn: int,
            has_teacher: bool = has_teacher,
            constants: dict[str, Any] = constants,
        ) -> None:
            loss_kernel.score_rows(
                logits[turn % 2],
                target_CV if has_teacher else None,
                slope_PV,
                label_R,
                index_R if has_teacher else None,
                stats_FR,
                0,
                constants,
            )

        with patch.object(loss_kernel, "WARP_VALUES", warp_values):
            ms = bench.ms(once)
        size_bytes = 2 * logits[0].nbytes + slope_PV.nbytes
        size_bytes += 2 * target_CV.nbytes if has_teacher else 0
        bench.tell(
            f"kernel {name} tile {tile} warps {tile // warp_values} stages {stages}, {rows} rows",
            ms=ms,
            gb_per_s=size_bytes / ms / 1e6,
        )


PARTS = (check, ceilings, loss, mask, step, small, wide, kernel, eager)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--only", default=",".join(part.__name__ for part in PARTS))
    parser.add_argument("--limit", type=float, default=200.0)
    options = parser.parse_args()
    bench = Bench(TINY_SIZES if options.tiny else FULL_SIZES, options.limit)
    chosen = [part for part in PARTS if part.__name__ in options.only.split(",")]
    with contextlib.ExitStack() as stack:
        if os.environ.get("TRITON_INTERPRET") == "1":
            stack.enter_context(patch.object(loss_module, "_has_kernel", lambda _logits: True))
        for part in chosen:
            bench.run(part)
    return int(any("error" in figure for figure in bench.figures))


if __name__ == "__main__":
    sys.exit(main())
