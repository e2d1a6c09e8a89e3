"""Errors of rows: many of them, and what counts as the worst."""

from __future__ import annotations

import pytest
import torch

from dflash_pipeline.capture.row_errors import RowErrors


def _errors(parts: list[torch.Tensor]) -> RowErrors:
    errors = RowErrors()
    errors.parts += parts
    return errors


def test_the_worst_is_the_largest_in_fp32_and_one_in_twenty_aside_in_bf16() -> None:
    errors = _errors([torch.arange(60.0), torch.arange(60.0, 100.0)])
    assert errors.worst(torch.float32) == 99.0
    assert errors.worst(torch.bfloat16) == pytest.approx(95.0)
    nan = _errors([torch.tensor([float("nan"), 1.0])])
    assert nan.worst(torch.float32) == nan.worst(torch.bfloat16) == float("inf")


def test_a_verify_of_more_rows_than_torch_takes_quantiles_of_is_judged() -> None:
    """16 million: some thousand long samples."""
    errors = _errors([torch.zeros(9_000_000), torch.ones(9_000_000)])
    assert errors.worst(torch.bfloat16) == 1.0
