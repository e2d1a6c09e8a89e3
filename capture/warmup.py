"""One forward of each extreme shape of the plan before the clock starts.

Kernels are chosen, tuned and loaded at a shape's first use, and the allocator grows to its largest:
all of that belongs here, in the main thread, not into the first batches.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dflash_pipeline.capture.shapes import Shape
from dflash_pipeline.capture.target import Target


def warm_up(target: Target, shapes: Sequence[Shape]) -> Sequence[Shape]:
    """One forward of each shape on CUDA; on a CPU there is nothing to warm. The shapes it ran.

    A shape that does not fit is left to the capture, which halves it.
    """
    if target.device.type != "cuda":
        return []
    for shape in shapes:
        try:
            ids_BT = torch.zeros(shape, dtype=torch.int64, device=target.device)
            target.run(ids_BT, lambda _place, _hidden_BTH: None)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
    torch.cuda.synchronize(target.device)
    return shapes
