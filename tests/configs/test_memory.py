"""What holds the device's memory."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from dflash_pipeline.configs.memory import Usage, explained, host_told_alike, report, usage

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


def _of_torch() -> None:
    torch.empty(1 << 60, dtype=torch.uint8)


def _of_numpy() -> None:
    np.empty(1 << 60, np.uint8)


def _of_python() -> None:
    raise MemoryError


@pytest.mark.parametrize("asks", [_of_torch, _of_numpy, _of_python])
def test_the_hosts_memory_is_accounted_for_alike(asks: Callable[[], None]) -> None:
    """Whoever it is that meets it, on a CPU or beside a GPU."""
    with pytest.raises(torch.OutOfMemoryError), host_told_alike(torch):
        asks()
    amount = {
        _of_torch: r"Tried to allocate 1073741824\.00 GiB",
        _of_numpy: "Unable to allocate 1.00 EiB .*",
        _of_python: "it was not told how much",
    }[asks]
    holds = r"of \d+\.\d\d GiB this process held weights 0\.00, activations at the peak \d.*; less$"
    cpu = torch.device("cpu")
    with (
        pytest.raises(ValueError, match=rf"^the host's .* in feed \({amount}\): {holds}"),
        explained(torch, cpu, lambda: {"weights": 1}, lambda: "feed", "activations", "less"),
    ):
        asks()
    used = Usage(peak=GIB, reserved=GIB, total=140 * GIB, free=GIB, host_peak=3 * GIB)
    text = report(used, {"weights": GIB}, "feed", "host: x", "activations", "less")
    assert text.endswith("GiB this process held all at the peak 3.00; less")
    # another error of torch's stays what it is
    with pytest.raises(RuntimeError, match="shape"), host_told_alike(torch):
        torch.zeros(2).view(3)
