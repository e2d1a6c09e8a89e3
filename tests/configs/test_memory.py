"""What holds the device's memory."""

from __future__ import annotations

import pytest
import torch

from dflash_pipeline.configs.memory import Usage, explained, report, usage

GIB = 1 << 30
TORCHS = (
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 139.81 GiB of "
    "which 1.00 GiB is free. Including non-PyTorch memory, this process has 138 GiB in use."
)


def test_the_report_gives_every_byte_of_the_device_a_holder() -> None:
    used = Usage(peak=100 * GIB, reserved=120 * GIB, total=140 * GIB, free=8 * GIB, host_peak=GIB)
    holdings = {"weights": 2 * GIB, "fp32 masters": 4 * GIB, "moments": 8 * GIB}
    beside = {"sums over GPUs": 3 * GIB}
    text = report(used, holdings, "backward", TORCHS, "activations", "lower it", beside)
    assert (
        "ran out in backward (Tried to allocate 2.50 GiB): of 140.00 GiB hold weights 2.00," in text
    )
    assert "fp32 masters 4.00, moments 8.00, activations at the peak 86.00," in text
    assert "the allocator's reserve 20.00, sums over GPUs 3.00, other processes" in text
    assert text.endswith("other processes and CUDA itself 9.00; lower it")


def test_only_the_devices_own_error_is_explained() -> None:
    cpu = torch.device("cpu")
    with (
        pytest.raises(ValueError, match=r"ran out in forward \(Tried.*weights 1\.00"),
        explained(torch, cpu, lambda: {"weights": GIB}, lambda: "forward", "activations", "less"),
    ):
        raise torch.OutOfMemoryError(TORCHS)
    with pytest.raises(KeyError), explained(torch, cpu, dict, lambda: "forward", "", ""):
        raise KeyError("other")


def test_a_cpus_memory_is_the_processs() -> None:
    used = usage(torch, torch.device("cpu"))
    assert used.peak == used.host_peak > 10_000_000
