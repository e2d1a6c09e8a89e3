"""Compiled layers: few versions, none after the warm-up, and the numbers of the plain ones.

The tracer alone runs on a CPU, where making code takes a minute.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from builds import builds
from dflash_pipeline.capture import compiled, measure, planning, preflight, worker
from dflash_pipeline.capture.compiled import (
    LEAST_TOKENS,
    SPREAD,
    Served,
    code_of,
    compile_layers,
    is_wanted,
    num_compiled,
)
from dflash_pipeline.capture.forward import Forward
from dflash_pipeline.capture.offload import DeviceBuffer
from dflash_pipeline.capture.pack import Packer
from dflash_pipeline.capture.shapes import planned_shapes
from dflash_pipeline.capture.target import Target
from dflash_pipeline.capture.turns import WAITING, turn
from dflash_pipeline.configs.errors import UsageError
from dflash_pipeline.configs.schema import Run, TargetConfig
from dflash_pipeline.store.check import verify
from dflash_pipeline.store.describe import describe
from dflash_pipeline.store.reader import Store, open_store
from dflash_pipeline.store.report import render
from dflash_pipeline.store.spec import ShardId
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
    monkeypatch.setattr(Qwen3DecoderLayer, "forward", _breaking(Qwen3DecoderLayer.forward))
    with pytest.raises(UsageError, match="layers of Qwen3ForCausalLM cannot be compiled"):
        compile_layers(Target(model, (0,)), PLANNED, backend="eager")


def test_a_batch_that_does_not_fit_while_compiling_is_left_to_the_capture(
    make_model: Callable[..., PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = Target(make_model("qwen3"), (0,))
    run, tried = target.run, []

    def full(ids_BT: torch.Tensor, take: Any) -> torch.Tensor:
        tried.append(tuple(ids_BT.shape))
        if len(tried) > 1:
            raise torch.OutOfMemoryError
        return run(ids_BT, take)

    monkeypatch.setattr(target, "run", full)
    served = compile_layers(target, PLANNED, backend="eager")
    assert tried == [(9, 16), (2, 64)]
    monkeypatch.undo()
    target.forward(_ids(3, 48))
    assert served.share == 1


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
        capture=replace(run.capture, compile="on", token_budget=256, pad_multiple=16),
    )


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Regions compiled after each target, the tracer alone compiling."""
    found = []

    def trace(target: Target, shapes: Any, **options: Any) -> Served:
        served = compile_layers(target, shapes, backend="eager")
        found.append(num_compiled())
        return served

    monkeypatch.setattr(worker, "compile_layers", trace)
    monkeypatch.setattr(preflight, "compile_layers", trace)
    return found


@pytest.fixture
def auto_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """`auto` decides on a CPU as on a GPU, and by a bound that the plan of `_run` reaches."""

    def decided(setting: str, _kind: str, is_spread: bool, num_tokens: int) -> bool:
        return is_wanted(setting, "cuda", is_spread, num_tokens)

    monkeypatch.setattr(worker, "is_wanted", decided)
    monkeypatch.setattr(compiled, "LEAST_TOKENS", 100)


def _captured(run: Run, folder: Path) -> None:
    planning.plan_and_capture(run, cpu_place(folder / "hs.logs", "capture"), _extra())


def _auto(run: Run, **changes: Any) -> Run:
    return replace(run, capture=replace(run.capture, compile="auto", **changes))


def _breaking(forward: Any) -> Any:
    def breaking(self: Any, hidden_states: torch.Tensor, *inputs: Any, **named: Any) -> Any:
        if hidden_states.sum().item() > 1e9:
            raise AssertionError
        return forward(self, hidden_states, *inputs, **named)

    return breaking


def _wrong(forward: Any, wrong: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A layer's forward whose compiled code gives something else than its plain code."""

    def doing(self: Any, *inputs: Any, **named: Any) -> Any:
        hidden = forward(self, *inputs, **named)
        return wrong(hidden) if torch.compiler.is_compiling() else hidden

    return doing


@pytest.mark.parametrize(
    ("setting", "kind", "is_spread", "num_tokens", "expected"),
    [
        ("auto", "cuda", False, LEAST_TOKENS, True),
        ("auto", "cuda", False, LEAST_TOKENS - 1, False),
        ("auto", "cuda", True, LEAST_TOKENS, False),
        ("auto", "cpu", False, LEAST_TOKENS, False),
        ("on", "cpu", False, 1, True),
        ("on", "cuda", True, 1, True),
        ("off", "cuda", False, LEAST_TOKENS, False),
    ],
)
def test_auto_compiles_for_one_gpu_from_a_bound_on(
    setting: str, kind: str, is_spread: bool, num_tokens: int, expected: bool
) -> None:
    assert is_wanted(setting, kind, is_spread, num_tokens) == expected


@pytest.mark.usefixtures("auto_here")
@pytest.mark.parametrize("below", [0, 1])
def test_auto_decides_by_the_tokens_of_the_plan(
    below: int,
    make_target_dir: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    traced: list[int],
) -> None:
    run = _auto(_run(make_target_dir("qwen3"), tmp_path))
    planning.main(run, cpu_place(tmp_path / "hs.logs", "plan"), _extra())
    num_tokens = int(open_store(run.store.path).table.num_tokens.sum())
    monkeypatch.setattr(compiled, "LEAST_TOKENS", num_tokens + below)
    worker.main(run, cpu_place(tmp_path / "hs.logs", "capture"), {})
    # the preflight's twin is not compiled under auto
    assert len(traced) == 1 - below
    assert open_store(run.store.path).is_complete


def test_auto_compiles_nothing_on_a_cpu(
    make_target_dir: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    traced: list[int],
) -> None:
    monkeypatch.setattr(compiled, "LEAST_TOKENS", 1)
    run = _auto(_run(make_target_dir("qwen3"), tmp_path))
    _captured(run, tmp_path)
    assert traced == []
    assert open_store(run.store.path).is_complete


def test_the_measurement_decides_by_the_planned_work_not_by_its_sample(
    make_target_dir: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[int] = []

    def decided(setting: str, kind: str, is_spread: bool, num_tokens: int) -> bool:
        asked.append(num_tokens)
        return is_wanted(setting, kind, is_spread, num_tokens)

    monkeypatch.setattr(worker, "is_wanted", decided)
    monkeypatch.setattr(measure, "CAPTURE_S", 0.0)
    monkeypatch.setattr(measure, "_LEAST_SAMPLED", 4)
    run = _auto(_run(make_target_dir("qwen3"), tmp_path))
    run = replace(run, generate=replace(run.generate, endpoints=("http://none",)))
    extra = {"folder": str(tmp_path), "is_measured": False, "kind": "cpu", "with_answers": True}
    measure.main(run, cpu_place(tmp_path / "logs", "plan"), extra)
    work = json.loads((tmp_path / "work.json").read_text())
    assert len(open_store(tmp_path / "store").table) < work["num_samples"]
    assert asked == [work["num_tokens"]]
    costs = json.loads((tmp_path / "costs.json").read_text())
    assert costs["is_compiled"] is work["is_compiled"] is False


@pytest.mark.usefixtures("auto_here")
def test_under_auto_a_family_that_cannot_be_compiled_runs_plain_and_says_so(
    make_target_dir: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    traced: list[int],
) -> None:
    monkeypatch.setattr(Qwen3DecoderLayer, "forward", _breaking(Qwen3DecoderLayer.forward))
    run = _auto(_run(make_target_dir("qwen3"), tmp_path))
    _captured(run, tmp_path)
    assert traced == []
    assert verify(run.store.path, deep=True).problems == []
    (told,) = (line for line in capsys.readouterr().out.splitlines() if "plain" in line)
    assert "the layers of Qwen3ForCausalLM cannot be compiled (" in told
    assert "compiled layers served" not in told


FAULTS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str]] = {
    "states": (lambda hidden: hidden * 1.5, "the gate refuses these rows"),
    "no numbers": (lambda hidden: hidden * float("nan"), "rows that are not finite"),
}


@pytest.mark.usefixtures("auto_here")
@pytest.mark.parametrize("fault", FAULTS)
def test_compiled_layers_that_are_wrong_are_given_up_under_auto(
    fault: str,
    make_target_dir: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    traced: list[int],
) -> None:
    wrong, found = FAULTS[fault]
    plain = Qwen3DecoderLayer.forward
    monkeypatch.setattr(Qwen3DecoderLayer, "forward", _wrong(plain, wrong))
    run = _auto(_run(make_target_dir("qwen3"), tmp_path))
    _captured(run, tmp_path)
    assert len(traced) == 1
    said = capsys.readouterr().out
    (told,) = (line for line in said.splitlines() if "compiled layers do not serve (" in line)
    assert found in told
    assert "compiled layers served" not in said
    assert verify(run.store.path, deep=True).problems == []
    # the rows are the plain layers' own, to the byte
    monkeypatch.setattr(Qwen3DecoderLayer, "forward", plain)
    (tmp_path / "off").mkdir()
    whole = _run(Path(run.target.id), tmp_path / "off")
    whole = replace(whole, capture=replace(whole.capture, compile="off"))
    _captured(whole, tmp_path / "off")
    one, other = open_store(run.store.path), open_store(whole.store.path)
    assert _compiled_shards(one) == set()
    assert not one.state_N.any()
    for sample in range(len(one.table)):
        np.testing.assert_array_equal(one.hidden(sample), other.hidden(sample))


@pytest.mark.usefixtures("auto_here")
def test_compiled_layers_that_raise_are_given_up_under_auto(
    make_target_dir: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    traced: list[int],
) -> None:
    compile_traced = worker.compile_layers

    def failing(target: Target, shapes: Any) -> Served:
        served, run = compile_traced(target, shapes), target.run

        def fail(ids_BT: torch.Tensor, take: Any) -> torch.Tensor:
            # not in the calibration's and the gate's own
            if target.is_compiled and len(ids_BT) > 1:
                raise RuntimeError("no such kernel")
            return run(ids_BT, take)

        monkeypatch.setattr(target, "run", fail)
        return served

    monkeypatch.setattr(worker, "compile_layers", failing)
    _captured(_auto(_run(make_target_dir("qwen3"), tmp_path)), tmp_path)
    assert len(traced) == 1
    told = "compiled layers do not serve (RuntimeError: no such kernel): they run plain"
    assert told in capsys.readouterr().out
    assert verify(str(tmp_path / "hs"), deep=True).problems == []


@pytest.mark.usefixtures("auto_here", "traced")
def test_a_store_tells_which_shards_were_computed_before_compiled_layers_were_given_up(
    make_target_dir: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = _auto(_run(make_target_dir("qwen3"), tmp_path))
    planning.main(run, cpu_place(tmp_path / "hs.logs", "plan"), _extra())
    compile_traced, first = worker.compile_layers, set[ShardId]()

    def failing(target: Target, shapes: Any) -> Served:
        served, forward = compile_traced(target, shapes), target.run

        def fail(ids_BT: torch.Tensor, take: Any) -> torch.Tensor:
            if target.is_compiled and len(ids_BT) > 1:
                first.update(_compiled_shards(open_store(run.store.path)))
                if first:
                    raise RuntimeError("no such kernel")
            return forward(ids_BT, take)

        monkeypatch.setattr(target, "run", fail)
        return served

    monkeypatch.setattr(worker, "compile_layers", failing)
    worker.main(run, cpu_place(tmp_path / "hs.logs", "capture"), {})
    store = open_store(run.store.path)
    num_shards = len(store.layout.shard_ids())
    assert _compiled_shards(store) == first
    assert 0 < len(first) < num_shards
    told = f"rows by compiled layers: {len(first)} of {num_shards} shards; those of the others"
    assert told in capsys.readouterr().out
    assert told in render(describe(run.store.path))
    assert verify(run.store.path, deep=True).problems == []


def _compiled_shards(store: Store) -> set[ShardId]:
    records = {shard_id: store.commit_of(shard_id) for shard_id in store.layout.shard_ids()}
    return {shard_id for shard_id, record in records.items() if record and record.is_compiled}


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("fault", FAULTS)
def test_compiled_layers_that_are_wrong_are_refused_when_asked_for_by_name(
    fault: str,
    make_target_dir: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wrong, found = FAULTS[fault]
    monkeypatch.setattr(preflight, "check", lambda *_: None)
    monkeypatch.setattr(Qwen3DecoderLayer, "forward", _wrong(Qwen3DecoderLayer.forward, wrong))
    run = _run(make_target_dir("qwen3"), tmp_path)
    with pytest.raises(ValueError, match=found) as refused:
        _captured(run, tmp_path)
    assert "--set capture.compile=off" in str(refused.value)
    store = open_store(run.store.path)
    committed = [i for i in store.layout.shard_ids() if store.is_committed(i)]
    # sequences alone, which the plain layers computed
    batches = [batch for one in committed for batch in store.table.batches_of(one)]
    assert all(batch.stop - batch.start == 1 for batch in batches)


@pytest.mark.usefixtures("auto_here", "traced")
def test_a_gate_that_refuses_the_plain_layers_too_ends_the_capture(
    make_target_dir: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = _auto(_run(make_target_dir("qwen3"), tmp_path))
    planning.main(run, cpu_place(tmp_path / "hs.logs", "plan"), _extra())
    monkeypatch.setattr(Packer, "layer", _rolled(Packer.layer))
    with pytest.raises(ValueError, match="the gate refuses these rows") as refused:
        worker.main(run, cpu_place(tmp_path / "hs.logs", "capture"), {})
    assert "capture.compile" not in str(refused.value)
    assert "compiled layers do not serve" in capsys.readouterr().out


def _rolled(layer: Any) -> Any:
    def moved(self: Any, place: int, hidden_BTH: torch.Tensor, *rest: Any) -> None:
        layer(self, place, hidden_BTH.roll(1, 1), *rest)

    return moved


def test_a_capture_with_compiled_layers_passes_the_gate_and_compiles_nothing_after_it(
    make_target_dir: Callable[..., Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    traced: list[int],
) -> None:
    run = _run(make_target_dir("qwen3"), tmp_path)
    _captured(run, tmp_path)
    found = traced
    assert verify(run.store.path, deep=True).problems == []
    # the twin of the preflight, then the target
    assert len(found) == 2
    assert num_compiled() == found[1] > found[0] > 0
    store = open_store(run.store.path)
    planned = planned_shapes(store.table, store.layout)
    counts = [one for shapes in planned for one, _ in shapes]
    share = sum(count > 1 for count in counts) / len(counts)
    told = f"compiled layers served {100 * share:.1f} % of the batches' layers"
    assert share > 0
    assert told in capsys.readouterr().out
    # sequences alone are the plain layers' to compute
    by_shard = {one: store.table.batches_of(one) for one in store.layout.shard_ids()}
    assert _compiled_shards(store) == {
        one for one, batches in by_shard.items() if any(b.stop - b.start > 1 for b in batches)
    }


def test_a_worker_that_compiles_what_another_one_does_waits_and_says_so(
    make_target_dir: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    traced: list[int],
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    run = _run(make_target_dir("qwen3"), tmp_path)
    planning.main(run, cpu_place(tmp_path / "hs.logs", "plan"), _extra())
    del traced[:]
    others, sleep = ExitStack(), time.sleep
    load = worker.load_target

    def loaded(*arguments: Any) -> Target:
        target = load(*arguments)
        # the other one has come first
        others.enter_context(turn(code_of(target), pytest.fail, pytest.fail))
        return target

    def waited(seconds: float) -> None:
        assert traced == []
        others.close()
        sleep(seconds)

    monkeypatch.setattr(worker, "load_target", loaded)
    monkeypatch.setattr(worker, "time", SimpleNamespace(sleep=waited))
    with others:
        worker.main(run, cpu_place(tmp_path / "hs.logs", "capture"), {})
    assert len(traced) == 1
    assert capsys.readouterr().out.count(WAITING) == 1
    assert open_store(run.store.path).is_complete


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("family", ["qwen3", "gemma3", "qwen3_moe", "gpt_oss", "qwen3_5"])
def test_on_a_gpu_the_compilers_code_passes_the_gate_and_no_batch_compiles_or_tunes_anything(
    family: str,
    make_target_dir: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from dflash_pipeline.capture.quantise_kernel import encode_kernel

    run = _run(make_target_dir(family, initializer_range=0.1), tmp_path)
    # rows by a kernel of ours as well
    run = replace(
        run,
        store=replace(run.store, hidden_mode="int4", last_mode="int8"),
        capture=replace(run.capture, force=True),
    )
    compute, warm_up = Forward.compute, Packer.warm_up
    in_warm_up, in_batches = list[str](), list[str]()

    def watched(self: Forward, batch: slice, buffer: DeviceBuffer) -> bool:
        with builds() as found:
            is_halved = compute(self, batch, buffer)
        in_batches.extend(found)
        return is_halved

    def noted(self: Packer, dtype: torch.dtype, device: torch.device) -> None:
        # as in a new process
        encode_kernel.device_caches.clear()
        with builds() as found:
            warm_up(self, dtype, device)
        in_warm_up.extend(found)

    monkeypatch.setattr(Forward, "compute", watched)
    monkeypatch.setattr(Packer, "warm_up", noted)
    place = replace(cpu_place(tmp_path / "hs.logs", "capture"), device="cuda:0", kind="cuda")
    planning.plan_and_capture(run, place, {**_extra(), "kind": "cuda"})
    assert verify(run.store.path, deep=True).problems == []
    assert any("encode_kernel" in one for one in in_warm_up)
    assert in_batches == []
