"""What is compiled or tuned while something runs, told by name.

Triton's names are those of 3.5 and later.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch


@contextmanager
def builds() -> Iterator[list[str]]:
    """The list is whole at the end: kernels that Triton built or tuned, torch.compile's regions."""
    import triton
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner
    from triton.runtime.autotuner import Autotuner

    found: list[str] = []

    def built(**told: Any) -> None:
        found.append(f"built {told['repr']}")

    def noting(bench: Any, what: str) -> Any:
        def tuned(self: Any, *inputs: Any, **named: Any) -> Any:
            found.append(f"{what} tuned {getattr(self, 'base_fn', None) or self.fn}")
            return bench(self, *inputs, **named)

        return tuned

    regions = torch._dynamo.utils.counters["stats"]
    before = regions["unique_graphs"]
    with ExitStack() as patches:
        patches.enter_context(patch.object(triton.knobs.runtime, "jit_post_compile_hook", built))
        for tuner, name in ((Autotuner, "_bench"), (CachingAutotuner, "bench")):
            noted = noting(getattr(tuner, name), tuner.__name__)
            patches.enter_context(patch.object(tuner, name, noted))
        yield found
    found += ["region of torch.compile"] * (regions["unique_graphs"] - before)


class _Hopper:
    """A driver without a device: it only says for what kernels would be built."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return -1

    def get_current_stream(self, _device: int) -> int:
        return 0


@contextmanager
def launches() -> Iterator[list[str]]:
    """Kernels that are launched meanwhile, on tensors of the host, neither are built nor run: what
    is listed is the key of each, by which Triton tells whether it has built that one before."""
    import triton
    from triton.runtime import driver

    keys: list[str] = []

    def keyed(*, key: str, fn: Any, **_told: Any) -> bool:
        keys.append(f"{fn.name} {key}")
        # as if it were built elsewhere
        return True

    hook = patch.object(triton.knobs.runtime, "jit_cache_hook", keyed)
    with patch.object(driver, "_active", _Hopper()), hook:
        yield keys
