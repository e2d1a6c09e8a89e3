"""Drafter dimensions from the config.json of each family of targets."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from dflash_pipeline.configs.schema import DrafterConfig
from dflash_pipeline.store.spec import StoreSpec
from dflash_pipeline.train.shape import drafter_shape, tensor_shapes

QWEN3_8B = {
    "model_type": "qwen3",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "rope_scaling": None,
    "max_position_embeddings": 40960,
    "bos_token_id": 151643,
    "eos_token_id": [151645, 151643],
    "attention_bias": True,
}


def spec(**changes: Any) -> StoreSpec:
    fields: dict[str, Any] = {
        "format": 1,
        "target_id": "target",
        "target_hash": "0",
        "target_dtype": "bf16",
        "quantisation": "",
        "layer_ids": (1, 9, 17, 25, 33),
        "num_target_layers": 36,
        "hidden_size": 4096,
        "vocab_size": 151936,
        "hidden_mode": "bf16",
        "last_mode": "none",
        "last_rows": "teacher",
        "calibration_hash": "",
        "tokenizer_hash": "0",
        "template_hash": "0",
        "template_args": "{}",
        "max_len": 3072,
        "overlong": "truncate",
    }
    return StoreSpec(**(fields | changes))


def shape(target: dict[str, Any], drafter: DrafterConfig | None = None, **changes: Any) -> Any:
    changes.setdefault("hidden_size", target.get("text_config", target)["hidden_size"])
    return drafter_shape(drafter or DrafterConfig(), target, spec(**changes), mask_token_id=7)


def test_qwen3_gives_its_own_dimensions() -> None:
    found = shape(QWEN3_8B)
    assert (found.num_heads, found.num_kv_heads, found.head_dim) == (32, 8, 128)
    assert (found.intermediate_size, found.num_layers, found.block_size) == (12288, 5, 16)
    assert found.layer_ids == (1, 9, 17, 25, 33)
    assert (found.rope_theta, found.rope_scaling) == (1e6, None)
    assert (found.bos_token_id, found.eos_token_id, found.pad_token_id) == (151643, 151645, None)
    assert (found.input_embedding_scale, found.output_multiplier) == (1.0, 1.0)
    # the public Qwen3-8B drafter holds 1.05 B parameters
    sizes = tensor_shapes(found).values()
    assert sum(size[0] * (size[1] if len(size) == 2 else 1) for size in sizes) == 1_048_626_432


def test_a_width_that_is_asked_for_wins() -> None:
    asked = DrafterConfig(
        intermediate_size=64, num_heads=8, num_kv_heads=2, head_dim=64, rope_theta=5e5, num_layers=2
    )
    found = shape(QWEN3_8B, asked)
    assert (found.intermediate_size, found.num_heads, found.num_kv_heads) == (64, 8, 2)
    assert (found.head_dim, found.rope_theta, found.num_layers) == (64, 5e5, 2)


def test_a_hybrid_target_lends_neither_heads_nor_rotary_parts() -> None:
    text = {
        "model_type": "qwen3_5_text",
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "layer_types": ["linear_attention", "full_attention"],
        "max_position_embeddings": 262144,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000000,
            "partial_rotary_factor": 0.25,
            "mrope_section": [11, 11, 10],
            "mrope_interleaved": True,
        },
        "eos_token_id": 248044,
    }
    found = shape({"model_type": "qwen3_5", "text_config": text, "pad_token_id": 3})
    assert (found.num_heads, found.num_kv_heads, found.head_dim) == (32, 8, 128)
    assert (found.rope_theta, found.rope_scaling) == (1e7, None)
    assert (found.eos_token_id, found.pad_token_id) == (248044, 3)


@pytest.mark.parametrize(
    ("experts", "width"),
    [
        ({"num_experts": 128, "moe_intermediate_size": 768, "intermediate_size": 5472}, 5472),
        ({"num_experts": 256, "moe_intermediate_size": 512, "intermediate_size": None}, 12288),
        ({"num_local_experts": 32, "intermediate_size": 2880}, 12288),
    ],
)
def test_a_pure_mixture_of_experts_gives_three_times_hidden(
    experts: dict[str, Any], width: int
) -> None:
    assert shape(QWEN3_8B | experts).intermediate_size == width


def test_rope_is_found_where_each_transformers_version_writes_it() -> None:
    bare = {name: value for name, value in QWEN3_8B.items() if name[:4] != "rope"}
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    nested = {"full_attention": yarn | {"rope_theta": 2e6}, "sliding_attention": {"rope_theta": 1}}
    for target in (
        bare | {"rope_theta": 2e6, "rope_scaling": yarn},
        bare | {"rope_parameters": yarn | {"rope_theta": 2e6}},
        bare | {"rope_parameters": nested},
    ):
        found = shape(target)
        assert (found.rope_theta, found.rope_scaling) == (2e6, yarn)
    old = {"type": "linear", "factor": 2.0}
    # of a target of images the drafter sees text, whose three positions are one
    mrope = {"type": "mrope", "mrope_section": [16, 24, 24]}
    assert shape(QWEN3_8B | {"rope_scaling": mrope}).rope_scaling is None
    assert shape(QWEN3_8B | {"rope_scaling": old}).rope_scaling == {
        "rope_type": "linear",
        "factor": 2.0,
    }


def test_yarn_states_the_length_it_stretches_from() -> None:
    found = shape(QWEN3_8B | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}})
    assert found.rope_scaling["original_max_position_embeddings"] == 40960


def test_gemma_scales_its_embedding_and_caps_its_logits() -> None:
    target = QWEN3_8B | {"model_type": "gemma2", "final_logit_softcapping": 30.0}
    found = shape(target)
    assert (found.input_embedding_scale, found.final_logit_softcapping) == (64.0, 30.0)


def test_granite_scales_both_ends() -> None:
    found = shape(QWEN3_8B | {"embedding_multiplier": 12.0, "logits_scaling": 16.0})
    assert (found.input_embedding_scale, found.output_multiplier) == (12.0, 1 / 16)


def test_the_last_layers_stay_full_beside_sliding_ones() -> None:
    found = shape(QWEN3_8B, DrafterConfig(num_layers=3, sliding_window=2048, num_full_layers=1))
    assert found.layer_types == ("sliding_attention", "sliding_attention", "full_attention")
    assert found.sliding_window == 2048
    assert shape(QWEN3_8B).sliding_window == 0
    all_full = shape(QWEN3_8B, DrafterConfig(num_layers=2, sliding_window=9, num_full_layers=2))
    assert (all_full.sliding_window, set(all_full.layer_types)) == (0, {"full_attention"})


def test_a_subset_of_the_stores_layers_is_read_in_layer_order() -> None:
    found = shape(QWEN3_8B, DrafterConfig(layer_ids=(33, 9)))
    assert found.layer_ids == (9, 33)
    assert [name for name in tensor_shapes(found) if name[:3] == "fc."] == [
        "fc.0.weight",
        "fc.1.weight",
    ]


@pytest.mark.parametrize(
    ("target", "drafter", "store", "words"),
    [
        ({}, {"layer_ids": (2,)}, {}, r"drafter.layer_ids asks for layers \(2,\)"),
        ({}, {}, {"hidden_size": 2048}, "hidden size 4096, the store holds rows of 2048"),
        ({"rope_theta": None}, {}, {}, "no rope_theta"),
        ({}, {"num_heads": 6, "num_kv_heads": 4}, {}, "6 heads and 4 KV heads"),
        ({}, {"head_dim": 5}, {}, "head_dim 5 is odd"),
        ({"rope_scaling": {"rope_type": "longrope"}}, {}, {}, "longrope"),
        ({}, {}, {"layer_ids": (1, 35)}, "35"),
    ],
)
def test_what_does_not_fit_is_named(
    target: dict[str, Any], drafter: dict[str, Any], store: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        shape(QWEN3_8B | target, DrafterConfig(**drafter), **store)


def test_a_mask_token_outside_the_embedding_is_refused() -> None:
    with pytest.raises(ValueError, match="mask token 151936"):
        dataclasses.replace(shape(QWEN3_8B), mask_token_id=151936)


@pytest.mark.parametrize(
    "changes",
    [
        {"rms_norm_eps": math.inf},
        {"rms_norm_eps": -1e-6},
        {"rope_theta": math.nan},
        {"init_std": 0.0},
        {"input_embedding_scale": math.inf},
        {"output_multiplier": -1.0},
        {"final_logit_softcapping": -30.0},
        {"rope_scaling": {"rope_type": "linear"}},
        {"rope_scaling": {"rope_type": "linear", "factor": 0}},
        {"rope_scaling": {"rope_type": "yarn", "factor": "4"}},
        {"rope_scaling": {"rope_type": "yarn", "original_max_position_embeddings": -1}},
        {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}},
    ],
)
def test_a_number_that_makes_no_arithmetic_is_named(changes: dict[str, Any]) -> None:
    (value,) = changes.values()
    names = list(value) if isinstance(value, dict) else list(changes)
    with pytest.raises(ValueError, match="must be a finite number above 0") as caught:
        dataclasses.replace(shape(QWEN3_8B), **changes)
    assert any(name in str(caught.value) for name in (*names, "factor"))
