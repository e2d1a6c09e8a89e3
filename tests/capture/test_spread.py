"""A target that one GPU cannot hold: what goes where, and that nothing of its states changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from dflash_pipeline.capture.decoder import Decoder
from dflash_pipeline.capture.model import resolve
from dflash_pipeline.capture.spread import device_map, spread_devices, spread_text
from dflash_pipeline.capture.target import Target
from dflash_pipeline.configs.errors import UsageError
from dflash_pipeline.configs.schema import TargetConfig

THREE = [torch.device("cuda", number) for number in range(3)]
IDS_BT = torch.arange(24).reshape(2, 12)


@pytest.mark.parametrize("family", ["qwen3", "llama", "gpt_oss", "gemma3", "qwen3_5", "qwen3_moe"])
def test_every_weight_has_one_place_and_layers_follow_each_other(
    family: str, make_model: Callable[..., PreTrainedModel]
) -> None:
    model = make_model(family)
    placed = device_map(model.config, THREE, trust_remote_code=False)
    for name, _ in (*model.named_parameters(), *model.named_buffers()):
        owners = [one for one in placed if name == one or name.startswith(f"{one}.")]
        assert len(owners) == 1, (name, owners)
    layers = [placed[f"model.layers.{layer}"].index for layer in range(6)]
    assert layers == [0, 0, 1, 1, 2, 2]
    assert placed["lm_head"] == placed["model.norm"] == THREE[2]
    is_tied = model.config.tie_word_embeddings
    assert placed["model.embed_tokens"] == THREE[2 if is_tied else 0]
    assert "layers 2 to 3 on cuda:1" in spread_text(placed)


def test_more_gpus_than_layers_are_refused(make_model: Callable[..., PreTrainedModel]) -> None:
    devices = [torch.device("cuda", number) for number in range(7)]
    with pytest.raises(UsageError, match="the target has 6 layers"):
        device_map(make_model("qwen3").config, devices, trust_remote_code=False)


def test_without_accelerate_it_says_what_to_install(
    make_model: Callable[..., PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(UsageError, match="needs accelerate"):
        device_map(make_model("qwen3").config, THREE, trust_remote_code=False)


def _states(directory: Path, num_gpus: int, device: str = "cpu") -> tuple[list[Any], Target]:
    files = resolve(TargetConfig(id=str(directory)))
    target = Target.load(files, (0, 2, 4), device, torch.float32, num_gpus)
    hidden_KBTH, last_BTH = target.forward(IDS_BT.to(target.device))
    assert {state.device for state in (*hidden_KBTH, last_BTH)} == {target.device}
    return [state.cpu() for state in (*hidden_KBTH, last_BTH)], target


@pytest.mark.parametrize("family", ["qwen3", "llama", "qwen3_5"])
def test_a_target_that_is_spread_gives_the_same_states(
    family: str, make_target_dir: Callable[..., Path]
) -> None:
    alone, _ = _states(make_target_dir(family), 1)
    spread, target = _states(make_target_dir(family), 2)
    assert target.spread.startswith("spread by transformers' device map: layers 0 to 5 on cpu")
    for one, other in zip(alone, spread, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_over_two_gpus_it_gives_the_same_states(make_target_dir: Callable[..., Path]) -> None:
    alone, _ = _states(make_target_dir("qwen3"), 1, "cuda")
    spread, target = _states(make_target_dir("qwen3"), 2, "cuda")
    assert "layers 3 to 5 on cuda:1" in target.spread
    for one, other in zip(alone, spread, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_a_target_that_is_spread_decodes_and_is_cut_back_alike(
    family: str, make_target_dir: Callable[..., Path]
) -> None:
    files = resolve(TargetConfig(id=str(make_target_dir(family))))
    prompts = [torch.arange(9), torch.arange(3, 8)]
    found = []
    for num_gpus in (1, 2):
        target = Target.load(files, (), "cpu", torch.float32, num_gpus)
        decoder = Decoder(target, (0, 2, 4))
        logits_BV, features = decoder.prefill(prompts)
        decoder.crop([0, 1], [7, 5])
        found.append([logits_BV, *features, *decoder.verify(torch.arange(8).reshape(2, 4))])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_states_are_given_on_the_last_of_a_targets_gpus() -> None:
    assert spread_devices("cuda:0", 1) == [torch.device("cuda:0")]
    assert spread_devices("cuda:0", 3) == THREE
    assert spread_devices("cpu", 2) == [torch.device("cpu")] * 2
