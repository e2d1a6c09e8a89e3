"""What a drafter is made of: dimensions taken from the target's config.json, never its oddities.

Whatever the target is, its drafter is plain Qwen3 layers (arXiv 2602.06036 and z-lab's code).
From the target it takes width, heads, RoPE base and scaling, norm epsilon and vocabulary; it never
takes mRoPE, a partial rotary factor, attention bias, (1 + w) norms or a hybrid target's heads.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dflash_pipeline.configs.layers import check_layer_ids
from dflash_pipeline.configs.schema import DrafterConfig
from dflash_pipeline.store.spec import StoreSpec

FULL = "full_attention"
SLIDING = "sliding_attention"

# heads, KV heads and head width where the target's own do not suit a plain attention layer:
# what the public drafters of Qwen3.5 and Qwen3.6 use
_PLAIN_HEADS = (32, 8, 128)
_LENGTH = "original_max_position_embeddings"
# kind -> the numbers that it must state; of yarn transformers fills in all that is left out
_ROPE_NUMBERS = {
    "linear": ("factor",),
    "yarn": (),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", _LENGTH),
}
_NOT_SCALING = ("rope_theta", "type", "partial_rotary_factor", "mrope_section", "mrope_interleaved")


@dataclass(frozen=True, kw_only=True, slots=True)
class DrafterShape:
    """Everything that fixes a drafter's tensors and arithmetic; what an export's config says."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    block_size: int
    """Slots of a block, the anchor's included: it proposes `block_size - 1` tokens."""
    mask_token_id: int
    layer_ids: tuple[int, ...]
    """Target layers whose outputs it reads, ascending: servers collect features in that order."""
    num_target_layers: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: dict[str, Any] | None
    """`rope_type` and its numbers; None: plain RoPE."""
    max_position_embeddings: int
    layer_types: tuple[str, ...]
    """`full_attention` or `sliding_attention`, one a layer."""
    sliding_window: int
    """Positions that a query of a sliding layer sees, its own included; 0: no layer slides."""
    input_embedding_scale: float
    """The target's embedding row is multiplied by it (Gemma: sqrt(hidden size))."""
    output_multiplier: float
    """Logits are multiplied by it, before the soft cap."""
    final_logit_softcapping: float
    """c in c * tanh(logit / c); 0: none."""
    init_std: float
    bos_token_id: int | None
    eos_token_id: int | None
    pad_token_id: int | None

    def __post_init__(self) -> None:
        for name in (
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "vocab_size",
            "num_target_layers",
            "max_position_embeddings",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"drafter {name} must be at least 1, got {getattr(self, name)}")
        if self.block_size < 2:
            raise ValueError(f"drafter block_size must be at least 2, got {self.block_size}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"drafter has {self.num_heads} heads and {self.num_kv_heads} KV heads: the first "
                "must be a multiple of the second; set drafter.num_heads and drafter.num_kv_heads"
            )
        if self.head_dim % 2:
            raise ValueError(
                f"drafter head_dim {self.head_dim} is odd, RoPE turns pairs: set drafter.head_dim"
            )
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError(
                f"mask token {self.mask_token_id} is not a row of the target's embedding "
                f"({self.vocab_size} rows): set target.mask_token_id"
            )
        if not self.layer_ids or list(self.layer_ids) != sorted(set(self.layer_ids)):
            raise ValueError(
                f"drafter layer ids {self.layer_ids} must be ascending and each named once: "
                "servers collect features in layer order"
            )
        check_layer_ids(self.layer_ids, self.num_target_layers)
        if len(self.layer_types) != self.num_layers:
            raise ValueError(
                f"drafter has {self.num_layers} layers but {len(self.layer_types)} layer types"
            )
        if unknown := set(self.layer_types) - {FULL, SLIDING}:
            raise ValueError(f"unknown layer types {sorted(unknown)}: use {FULL} or {SLIDING}")
        if (SLIDING in self.layer_types) != (self.sliding_window > 0):
            raise ValueError(
                f"layer types {self.layer_types} do not fit a sliding window of "
                f"{self.sliding_window}"
            )
        for name in (
            "rope_theta",
            "rms_norm_eps",
            "init_std",
            "input_embedding_scale",
            "output_multiplier",
        ):
            _check_positive(f"drafter {name}", getattr(self, name))
        if self.final_logit_softcapping:
            _check_positive("drafter final_logit_softcapping", self.final_logit_softcapping)
        if self.rope_scaling is not None:
            _check_rope_scaling(self.rope_scaling)

    @property
    def num_features(self) -> int:
        """K, the hidden states of one token."""
        return len(self.layer_ids)


def _check_rope_scaling(scaling: Mapping[str, Any]) -> None:
    kind = scaling.get("rope_type")
    if kind not in _ROPE_NUMBERS:
        raise ValueError(
            f"RoPE scaling {kind!r} is not known here, expected one of {', '.join(_ROPE_NUMBERS)}"
        )
    stated = [name for name in ("factor", _LENGTH) if scaling.get(name) is not None]
    for name in dict.fromkeys((*_ROPE_NUMBERS[kind], *stated)):
        _check_positive(f"{kind} RoPE scaling's {name}", scaling.get(name))


def _check_positive(name: str, value: object) -> None:
    if not isinstance(value, (int, float)) or not math.isfinite(value) or value <= 0:
        raise ValueError(f"{name} must be a finite number above 0, got {value!r}")


def tensor_shapes(shape: DrafterShape) -> dict[str, tuple[int, ...]]:
    """Name and shape of each parameter of `Drafter(shape)`; `fc` is split by captured layer."""
    hidden, width = shape.hidden_size, shape.head_dim
    query, key = shape.num_heads * width, shape.num_kv_heads * width
    shapes: dict[str, tuple[int, ...]] = {
        f"fc.{index}.weight": (hidden, hidden) for index in range(shape.num_features)
    }
    shapes["hidden_norm.weight"] = (hidden,)
    for index in range(shape.num_layers):
        layer = {
            "input_layernorm": (hidden,),
            "self_attn.q_proj": (query, hidden),
            "self_attn.k_proj": (key, hidden),
            "self_attn.v_proj": (key, hidden),
            "self_attn.o_proj": (hidden, query),
            "self_attn.q_norm": (width,),
            "self_attn.k_norm": (width,),
            "post_attention_layernorm": (hidden,),
            "mlp.gate_proj": (shape.intermediate_size, hidden),
            "mlp.up_proj": (shape.intermediate_size, hidden),
            "mlp.down_proj": (hidden, shape.intermediate_size),
        }
        shapes |= {f"layers.{index}.{name}.weight": size for name, size in layer.items()}
    shapes["norm.weight"] = (hidden,)
    return shapes


def drafter_shape(
    config: DrafterConfig,
    target_config: Mapping[str, Any],
    spec: StoreSpec,
    mask_token_id: int,
) -> DrafterShape:
    """The drafter that `config` asks for, for the target whose config.json is `target_config`.

    `spec` is the identity of the store that holds the features. ValueError when they do not fit.
    """
    layer_ids = config.layer_ids or spec.layer_ids
    if missing := sorted(set(layer_ids) - set(spec.layer_ids)):
        raise ValueError(
            f"drafter.layer_ids asks for layers {tuple(missing)}, the store holds "
            f"{tuple(spec.layer_ids)}: choose among them or capture again"
        )
    target = text_config(target_config)
    hidden_size = int(target["hidden_size"])
    if hidden_size != spec.hidden_size:
        raise ValueError(
            f"the target's config.json says hidden size {hidden_size}, the store holds rows of "
            f"{spec.hidden_size}: the store is of another target, capture again"
        )
    num_heads, num_kv_heads, head_dim = _heads(target)
    scaling = _rope_scaling(target)
    num_sliding = config.num_layers - config.num_full_layers if config.sliding_window else 0
    return DrafterShape(
        hidden_size=hidden_size,
        intermediate_size=config.intermediate_size or _dense_width(target),
        num_layers=config.num_layers,
        num_heads=config.num_heads or num_heads,
        num_kv_heads=config.num_kv_heads or num_kv_heads,
        head_dim=config.head_dim or head_dim,
        vocab_size=spec.vocab_size,
        block_size=config.block_size,
        mask_token_id=mask_token_id,
        layer_ids=tuple(sorted(layer_ids)),
        num_target_layers=spec.num_target_layers,
        rms_norm_eps=float(target.get("rms_norm_eps") or target.get("norm_eps") or 1e-6),
        rope_theta=config.rope_theta or _rope_theta(target),
        rope_scaling=scaling,
        max_position_embeddings=int(target["max_position_embeddings"]),
        layer_types=(SLIDING,) * num_sliding + (FULL,) * (config.num_layers - num_sliding),
        sliding_window=config.sliding_window if num_sliding else 0,
        input_embedding_scale=_embedding_scale(target),
        output_multiplier=_output_multiplier(target),
        final_logit_softcapping=float(target.get("final_logit_softcapping") or 0.0),
        init_std=config.init_std,
        bos_token_id=_first_id(target_config, target, "bos_token_id"),
        eos_token_id=_first_id(target_config, target, "eos_token_id"),
        pad_token_id=_first_id(target_config, target, "pad_token_id"),
    )


def text_config(target_config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's part of a config.json; multimodal targets nest it."""
    nested = target_config.get("text_config")
    return nested if isinstance(nested, Mapping) else target_config


def _heads(target: Mapping[str, Any]) -> tuple[int, int, int]:
    # hybrid targets give head widths (160, 256) that break the servers' KV page sizes, latent
    # attention has no KV heads at all: neither is a shape to copy
    hybrid = "linear_attention" in (target.get("layer_types") or ()) or any(
        name in target for name in ("linear_num_key_heads", "full_attention_interval")
    )
    if hybrid or target.get("kv_lora_rank"):
        return _PLAIN_HEADS
    num_heads = int(target["num_attention_heads"])
    num_kv_heads = int(target.get("num_key_value_heads") or num_heads)
    head_dim = int(target.get("head_dim") or int(target["hidden_size"]) // num_heads)
    return num_heads, num_kv_heads, head_dim


def _dense_width(target: Mapping[str, Any]) -> int:
    experts = ("num_experts", "num_local_experts", "n_routed_experts")
    is_moe = any(target.get(name) for name in experts)
    dense = target.get("intermediate_size")
    # a MoE without a width of its own for experts (gpt-oss, Mixtral) uses this key for them
    if is_moe and not target.get("moe_intermediate_size"):
        dense = None
    return int(dense) if dense else 3 * int(target["hidden_size"])


def _rope_parameters(target: Mapping[str, Any]) -> Mapping[str, Any]:
    """transformers 5 writes `rope_parameters`, by layer type where types differ."""
    parameters = target.get("rope_parameters")
    if not isinstance(parameters, Mapping):
        return {}
    by_type = parameters.get(FULL)
    return by_type if isinstance(by_type, Mapping) else parameters


def _rope_theta(target: Mapping[str, Any]) -> float:
    theta = target.get("rope_theta") or _rope_parameters(target).get("rope_theta")
    if not theta:
        # a drafter with another base than its target still converges, and accepts less
        raise ValueError(
            "the target's config.json has no rope_theta, neither at the top nor in "
            "rope_parameters: set drafter.rope_theta"
        )
    return float(theta)


def _rope_scaling(target: Mapping[str, Any]) -> dict[str, Any] | None:
    stated = target.get("rope_scaling") or _rope_parameters(target)
    if isinstance(stated.get(FULL), Mapping):
        stated = stated[FULL]
    rope_type = stated.get("rope_type") or stated.get("type") or "default"
    if rope_type in ("default", "mrope"):
        return None
    scaling = {name: value for name, value in stated.items() if name not in _NOT_SCALING}
    scaling["rope_type"] = rope_type
    if rope_type in ("yarn", "llama3"):
        scaling.setdefault(_LENGTH, int(target["max_position_embeddings"]))
    return scaling


def _embedding_scale(target: Mapping[str, Any]) -> float:
    if str(target.get("model_type", "")).startswith("gemma"):
        return math.sqrt(int(target["hidden_size"]))
    return float(target.get("embedding_multiplier") or 1.0)


def _output_multiplier(target: Mapping[str, Any]) -> float:
    # Granite divides its logits, Cohere multiplies them
    return float(target.get("logit_scale") or 1.0) / float(target.get("logits_scaling") or 1.0)


def _first_id(outer: Mapping[str, Any], inner: Mapping[str, Any], name: str) -> int | None:
    value = inner.get(name) if inner.get(name) is not None else outer.get(name)
    if isinstance(value, list):
        value = value[0] if value else None
    return None if value is None else int(value)
