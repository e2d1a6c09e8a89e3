"""An export in the speculators layout, loaded by speculators itself; skipped where it is not.

It pins another transformers, so it has an environment of its own:
`pip install speculators pytest` and this package, then this file alone.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from dflash_pipeline.train.drafter import Drafter
from dflash_pipeline.train.export import write_speculators
from dflash_pipeline.train.head import TargetHead
from dflash_pipeline.train.shape import DrafterShape

pytestmark = pytest.mark.filterwarnings("default")
ANCHORS = (7, 15, 22)
# not saved: speculators takes them from the target again
OF_THE_TARGET = {"verifier_lm_head.weight", "verifier_norm.weight"}


# a window that reaches to the first token: where it cuts, speculators counts from the anchor and
# servers, z-lab and we from each slot
@pytest.mark.parametrize("window", [0, 64])
def test_speculators_loads_all_of_it_and_gives_our_logits(
    window: int, shape: DrafterShape, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("speculators")
    from speculators import SpeculatorModel
    from speculators.models.dflash import core

    if window:
        shape = replace(shape, layer_types=("sliding_attention",) * 2, sliding_window=window)
    torch.manual_seed(0)
    target = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=shape.vocab_size,
            hidden_size=shape.hidden_size,
            intermediate_size=16,
            num_hidden_layers=shape.num_target_layers,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=8,
            tie_word_embeddings=False,
        )
    ).bfloat16()
    target.save_pretrained(tmp_path / "target")
    drafter = Drafter(replace(shape, init_std=0.3))
    drafter.initialise(1)
    for parameter in drafter.parameters():
        parameter.data = parameter.data.bfloat16().float()
    embed_VH, head_VH = (
        module.weight.detach() for module in (target.get_input_embeddings(), target.lm_head)
    )
    out = tmp_path / "export"
    tensors = dict(drafter.named_parameters())
    write_speculators(
        out, shape, tensors, embed_VH, head_VH, str(tmp_path / "target"), ["Qwen3ForCausalLM"]
    )
    model: Any = SpeculatorModel.from_pretrained(str(out))
    own, written = model.state_dict(), load_file(out / "model.safetensors")
    assert set(own) - OF_THE_TARGET == set(written)
    assert all(own[name].shape == tensor.shape for name, tensor in written.items())

    ids_T, feature_TKH = torch.randint(0, 96, (30,)), torch.randn(30, 3, shape.hidden_size)
    eager(model, core)
    chosen = (torch.tensor(ANCHORS), torch.ones(len(ANCHORS), dtype=torch.bool))
    monkeypatch.setattr(core, "select_anchors", lambda *_: chosen)
    with torch.no_grad():
        _, logits_1QV, *_ = model.float()._backbone_forward(
            feature_TKH.flatten(1)[None],
            ids_T[None],
            torch.ones(1, 30),
            torch.zeros(1, 30, shape.hidden_size),
            torch.zeros(1, 30, dtype=torch.long),
            max_anchors=len(ANCHORS),
        )
    head = TargetHead(embed_VH.float(), head_VH.float(), shape)
    ours = [block_logits(drafter, head, ids_T, feature_TKH, anchor) for anchor in ANCHORS]
    found = logits_1QV[0].unflatten(0, (len(ANCHORS), shape.block_size))
    torch.testing.assert_close(found, torch.stack(ours), rtol=1e-4, atol=1e-5)


def block_logits(
    drafter: Drafter,
    head: TargetHead,
    ids_T: torch.Tensor,
    feature_TKH: torch.Tensor,
    anchor: int,
) -> torch.Tensor:
    """[S, V], the anchor's own slot included."""
    shape = drafter.shape
    ids_1S = torch.full((1, shape.block_size), shape.mask_token_id)
    ids_1S[0, 0] = ids_T[anchor]
    with torch.no_grad():
        context_NH = drafter.context(feature_TKH[:anchor])
        keys_values = [
            (key[None], value[None])
            for key, value in drafter.context_keys_values(context_NH, torch.arange(anchor))
        ]
        (hidden_SH,) = drafter.draft(keys_values, [anchor], head.embed(ids_1S))
        return head.logits(hidden_SH)


def eager(model: Any, core: Any) -> None:
    """Its block masks as plain tensors: no compiler is needed."""
    model.config.transformer_layer_config._attn_implementation = "eager"
    model._attn_impl, model._create_mask_fn = "eager", core.create_float_mask
    for layer in model.layers:
        layer.self_attn.config._attn_implementation = "eager"
