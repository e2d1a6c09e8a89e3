"""The drafter over all blocks of a batch, eager or compiled: two ways to the same numbers.

Eager takes batches as they are. Compiled wants the drafted rows of every batch in one shape and
context in whole tiles (`train/ring.py` pads both); it then compiles once and never again, however
much context a batch has.

Shape letters: N packed tokens in T tiles of L rows, K captured layers, H hidden, A anchors,
Q = A x slots drafted rows, D width of a head.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.fx.experimental import _config as symbols
from torch.nn.attention import flex_attention as flex

from dflash_pipeline.configs.schema import TrainConfig
from dflash_pipeline.train.drafter import Drafter, Layer, Norm, Turn
from dflash_pipeline.train.mask import TILE, Visibility, flex_attend, grouped_attend
from dflash_pipeline.train.shape import DrafterShape


class Forward(Protocol):
    """hidden_QH of all blocks of a batch, after the final norm."""

    @property
    def shape(self) -> DrafterShape: ...

    def __call__(
        self,
        feature_NKH: Tensor,
        position_N: Tensor,
        block_QH: Tensor,
        position_Q: Tensor,
        visibility: Visibility,
    ) -> Tensor: ...


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

    def __call__(
        self,
        feature_NKH: Tensor,
        position_N: Tensor,
        block_QH: Tensor,
        position_Q: Tensor,
        visibility: Visibility,
    ) -> Tensor:
        drafter = self._drafter
        attend = grouped_attend(visibility, drafter.shape.layer_types)
        context_NH = drafter.context(feature_NKH)
        hidden_QH: Tensor = drafter(context_NH, position_N, block_QH, position_Q, attend)
        return hidden_QH


class CompiledForward:
    """The fast way: a layer is one compiled region, the same code for all layers of a kind.

    The keys and values of the context are made inside the region, so that norm, rotation and the
    joining of context and block are one pass over them. Two versions a kind: what enters the first
    layer, the target's frozen embedding, has no gradient. One such object a process.
    """

    def __init__(self, drafter: Drafter, backend: str = "inductor") -> None:
        self._drafter = drafter

        # the compiler keeps few versions of a function: those for another drafter must go
        torch._dynamo.reset()
        # lengths that are equal in the first batch need not be in the next
        symbols.use_duck_shape = False

        def compiled(function: Any) -> Any:
            return torch.compile(function, dynamic=True, fullgraph=True, backend=backend)

        self._context, self._layer, self._norm = map(compiled, (_context, _layer, _norm))

    @property
    def shape(self) -> DrafterShape:
        return self._drafter.shape

    def __call__(
        self,
        feature_NKH: Tensor,
        position_N: Tensor,
        block_QH: Tensor,
        position_Q: Tensor,
        visibility: Visibility,
    ) -> Tensor:
        drafter = self._drafter
        masks = {kind: visibility.block_mask(kind) for kind in set(self.shape.layer_types)}
        cos_Q, sin_Q = drafter.rotary(position_Q, block_QH.dtype)
        turn_Q = _one_length(cos_Q), _one_length(sin_Q)
        cos_N, sin_N = drafter.rotary(position_N, block_QH.dtype)
        turn_TL = _tiles(cos_N), _tiles(sin_N)
        context_TLH = self._context(drafter, _tiles(feature_NKH))
        torch._dynamo.mark_static(context_TLH, 1)
        for layer, kind in zip(drafter.layers, self.shape.layer_types, strict=True):
            block_QH = self._layer(
                layer, _one_length(block_QH), turn_Q, context_TLH, turn_TL, masks[kind]
            )
        hidden_QH: Tensor = self._norm(drafter.norm, _one_length(block_QH))
        return hidden_QH


def _tiles(rows: Tensor) -> Tensor:
    """[N, ...] -> [T, L, ...]: the compiler sees N = T x 128 and so needs no bounds checks."""
    tiles: Tensor = rows.unflatten(0, (-1, TILE))
    torch._dynamo.mark_static(tiles, 1)
    return tiles


def _one_length(rows: Tensor) -> Tensor:
    torch._dynamo.mark_static(rows)
    return rows


def _context(drafter: Drafter, feature_TLKH: Tensor) -> Tensor:
    context_NH = drafter.context(feature_TLKH.flatten(0, 1))
    context_TLH: Tensor = context_NH.unflatten(0, feature_TLKH.shape[:2])
    return context_TLH


def _layer(
    layer: Layer,
    block_QH: Tensor,
    turn_Q: Turn,
    context_TLH: Tensor,
    turn_TL: Turn,
    mask: flex.BlockMask,
) -> Tensor:
    cos_TL, sin_TL = turn_TL
    key_NGD, value_NGD = layer.self_attn.key_value(
        context_TLH.flatten(0, 1), (cos_TL.flatten(0, 1), sin_TL.flatten(0, 1))
    )
    attend = flex_attend({layer.self_attn.layer_type: mask}, flex.flex_attention)
    mixed_QH: Tensor = layer(block_QH, turn_Q, key_NGD, value_NGD, attend)
    return mixed_QH


def _norm(norm: Norm, state_QH: Tensor) -> Tensor:
    normed_QH: Tensor = norm(state_QH)
    return normed_QH
