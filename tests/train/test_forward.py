"""Eager and compiled are one drafter."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.fx.experimental import _config as symbols
from torch.nn.attention import flex_attention

from dflash_pipeline.configs.place import Place
from dflash_pipeline.configs.schema import Run, TrainConfig
from dflash_pipeline.store.reader import Store
from dflash_pipeline.train import feed, forward, worker
from dflash_pipeline.train.drafter import Drafter
from dflash_pipeline.train.forward import BlockBatch, CompiledForward, EagerForward
from dflash_pipeline.train.mask import TILE, Visibility
from dflash_pipeline.train.shape import FULL, SLIDING, DrafterShape

NUM_BLOCKS = 64
HOPPER_TILES = {
    "BLOCK_M1": 32,
    "BLOCK_N1": 64,
    "BLOCK_M2": 64,
    "BLOCK_N2": 32,
    "num_stages": 3,
    "num_warps": 4,
}


def _batch(num_context: int, shape: DrafterShape, device: str) -> tuple[torch.Tensor, ...]:
    """Features, positions, embedded blocks, their positions, anchors and starts of documents."""
    random = torch.Generator().manual_seed(num_context)
    starts = torch.tensor([0, num_context // 3])
    anchor = torch.randperm(num_context - 8, generator=random)[:NUM_BLOCKS].sort().values
    start = starts[torch.searchsorted(starts, anchor, right=True) - 1]
    row = torch.arange(num_context)
    position_A = (anchor - start)[:, None] + torch.arange(shape.block_size)
    num_layers, hidden = len(shape.layer_ids), shape.hidden_size
    made = (
        torch.randn(num_context, num_layers, hidden, generator=random),
        row - starts[torch.searchsorted(starts, row, right=True) - 1],
        torch.randn(NUM_BLOCKS * shape.block_size, hidden, generator=random),
        position_A.flatten(),
        anchor.int(),
        start.int(),
    )
    return tuple(part.to(device) for part in made)


def _of_both_kinds(shape: DrafterShape) -> DrafterShape:
    kinds = (FULL, SLIDING, FULL, SLIDING)
    return replace(
        shape, num_layers=4, layer_types=kinds, sliding_window=40, head_dim=16, block_size=4
    )


def _run(
    forward: EagerForward | CompiledForward,
    num_context: int,
    device: str,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    feature, position_N, block, position_Q, anchor, start = _batch(
        num_context, forward.shape, device
    )
    size, window = forward.shape.block_size, forward.shape.sliding_window
    visibility = Visibility(anchor, start, num_context, size, window)
    rows = feature.to(dtype), position_N, block.to(dtype), position_Q
    return forward(BlockBatch(*rows, visibility))


@torch.no_grad()
def test_the_compiled_way_gives_the_eager_ones_numbers_and_compiles_once(
    shape: DrafterShape,
) -> None:
    torch._dynamo.reset()
    drafter = Drafter(_of_both_kinds(shape))
    drafter.initialise(0)
    # FlexAttention's own plain way under the tracer that a GPU's compiler begins with
    eager, compiled = EagerForward(drafter), CompiledForward(drafter, backend="eager")
    counts = torch._dynamo.utils.counters["stats"]
    num_graphs = -1
    # the first batch has as many tiles of context as of drafted rows, which is chance
    for num_tiles in (2, 5, 3, 7, 4):
        found, wanted = (_run(way, num_tiles * TILE, "cpu") for way in (compiled, eager))
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
        if num_graphs < 0:
            num_graphs = counts["unique_graphs"]
    assert counts["unique_graphs"] == num_graphs
    # other code of this process compiles as it would without
    assert symbols.use_duck_shape


@torch.no_grad()
def test_on_hopper_the_kernel_is_told_its_tiles_as_plain_numbers(
    shape: DrafterShape, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch._dynamo.reset()
    told: list[dict[str, object]] = []

    def listen(graph: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        for node in graph.graph.nodes:
            if node.target is torch.ops.higher_order.flex_attention:
                told.extend(one for one in node.args if isinstance(one, dict))
        return graph.forward

    bf16, fp32 = torch.bfloat16, torch.float32
    # float32 rows of that width do not fit with them
    cases = ((128, bf16, True), (64, bf16, True), (128, fp32, True), (128, bf16, False))
    for width, dtype, is_hopper in cases:
        monkeypatch.setattr(forward, "is_hopper", lambda device, said=is_hopper: said)
        drafter = Drafter(replace(shape, num_layers=1, layer_types=(FULL,), head_dim=width))
        drafter.initialise(0)
        _run(CompiledForward(drafter.to(dtype), backend=listen), 2 * TILE, "cpu", dtype)
    tiles = [{name: size for name, size in one.items() if "bwd_" in name} for one in told]
    assert tiles == [{f"bwd_{name}": size for name, size in HOPPER_TILES.items()}, {}, {}, {}]
    assert {type(size) for size in tiles[0].values()} == {int}


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")
def test_on_cuda_gradients_are_alike_too_and_nothing_is_compiled_twice(
    shape: DrafterShape,
) -> None:
    torch._dynamo.reset()
    drafter = Drafter(_of_both_kinds(shape))
    drafter.initialise(0)
    drafter.cuda()
    ways = CompiledForward(drafter), EagerForward(drafter)
    counts = torch._dynamo.utils.counters["stats"]
    num_graphs = -1
    for num_tiles in (5, 2, 3, 7):
        results = []
        for way in ways:
            drafter.zero_grad()
            hidden = _run(way, num_tiles * TILE, "cuda")
            hidden.square().sum().backward()
            grads = [parameter.grad for parameter in drafter.parameters()]
            results.append([hidden, *(grad.clone() for grad in grads if grad is not None)])
        for found, wanted in zip(*results, strict=True):
            torch.testing.assert_close(found, wanted, rtol=2e-2, atol=2e-2)
        if num_graphs < 0:
            num_graphs = counts["unique_graphs"]
    assert counts["unique_graphs"] == num_graphs


@pytest.mark.filterwarnings("default")
def test_a_whole_run_compiles_four_graphs_and_learns_what_an_eager_one_does(
    whole_store: Store,
    train_run: Callable[..., Run],
    place: Place,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Batches of one and more tiles; the tracer alone, since the compiler's half needs a GPU."""
    run = train_run(epochs=2, max_steps=6, validate_every=0, log_every=1)
    run = replace(run, drafter=replace(run.drafter, head_dim=16, block_size=16, layer_ids=(1, 5)))

    def losses() -> list[float]:
        worker.main(run, place, {"resume": False})
        lines = (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
        shutil.rmtree(tmp_path / "out")
        return [record["loss"] for record in map(json.loads, lines) if "loss" in record]

    wanted = losses()
    torch._dynamo.utils.counters.clear()
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_tensors: None)
    begin = functools.partialmethod(CompiledForward.__init__, backend="eager")
    monkeypatch.setattr(CompiledForward, "__init__", begin)
    for module in (feed, forward):
        monkeypatch.setattr(module, "is_compiled", lambda _config, _device: True)
    found = losses()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 4
    assert found == pytest.approx(wanted, rel=1e-3)


@pytest.mark.usefixtures("whole_store")
def test_with_compile_off_nothing_is_compiled_or_padded(
    shape: DrafterShape, train_run: Callable[..., Run], place: Place
) -> None:
    cuda = torch.device("cuda")
    on, off = TrainConfig(), TrainConfig(compile=False)
    assert forward.is_compiled(on, cuda)
    assert not forward.is_compiled(off, cuda)
    assert isinstance(forward.forward_of(Drafter(shape), off, cuda), EagerForward)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    run = train_run(epochs=1, max_steps=2, compile=False)
    worker.main(run, place, {"resume": False})
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 0
