"""Tiny random targets of each family, and a tokenizer of bytes.

What norms multiply by is drawn from [0.5, 1.5] and the initializer's range is 0.3: with all-ones
norms and the default 0.02 a doubled norm changes nothing and greedy decoding repeats one token.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VOCAB_SIZE = 272
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 258,
}
# family -> configuration class of transformers and what differs from the common settings
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3Config", {}),
    "llama": ("LlamaConfig", {"tie_word_embeddings": True}),
    "qwen2": ("Qwen2Config", {}),
    "mistral": ("MistralConfig", {"sliding_window": 8}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    ),
    "gemma3": (
        "Gemma3TextConfig",
        {
            "query_pre_attn_scalar": 8,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"] * 3,
            "final_logit_softcapping": 5.0,
        },
    ),
    "gpt_oss": (
        "GptOssConfig",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"] * 3,
        },
    ),
    "qwen3_5": (
        "Qwen3_5TextConfig",
        {
            "layer_types": ["linear_attention", "linear_attention", "full_attention"] * 2,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
        },
    ),
}
_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
FAMILIES["qwen3_5_moe"] = ("Qwen3_5MoeTextConfig", {**FAMILIES["qwen3_5"][1], **_EXPERTS})
# as the hub has them: the text model's configuration inside that of a vision model
NESTED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen3_5_nested": (
        "Qwen3_5Config",
        "qwen3_5",
        {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2},
    ),
    "qwen3_5_moe_nested": (
        "Qwen3_5MoeConfig",
        "qwen3_5_moe",
        {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2},
    ),
    "gemma3_nested": (
        "Gemma3Config",
        "gemma3",
        {
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 28,
            "patch_size": 14,
        },
    ),
}
EVERY_FAMILY = (*FAMILIES, *NESTED)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level, no merges: 256 bytes, then three special tokens; ChatML template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: index for index, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    wrapped.chat_template = CHATML
    return wrapped


def tiny_config(family: str, **changes: Any) -> transformers.PretrainedConfig:
    """The configuration of the family's tiny model; changes go to its text model."""
    if family in NESTED:
        class_name, inner, vision = NESTED[family]
        values: dict[str, Any] = {
            # Gemma 3's checkpoints cap no logits, and its whole model knows no cap
            "text_config": tiny_config(
                inner, **{"final_logit_softcapping": None, **changes}
            ).to_dict(),
            "vision_config": vision,
            "tie_word_embeddings": False,
        }
    else:
        class_name, differences = FAMILIES[family]
        values = {**_COMMON, **differences, **changes}
    config: transformers.PretrainedConfig = getattr(transformers, class_name)(**values)
    return config


def tiny_model(family: str, **changes: Any) -> PreTrainedModel:
    """A random causal language model of the family, fp32, the same each time."""
    config = tiny_config(family, **changes)
    torch.manual_seed(0)
    # the checkpoint of a nested one is that of the whole model, vision tower and all
    kind = transformers.AutoModelForImageTextToText
    loader = kind if family in NESTED else transformers.AutoModelForCausalLM
    model = loader.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name and parameter.ndim == 1:
                # a family that multiplies by 1 + weight begins with zeros, not with ones
                neutral = parameter.mean() - 1
                parameter.uniform_(0.5, 1.5, generator=generator).add_(neutral)
    # Only batch and position differ between a padded and a lone row: no dropout, no sampling
    return model


def save_target(directory: Path, family: str, **changes: Any) -> None:
    """A Hugging Face directory with model and tokenizer."""
    tiny_model(family, **changes).save_pretrained(directory)
    tiny_tokenizer().save_pretrained(directory)
