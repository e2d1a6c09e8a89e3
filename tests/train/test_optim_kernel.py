"""The kernel of the optimizer against torch's AdamW: in the interpreter, for Hopper, on a GPU.

Run as a script it is the interpreter's half: TRITON_INTERPRET counts only before triton loads.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from dflash_pipeline.configs.schema import OptimConfig
from dflash_pipeline.train import optim
from dflash_pipeline.train.optim import Optimizer

# of bf16 parameters one: a master's last bits may round a parameter the other way
NUM_STEPS = {torch.float32: 5, torch.bfloat16: 1}
BAD_STEP = 2


class _Alone:
    """A group of one."""

    world = 1


def _run(by_kernel: bool, device: str, dtype: torch.dtype) -> tuple[nn.Module, Optimizer]:
    """Steps of two batches each; one step is bad."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(70, 33, bias=False), nn.LayerNorm(33, bias=False)).to(device)
    alone: Any = _Alone()
    config = OptimConfig(clip=0.05, weight_decay=0.1, beta2=0.98)
    with patch.object(optim, "_has_kernel", lambda _flat: by_kernel):
        optimizer = Optimizer(model.named_parameters(), config, alone, 10, dtype)
        for step in range(NUM_STEPS[dtype]):
            for part in range(2):
                rows = torch.randn(4, 70, generator=torch.Generator().manual_seed(2 * step + part))
                loss = (
                    (model(rows.to(device, dtype)).float() - rows[:, :33].to(device)).square().sum()
                )
                if step == BAD_STEP:
                    loss = loss * torch.nan
                loss.backward()
                optimizer.add(
                    loss.detach(),
                    torch.tensor(3.0, device=device),
                    torch.zeros((), device=device),
                )
            optimizer.sum_up(wants_stop=False)
            optimizer.step(0.01)
    return model, optimizer


def _compare(device: str, dtype: torch.dtype) -> None:
    model, fast = _run(True, device, dtype)
    _, plain = _run(False, device, dtype)
    found, wanted = fast.state(), plain.state()
    assert float(found["step"]) == (4 if dtype == torch.float32 else 1)
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-7)
    for parameter, master in zip(model.parameters(), fast.masters().values(), strict=True):
        # the interpreter cuts bits off where a GPU rounds
        torch.testing.assert_close(parameter.float(), master, rtol=2**-7, atol=0)


def test_the_kernel_equals_torchs_adamw_in_the_interpreter() -> None:
    pytest.importorskip("triton", reason="triton has no build for this platform")
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-W", "error", __file__], check=True, env=environment)


def test_the_kernel_compiles_for_hopper_with_wide_loads(
    ptx_for_hopper: Callable[..., str],
) -> None:
    from dflash_pipeline.train import optim_kernel

    settings = asdict(OptimConfig())
    constants = {name: settings[name.lower()] for name in ("BETA1", "BETA2", "EPS")}
    constants |= {"DECAY": settings["weight_decay"], "TILE": optim_kernel.TILE}
    kinds = dict.fromkeys(("master", "average", "square", "gradient"), "*fp32")
    kinds |= {"rounded": "*bf16", "numbers": "*fp32", "size": "i64"}
    kinds |= {"num_decayed": "i64", "lr": "fp32"}
    code = ptx_for_hopper(
        optim_kernel.adamw_kernel,
        kinds,
        constants,
        num_warps=optim_kernel.NUM_WARPS,
        fused=True,
        aligned=range(7),
    )
    assert ".local" not in code
    assert "v4.b32" in code


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_equals_torchs_adamw_on_the_gpu(dtype: torch.dtype) -> None:
    _compare("cuda", dtype)


if __name__ == "__main__":
    for wanted_dtype in (torch.float32, torch.bfloat16):
        _compare("cpu", wanted_dtype)
