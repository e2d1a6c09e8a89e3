"""The kernel of the loss against fp64: in Triton's interpreter, compiled for Hopper, on a GPU.

Run as a script it is the interpreter's half: TRITON_INTERPRET counts only before triton loads.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor

from dflash_pipeline.configs.schema import LossConfig
from dflash_pipeline.train import loss
from dflash_pipeline.train.head import TargetHead
from dflash_pipeline.train.loss import chunked_loss, reference_loss
from dflash_pipeline.train.shape import FULL, DrafterShape
from dflash_pipeline.train.teacher import Teacher, teacher_spans

CONFIGS = {
    "ce": LossConfig(ce=0.7, kl=0.0),
    "kl": LossConfig(ce=0.0, kl=1.3),
    "both": LossConfig(ce=0.3, kl=0.7),
    "hot": LossConfig(ce=0.3, kl=0.7, temperature=2.5),
    "cold": LossConfig(ce=0.0, kl=0.7, temperature=0.5),
    "tv": LossConfig(ce=0.0, kl=0.0, tv=1.2),
    "cap": LossConfig(ce=0.4, kl=0.0, cap_lambda=0.8),
    "all": LossConfig(ce=0.3, kl=0.7, tv=0.5, cap_lambda=0.2, temperature=1.7),
}
ROWS, TEACHERS, HIDDEN, CHUNK = 11, 6, 16, 4


def _shape(vocab_size: int, soft_cap: float, multiplier: float) -> DrafterShape:
    return DrafterShape(
        hidden_size=HIDDEN,
        intermediate_size=16,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=16,
        vocab_size=vocab_size,
        block_size=4,
        mask_token_id=0,
        layer_ids=(1,),
        num_target_layers=4,
        rms_norm_eps=1e-6,
        rope_theta=1e4,
        rope_scaling=None,
        max_position_embeddings=64,
        layer_types=(FULL,),
        sliding_window=0,
        input_embedding_scale=1.0,
        output_multiplier=multiplier,
        final_logit_softcapping=soft_cap,
        init_std=0.02,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )


def _stats(
    hidden_RH: Tensor, teacher_RH: Tensor | None, head: TargetHead, label_R: Tensor, heat: float
) -> list[Tensor]:
    """correct, ce, kl, entropy and overlap from the definitions, fp64."""

    def logits(rows: Tensor) -> Tensor:
        raw = rows @ head.weight_VH.t() * head.multiplier
        return head.soft_cap * torch.tanh(raw / head.soft_cap) if head.soft_cap else raw

    z = logits(hidden_RH)
    log_q = z.log_softmax(-1)
    correct = (z.argmax(-1) == label_R).double()
    entropy = -(log_q.exp() * log_q).sum(-1)
    ce = -log_q.gather(1, label_R[:, None])[:, 0]
    if teacher_RH is None:
        return [correct, ce, torch.zeros_like(ce), entropy, torch.zeros_like(ce)]
    t = logits(teacher_RH)
    hot_q, hot_p = (z / heat).log_softmax(-1), (t / heat).log_softmax(-1)
    kl = (hot_p.exp() * (hot_p - hot_q)).sum(-1)
    return [correct, ce, kl, entropy, torch.minimum(log_q.exp(), t.softmax(-1)).sum(-1)]


def compare(name: str, vocab_size: int, soft_cap: float, dtype: torch.dtype, device: str) -> None:
    """Value, gradient and statistics of one case; the operands' own rounding is in the truth."""
    config = replace(CONFIGS[name], position_chunk=CHUNK)
    random = torch.Generator().manual_seed(vocab_size)
    shape = _shape(vocab_size, soft_cap, 1.0 if not soft_cap else 1.5)
    hidden_RH = (torch.randn(ROWS, HIDDEN, generator=random) * 2).to(dtype)
    head_VH = torch.randn(vocab_size, HIDDEN, generator=random).to(dtype)
    state_UH = (torch.randn(TEACHERS, HIDDEN, generator=random) * 2).to(dtype)
    weight_R = torch.rand(ROWS, generator=random) + 0.1
    index_R = np.sort(np.random.default_rng(0).integers(0, TEACHERS, ROWS))
    spans = teacher_spans(index_R, CHUNK)
    index = torch.from_numpy(index_R)
    exact = hidden_RH.double().requires_grad_()
    truth_head = TargetHead(head_VH.double(), None, shape)
    label_R = torch.randint(0, vocab_size, (ROWS,), generator=random)
    # some rows are right, and the last token counts like any other
    label_R[:3] = (exact.detach()[:3] @ truth_head.weight_VH.t()).argmax(-1)
    label_R[3] = vocab_size - 1
    exact_teacher = Teacher(state_UH.double(), index, spans)
    loss_R = reference_loss(exact, truth_head, label_R, exact_teacher, config)
    truth = (loss_R * weight_R).sum()
    truth.backward()
    wanted = _stats(
        exact.detach(),
        state_UH.double()[index] if config.needs_last else None,
        truth_head,
        label_R,
        config.temperature,
    )

    rows = hidden_RH.to(device).requires_grad_()
    teacher = Teacher(state_UH.to(device), index.to(device), spans)
    head = TargetHead(head_VH.to(device), None, shape)
    # small groups: the held rows go round
    with (
        patch.object(loss, "_has_kernel", lambda _logits: True),
        patch("dflash_pipeline.train.teacher.GROUP_ROWS", 2),
    ):
        loss_R, stats = chunked_loss(rows, head, label_R.to(device), teacher, config)
    total = (loss_R * weight_R.to(device)).sum()
    (total / 3).backward()
    torch.testing.assert_close(total.detach().cpu().double(), truth.detach(), rtol=1e-5, atol=1e-5)
    found = (stats.correct_R, stats.ce_R, stats.kl_R, stats.entropy_R, stats.overlap_R)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.cpu().double(), other, rtol=2e-5, atol=2e-5)
    error = (rows.grad.cpu().double() * 3 - exact.grad).norm() / exact.grad.norm()
    # bf16: the logits' gradient and the result are rounded once each; the interpreter cuts off
    bound = 1e-5 if dtype == torch.float32 else 2**-7
    assert float(error) < bound, (name, vocab_size, soft_cap, dtype, float(error))


def compare_far(device: str) -> None:
    """Logits far below and far above, then such as are no numbers; the last tile is not full."""
    from dflash_pipeline.train import loss_kernel

    logits_PV = torch.zeros((5, 5000), device=device)
    # powers of two: their products are exact, rounded or not
    for row, far in enumerate((-(2.0**27), 2.0**27)):
        logits_PV[row] = far - 2.0**20
        logits_PV[row, 4999] = far
    logits_PV[2, 0], logits_PV[3, 2500], logits_PV[4] = torch.nan, torch.inf, -torch.inf
    label_R = torch.full((5,), 4999, device=device)
    index_R = torch.arange(5, device=device)
    slope_PV = torch.empty_like(logits_PV)
    stats_FR = torch.empty((5, 5), device=device)
    config = LossConfig(ce=0.3, kl=0.7, tv=0.5, cap_lambda=0.2, temperature=0.05)
    constants = loss_kernel.score_constants(5000, config, 1.0, 0.0)
    with np.errstate(all="ignore"):
        loss_kernel.score_rows(
            logits_PV, logits_PV, slope_PV, label_R, index_R, stats_FR, 0, constants
        )
    # right, sure of it, and as the target
    assert stats_FR[:, :2].t().tolist() == [[1.0, 0.0, 0.0, 0.0, 1.0]] * 2
    assert slope_PV[:2].abs().max() == 0
    assert not stats_FR[1:3, 2:].isfinite().any()


def test_the_kernel_equals_fp64_in_the_interpreter():
    pytest.importorskip("triton", reason="triton has no build for this platform")
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-W", "error", __file__], check=True, env=environment)


def test_what_is_beyond_the_vocabulary_gives_no_infinity_where_the_product_is_not_rounded():
    """`_power` does not round its first product; the interpreter of some versions does."""
    pytest.importorskip("triton", reason="triton has no build for this platform")
    from dflash_pipeline.train import loss_kernel

    nowhere = np.float32(loss_kernel.NOWHERE.value)
    for temperature in (0.001, 0.005, 0.05, 0.5, 1.0, 2.5, 50.0):
        scale = np.float32(loss_kernel.LOG2_E.value / temperature)
        assert float(nowhere) * float(scale) - float(nowhere * scale) == 0


@pytest.mark.parametrize(
    ("name", "vocab_size", "soft_cap", "bits"),
    [
        ("ce", 151936, 0.0, 16),
        ("hot", 151936, 0.0, 16),
        ("both", 1003, 30.0, 32),
        ("tv", 151936, 0.0, 16),
        ("all", 248320, 30.0, 16),
    ],
)
def test_the_kernel_compiles_for_hopper_without_spilling_into_memory(
    name, vocab_size, soft_cap, bits, ptx_for_hopper
):
    from dflash_pipeline.train import loss_kernel

    config = CONFIGS[name]
    constants = loss_kernel.score_constants(vocab_size, config, 1.0, soft_cap)
    kinds = {
        "logits_PV": "*fp32",
        "target_CV": "*fp32",
        "gradient_PV": "*bf16" if bits == 16 else "*fp32",
        "label_R": "*i64",
        "index_R": "*i64",
        "stats_FR": "*fp32",
        "first_row": "i32",
        "num_held": "i32",
        "num_rows": "i32",
    }
    code = ptx_for_hopper(
        loss_kernel.score_kernel,
        kinds,
        constants,
        num_warps=constants["TILE"] // loss_kernel.WARP_VALUES,
        fused=True,
        aligned=range(3),
    )
    assert ".local" not in code
    if vocab_size % 16 == 0:
        assert "ld.global.v4" in code


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    ("vocab_size", "soft_cap", "dtype"),
    [(1003, 20.0, torch.float32), (151936, 0.0, torch.bfloat16)],
)
@pytest.mark.parametrize("name", CONFIGS)
def test_the_kernel_equals_fp64_on_the_gpu(name, vocab_size, soft_cap, dtype):
    compare(name, vocab_size, soft_cap, dtype, "cuda")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_kernel_takes_logits_of_any_size_on_the_gpu():
    compare_far("cuda")


if __name__ == "__main__":
    torch.set_num_threads(1)
    kinds = itertools.product(CONFIGS, (0.0, 20.0), (torch.float32, torch.bfloat16))
    for place, (name, soft_cap, dtype) in enumerate(kinds):
        compare(name, (1003, 2048, 5000)[place % 3], soft_cap, dtype, "cpu")
    compare_far("cpu")
