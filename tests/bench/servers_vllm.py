"""`servers.py` for vLLM: its argument parser, configuration, loader and DFlash model on a CPU."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
# what it takes by itself where Triton has a device
os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "1")

import torch
from torch import Tensor
from vllm import _custom_ops as compiled
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.common.cli_args import make_arg_parser
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading
from vllm.model_executor.models.interfaces import supports_eagle3
from vllm.model_executor.models.registry import ModelRegistry
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils import get_eagle3_aux_layers_from_config
from vllm.v1.worker.gpu.spec_decode.utils import get_parallel_drafting_token_id

from dflash_pipeline.capture.counters import counted
from server_cases import ANCHOR, LAYER_IDS, TEXT_T, TOLERANCE, Case, architecture, scaled_case
from server_checks import (
    Found,
    attend,
    captured_error,
    check_weights,
    compared,
    errors,
    meaning,
    one_process,
    ours,
    same,
    with_forward,
)
from tiny_targets import EVERY_FAMILY

# of this machine, not of the checkpoint: fp32 to compare in, nothing compiled
_HERE = ("--dtype", "float32", "--max-model-len", "256", "--enforce-eager")
_NOT_OURS = {"mask_embedding", "embed_tokens.weight", "lm_head.weight"}


class Server:
    """vLLM's own code on one process of a CPU."""

    def __init__(self, folder: Path) -> None:
        init_distributed_environment(**one_process(folder))
        compiled.rms_norm = _rms_norm
        compiled.rotary_embedding = _rotary_embedding

    def check(self, case: Case) -> dict[str, Any]:
        """Config, weights and one block of `case`; ValueError says what is read otherwise."""
        with _model(case) as model:
            layers = [layer.self_attn for layer in model.model.layers]
            found = {
                "causal": model.get_draft_attn_causal(),
                "windows": [layer.attn.sliding_window for layer in layers],
            }
            same(found, {name: meaning(case.shape)[name] for name in found})
            differences = compared(case, lambda feature_NKH: _block(model, case, feature_NKH))
        return {"model": type(model).__name__} | differences

    def about(self, folder: Path) -> dict[str, Any]:
        """What is no matter of one drafter: captured layers, servable targets, metrics."""
        return {
            "captured_layers": {name: _captured(folder / name) for name in ("qwen3", "llama")},
            "input_embedding_scale": _is_scaled(folder),
            "targets": {family: _is_served(family) for family in EVERY_FAMILY},
            "metrics": _metrics(),
        }


@contextmanager
def _model(case: Case) -> Iterator[Any]:
    """Its drafter, built from the printed line and filled by its own loader; both are checked."""
    config = _configuration(case.command)
    spec = config.speculative_config
    same(_read(spec), _expected(case))
    with set_current_vllm_config(config):
        ensure_model_parallel_initialized(1, 1)
        model = initialize_model(vllm_config=config, model_config=spec.draft_model_config)
        parameters = {name.removeprefix("model."): one for name, one in model.named_parameters()}
        loader = get_model_loader(config.load_config)
        check_weights(case, parameters, lambda: loader.load_weights(model, spec.draft_model_config))
        own = {getattr(model, f"has_own_{part}", False) for part in ("embed_tokens", "lm_head")}
        if own != {case.layout == "speculators"}:
            raise ValueError("of the embedding and the head it takes the wrong ones")
        if unknown := parameters.keys() - case.stacked().keys() - _NOT_OURS:
            raise ValueError(f"parameters that no tensor fills: {sorted(unknown)}")
        if case.layout == "zlab":
            _share(case, parameters)
        process_weights_after_loading(model, spec.draft_model_config, torch.device("cpu"))
        yield model


def _configuration(command: list[str]) -> VllmConfig:
    assert command[:2] == ["vllm", "serve"], command
    parser = make_arg_parser(FlexibleArgumentParser())
    chosen = parser.parse_args([*command[2:], *_HERE])
    chosen.model = chosen.model_tag
    return AsyncEngineArgs.from_cli_args(chosen).create_engine_config()


def _expected(case: Case) -> dict[str, object]:
    rope = {"rope_type": "default"} | (case.shape.rope_scaling or {})
    return {
        "method": "dflash",
        "num_speculative_tokens": case.shape.block_size - 1,
        "architecture": "DFlashDraftModel",
        "mask_token_id": case.shape.mask_token_id,
        "layer_ids": list(case.shape.layer_ids),
        "rope": rope | {"rope_theta": case.shape.rope_theta},
    }


def _read(spec: Any) -> dict[str, object]:
    draft = spec.draft_model_config
    return {
        "method": spec.method,
        "num_speculative_tokens": spec.num_speculative_tokens,
        "architecture": draft.architecture,
        "mask_token_id": get_parallel_drafting_token_id(draft.hf_config),
        # its targets count what enters a layer: the output of layer i enters layer i + 1
        "layer_ids": [index - 1 for index in get_eagle3_aux_layers_from_config(spec) or ()],
        "rope": dict(draft.hf_config.rope_parameters),
    }


def _share(case: Case, parameters: Mapping[str, Tensor]) -> None:
    """z-lab's layout has neither: the server shares the target's."""
    with torch.no_grad():
        for name, tensor in (("embed_tokens", case.embed_VH), ("lm_head", case.head_VH)):
            parameters[f"{name}.weight"].zero_()[: len(tensor)] = tensor


def _block(model: Any, case: Case, feature_NKH: Tensor) -> Found:
    """Its own prefill of the context and forward of one block."""
    with torch.no_grad():
        context_NH = model.combine_hidden_states(feature_NKH.flatten(1))
        far = _context(model, context_NH, case.far_N)
        near = _context(model, context_NH, torch.arange(ANCHOR))
        position_S = torch.arange(ANCHOR, ANCHOR + case.shape.block_size)
        causal = dict(
            zip(model.get_draft_kv_cache_layer_names(), model.get_draft_attn_causal(), strict=True)
        )
        with _plain_attention(near, causal):
            hidden_SH = model(case.ids_S, position_S)
        logits_SV = torch.nn.functional.linear(hidden_SH, model.lm_head.weight)
    return Found(
        far_keys=[key for key, _ in far.values()],
        keys=[key for key, _ in near.values()],
        values=[value for _, value in near.values()],
        hidden_SH=hidden_SH,
        logits_SV=logits_SV[:, : len(case.head_VH)],
    )


def _context(
    model: Any, context_NH: Tensor, position_N: Tensor
) -> dict[str, tuple[Tensor, Tensor]]:
    """Layer name -> what it would put into the cache: keys and values [N, G, D]."""
    stored: dict[str, tuple[Tensor, Tensor]] = {}

    def keep(layer: Any, key: Tensor, value: Tensor, *_: object) -> None:
        stored[layer.layer_name] = (key.clone(), value.clone())

    for layer in model.model.layers:
        layer.self_attn.attn.impl.do_kv_cache_update = keep
    model.precompute_and_store_context_kv(context_NH, position_N, torch.arange(len(position_N)))
    return stored


def _plain_attention(
    stored: dict[str, tuple[Tensor, Tensor]], causal: dict[str, bool]
) -> AbstractContextManager[None]:
    def forward(layer: Any, query: Tensor, key: Tensor, value: Tensor, *_: object) -> Tensor:
        query_SED = query.view(-1, layer.num_heads, layer.head_size)
        key_SGD, value_SGD = (
            state.view(-1, layer.num_kv_heads, layer.head_size) for state in (key, value)
        )
        before = stored.get(layer.layer_name)
        mixed = attend(
            query_SED,
            torch.cat([before[0], key_SGD]) if before else key_SGD,
            torch.cat([before[1], value_SGD]) if before else value_SGD,
            is_causal=causal.get(layer.layer_name, True),
            window=layer.sliding_window,
            scale=layer.impl.scale,
        )
        return mixed.flatten(1)

    return with_forward(Attention, forward)


def _captured(target: Path) -> float:
    """How far the states that its target collects for us are from transformers' own."""
    config = _configuration(["vllm", "serve", str(target)])
    with set_current_vllm_config(config):
        ensure_model_parallel_initialized(1, 1)
        model = initialize_model(vllm_config=config, model_config=config.model_config)
        get_model_loader(config.load_config).load_weights(model, config.model_config)
        process_weights_after_loading(model, config.model_config, torch.device("cpu"))
        model.set_aux_hidden_state_layers(tuple(index + 1 for index in LAYER_IDS))
        with torch.no_grad(), _plain_attention({}, {}):
            _, collected = model(TEXT_T, torch.arange(len(TEXT_T)))
    return captured_error(collected, target.name)


def _is_scaled(folder: Path) -> bool:
    """Whether it multiplies the embedding by the scale that config.json states."""
    case = scaled_case(folder / "scaled", "vllm")
    with _model(case) as model:
        return errors(ours(case), _block(model, case, case.feature_NKH))["hidden"] <= TOLERANCE


def _is_served(family: str) -> bool:
    """Whether vLLM's model of that family hands out the states of its layers."""
    kind = ModelRegistry._try_load_model_cls(architecture(family))
    return kind is not None and bool(supports_eagle3(kind))


def _metrics() -> dict[str, float]:
    """Its own counters after three verifications, as our `eval --endpoint` reads them."""
    import prometheus_client
    from vllm.v1.spec_decode.metrics import SpecDecodingProm, SpecDecodingStats

    class Spec:
        num_speculative_tokens = 5

    labels: dict[int, list[object]] = {0: ["tiny", "0"]}
    written = SpecDecodingProm(Spec(), ["model_name", "engine"], labels)
    stats = SpecDecodingStats.new(5)
    for num_accepted in (5, 0, 2):
        stats.observe_draft(num_draft_tokens=5, num_accepted_tokens=num_accepted)
    written.observe(stats)
    tokens = prometheus_client.Counter("vllm:generation_tokens", "x", ["model_name", "engine"])
    tokens.labels("tiny", "0").inc(10)
    found = counted(prometheus_client.generate_latest().decode())
    assert found is not None, "none of its counters is known"
    figures = {"cycles": found.cycles, "accepted": found.accepted or 0.0}
    same(
        {**figures, "by_slot": found.accepted_S},
        {"cycles": 3.0, "accepted": 7.0, "by_slot": (2.0, 2.0, 1.0, 1.0, 1.0)},
    )
    return figures


def _rms_norm(out: Tensor, state: Tensor, weight: Tensor, epsilon: float) -> None:
    """Stands in for its compiled kernel; a weight [L, D] belongs to state [L, .., D]."""
    scale = torch.rsqrt(state.square().mean(-1, keepdim=True) + epsilon)
    wide = weight if weight.ndim == 1 else weight.view(len(weight), *[1] * (state.ndim - 2), -1)
    out.copy_(state * scale * wide)


def _rotary_embedding(
    position: Tensor,
    query: Tensor,
    key: Tensor | None,
    head_size: int,
    cos_sin_cache: Tensor,
    is_neox: bool,
    *_: object,
) -> None:
    """Its compiled kernel works in place; the same out of its own plain PyTorch."""
    turned = RotaryEmbedding.forward_static(
        position, query.clone(), key, head_size, cos_sin_cache.shape[-1], cos_sin_cache, is_neox
    )
    query.copy_(turned[0])
    if key is not None:
        key.copy_(turned[1])
