"""Drafters of every kind on disk, and ours beside them: what `servers.py` tries servers on."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from dflash_pipeline.configs.schema import DrafterConfig
from dflash_pipeline.store.spec import StoreSpec
from dflash_pipeline.train import layout
from dflash_pipeline.train.drafter import Drafter
from dflash_pipeline.train.export import serving_commands, write_speculators, write_zlab
from dflash_pipeline.train.head import TargetHead
from dflash_pipeline.train.loading import read_checkpoint
from dflash_pipeline.train.shape import DrafterShape, drafter_shape

sys.path.append(str(Path(__file__).parents[1]))
from tiny_targets import save_target, tiny_model

TOLERANCE = 1e-4
ANCHOR = 21
WINDOW = 9
NUM_LAYERS = 3
LAYER_IDS = (1, 2, 4)
# one row of the embedding beyond the tokenizer's ids
MASK_TOKEN_ID = 262
TEXT_T = torch.arange(40) * 5 % 256
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
# name -> tiny family and what differs; gpt-oss has YaRN of its own
TARGETS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3", {"head_dim": 32}),
    "llama": ("llama", {"head_dim": 32, "rope_parameters": _LLAMA3, "tie_word_embeddings": False}),
    "gpt-oss": ("gpt_oss", {"head_dim": 32, "max_position_embeddings": 16384}),
    "qwen3.5": ("qwen3_5_nested", {"head_dim": 32}),
}
LAYERS = {
    "full": DrafterConfig(sliding_window=0),
    "sliding": DrafterConfig(sliding_window=WINDOW, num_full_layers=0),
    "mixed": DrafterConfig(sliding_window=WINDOW, num_full_layers=1),
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A drafter on disk beside ours, and a text to draft for."""

    name: str
    family: str
    layout: str
    target: Path
    export: Path
    shape: DrafterShape
    command: list[str]
    """The printed line of the server under test, as a shell splits it."""
    drafter: Drafter
    head: TargetHead
    embed_VH: Tensor
    head_VH: Tensor
    feature_NKH: Tensor
    far_N: Tensor
    """Positions up to the last one, to tell one RoPE scaling from another."""
    ids_S: Tensor

    def stacked(self) -> dict[str, Tensor]:
        """Both servers' parameters: z-lab's, with q, k, v and gate, up below one another."""
        tensors = layout.joined(dict(self.drafter.named_parameters()), self.shape)
        if self.layout == "speculators":
            tensors |= {"embed_tokens.weight": self.embed_VH, "lm_head.weight": self.head_VH}
        for index in range(self.shape.num_layers):
            for name, parts in {"self_attn.qkv": "q k v", "mlp.gate_up": "gate up"}.items():
                start = f"layers.{index}.{name.split('.')[0]}"
                rows = [tensors.pop(f"{start}.{part}_proj.weight") for part in parts.split()]
                tensors[f"layers.{index}.{name}_proj.weight"] = torch.cat(rows)
        return tensors


def cases(folder: Path, server: str, only: str) -> Iterator[Case]:
    """Every family x kind of layers x layout that the server reads and the layout can hold."""
    for family, (tiny, changes) in TARGETS.items():
        target = folder / family
        save_target(target, tiny, **changes)
        model = tiny_model(tiny, **changes).bfloat16()
        embed_VH = model.get_input_embeddings().weight.detach().float()
        head_VH = model.get_output_embeddings().weight.detach().float()
        for kind, config in LAYERS.items():
            shape = _shape(json.loads((target / "config.json").read_text()), config, embed_VH)
            tensors = _tensors(shape)
            for kept in ("zlab", "speculators"):
                name = f"{family} {kind} {kept}"
                # SGLang reads no speculators layout, and that layout holds no mixture
                if kept == "speculators" and (server == "sglang" or kind == "mixed"):
                    continue
                if only not in name:
                    continue
                out = folder / name.replace(" ", "-")
                if kept == "zlab":
                    write_zlab(out, shape, tensors)
                else:
                    write_speculators(
                        out, shape, tensors, embed_VH, head_VH, "org/target", ["ForCausalLM"]
                    )
                lines = serving_commands(shape, out, str(target))
                yield _case(name, family, kept, target, out, server, lines, embed_VH, head_VH)


def written(case: Case) -> dict[str, list[str]]:
    """Every key of the export's config.json and every tensor, by which a test knows a change."""
    config = json.loads((case.export / "config.json").read_text())
    with safe_open(case.export / "model.safetensors", framework="pt") as file:
        return {"config": dotted(config), "tensors": sorted(file.keys())}


def dotted(config: Mapping[str, Any]) -> list[str]:
    """The keys of nested tables, `outer.inner`, sorted."""
    keys = []
    for key, value in config.items():
        inner = dotted(value) if isinstance(value, Mapping) else []
        keys += [f"{key}.{name}" for name in inner] or [key]
    return sorted(keys)


def scaled_case(folder: Path, server: str) -> Case:
    """A drafter of a target that multiplies its embedding, as Gemma does."""
    plain = next(cases(folder, server, "qwen3 full zlab"))
    shape = replace(plain.shape, input_embedding_scale=4.0)
    out = folder / "scaled"
    write_zlab(out, shape, _tensors(shape))
    head = TargetHead(plain.embed_VH, plain.head_VH, shape)
    command = shlex.split(serving_commands(shape, out, str(plain.target))[0])
    return replace(plain, name="scaled", export=out, shape=shape, head=head, command=command)


def architecture(family: str) -> str:
    """The name in the config.json of a tiny family's checkpoint."""
    return type(tiny_model(family)).__name__


def _shape(target: Mapping[str, Any], config: DrafterConfig, embed_VH: Tensor) -> DrafterShape:
    spec = StoreSpec(
        format=1,
        target_id="tiny",
        target_hash="",
        target_dtype="fp32",
        quantisation="",
        layer_ids=LAYER_IDS,
        num_target_layers=6,
        hidden_size=embed_VH.shape[1],
        vocab_size=embed_VH.shape[0],
        hidden_mode="bf16",
        last_mode="none",
        last_rows="teacher",
        calibration_hash="",
        tokenizer_hash="",
        template_hash="",
        template_args="{}",
        max_len=512,
        overlong="truncate",
    )
    wanted = replace(config, num_layers=NUM_LAYERS, block_size=6, init_std=0.3)
    return drafter_shape(wanted, target, spec, MASK_TOKEN_ID)


def _tensors(shape: DrafterShape) -> dict[str, Tensor]:
    drafter = Drafter(shape)
    drafter.initialise(1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in drafter.parameters():
            # norms of ones could be swapped unseen
            if parameter.ndim == 1:
                parameter.uniform_(0.5, 1.5, generator=generator)
    return {name: parameter.detach() for name, parameter in drafter.named_parameters()}


def _case(
    name: str,
    family: str,
    kept: str,
    target: Path,
    out: Path,
    server: str,
    lines: list[str],
    embed_VH: Tensor,
    head_VH: Tensor,
) -> Case:
    found = read_checkpoint(out)
    drafter = Drafter(found.shape)
    drafter.load_state_dict({key: tensor.float() for key, tensor in found.tensors.items()})
    generator = torch.Generator().manual_seed(3)
    size = (ANCHOR, found.shape.num_features, found.shape.hidden_size)
    ids_S = torch.full((found.shape.block_size,), found.shape.mask_token_id)
    ids_S[0] = 77
    return Case(
        name=name,
        family=family,
        layout=kept,
        target=target,
        export=out,
        shape=found.shape,
        command=shlex.split(lines[0 if server == "vllm" else 1]),
        drafter=drafter,
        head=TargetHead(embed_VH, head_VH, found.shape),
        embed_VH=embed_VH,
        head_VH=head_VH,
        feature_NKH=torch.randn(size, generator=generator),
        far_N=torch.arange(ANCHOR) * (found.shape.max_position_embeddings // ANCHOR),
        ids_S=ids_S,
    )
