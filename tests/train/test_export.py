"""Exports hold exactly what servers read, come back bit for bit, and refuse what is not whole."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen3Config

from dflash_pipeline.configs.errors import UsageError
from dflash_pipeline.configs.schema import Run, TargetConfig
from dflash_pipeline.train import export, layout
from dflash_pipeline.train.drafter import Drafter
from dflash_pipeline.train.export import serving_commands, write_zlab
from dflash_pipeline.train.loading import read_checkpoint
from dflash_pipeline.train.shape import tensor_shapes
from dflash_pipeline.train.tensorfile import write_tensors
from exports import GEMMA, MIXED, SLIDING, YARN, config_of, shape, speculators, tensors, written
from places import cpu_place

# what the servers' own code made of exports
BENCH = Path(__file__).parents[1] / "bench"


def keys(config: dict[str, Any]) -> set[str]:
    """Those of nested tables as `outer.inner`."""
    nested = {
        f"{name}.{inner}"
        for name, value in config.items()
        if isinstance(value, dict)
        for inner in keys(value)
    }
    return nested | {name for name, value in config.items() if not isinstance(value, dict)}


def test_tensor_names_are_the_drafters() -> None:
    for of in (shape(), shape(num_layers=1, layer_types=("full_attention",))):
        found = {name: tuple(p.shape) for name, p in Drafter(of).named_parameters()}
        assert found == tensor_shapes(of)


@pytest.mark.parametrize("changes", [{}, {"rope_scaling": YARN}, SLIDING, MIXED, GEMMA], ids=str)
def test_zlab_comes_back_as_it_went(tmp_path: Path, changes: dict[str, Any]) -> None:
    of = shape(**changes)
    body = tensors(of)
    write_zlab(tmp_path / "out", of, body)
    found = read_checkpoint(tmp_path / "out")
    assert (found.shape, found.layout) == (of, "zlab")
    assert found.tensors.keys() == body.keys()
    for name, tensor in body.items():
        assert torch.equal(found.tensors[name], tensor.bfloat16())
    assert sorted(file.name for file in tmp_path.iterdir()) == ["out"]


@pytest.mark.parametrize("changes", [{}, {"rope_scaling": YARN}, SLIDING], ids=str)
def test_speculators_comes_back_as_it_went(tmp_path: Path, changes: dict[str, Any]) -> None:
    of = shape(**changes)
    body = tensors(of)
    speculators(tmp_path / "out", of, body)
    found = read_checkpoint(tmp_path / "out")
    assert (found.shape, found.layout) == (of, "speculators")
    for name, tensor in body.items():
        assert torch.equal(found.tensors[name], tensor.bfloat16())


def test_zlab_config_says_what_servers_read(tmp_path: Path) -> None:
    write_zlab(tmp_path / "out", shape(rope_scaling=YARN), tensors(shape()))
    config = config_of(tmp_path / "out")
    assert config["architectures"] == ["DFlashDraftModel"]
    assert config["block_size"] == config["dflash_config"]["block_size"] == 4
    assert config["dflash_config"]["target_layer_ids"] == [1, 3, 4]
    assert config["dflash_config"]["mask_token_id"] == 39
    assert config["is_causal"] is False
    assert config["rope_scaling"] == YARN
    assert config["rope_parameters"] == YARN | {"rope_theta": 5e5}
    assert "auto_map" not in config
    read = Qwen3Config(**config)
    assert (read.rope_parameters["rope_theta"], read.rope_parameters["factor"]) == (5e5, 4.0)
    assert (read.head_dim, read.layer_types) == (8, ["full_attention"] * 2)


def test_a_mixture_of_layer_types_leaves_causality_to_each_layer() -> None:
    assert layout.zlab_config(shape(**SLIDING))["is_causal"] is True
    assert "is_causal" not in layout.zlab_config(shape(**MIXED))


def test_zlab_tensors_are_the_public_set(tmp_path: Path) -> None:
    of = shape(num_layers=1, layer_types=("full_attention",))
    body = tensors(of)
    write_zlab(tmp_path / "out", of, body)
    stored = load_file(tmp_path / "out" / "model.safetensors")
    layer = "input_layernorm post_attention_layernorm mlp.gate_proj mlp.up_proj mlp.down_proj"
    layer += " self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.o_proj"
    layer += " self_attn.q_norm self_attn.k_norm"
    expected = {f"layers.0.{name}.weight" for name in layer.split()}
    assert stored.keys() == expected | {"fc.weight", "hidden_norm.weight", "norm.weight"}
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
    # the parts stand side by side in layer order: one product with the concatenated features
    feature_NKH = torch.randn(5, 3, 16)
    apart = sum(feature_NKH[:, k] @ body[f"fc.{k}.weight"].bfloat16().float().T for k in range(3))
    joined = feature_NKH.flatten(1) @ stored["fc.weight"].float().T
    torch.testing.assert_close(joined, apart)


def test_speculators_config_is_what_vllm_converts(tmp_path: Path) -> None:
    speculators(tmp_path / "out", shape(), tensors(shape()))
    config = config_of(tmp_path / "out")
    assert config["architectures"] == ["DFlashSpeculator"]
    assert config["aux_hidden_state_layer_ids"] == [2, 4, 5]
    method = config["speculators_config"]["proposal_methods"][0]
    assert method == {"proposal_type": "greedy", "speculative_tokens": 3}
    assert config["sliding_window_non_causal"] is True
    assert (
        layout.speculators_config(shape(**SLIDING), "t", [])["sliding_window_non_causal"] is False
    )
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(stored["embed_tokens.weight"], stored["lm_head.weight"])
    # speculators 0.9 finds the maps of a full vocabulary unexpected
    assert not {"t2d", "d2t"} & set(stored)


@pytest.mark.parametrize(("changes", "words"), [(MIXED, "one causality"), (GEMMA, "zlab")])
def test_what_speculators_cannot_say_is_refused(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        speculators(tmp_path / "out", shape(**changes), tensors(shape(**changes)))
    assert not list(tmp_path.iterdir())


def test_each_wrong_tensor_is_named_on_write(tmp_path: Path) -> None:
    body = tensors(shape())
    body["extra.weight"] = body.pop("norm.weight")
    body["fc.0.weight"] = torch.zeros(16, 17)
    words = r"missing norm.weight \[16\]; unexpected extra.weight \[16\]; fc.0.weight is \[16, 17\]"
    with pytest.raises(ValueError, match=words):
        write_zlab(tmp_path / "out", shape(), body)
    body = tensors(shape())
    body["norm.weight"] = body["norm.weight"] * torch.nan
    with pytest.raises(ValueError, match=r"^norm.weight holds NaN or Inf: nothing is exported"):
        write_zlab(tmp_path / "out", shape(), body)
    assert not list(tmp_path.iterdir())


def test_an_existing_directory_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(UsageError, match="exists"):
        write_zlab(tmp_path / "out", shape(), tensors(shape()))


def test_a_disk_that_changes_a_byte_publishes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def bad_write(path: Path, written: dict[str, torch.Tensor], metadata: Any) -> None:
        write_tensors(path, written, metadata)
        damaged = bytearray(path.read_bytes())
        damaged[-1] ^= 1
        path.write_bytes(damaged)

    monkeypatch.setattr(export, "write_tensors", bad_write)
    with pytest.raises(ValueError, match="came back from the disk changed"):
        write_zlab(tmp_path / "out", shape(), tensors(shape()))
    assert not list(tmp_path.iterdir())


def test_serving_commands_count_drafts_as_each_server_does() -> None:
    vllm, sglang = serving_commands(shape(), Path("out"), "org/target")
    assert '"num_speculative_tokens": 3' in vllm
    assert sglang.endswith("--speculative-num-draft-tokens 4")


def test_serving_commands_can_be_typed_whatever_the_names_hold() -> None:
    target, path = "odd name's", Path('a dir/it\'s "$HOME"')
    vllm, sglang = (shlex.split(line) for line in serving_commands(shape(), path, target))
    assert vllm[:3] == ["vllm", "serve", target]
    assert json.loads(vllm[-1])["model"] == str(path)
    assert sglang[sglang.index("--model-path") + 1] == target
    assert sglang[sglang.index("--speculative-draft-model-path") + 1] == str(path)


def test_the_readme_shows_the_lines_that_are_printed() -> None:
    readme = (Path(export.__file__).parents[1] / "README.md").read_text()
    lines = serving_commands(shape(block_size=16), Path("drafter"), "TARGET")
    assert "```bash\n" + "\n".join(lines) + "\n```" in readme


def test_a_server_that_leaves_out_the_scale_of_the_embedding_is_not_offered(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    measured = json.loads((BENCH / "servers_vllm.json").read_text())
    assert measured["input_embedding_scale"] is False
    of = shape(input_embedding_scale=4.0)
    write_zlab(tmp_path / "in", of, tensors(of))
    extra = {"checkpoint": str(tmp_path / "in"), "out": str(tmp_path / "z"), "layout": "zlab"}
    place = cpu_place(tmp_path / "logs", "export")
    export.main(Run(target=TargetConfig(id="org/t")), place, extra | {"store": ""})
    out = capsys.readouterr().out
    assert "multiplies its embedding by 4; vLLM does not" in out
    assert "vllm serve" not in out
    assert "next: serve it with\n  python -m sglang.launch_server --model-path org/t " in out


def test_a_target_that_the_drafter_was_not_trained_for_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The serving lines name the target of the command line: nothing else would tell."""
    remembered = {"target_id": "org/t"}
    of = shape()
    write_zlab(tmp_path / "z", of, tensors(of), remembered)
    place = cpu_place(tmp_path / "logs", "export")
    extra = {"checkpoint": str(tmp_path / "z"), "layout": "zlab", "store": ""}
    for target_id, is_said in (("org/t", False), ("", False), ("org/other", True)):
        out = tmp_path / f"out-{is_said}-{bool(target_id)}"
        export.main(Run(target=TargetConfig(id=target_id)), place, extra | {"out": str(out)})
        told = "was trained for target org/t, this command names org/other"
        assert (told in capsys.readouterr().out) is is_said


@pytest.mark.parametrize("server", ["vllm", "sglang"])
def test_servers_have_read_what_is_written_now(server: str, tmp_path: Path) -> None:
    measured = json.loads((BENCH / f"servers_{server}.json").read_text())
    assert len(measured["cases"]) == {"vllm": 20, "sglang": 12}[server]
    for case in measured["cases"]:
        assert max(case["errors"].values()) <= measured["tolerance"] < case["control"], case["name"]
    of = shape(num_layers=3, layer_types=("full_attention",) * 3)
    write_zlab(tmp_path / "zlab", of, tensors(of))
    speculators(tmp_path / "speculators", of, tensors(of))
    for name, read in measured["layouts"].items():
        # other keys or tensors than these no server has seen: run tests/bench/servers.py again
        assert keys(config_of(tmp_path / name)) == set(read["config"])
        assert load_file(tmp_path / name / "model.safetensors").keys() == set(read["tensors"])


def test_the_command_turns_one_layout_into_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path)
    bits_VH = np.arange(40 * 16, dtype=np.uint16).reshape(40, 16)
    store = SimpleNamespace(
        embed=lambda: bits_VH,
        head=lambda: bits_VH + 1,
        spec=SimpleNamespace(target_id="tiny"),
        target_config=lambda: {"architectures": ["Qwen3ForCausalLM"]},
    )
    monkeypatch.setattr(export, "open_store", lambda _path: store)
    place = cpu_place(tmp_path / "logs", "export")
    extra = {"checkpoint": str(path), "out": str(tmp_path / "s"), "layout": "speculators"}
    with pytest.raises(UsageError, match="--store"):
        export.main(Run(), place, extra | {"store": ""})
    export.main(Run(), place, extra | {"store": "store"})
    stored = load_file(tmp_path / "s" / "model.safetensors")
    assert np.array_equal(stored["lm_head.weight"].view(torch.int16).numpy(), bits_VH + 1)
    assert config_of(tmp_path / "s")["speculators_config"]["verifier"] == {
        "name_or_path": "tiny",
        "architectures": ["Qwen3ForCausalLM"],
    }
    back = {"checkpoint": str(tmp_path / "s"), "out": str(tmp_path / "z"), "layout": "zlab"}
    export.main(Run(target=TargetConfig(id="org/t")), place, back | {"store": ""})
    assert (tmp_path / "z" / "model.safetensors").read_bytes() == (
        path / "model.safetensors"
    ).read_bytes()
    assert config_of(tmp_path / "z") == config_of(path)
    out = capsys.readouterr().out
    # one line where one server reads the layout, two where two do
    assert out.count("next: serve it with\n  vllm serve TARGET ") == 1
    assert "next: serve it with one of\n  vllm serve org/t " in out
    packaged = Run(target=TargetConfig(id="toy"))
    export.main(packaged, place, back | {"store": "", "out": str(tmp_path / "y")})
    out = capsys.readouterr().out
    assert "toy is a name of this package alone; TARGET stands for" in out
    assert "serve toy" not in out
