"""On a CUDA device, what makes the host wait for it, told as an error."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def no_waits() -> Iterator[None]:
    """Raises RuntimeError where the host would wait for the device; afterwards waits are free."""
    torch.cuda.synchronize()
    try:
        with warnings.catch_warnings():
            # torch says at the first use that this mode is a prototype
            warnings.simplefilter("ignore")
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
