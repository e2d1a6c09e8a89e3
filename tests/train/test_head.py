"""The target's frozen embedding and head."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dflash_pipeline.store.bf16 import bf16_to_float32
from dflash_pipeline.store.reader import Store
from dflash_pipeline.train.head import TargetHead
from dflash_pipeline.train.shape import DrafterShape


def test_a_stores_matrices_come_out_as_they_went_in(
    whole_store: Store, shape: DrafterShape
) -> None:
    head = TargetHead.from_store(whole_store, shape, "cpu", torch.float32)
    embed_VH = torch.from_numpy(bf16_to_float32(whole_store.embed()))
    head_VH = torch.from_numpy(bf16_to_float32(whole_store.head()))
    ids = torch.tensor([[3, 5], [96, 0]])
    assert torch.equal(head.embed(ids), embed_VH[ids])
    hidden_NH = torch.randn(2, 8)
    torch.testing.assert_close(head.logits(hidden_NH), hidden_NH @ head_VH.T)


def test_scales_and_soft_cap_are_the_targets(shape: DrafterShape) -> None:
    shape = replace(
        shape, input_embedding_scale=2.0, output_multiplier=0.5, final_logit_softcapping=3.0
    )
    embed_VH, head_VH, hidden_NH = torch.randn(97, 8), torch.randn(97, 8), torch.randn(2, 8)
    head = TargetHead(embed_VH, head_VH, shape)
    assert torch.equal(head.embed(torch.tensor([4])), embed_VH[4:5] * 2)
    wanted = 3 * torch.tanh(0.5 * hidden_NH @ head_VH.T / 3)
    torch.testing.assert_close(head.logits(hidden_NH), wanted)


def test_bf16_states_give_fp32_logits(shape: DrafterShape) -> None:
    embed_VH, hidden_NH = torch.randn(97, 8).bfloat16(), torch.randn(2, 8).bfloat16()
    logits = TargetHead(embed_VH, None, shape).logits(hidden_NH)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, hidden_NH.float() @ embed_VH.float().T)


def test_a_head_of_another_target_is_refused(shape: DrafterShape) -> None:
    with pytest.raises(ValueError, match=r"embedding is \(96, 8\).*\(97, 8\)"):
        TargetHead(torch.zeros(96, 8), None, shape)
