"""Drafters of either layout are read with suspicion: what is not exactly one is refused by name."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_pipeline.train.export import write_zlab
from dflash_pipeline.train.loading import read_checkpoint
from exports import SLIDING, config_of, shape, speculators, tensors, written


def test_vocabulary_maps_of_older_speculators_are_read_if_they_map_nothing(tmp_path: Path) -> None:
    speculators(tmp_path / "out", shape(), tensors(shape()))
    file = tmp_path / "out" / "model.safetensors"
    known_V, offset_V = torch.ones(40, dtype=torch.bool), torch.zeros(40, dtype=torch.int64)
    save_file(load_file(file) | {"t2d": known_V, "d2t": offset_V}, file)
    assert not {"t2d", "d2t"} & set(read_checkpoint(tmp_path / "out").tensors)
    for mapped in ({"t2d": known_V & (torch.arange(40) > 0)}, {"d2t": offset_V + 1}):
        save_file(load_file(file) | {"t2d": known_V, "d2t": offset_V} | mapped, file)
        with pytest.raises(ValueError, match="maps its vocabulary"):
            read_checkpoint(tmp_path / "out")
    save_file(load_file(file) | {"t2d": known_V[1:], "d2t": offset_V}, file)
    with pytest.raises(ValueError, match=r"t2d is \[39\], expected \[40\]"):
        read_checkpoint(tmp_path / "out")


def test_a_speculators_config_that_leaves_out_defaults_is_read(tmp_path: Path) -> None:
    of = shape(head_dim=128, rms_norm_eps=1e-6, max_position_embeddings=32768)
    speculators(tmp_path / "out", of, tensors(of))
    config = config_of(tmp_path / "out")
    body = config["transformer_layer_config"]
    for name in ("head_dim", "rms_norm_eps", "max_position_embeddings", "rope_theta"):
        del body[name]
    del body["num_target_layers"]
    (tmp_path / "out" / "config.json").write_text(json.dumps(config))
    assert read_checkpoint(tmp_path / "out").shape == dataclasses.replace(of, num_target_layers=6)


def test_a_checkpoint_is_read_as_the_trainer_of_speculators_leaves_it(tmp_path: Path) -> None:
    of = shape(**SLIDING)
    body, out = tensors(of), tmp_path / "out"
    speculators(out, of, body)
    config = config_of(out)
    # 0.9.0: the name of its class, as z-lab's is called, and nothing of the target
    config["architectures"] = ["DFlashDraftModel"]
    (out / "config.json").write_text(json.dumps(config))
    file = out / "model.safetensors"
    stored = load_file(file)
    own = {name: value for name, value in stored.items() if not name.startswith(("embed", "lm_"))}
    assert len(own) == len(stored) - 2
    save_file(own, file)
    found = read_checkpoint(out)
    assert (found.shape, found.layout) == (of, "speculators")
    for name, tensor in body.items():
        assert torch.equal(found.tensors[name], tensor.bfloat16())
    save_file({name: value for name, value in own.items() if name != "norm.weight"}, file)
    with pytest.raises(ValueError, match=r"missing norm.weight \[16\]"):
        read_checkpoint(out)
    (out / "config.json").write_text(json.dumps(config | {"speculators_model_type": "dspark"}))
    with pytest.raises(ValueError, match="'dspark': this is not plain DFlash"):
        read_checkpoint(out)


def _drop(body: dict[str, torch.Tensor]) -> None:
    del body["norm.weight"]


def _add(body: dict[str, torch.Tensor]) -> None:
    body["rotary.frequency"] = torch.zeros(4)


def _widen(body: dict[str, torch.Tensor]) -> None:
    body["fc.weight"] = torch.zeros(16, 32)


def _cast(body: dict[str, torch.Tensor]) -> None:
    body["norm.weight"] = body["norm.weight"].to(torch.int8)


def _spoil(body: dict[str, torch.Tensor]) -> None:
    body["layers.0.mlp.up_proj.weight"][3, 5] = float("nan")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_spoil, r"layers\.0\.mlp\.up_proj\.weight holds NaN or Inf"),
        (_drop, r"missing norm.weight \[16\]"),
        (_add, r"unexpected rotary.frequency \[4\]"),
        (_widen, r"fc.weight is \[16, 32\], expected \[16, 48\]"),
        (_cast, r"norm.weight has dtype I8"),
    ],
)
def test_each_wrong_tensor_is_named_on_read(tmp_path: Path, change: Any, words: str) -> None:
    path = written(tmp_path)
    body = load_file(path / "model.safetensors")
    change(body)
    save_file(body, path / "model.safetensors")
    with pytest.raises(ValueError, match=words):
        read_checkpoint(path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "architecture LlamaForCausalLM"),
        ({"block_size": 8}, "block_size 4 in one place and 8 in another"),
        ({"is_causal": True}, "causal on every layer"),
        ({"attention_bias": True}, "attention_bias"),
        ({"rope_theta": 1e4}, "rope_theta"),
        ({"partial_rotary_factor": 0.25}, "partial_rotary_factor"),
        ({"dflash_config": {}}, "no key 'mask_token_id'"),
        ({"dflash_config": None}, "not a drafter that can be read"),
        ({"hidden_size": "x"}, "not a drafter that can be read"),
    ],
)
def test_a_config_of_something_else_is_refused(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    path = written(tmp_path)
    (path / "config.json").write_text(json.dumps(config_of(path) | changes))
    with pytest.raises(ValueError, match=words):
        read_checkpoint(path)


def test_a_damaged_file_is_refused_before_it_is_loaded(tmp_path: Path) -> None:
    path = written(tmp_path)
    weights = path / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-10])
    with pytest.raises(ValueError, match="truncated or damaged"):
        read_checkpoint(path)
    weights.write_bytes((1 << 40).to_bytes(8, "little") + whole[8:])
    with pytest.raises(ValueError, match="claims a header of"):
        read_checkpoint(path)
    weights.write_bytes(whole[:4])
    with pytest.raises(ValueError, match="truncated"):
        read_checkpoint(path)
    weights.unlink()
    with pytest.raises(ValueError, match=r"model.safetensors is missing"):
        read_checkpoint(path)


def test_a_file_that_claims_what_is_not_so_is_refused_in_one_line(
    tmp_path: Path, hostile_files: Callable[[Path], dict[str, Path]]
) -> None:
    path = written(tmp_path)
    weights = path / "model.safetensors"
    for claim, file in hostile_files(weights).items():
        shutil.copyfile(file, weights)
        with pytest.raises(ValueError, match=re.escape(str(path))) as caught:
            read_checkpoint(path)
        assert "\n" not in str(caught.value), claim


def test_shards_and_a_model_prefix_are_read(tmp_path: Path) -> None:
    path = written(tmp_path)
    whole = read_checkpoint(path).tensors
    body = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    names = sorted(body)
    parts = {"one.safetensors": names[:5], "two.safetensors": names[5:]}
    for file, held in parts.items():
        save_file({f"model.{name}": body[name] for name in held}, path / file)
    weight_map = {f"model.{name}": file for file, held in parts.items() for name in held}
    index = path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    found = read_checkpoint(path).tensors
    assert all(torch.equal(found[name], tensor) for name, tensor in whole.items())
    (tmp_path / "outside.safetensors").write_bytes((path / "one.safetensors").read_bytes())
    index.write_text(json.dumps({"weight_map": {"fc.weight": "../outside.safetensors"}}))
    with pytest.raises(ValueError, match=r"names '../outside.safetensors'"):
        read_checkpoint(path)
    for nothing in ({}, {"weight_map": []}):
        index.write_text(json.dumps(nothing))
        with pytest.raises(ValueError, match=r"model\.safetensors\.index\.json names no file"):
            read_checkpoint(path)


def test_a_run_gives_its_best_step_else_its_last(tmp_path: Path) -> None:
    run = tmp_path / "run"
    write_zlab(run / "step-00000010", shape(), tensors(shape()))
    write_zlab(run / "step-00000020", shape(), tensors(shape()))
    (run / "last").symlink_to("step-00000020")
    assert read_checkpoint(run).path.resolve().name == "step-00000020"
    (run / "best").write_text("step-00000010\n")
    assert read_checkpoint(run).path.name == "step-00000010"
    assert read_checkpoint(run / "step-00000020").path.name == "step-00000020"
    (run / "best").write_text("../run/step-00000010")
    with pytest.raises(ValueError, match="plain name"):
        read_checkpoint(run)
    with pytest.raises(ValueError, match="is not a directory"):
        read_checkpoint(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=re.escape("no best and no last step")):
        read_checkpoint(tmp_path)
