"""Compiled layers: few versions, none after the warm-up, and the numbers of the plain ones.

The tracer alone runs on a CPU, where making code takes a minute.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from dflash_pipeline.capture import planning, preflight, worker
from dflash_pipeline.capture.compiled import SPREAD, Served, compile_layers, num_compiled
from dflash_pipeline.capture.shapes import planned_shapes
from dflash_pipeline.capture.target import Target
from dflash_pipeline.configs.errors import UsageError
from dflash_pipeline.configs.schema import Run, TargetConfig
from dflash_pipeline.store.check import verify
from dflash_pipeline.store.reader import open_store
from places import cpu_place
from tiny_targets import EVERY_FAMILY

PLANNED = [(9, 16), (1, 32), (5, 48), (2, 64)]


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    yield
    torch.compiler.set_stance("default")
    torch._dynamo.reset()


def _ids(num_sequences: int, width: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(width)
    return torch.randint(0, 256, (num_sequences, width), generator=generator)


def _states(target: Target, ids_BT: torch.Tensor) -> list[torch.Tensor]:
    hidden_KBTH, last_BTH = target.forward(ids_BT)
    return [*hidden_KBTH, last_BTH]


@pytest.mark.parametrize("family", EVERY_FAMILY)
def test_every_family_has_few_versions_and_the_plain_layers_states(
    family: str, make_model: Callable[..., PreTrainedModel]
) -> None:
    target = Target(make_model(family), (0, 2, 4))
    # longer and shorter than a sliding window, several and one alone
    batches = [_ids(*shape) for shape in ((3, 32), (16, 16), (4, 24), (7, 112), (2, 16))]
    plain = [_states(target, ids_BT) for ids_BT in batches]
    alone = _states(target, _ids(1, 32))
    before = num_compiled()
    compile_layers(target, PLANNED, backend="eager", later="fail_on_recompile")
    num_versions = num_compiled() - before
    # one for each way that layers of the family differ
    assert 1 <= num_versions <= 2
    for ids_BT, expected in zip(batches, plain, strict=True):
        for found, state in zip(_states(target, ids_BT), expected, strict=True):
            torch.testing.assert_close(found, state, rtol=0, atol=0)
    torch.compiler.set_stance("eager_on_recompile")
    for found, state in zip(_states(target, _ids(1, 32)), alone, strict=True):
        torch.testing.assert_close(found, state, rtol=0, atol=0)
    assert num_compiled() - before == num_versions


def test_only_batches_go_through_the_compiled_layers(
    make_model: Callable[..., PreTrainedModel],
) -> None:
    target = Target(make_model("qwen3"), (0, 2, 4))
    served = compile_layers(target, PLANNED, backend="eager")
    target.forward(_ids(3, 32))
    assert (served.calls, served.compiled_calls) == (6, 6)
    # as the gate computes its truth, which leaves hooks of its own on the layers
    target.model(input_ids=_ids(3, 32), use_cache=False, output_hidden_states=True)
    assert (served.calls, served.compiled_calls) == (6, 6)
    target.forward(_ids(4, 48))
    assert (served.calls, served.compiled_calls) == (12, 12)
    # one sequence alone runs as it was
    target.forward(_ids(1, 48))
    assert (served.calls, served.compiled_calls) == (18, 12)


def test_a_family_that_cannot_be_traced_whole_is_refused_by_name(
    make_model: Callable[..., PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model("qwen3")
    layer = type(model.model.layers[0])
    forward = layer.forward

    def breaking(self: Any, hidden_states: torch.Tensor, *inputs: Any, **named: Any) -> Any:
        if hidden_states.sum().item() > 1e9:
            raise AssertionError
        return forward(self, hidden_states, *inputs, **named)

    monkeypatch.setattr(layer, "forward", breaking)
    with pytest.raises(UsageError, match="layers of Qwen3ForCausalLM cannot be compiled"):
        compile_layers(Target(model, (0,)), PLANNED, backend="eager")


def test_a_target_over_several_gpus_is_refused(
    make_model: Callable[..., PreTrainedModel], make_target_dir: Callable[..., Path], tmp_path: Path
) -> None:
    target = Target(make_model("qwen3"), (0,))
    target.spread = "layers 0 to 2 on cuda:0"
    with pytest.raises(UsageError, match="does not go with --gpus-per-target"):
        compile_layers(target, PLANNED, backend="eager")
    run = _run(make_target_dir("qwen3"), tmp_path)
    run = replace(run, target=replace(run.target, num_gpus=2))
    with pytest.raises(UsageError) as refused:
        planning.main(run, cpu_place(tmp_path / "logs", "plan"), _extra())
    assert str(refused.value) == SPREAD


def _extra() -> dict[str, object]:
    return {"kind": "cpu", "num_workers": 1, "only_count": False}


def _run(target: Path, folder: Path) -> Run:
    data = folder / "data.jsonl"
    letters = random.Random(0)
    turns = [
        ("".join(letters.choices("abcdefgh", k=k)) for k in (number % 7 + 1, 3 * number))
        for number in range(1, 25)
    ]
    data.write_text("\n".join(json.dumps({"prompt": q, "response": a}) for q, a in turns))
    run = Run(target=TargetConfig(id=str(target), layer_ids=(0, 2, 4)))
    return replace(
        run,
        data=replace(run.data, files=(str(data),), heldout=0.0),
        store=replace(run.store, path=str(folder / "hs"), shard_bytes=1),
        capture=replace(run.capture, compile=True, token_budget=256, pad_multiple=16),
    )


def test_a_capture_with_compiled_layers_passes_the_gate_and_compiles_nothing_after_it(
    make_target_dir: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = []

    def traced(target: Target, shapes: Any, **options: Any) -> Served:
        served = compile_layers(target, shapes, backend="eager")
        found.append(num_compiled())
        return served

    monkeypatch.setattr(worker, "compile_layers", traced)
    monkeypatch.setattr(preflight, "compile_layers", traced)
    run = _run(make_target_dir("qwen3"), tmp_path)
    place = cpu_place(tmp_path / "hs.logs", "capture")
    planning.plan_and_capture(run, place, _extra())
    assert verify(run.store.path, deep=True).problems == []
    # the twin of the preflight, then the target
    assert len(found) == 2
    assert num_compiled() == found[1] > found[0] > 0
    store = open_store(run.store.path)
    counts = [one for found in planned_shapes(store.table, store.layout) for one, _ in found]
    share = sum(count > 1 for count in counts) / len(counts)
    told = f"compiled layers served {100 * share:.1f} % of the batches' layers"
    assert share > 0
    assert told in capsys.readouterr().out


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("family", ["qwen3", "gemma3", "qwen3_moe", "gpt_oss", "qwen3_5"])
def test_on_a_gpu_the_compilers_code_passes_the_gate(
    family: str, make_target_dir: Callable[..., Path], tmp_path: Path
) -> None:
    run = _run(make_target_dir(family, initializer_range=0.1), tmp_path)
    place = replace(cpu_place(tmp_path / "hs.logs", "capture"), device="cuda:0", kind="cuda")
    planning.plan_and_capture(run, place, {**_extra(), "kind": "cuda"})
    assert verify(run.store.path, deep=True).problems == []
