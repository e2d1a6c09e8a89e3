"""The process of one run: `dflash train`, or the same with logits rounded to bf16.

Logits of bf16 are no setting of the product: every loss there is made of fp32 ones. Rounding the
fp32 product and widening it again gives the very numbers that a bf16 product would have written;
all that follows from them stays fp32, so the arm changes that rounding and nothing else.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dflash_pipeline.configs.place import Place
from dflash_pipeline.configs.schema import Run
from dflash_pipeline.train import loss, teacher, worker
from studies.arms import is_of_bf16_logits

TRAIN = "studies.arm:main"

_raw_logits = loss.raw_logits


def main(run: Run, place: Place, extra: dict[str, Any]) -> None:
    """The product's own training; in a folder of the arm of bf16 logits they are rounded."""
    if not is_of_bf16_logits(Path(run.train.out).name):
        worker.main(run, place, extra)
        return
    loss.raw_logits = teacher.raw_logits = bf16_logits
    try:
        worker.main(run, place, extra)
    finally:
        loss.raw_logits = teacher.raw_logits = _raw_logits


def bf16_logits(hidden_NH: Tensor, weight_VH: Tensor, out_NV: Tensor | None = None) -> Tensor:
    """fp32 [N, V] that hold what bf16 ones would."""
    logits_NV = _raw_logits(hidden_NH, weight_VH, out_NV)
    return logits_NV.copy_(logits_NV.to(torch.bfloat16))
