"""A target with random weights on disk and conversations for it: what a bench of commands runs on.

Weights are drawn where they are (a GPU makes the 16 GB of Qwen3-8B's shape in seconds), those of
norms from [0.5, 1.5]: with all-ones norms two of the gate's controls would be no-ops.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

sys.path.append(str(Path(__file__).parents[1]))
from tiny_targets import tiny_tokenizer

_LETTERS = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz      ", np.uint8)


@dataclass(frozen=True)
class TargetShape:
    """Fields of Qwen3's configuration, and what the captured layers are."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int


SHAPES = {
    "8b": TargetShape(4096, 12288, 36, 32, 8, 128, 151936),
    "0.6b": TargetShape(1024, 3072, 28, 16, 8, 128, 151936),
    "tiny": TargetShape(64, 96, 8, 4, 2, 16, 512),
}


def save_random_target(folder: Path, shape: TargetShape, device: torch.device, seed: int) -> None:
    """A Hugging Face directory in bf16 with a tokenizer of bytes; fp32 where `device` is a CPU."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    tokenizer = tiny_tokenizer()
    config = Qwen3Config(
        **asdict(shape),
        max_position_embeddings=40960,
        rope_theta=1e6,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.convert_tokens_to_ids("<|im_end|>"),
        pad_token_id=0,
    )
    torch.manual_seed(seed)
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = Qwen3ForCausalLM(config)
    finally:
        torch.set_default_dtype(torch.float32)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("norm.weight"):
                weight.uniform_(0.5, 1.5)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def lognormal_lengths(num: int, mean: float, longest: int, seed: int) -> list[int]:
    """Tokens of each sample: lognormal around `mean`, sigma 0.8, cut off at `longest`."""
    sigma = 0.8
    drawn = np.random.default_rng(seed).lognormal(np.log(mean) - sigma**2 / 2, sigma, num)
    return [int(length) for length in drawn.clip(64, longest)]


def save_conversations(path: Path, lengths: list[int], seed: int) -> None:
    """A JSONL row a length: random letters, so many that the rendered text has about that length.

    The tokenizer's tokens are bytes; its template adds about 50 of them.
    """
    random = np.random.default_rng(seed)
    with path.open("w") as file:
        for row, length in enumerate(lengths):
            letters = random.choice(_LETTERS, max(8, length - 70)).tobytes().decode()
            messages = [
                {"role": "user", "content": f"number {row}"},
                {"role": "assistant", "content": letters},
            ]
            file.write(json.dumps({"id": f"row-{row}", "messages": messages}) + "\n")
