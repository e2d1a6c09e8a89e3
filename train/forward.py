"""The drafter over all blocks of a batch, eager or compiled: two ways to the same numbers.

Eager takes batches as they are. Compiled wants the drafted rows of every batch in one shape and
context in whole tiles (`train/ring.py` pads both); it then compiles once and never again, however
much context a batch has.

Shape letters: N packed tokens in J tiles of L rows, K captured layers, H hidden, A anchors,
Q = A x slots drafted rows, G key/value heads, D width of a head.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.fx.experimental import _config as symbols
from torch.nn.attention import flex_attention as flex

from dflash_pipeline.configs.schema import TrainConfig
from dflash_pipeline.train.drafter import Drafter, Layer, Norm, Turn
from dflash_pipeline.train.mask import TILE, Visibility, flex_attend, grouped_attend, is_hopper
from dflash_pipeline.train.shape import DrafterShape


@dataclass(frozen=True, slots=True)
class BlockBatch:
    """All blocks of a batch and the context that they may see."""

    feature_NKH: Tensor
    position_N: Tensor
    """Position of each context row in its own document."""
    block_QH: Tensor
    """The embedded tokens of the blocks."""
    position_Q: Tensor
    visibility: Visibility


class Forward(Protocol):
    """hidden_QH of all blocks of a batch, after the final norm."""

    @property
    def shape(self) -> DrafterShape: ...

    def __call__(self, batch: BlockBatch) -> Tensor: ...


def is_compiled(config: TrainConfig, device: torch.device) -> bool:
    """Whether batches are padded and the drafter compiled: FlexAttention's backward is CUDA's."""
    return config.compile and device.type == "cuda"


def forward_of(drafter: Drafter, config: TrainConfig, device: torch.device) -> Forward:
    """The way that `train.compile` asks for."""
    return CompiledForward(drafter) if is_compiled(config, device) else EagerForward(drafter)


class EagerForward:
    """The plain way."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter

    @property
    def shape(self) -> DrafterShape:
        return self._drafter.shape

    def __call__(self, batch: BlockBatch) -> Tensor:
        drafter = self._drafter
        attend = grouped_attend(batch.visibility, drafter.shape.layer_types)
        context_NH = drafter.context(batch.feature_NKH)
        hidden_QH: Tensor = drafter(
            context_NH, batch.position_N, batch.block_QH, batch.position_Q, attend
        )
        return hidden_QH


class CompiledForward:
    """The fast way: a layer is one compiled region, the same code for all layers of a kind.

    The keys and values of the context are made inside the region, so that norm, rotation and the
    joining of context and block are one pass over them. Two versions a kind: what enters the first
    layer, the target's frozen embedding, has no gradient. One such object a process.
    """

    def __init__(self, drafter: Drafter, backend: str | Callable[..., Any] = "inductor") -> None:
        self._drafter = drafter

        # the compiler keeps few versions of a function: those for another drafter must go
        torch._dynamo.reset()

        def compiled(function: Any) -> Any:
            return torch.compile(function, dynamic=True, fullgraph=True, backend=backend)

        on_hopper = is_hopper(drafter.norm.weight.device)

        def layer(*inputs: Any) -> Tensor:
            return _layer(*inputs, on_hopper=on_hopper)

        self._context, self._layer, self._norm = map(compiled, (_context, layer, _norm))

    @property
    def shape(self) -> DrafterShape:
        return self._drafter.shape

    def __call__(self, batch: BlockBatch) -> Tensor:
        with _own_lengths():
            return self._hidden(batch)

    def _hidden(self, batch: BlockBatch) -> Tensor:
        drafter, block_QH = self._drafter, batch.block_QH
        kinds = set(self.shape.layer_types)
        masks = {kind: batch.visibility.block_mask(kind) for kind in kinds}
        cos_Q, sin_Q = drafter.rotary(batch.position_Q, block_QH.dtype)
        turn_Q = _one_length(cos_Q), _one_length(sin_Q)
        cos_N, sin_N = drafter.rotary(batch.position_N, block_QH.dtype)
        turn_JL = _tiles(cos_N), _tiles(sin_N)
        context_JLH = self._context(drafter, _tiles(batch.feature_NKH))
        torch._dynamo.mark_static(context_JLH, 1)
        for layer, kind in zip(drafter.layers, self.shape.layer_types, strict=True):
            block_QH = self._layer(
                layer, _one_length(block_QH), turn_Q, context_JLH, turn_JL, masks[kind]
            )
        hidden_QH: Tensor = self._norm(drafter.norm, _one_length(block_QH))
        return hidden_QH


@contextlib.contextmanager
def _own_lengths() -> Iterator[None]:
    """What is traced within takes lengths that happen to be equal for two lengths: in the next
    batch they need not be equal. Other code of the process keeps the compiler's own rule."""
    before = symbols.use_duck_shape
    symbols.use_duck_shape = False
    try:
        yield
    finally:
        symbols.use_duck_shape = before


def _tiles(rows: Tensor) -> Tensor:
    """[N, ...] -> [J, L, ...]: the compiler sees N = J x 128 and so needs no bounds checks."""
    tiles: Tensor = rows.unflatten(0, (-1, TILE))
    torch._dynamo.mark_static(tiles, 1)
    return tiles


def _one_length(rows: Tensor) -> Tensor:
    torch._dynamo.mark_static(rows)
    return rows


def _context(drafter: Drafter, feature_JLKH: Tensor) -> Tensor:
    context_NH = drafter.context(feature_JLKH.flatten(0, 1))
    context_JLH: Tensor = context_NH.unflatten(0, feature_JLKH.shape[:2])
    return context_JLH


def _layer(
    layer: Layer,
    block_QH: Tensor,
    turn_Q: Turn,
    context_JLH: Tensor,
    turn_JL: Turn,
    mask: flex.BlockMask,
    *,
    on_hopper: bool,
) -> Tensor:
    cos_JL, sin_JL = turn_JL
    context_NGD = layer.self_attn.key_value(
        context_JLH.flatten(0, 1), (cos_JL.flatten(0, 1), sin_JL.flatten(0, 1))
    )
    attend = flex_attend(
        {layer.self_attn.layer_type: mask}, flex.flex_attention, on_hopper=on_hopper
    )
    mixed_QH: Tensor = layer(block_QH, turn_Q, context_NGD, attend)
    return mixed_QH


def _norm(norm: Norm, state_QH: Tensor) -> Tensor:
    normed_QH: Tensor = norm(state_QH)
    return normed_QH
