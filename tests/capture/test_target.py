"""The target's captured states are the family's own, whatever the batch they were computed in."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from dflash_pipeline.capture.model import embedding_and_head, resolve
from dflash_pipeline.capture.target import Target, compute_dtype, slow_fallback
from dflash_pipeline.configs.schema import TargetConfig
from tiny_targets import EVERY_FAMILY

LAYER_IDS = (0, 2, 4)
LENGTHS = (5, 23, 12)


def _ids(lengths: tuple[int, ...], vocab_size: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, vocab_size, (length,), generator=generator) for length in lengths]


@pytest.mark.parametrize("family", EVERY_FAMILY)
def test_captured_states_are_the_familys_own_for_padded_and_lone_rows(
    family: str, make_model: Callable[..., PreTrainedModel]
) -> None:
    model = make_model(family)
    target = Target(model, LAYER_IDS)
    rows = _ids(LENGTHS, 256)
    # padding of valid ids that differ: whatever stands behind a row must not reach it
    ids_BT = torch.randint(0, 256, (len(rows), 28), generator=torch.Generator().manual_seed(4))
    for index, ids_T in enumerate(rows):
        ids_BT[index, : len(ids_T)] = ids_T
    hidden_KBTH, last_BTH = target.forward(ids_BT)
    assert [tuple(hidden.shape) for hidden in hidden_KBTH] == [(3, 28, 32)] * 3
    for index, ids_T in enumerate(rows):
        length = len(ids_T)
        with torch.no_grad():
            truth = model(ids_T[None], output_hidden_states=True, use_cache=False)
        for place, layer_id in enumerate(LAYER_IDS):
            torch.testing.assert_close(
                hidden_KBTH[place][index, :length],
                truth.hidden_states[layer_id + 1][0],
                rtol=2e-4,
                atol=2e-4,
            )
        torch.testing.assert_close(
            last_BTH[index, :length], truth.hidden_states[-1][0], rtol=2e-4, atol=2e-4
        )
        torch.testing.assert_close(
            target.head_logits(last_BTH[index, :length]), truth.logits[0], rtol=2e-4, atol=5e-4
        )


def test_a_vision_language_model_is_reduced_to_its_text_model(
    make_model: Callable[..., PreTrainedModel],
) -> None:
    import transformers

    text = make_model("gemma3").config.to_dict()
    config = transformers.Gemma3Config(
        text_config=text,
        vision_config={
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 6,
            "num_attention_heads": 2,
            "image_size": 28,
            "patch_size": 14,
        },
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    target = Target(model, (1, 3))
    assert target.backbone is model.model.language_model
    hidden_KBTH, last_BTH = target.forward(torch.arange(6)[None])
    assert (len(hidden_KBTH), tuple(last_BTH.shape)) == (2, (1, 6, 32))


def test_nothing_of_a_forward_stays_alive_in_the_target(
    make_model: Callable[..., PreTrainedModel],
) -> None:
    import gc
    import weakref

    target = Target(make_model("qwen3"), (1,))
    hidden_KBTH, last_BTH = target.forward(torch.arange(9)[None])
    alive = [weakref.ref(tensor) for tensor in (*hidden_KBTH, last_BTH)]
    del hidden_KBTH, last_BTH
    gc.collect()
    assert [reference() for reference in alive] == [None, None]


def test_a_model_without_decoder_layers_is_refused_by_name(
    make_model: Callable[..., PreTrainedModel],
) -> None:
    model = make_model("qwen3")
    model.config.num_hidden_layers = 5
    with pytest.raises(ValueError, match="Qwen3ForCausalLM: expected one list of 5 decoder layers"):
        Target(model, (1,))


def test_a_family_whose_final_norm_is_not_known_is_refused_by_name() -> None:
    import transformers

    config = transformers.MambaConfig(
        vocab_size=64, hidden_size=16, state_size=4, num_hidden_layers=2
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    with pytest.raises(ValueError, match="MambaModel: no final norm under one of"):
        Target(model, (0,))


def test_a_model_without_a_linear_head_is_refused_by_name(
    make_model: Callable[..., PreTrainedModel],
) -> None:
    model = make_model("qwen3")
    model.lm_head = torch.nn.Identity()
    with pytest.raises(ValueError, match="Qwen3ForCausalLM has no linear head"):
        Target(model, (1,))


@pytest.mark.parametrize("family", ["qwen3_5_nested", "qwen3_5_moe_nested", "gemma3_nested"])
def test_a_checkpoint_with_a_nested_text_model_is_read_from_its_files(
    family: str, make_model: Callable[..., PreTrainedModel], make_target_dir: Callable[..., Path]
) -> None:
    files = resolve(TargetConfig(id=str(make_target_dir(family))))
    assert files.num_layers == 6
    target = Target.load(files, LAYER_IDS, "cpu", torch.float32)
    whole = make_model(family)
    ids_BT = torch.arange(20).reshape(2, 10)
    hidden_KBTH, last_BTH = target.forward(ids_BT)
    with torch.no_grad():
        truth = whole(ids_BT, output_hidden_states=True, use_cache=False)
    for place, layer_id in enumerate(LAYER_IDS):
        torch.testing.assert_close(hidden_KBTH[place], truth.hidden_states[layer_id + 1])
    torch.testing.assert_close(last_BTH, truth.hidden_states[-1])
    embed_VH, head_VH = embedding_and_head(files)
    assert (embed_VH.shape, head_VH is None) == ((272, 32), files.is_tied)


def test_linear_attention_without_its_kernels_is_said(
    make_target_dir: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    hybrid, plain = (
        resolve(TargetConfig(id=str(make_target_dir(family))))
        for family in ("qwen3_5_nested", "qwen3")
    )
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    assert "4 of 6 layers are linear attention" in slow_fallback(hybrid, "cuda")
    assert "flash-linear-attention" in slow_fallback(hybrid, "cuda")
    assert slow_fallback(hybrid, "cpu") == slow_fallback(plain, "cuda") == ""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    assert slow_fallback(hybrid, "cuda") == ""


def test_a_checkpoint_that_lacks_a_weight_is_refused(target_dir: Path, tmp_path: Path) -> None:
    import shutil

    from safetensors.torch import load_file, save_file

    broken = tmp_path / "broken"
    shutil.copytree(target_dir, broken)
    weights = load_file(broken / "model.safetensors")
    del weights["model.layers.3.mlp.up_proj.weight"]
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    files = resolve(TargetConfig(id=str(broken)))
    with pytest.raises(ValueError, match=r"lacks model\.layers\.3\.mlp\.up_proj\.weight"):
        Target.load(files, (1,), "cpu", torch.float32)


def test_a_checkpoint_of_other_widths_is_refused_by_name(target_dir: Path, tmp_path: Path) -> None:
    import json
    import shutil

    broken = Path(shutil.copytree(target_dir, tmp_path / "broken"))
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps({**config, "intermediate_size": 7}))
    files = resolve(TargetConfig(id=str(broken)))
    with pytest.raises(
        ValueError,
        match=r"mlp\.down_proj\.weight has shape \[32, 48\] in the checkpoint, \[32, 7\]",
    ):
        Target.load(files, (1,), "cpu", torch.float32)


def test_auto_means_bf16_on_cuda_and_fp32_on_a_cpu() -> None:
    assert compute_dtype("auto", "cuda") is torch.bfloat16
    assert compute_dtype("auto", "cpu") is torch.float32
    assert compute_dtype("bf16", "cpu") is torch.bfloat16
