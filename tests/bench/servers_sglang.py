"""`servers.py` for SGLang: its argument parser, configuration, loader and DFlash model on a CPU."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from sglang.srt.arg_groups import mamba_hook
from sglang.srt.distributed import init_distributed_environment, initialize_model_parallel
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.layers.rotary_embedding import base as rotary
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.model_loader.weight_utils import safetensors_weights_iterator
from sglang.srt.models.registry import ModelRegistry
from sglang.srt.observability.metrics_collector import TokenizerMetricsCollector
from sglang.srt.runtime_context import SpawnRanks, publish
from sglang.srt.server_args import ServerArgs, prepare_server_args
from sglang.srt.speculative.dflash_utils import parse_dflash_draft_config
from sglang.srt.utils.hf_transformers_utils import get_config, get_rope_config
from torch import Tensor

from dflash_pipeline.capture.counters import Counters, counted, difference
from server_cases import ANCHOR, LAYER_IDS, TEXT_T, Case, architecture
from server_checks import (
    Found,
    attend,
    captured_error,
    check_weights,
    compared,
    meaning,
    one_process,
    same,
    with_forward,
)
from tiny_targets import EVERY_FAMILY, save_target


class Server:
    """SGLang's own code on one process of a CPU."""

    def __init__(self, folder: Path) -> None:
        # plain PyTorch for RoPE; its CPU engine as a whole would need a build of its own
        rotary._is_cpu = True
        # asked of hybrid targets alone; the lines are for a GPU
        mamba_hook._platform_supports_mamba_cache_extra_buffer = lambda: True
        save_target(folder / "here", "qwen3")
        here = prepare_server_args(["--model-path", str(folder / "here"), "--device", "cpu"])
        publish(here, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0))
        init_distributed_environment(**one_process(folder))
        initialize_model_parallel()

    def check(self, case: Case) -> dict[str, Any]:
        """Config, weights and one block of `case`; ValueError says what is read otherwise."""
        arguments = _arguments(case.command)
        config = get_config(arguments.speculative_draft_model_path, trust_remote_code=False)
        read = parse_dflash_draft_config(draft_hf_config=config)
        theta, scaling = get_rope_config(config)
        found = {
            "algorithm": arguments.speculative_algorithm,
            "num_draft_tokens": arguments.speculative_num_draft_tokens,
            "layer_ids": read.resolve_target_layer_ids(
                target_num_layers=case.shape.num_target_layers
            ),
            "mask_token_id": read.mask_token_id,
            "block_size": read.block_size,
            "rope_theta": theta,
            "rope_type": (scaling or {}).get("rope_type", "default"),
        }
        expected = {name: value for name, value in meaning(case.shape).items() if name in found}
        kind = (case.shape.rope_scaling or {}).get("rope_type", "default")
        same(
            found,
            expected
            | {
                "algorithm": "DFLASH",
                "num_draft_tokens": case.shape.block_size,
                "rope_theta": case.shape.rope_theta,
                "rope_type": kind,
            },
        )
        model = ModelRegistry._try_load_model_cls(config.architectures[0])(config)
        parameters = dict(model.named_parameters())
        files = [str(file) for file in case.export.glob("*.safetensors")]
        check_weights(
            case, parameters, lambda: model.load_weights(safetensors_weights_iterator(files))
        )
        if unknown := parameters.keys() - case.stacked().keys():
            raise ValueError(f"parameters that no tensor fills: {sorted(unknown)}")
        layers = [layer.self_attn.attn for layer in model.layers]
        attention = {
            "causal": [layer.attn_type == AttentionType.DECODER for layer in layers],
            "windows": [_window(layer) for layer in layers],
        }
        same(attention, {name: meaning(case.shape)[name] for name in attention})
        differences = compared(case, lambda feature_NKH: _block(model, case, feature_NKH))
        return {"model": type(model).__name__} | differences

    def about(self, folder: Path) -> dict[str, Any]:
        """What is no matter of one drafter: servable targets, metrics."""
        return {
            "captured_layers": {name: _captured(folder / name) for name in ("qwen3", "llama")},
            "targets": {family: _is_served(family) for family in EVERY_FAMILY},
            "metrics": _metrics(),
        }


def _arguments(command: list[str]) -> ServerArgs:
    """The printed line through its parser, and its own checks of DFLASH, for the GPU it is for."""
    assert command[:3] == ["python", "-m", "sglang.launch_server"], command
    arguments = prepare_server_args([*command[3:], "--device", "cuda"])
    arguments.resolve_once()
    return arguments


def _block(model: Any, case: Case, feature_NKH: Tensor) -> Found:
    """The steps of its DFLASH worker: context into the cache of each layer, then one block."""
    with torch.no_grad():
        context_NH = model.project_target_hidden(feature_NKH.flatten(1))
        far = [_context(layer, model, context_NH, case.far_N) for layer in model.layers]
        near = [_context(layer, model, context_NH, torch.arange(ANCHOR)) for layer in model.layers]
        block_SH = torch.nn.functional.embedding(case.ids_S, case.embed_VH)
        position_S = torch.arange(ANCHOR, ANCHOR + case.shape.block_size)
        with _plain_attention(near):
            hidden_SH = model(case.ids_S, position_S, None, input_embeds=block_SH).hidden_states
    return Found(
        far_keys=[key for key, _ in far],
        keys=[key for key, _ in near],
        values=[value for _, value in near],
        hidden_SH=hidden_SH,
        logits_SV=hidden_SH @ case.head_VH.T,
    )


def _context(
    layer: Any, model: Any, context_NH: Tensor, position_N: Tensor
) -> tuple[Tensor, Tensor]:
    attention = layer.self_attn
    key, value = attention.kv_proj_only(model.prepare_context_hidden_for_kv(layer, context_NH))
    turned = attention.apply_k_rope(position_N, attention.apply_k_norm(key))
    size = (-1, attention.num_kv_heads, attention.head_dim)
    return turned.view(size), value.reshape(size)


def _plain_attention(stored: list[tuple[Tensor, Tensor]]) -> AbstractContextManager[None]:
    def forward(
        layer: Any, query: Tensor, key: Tensor, value: Tensor, *_: object, **__: object
    ) -> Tensor:
        size = (-1, layer.tp_k_head_num, layer.head_dim)
        key_PGD, value_PGD = key.view(size), value.view(size)
        if stored:
            before = stored[layer.layer_id]
            key_PGD, value_PGD = torch.cat([before[0], key_PGD]), torch.cat([before[1], value_PGD])
        mixed = attend(
            query.view(-1, layer.tp_q_head_num, layer.head_dim),
            key_PGD,
            value_PGD,
            is_causal=layer.attn_type == AttentionType.DECODER,
            window=_window(layer),
            scale=layer.scaling,
        )
        return mixed.flatten(1)

    return with_forward(RadixAttention, forward)


def _window(layer: Any) -> int | None:
    """It stores how far back a query sees beside itself; -1: all."""
    return None if layer.sliding_window_size < 0 else layer.sliding_window_size + 1


def _captured(target: Path) -> float:
    """How far the states that its target collects for us are from transformers' own."""
    config = get_config(str(target), trust_remote_code=False)
    model = ModelRegistry._try_load_model_cls(config.architectures[0])(config)
    files = [str(file) for file in target.glob("*.safetensors")]
    model.load_weights(safetensors_weights_iterator(files))
    model.set_dflash_layers_to_capture(list(LAYER_IDS))
    num_tokens = len(TEXT_T)
    batch = ForwardBatch(
        forward_mode=ForwardMode.EXTEND,
        batch_size=1,
        input_ids=TEXT_T,
        req_pool_indices=torch.zeros(1, dtype=torch.long),
        seq_lens=torch.tensor([num_tokens]),
        out_cache_loc=torch.arange(num_tokens),
        seq_lens_sum=num_tokens,
    )
    with torch.no_grad(), _plain_attention([]):
        _, collected = model.model(TEXT_T, torch.arange(num_tokens), batch)
    return captured_error(collected, target.name)


def _is_served(family: str) -> bool:
    """Whether SGLang's model of that family hands out the states of its layers to DFLASH."""
    kind = ModelRegistry._try_load_model_cls(architecture(family))
    return kind is not None and hasattr(kind, "set_dflash_layers_to_capture")


def _metrics() -> dict[str, float]:
    """Its own counters after two answers, as our `eval --endpoint` reads them."""
    import prometheus_client

    line = ["--model-path", "tiny", "--enable-metrics"]
    assert prepare_server_args(line).enable_metrics
    written = TokenizerMetricsCollector(labels={"model_name": "tiny"})
    for num_tokens, num_cycles in ((9, 2), (7, 3)):
        written.observe_one_finished_request(
            labels={"model_name": "tiny"},
            prompt_tokens=3,
            generation_tokens=num_tokens,
            cached_tokens=0,
            e2e_latency=1.0,
            has_grammar=False,
            spec_verify_ct=num_cycles,
        )
    after = counted(prometheus_client.generate_latest().decode())
    assert after is not None, "none of its counters is known"
    before = Counters(server="sglang", tokens=0.0, cycles=0.0)
    served = difference(before, after, num_answers=2)
    figures = {"cycles": served.cycles, "tokens": served.tokens, "tau": served.tau}
    same(figures, {"cycles": 5.0, "tokens": 16.0, "tau": 14 / 5})
    return figures
