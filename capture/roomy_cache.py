"""A cache that is not copied at each step: its buffers have room for more tokens.

transformers' own concatenates each layer anew for each token, which reads and writes all of it.
Letters: B sequences, G key-value heads, T positions, D head dimension.
Trap: what a layer gives out is a view of its buffer, which later tokens extend but never change.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

# tokens: a copy per so many, and at most so much memory more than is filled
ROOM = 32


@contextmanager
def roomy(model: nn.Module) -> Iterator[None]:
    """Within it a dynamic cache that the model is called with gets layers of this kind.

    Layers of other kinds (sliding, linear attention, quantised) stay as they are.
    """

    def furnish(_module: nn.Module, _inputs: Any, arguments: dict[str, Any]) -> None:
        # transformers 5 renamed the argument on the way
        for cache in arguments.values():
            if type(cache) is DynamicCache:
                for layer in cache.layers:
                    if type(layer) is DynamicLayer:
                        # not a new one in its place: 5.0 passes none on before the first is filled
                        layer.__class__ = RoomyLayer

    handle = model.register_forward_pre_hook(furnish, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


class RoomyLayer(DynamicLayer):
    """transformers' growing layer over buffers of its own; one may become this at any time."""

    _rooms: tuple[_Room, _Room] | None = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_unused: Any, **_idle: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append to both; all of them so far."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if self._rooms is None:
            self._rooms = _Room(), _Room()
        assert self.keys is not None
        assert self.values is not None
        self.keys = self._rooms[0].appended(self.keys, key_states)
        self.values = self._rooms[1].appended(self.values, value_states)
        return self.keys, self.values

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """These rows, in this order; fewer than there were will do."""
        if self._rooms is None:
            super().reorder_cache(beam_idx)
            return
        assert self.keys is not None
        assert self.values is not None
        self.keys = self._rooms[0].selected(self.keys, beam_idx)
        self.values = self._rooms[1].selected(self.values, beam_idx)


class _Room:
    """One buffer, [B, G, T and room, D]."""

    def __init__(self) -> None:
        self._buffer: torch.Tensor | None = None
        self._given: torch.Tensor | None = None

    def appended(self, old: torch.Tensor, new_BGTD: torch.Tensor) -> torch.Tensor:
        """`old` with new positions behind it; copied where it is not what was given last."""
        # one that was never filled has one dimension; one of no channels is filled all the same
        begin = old.shape[2] if old.ndim > 1 else 0
        end = begin + new_BGTD.shape[2]
        buffer = self._buffer
        if buffer is None or old is not self._given or end > buffer.shape[2]:
            num_rows, num_groups, _, size = new_BGTD.shape
            buffer = new_BGTD.new_empty((num_rows, num_groups, end + ROOM, size))
            if begin:
                buffer[:, :, :begin] = old
            self._buffer = buffer
        buffer[:, :, begin:end] = new_BGTD
        self._given = buffer[:, :, :end]
        return self._given

    def selected(self, old: torch.Tensor, index_B: torch.Tensor) -> torch.Tensor:
        """Rows of `old`, with room behind them, so that the next token copies nothing again."""
        index_B = index_B.to(old.device)
        buffer = self._buffer
        if buffer is None or old is not self._given:
            self._buffer = self._given = None
            return old.index_select(0, index_B)
        self._buffer = buffer.index_select(0, index_B)
        self._given = self._buffer[:, :, : old.shape[2]]
        return self._given
