"""Runs in the environment of speculators: `python their_step.py TASK`, times its training step.

TASK is a JSON file of sizes and of where to write what was found (`peers.Task`). Model, loss and
arguments are the package's own, called as its trainer calls them: fp32 weights under autocast to
bf16, one packed row of random states and tokens, all of it supervised. Imports of this project the
clock alone.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from torch import Tensor, nn
from transformers.models.qwen3.modeling_qwen3 import Qwen3Config

sys.path.append(str(Path(__file__).parents[1]))
from timing import median_ms, peak_gib

# of its trainer, where no option sets it
CLIP_NORM = 1.0
NUM_BATCHES = 3


def build(task: dict[str, Any], attention: str, device: torch.device) -> DFlashDraftModel:
    """Its drafter with random weights, the target's embedding, head and norm among them."""
    shape = task["shape"]
    decoder = Qwen3Config(
        vocab_size=shape["vocab_size"],
        hidden_size=shape["hidden_size"],
        intermediate_size=shape["intermediate_size"],
        num_hidden_layers=shape["num_layers"],
        num_attention_heads=shape["num_heads"],
        num_key_value_heads=shape["num_kv_heads"],
        head_dim=shape["head_dim"],
        max_position_embeddings=shape["max_position_embeddings"],
        rms_norm_eps=shape["rms_norm_eps"],
        rope_parameters={"rope_type": "default", "rope_theta": shape["rope_theta"]},
        layer_types=shape["layer_types"],
        tie_word_embeddings=False,
        attn_implementation=attention,
    )
    config = DFlashSpeculatorConfig(
        transformer_layer_config=decoder,
        draft_vocab_size=shape["vocab_size"],
        block_size=shape["block_size"],
        # the ids of the library count the embedding's output
        aux_hidden_state_layer_ids=[layer_id + 1 for layer_id in shape["layer_ids"]],
        mask_token_id=shape["mask_token_id"],
        speculators_config=SpeculatorsConfig(
            algorithm="dflash",
            proposal_methods=[
                GreedyTokenProposalConfig(speculative_tokens=shape["block_size"] - 1)
            ],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=[]),
        ),
    )
    with device:
        model = DFlashDraftModel(config)
    for module in (model.embed_tokens, model.lm_head, model.verifier_lm_head):
        nn.init.normal_(module.weight, std=shape["init_std"])
    used = {layer.self_attn.config._attn_implementation for layer in model.layers}
    if used != {attention}:
        raise ValueError(f"attention of the layers is {used}, {attention} was asked for")
    return model.to(device).train()


def make_batch(task: dict[str, Any], device: torch.device) -> dict[str, Tensor]:
    """What its loader hands over, of one document that fills the row."""
    shape, num = task["shape"], task["num_context"]
    width, num_layers = shape["hidden_size"], len(shape["layer_ids"])

    def states(size: int) -> Tensor:
        return torch.randn(1, num, size, device=device, dtype=torch.bfloat16)

    return {
        "hidden_states": states(num_layers * width),
        "verifier_last_hidden_states": states(width),
        "input_ids": torch.randint(shape["vocab_size"], (1, num), device=device),
        "loss_mask": torch.ones(1, num, device=device, dtype=torch.long),
        "document_ids": torch.zeros(1, num, device=device, dtype=torch.long),
        "position_ids": torch.arange(num, device=device)[None],
    }


def measure(task: dict[str, Any]) -> dict[str, Any]:
    """Both figures of one way; ValueError where the step is not what was to be timed."""
    is_cuda = torch.cuda.is_available()
    if task["compiled"] and not is_cuda:
        raise ValueError("its compiled step needs CUDA: elsewhere the package compiles nothing")
    device = torch.device("cuda" if is_cuda else "cpu")
    torch.manual_seed(0)
    attention = "simple_flex_attention" if task["compiled"] else "sdpa"
    # the fused loss is a kernel for CUDA
    loss_implementation = "fused" if is_cuda else "eager"
    model = build(task, attention, device)
    trained = [one for one in model.parameters() if one.requires_grad]
    arguments, _ = model.get_trainer_kwargs(
        loss_fn="ce",
        loss_implementation=loss_implementation,
        max_anchors=task["num_anchors"],
        per_position_loss_weight="dpace",
    )
    batches = [make_batch(task, device) for _ in range(NUM_BATCHES)]

    def learn(turn: int) -> Tensor:
        with torch.autocast(device.type, dtype=torch.bfloat16):
            _, loss, _ = model(**batches[turn % NUM_BATCHES], **arguments)
        loss.backward()
        return loss

    def bare(turn: int) -> None:
        learn(turn)
        model.zero_grad()

    def clipped(turn: int) -> None:
        learn(turn)
        nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        model.zero_grad()

    loss = float(learn(0).detach())
    norms = [None if one.grad is None else float(one.grad.norm()) for one in trained]
    if not loss > 0 or any(norm is None or not 0 < norm < float("inf") for norm in norms):
        raise ValueError(f"its loss is {loss}, the norms of its gradients {norms}")
    model.zero_grad()
    figures = {
        name: {
            "ms": median_ms(work, task["num_timed"], is_cuda),
            "peak_gib": peak_gib(work, is_cuda),
        }
        for name, work in (
            ("forward and backward", bare),
            ("forward, backward, clipping", clipped),
        )
    }
    return {
        "device": torch.cuda.get_device_name() if is_cuda else "cpu",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "attention": attention,
        "loss": f"ce, {loss_implementation}",
        "trained_parameters": sum(one.numel() for one in trained),
        "first_loss": loss,
        "figures": figures,
    }


def main() -> None:
    task = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    Path(task["result"]).write_text(json.dumps(measure(task)), encoding="utf-8")


if __name__ == "__main__":
    main()
