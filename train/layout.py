"""A drafter's shape and tensors in the two public checkpoint layouts, as plain data; no files here.

z-lab layout: what vLLM, SGLang and z-lab's own code read. speculators layout: what vLLM converts.
Layer ids count outputs from 0 in z-lab's, and are one higher in speculators'.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from dflash_pipeline.train.layoutname import (
    SPECULATORS_ARCHITECTURE,
    SPECULATORS_KIND,
    ZLAB_ARCHITECTURE,
)
from dflash_pipeline.train.shape import FULL, SLIDING, DrafterShape, tensor_shapes


def zlab_config(shape: DrafterShape) -> dict[str, Any]:
    """config.json of the z-lab layout."""
    dflash: dict[str, Any] = {
        "block_size": shape.block_size,
        "mask_token_id": shape.mask_token_id,
        "target_layer_ids": list(shape.layer_ids),
    }
    if shape.input_embedding_scale != 1.0:
        dflash["input_embedding_scale"] = shape.input_embedding_scale
    if shape.output_multiplier != 1.0:
        dflash["output_multiplier"] = shape.output_multiplier
    if shape.final_logit_softcapping:
        dflash["final_logit_softcapping"] = shape.final_logit_softcapping
    config = _qwen3_config(shape) | {
        "architectures": [ZLAB_ARCHITECTURE],
        "block_size": shape.block_size,
        "dflash_config": dflash,
        "num_target_layers": shape.num_target_layers,
    }
    # one flag rules every layer: it can state all-full and all-sliding, and would change a mixture,
    # whose layers the servers decide one by one from layer_types
    if len(set(shape.layer_types)) == 1:
        config["is_causal"] = shape.layer_types[0] == SLIDING
    return config


def speculators_config(
    shape: DrafterShape, target_id: str, target_architectures: Sequence[str]
) -> dict[str, Any]:
    """config.json of the speculators layout; ValueError for a shape that it cannot express."""
    kinds = set(shape.layer_types)
    if len(kinds) > 1:
        raise ValueError(
            "the speculators layout has one causality for all layers and cannot hold sliding and "
            "full layers together: export with --layout zlab"
        )
    if (shape.input_embedding_scale, shape.output_multiplier) != (1.0, 1.0) or (
        shape.final_logit_softcapping
    ):
        raise ValueError(
            "the speculators layout has no input_embedding_scale, output_multiplier or "
            "final_logit_softcapping, which this target needs: export with --layout zlab"
        )
    return {
        "architectures": [SPECULATORS_ARCHITECTURE],
        SPECULATORS_KIND: "dflash",
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {"proposal_type": "greedy", "speculative_tokens": shape.block_size - 1}
            ],
            "verifier": {
                "name_or_path": target_id,
                "architectures": list(target_architectures),
            },
        },
        # num_target_layers has no key of its own there; a Qwen3 config keeps what it does not know
        "transformer_layer_config": _qwen3_config(shape)
        | {"num_target_layers": shape.num_target_layers},
        "draft_vocab_size": shape.vocab_size,
        "block_size": shape.block_size,
        "target_hidden_size": shape.hidden_size,
        "aux_hidden_state_layer_ids": [layer_id + 1 for layer_id in shape.layer_ids],
        "mask_token_id": shape.mask_token_id,
        # vLLM turns it into `causal` for every layer: only true keeps full layers bidirectional
        "sliding_window_non_causal": kinds == {FULL},
        "sample_from_anchor": False,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }


def shape_from_zlab(config: Mapping[str, Any]) -> DrafterShape:
    """The shape that a z-lab config.json states; KeyError and ValueError when it does not."""
    dflash = config["dflash_config"]
    shape = _shape(
        config,
        block_size=_agreed("block_size", dflash.get("block_size"), config.get("block_size")),
        mask_token_id=int(dflash["mask_token_id"]),
        layer_ids=tuple(int(layer_id) for layer_id in dflash["target_layer_ids"]),
        scale=float(dflash.get("input_embedding_scale", 1.0)),
        multiplier=float(dflash.get("output_multiplier", 1.0)),
        softcap=float(dflash.get("final_logit_softcapping") or 0.0),
    )
    for name in ("projector_type", "attention_sink_bias", "use_swa", "conv_kernel_size"):
        if dflash.get(name):
            raise ValueError(f"dflash_config.{name} is {dflash[name]!r}: this is not plain DFlash")
    for causal in (config.get("is_causal"), dflash.get("causal")):
        if causal is not None:
            _check_causal(bool(causal), shape)
    return shape


def shape_from_speculators(config: Mapping[str, Any]) -> DrafterShape:
    """The shape that a speculators config.json states; KeyError and ValueError as above."""
    # speculators writes only what differs from a Qwen3 config's defaults; imported here because
    # transformers takes seconds and nothing else in train/ needs it
    from transformers import Qwen3Config

    kind = config.get(SPECULATORS_KIND, "dflash")
    if kind != "dflash":
        raise ValueError(f"{SPECULATORS_KIND} is {kind!r}: this is not plain DFlash")
    stated = config["transformer_layer_config"]
    if stated.get("model_type", "qwen3") != "qwen3":
        raise ValueError(f"its layers are {stated['model_type']}, expected qwen3")
    body = Qwen3Config(**stated).to_dict()
    if config["draft_vocab_size"] != body["vocab_size"]:
        raise ValueError(
            f"its vocabulary is cut to {config['draft_vocab_size']} of {body['vocab_size']} "
            "tokens: only full vocabularies are read"
        )
    if config.get("sample_from_anchor"):
        raise ValueError("sample_from_anchor is true: its slots are shifted, this is not DFlash")
    shape = _shape(
        body,
        block_size=int(config["block_size"]),
        mask_token_id=int(config["mask_token_id"]),
        layer_ids=tuple(int(index) - 1 for index in config["aux_hidden_state_layer_ids"]),
        scale=1.0,
        multiplier=1.0,
        softcap=0.0,
    )
    if SLIDING in shape.layer_types:
        _check_causal(not config.get("sliding_window_non_causal"), shape)
    return shape


def joined(tensors: Mapping[str, torch.Tensor], shape: DrafterShape) -> dict[str, torch.Tensor]:
    """Public names: the split `fc.{k}.weight` [H, H] side by side as `fc.weight` [H, K H]."""
    rest = {name: tensor for name, tensor in tensors.items() if not name.startswith("fc.")}
    parts = [tensors[f"fc.{index}.weight"] for index in range(shape.num_features)]
    return {"fc.weight": torch.cat(parts, dim=1)} | rest


def split(tensors: Mapping[str, torch.Tensor], shape: DrafterShape) -> dict[str, torch.Tensor]:
    """The inverse of `joined`."""
    rest = {name: tensor for name, tensor in tensors.items() if name != "fc.weight"}
    parts = tensors["fc.weight"].chunk(shape.num_features, dim=1)
    return {f"fc.{index}.weight": part.contiguous() for index, part in enumerate(parts)} | rest


def zlab_tensors(shape: DrafterShape) -> dict[str, tuple[int, ...]]:
    """Name and shape of each tensor of the z-lab layout."""
    rest = {name: size for name, size in tensor_shapes(shape).items() if not name.startswith("fc.")}
    return {"fc.weight": (shape.hidden_size, shape.num_features * shape.hidden_size)} | rest


def speculators_tensors(shape: DrafterShape) -> dict[str, tuple[int, ...]]:
    """Name and shape of each tensor of the speculators layout as it is written here, full
    vocabulary."""
    return zlab_tensors(shape) | target_tensors(shape)


def target_tensors(shape: DrafterShape) -> dict[str, tuple[int, ...]]:
    """Of these, the target's own."""
    size = (shape.vocab_size, shape.hidden_size)
    return {"embed_tokens.weight": size, "lm_head.weight": size}


def speculators_optional(shape: DrafterShape) -> dict[str, tuple[int, ...]]:
    """What a checkpoint of that layout may hold beside the drafter: the trainer of 0.9 leaves the
    target's own out, and older ones wrote maps of the vocabulary, which a full one does not need.
    """
    return target_tensors(shape) | {"t2d": (shape.vocab_size,), "d2t": (shape.vocab_size,)}


def differences(
    expected: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]]
) -> list[str]:
    """One line for each tensor that is missing, unexpected or of another shape."""
    lines = [f"missing {name} {list(expected[name])}" for name in expected if name not in found]
    lines += [f"unexpected {name} {list(found[name])}" for name in found if name not in expected]
    lines += [
        f"{name} is {list(found[name])}, expected {list(size)}"
        for name, size in expected.items()
        if name in found and found[name] != size
    ]
    return lines


def _qwen3_config(shape: DrafterShape) -> dict[str, Any]:
    scaling = shape.rope_scaling
    return {
        "model_type": "qwen3",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": shape.rms_norm_eps,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "layer_types": list(shape.layer_types),
        "sliding_window": shape.sliding_window or None,
        "use_sliding_window": shape.sliding_window > 0,
        "max_window_layers": shape.num_layers,
        "max_position_embeddings": shape.max_position_embeddings,
        # both schemas: transformers 5 drops rope_scaling, older readers know no rope_parameters
        "rope_theta": shape.rope_theta,
        "rope_scaling": scaling,
        "rope_parameters": {"rope_type": "default"}
        | (scaling or {})
        | {"rope_theta": shape.rope_theta},
        "vocab_size": shape.vocab_size,
        "tie_word_embeddings": False,
        "bos_token_id": shape.bos_token_id,
        "eos_token_id": shape.eos_token_id,
        "pad_token_id": shape.pad_token_id,
        "initializer_range": shape.init_std,
        "dtype": "bfloat16",
        "use_cache": True,
    }


def _shape(
    config: Mapping[str, Any],
    *,
    block_size: int,
    mask_token_id: int,
    layer_ids: tuple[int, ...],
    scale: float,
    multiplier: float,
    softcap: float,
) -> DrafterShape:
    if config.get("attention_bias"):
        raise ValueError("attention_bias is true: a DFlash drafter has no biases")
    if config.get("hidden_act", "silu") != "silu":
        raise ValueError(f"hidden_act is {config['hidden_act']!r}, expected 'silu'")
    parameters = config.get("rope_parameters") or {}
    for place in (config, parameters):
        if place.get("partial_rotary_factor", 1.0) != 1.0:
            raise ValueError("partial_rotary_factor is set: a DFlash drafter turns whole heads")
    theta = _agreed("rope_theta", config.get("rope_theta"), parameters.get("rope_theta"))
    stated = config.get("rope_scaling") or parameters
    scaling = {name: value for name, value in stated.items() if name not in ("rope_theta", "type")}
    scaling["rope_type"] = stated.get("rope_type") or stated.get("type") or "default"
    num_layers = int(config["num_hidden_layers"])
    layer_types = tuple(config.get("layer_types") or (FULL,) * num_layers)
    return DrafterShape(
        hidden_size=int(config["hidden_size"]),
        intermediate_size=int(config["intermediate_size"]),
        num_layers=num_layers,
        num_heads=int(config["num_attention_heads"]),
        num_kv_heads=int(config["num_key_value_heads"]),
        head_dim=int(config["head_dim"]),
        vocab_size=int(config["vocab_size"]),
        block_size=block_size,
        mask_token_id=mask_token_id,
        layer_ids=layer_ids,
        # a foreign speculators checkpoint does not say it: the least that admits these ids
        num_target_layers=int(config.get("num_target_layers") or max(layer_ids) + 2),
        rms_norm_eps=float(config["rms_norm_eps"]),
        rope_theta=float(theta),
        rope_scaling=None if scaling["rope_type"] == "default" else scaling,
        max_position_embeddings=int(config["max_position_embeddings"]),
        layer_types=layer_types,
        sliding_window=int(config.get("sliding_window") or 0) if SLIDING in layer_types else 0,
        input_embedding_scale=scale,
        output_multiplier=multiplier,
        final_logit_softcapping=softcap,
        init_std=float(config["initializer_range"]),
        bos_token_id=config.get("bos_token_id"),
        eos_token_id=config.get("eos_token_id"),
        pad_token_id=config.get("pad_token_id"),
    )


def _agreed(name: str, first: Any, second: Any) -> Any:
    """The value of a key that may stand in two places; both must say the same."""
    if first is None and second is None:
        raise ValueError(f"it has no {name}")
    if first is not None and second is not None and first != second:
        raise ValueError(f"it says {name} {first} in one place and {second} in another")
    return second if first is None else first


def _check_causal(causal: bool, shape: DrafterShape) -> None:
    if set(shape.layer_types) != {SLIDING if causal else FULL}:
        raise ValueError(
            f"its blocks are {'causal' if causal else 'bidirectional'} on every layer while its "
            f"layer types are {sorted(set(shape.layer_types))}: here a block is causal on sliding "
            "layers and bidirectional on full ones"
        )
