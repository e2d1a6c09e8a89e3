"""A planned batch -> its packed rows in a device buffer; halved once when memory does not do.

Letters: B sequences, T positions.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from dflash_pipeline.capture.offload import DeviceBuffer
from dflash_pipeline.capture.pack import Packer, index_batch
from dflash_pipeline.capture.shapes import Shape, shape_of
from dflash_pipeline.capture.target import Target
from dflash_pipeline.configs.memory import host_told_alike, report, usage
from dflash_pipeline.store.reader import Store
from dflash_pipeline.store.table import teacher_positions

MORE_GPUS = "spread each target over several GPUs with --gpus-per-target"
LESS_MEMORY = f"lower capture.token_budget in another --store (the plan fixes it), or {MORE_GPUS}"


class ForwardFailed(Exception):
    """A batch could not be computed; its text says why in one line."""


class Forward:
    """Runs the target over batches of a store's plan."""

    def __init__(
        self, store: Store, target: Target, buffer_bytes: int, say: Callable[[str], None]
    ) -> None:
        """`buffer_bytes`: device memory of all its buffers, for the report when memory runs out."""
        self._store, self._target = store, target
        self._buffer_bytes, self._say = buffer_bytes, say
        self._packer = Packer(store.calibration, target.device)
        if target.device.type == "cuda":
            self._packer.warm_up(target.dtype, target.device)

    def shape(self, batch: slice) -> Shape:
        """Of a batch of samples."""
        return shape_of(batch, self._store.table, self._store.layout)

    def compute(self, batch: slice, buffer: DeviceBuffer) -> bool:
        """Fill the buffer with the rows of the samples `batch`; True if it had to be halved.

        The host does not wait for the device. Raises ForwardFailed.
        """
        num_sequences, width = self.shape(batch)
        try:
            self._part(batch, width, buffer)
            return False
        except torch.OutOfMemoryError as error:
            shape = f"a batch of {num_sequences} x {width} tokens"
            found = self._report(shape, error)
            if num_sequences == 1:
                raise ForwardFailed(found) from error
        except Exception as error:
            raise ForwardFailed(f"{type(error).__name__}: {error}") from error
        # outside of the handler: the error's frames would keep the batch's tensors alive
        self._say(f"{found}; halving it")
        if self._target.device.type == "cuda":
            torch.cuda.synchronize(self._target.device)
            torch.cuda.empty_cache()
        buffer.clear()
        middle = (batch.start + batch.stop) // 2
        try:
            for half in (slice(batch.start, middle), slice(middle, batch.stop)):
                self._part(half, width, buffer)
        except torch.OutOfMemoryError as error:
            raise ForwardFailed(self._report(f"half of {shape}", error)) from error
        except Exception as error:
            raise ForwardFailed(f"half of {shape}: {type(error).__name__}: {error}") from error
        return True

    def check_device(self, failed: ForwardFailed) -> None:
        """ValueError when the device answers nothing any more, as after some CUDA errors."""
        try:
            torch.ones(1, device=self._target.device).add_(1).item()
        except RuntimeError:
            raise ValueError(f"the device is unusable after: {failed}") from failed

    def _part(self, batch: slice, width: int, buffer: DeviceBuffer) -> None:
        spec = self._store.spec
        ids_BT = np.zeros((batch.stop - batch.start, width), np.int64)
        lengths_B, teachers_B = [], []
        for sequence, sample in enumerate(range(batch.start, batch.stop)):
            ids_T, mask_T = self._store.tokens(sample)
            ids_BT[sequence, : len(ids_T)] = ids_T
            lengths_B.append(len(ids_T))
            teachers_B.append(
                teacher_positions(mask_T, spec.last_rows)
                if spec.has_last
                else np.empty(0, np.int64)
            )
        part = buffer.part(ids_BT, index_batch(lengths_B, teachers_B, width))
        self._packer.begin(part.out)

        def take(place: int, hidden_BTH: torch.Tensor) -> None:
            self._packer.layer(place, hidden_BTH, part.index, part.out)

        with host_told_alike(torch):
            last_BTH = self._target.run(part.ids_BT, take)
            self._packer.last(last_BTH, part.index, part.out)

    def _report(self, where: str, error: torch.OutOfMemoryError) -> str:
        """What holds the device's memory."""
        holdings = {
            "weights": self._target.weight_bytes,
            "the ring of row buffers": self._buffer_bytes,
        }
        used = usage(torch, self._target.device)
        return report(used, holdings, where, str(error), "activations", LESS_MEMORY)
