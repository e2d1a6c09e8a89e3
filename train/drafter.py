"""The network and only the network: a Qwen3 stack whose keys and values begin with the target.

Its one trap: the context is the *same* tensor for every layer. It passes through `fc` and
`hidden_norm` once and through no layer's input norm; only keys and values are made of it.

Shape letters: N packed tokens, K captured layers, H hidden, Q = anchors x slots, S slots of one
block, E query heads, G key/value heads, D width of a head, B texts drafted for together, A blocks
of each, X keys of the longest.
Contract: arXiv 2602.06036 and z-lab's `dflash/model.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dflash_pipeline.configs.threads import Threads
from dflash_pipeline.train.rope import Rotary, rotate
from dflash_pipeline.train.shape import SLIDING, DrafterShape

Turn = tuple[Tensor, Tensor]
"""Cosines and sines of positions."""
KeyValue = tuple[Tensor, Tensor]
"""Keys and values, of one size."""
# of 200 MB each at Qwen3-8B's width
_MOST_DRAWN = 8


class Attend(Protocol):
    """Attention of drafted rows over [context ; their own block]; `train/mask.py` has both ways."""

    def __call__(
        self, layer_type: str, query_QED: Tensor, context_NGD: KeyValue, block_QGD: KeyValue
    ) -> Tensor:
        """-> [Q, E, D]."""
        ...


class Norm(nn.Module):
    """RMSNorm as Qwen3 writes it: normalised in fp32, rounded, then scaled by the weight."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self._eps = eps

    def forward(self, state: Tensor) -> Tensor:
        wide = state.float()
        inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self._eps)
        return self.weight * (wide * inverse).to(state.dtype)


def _linear(size_in: int, size_out: int) -> nn.Linear:
    return nn.Linear(size_in, size_out, bias=False)


class Attention(nn.Module):
    """Projections of one layer; who attends to what is the caller's (`Attend`)."""

    def __init__(self, shape: DrafterShape, layer_type: str) -> None:
        super().__init__()
        self.layer_type = layer_type
        self.head_dim = shape.head_dim
        query, key = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        self.q_proj = _linear(shape.hidden_size, query)
        self.k_proj = _linear(shape.hidden_size, key)
        self.v_proj = _linear(shape.hidden_size, key)
        self.o_proj = _linear(query, shape.hidden_size)
        self.q_norm = Norm(shape.head_dim, shape.rms_norm_eps)
        self.k_norm = Norm(shape.head_dim, shape.rms_norm_eps)

    def key_value(self, state_NH: Tensor, turn: Turn) -> KeyValue:
        """Keys (normed, turned) and values [N, G, D] of context or block: the same for both."""
        key_NGD = self.k_proj(state_NH).unflatten(-1, (-1, self.head_dim))
        value_NGD = self.v_proj(state_NH).unflatten(-1, (-1, self.head_dim))
        return rotate(self.k_norm(key_NGD), turn), value_NGD

    def query(self, state_QH: Tensor, turn: Turn) -> Tensor:
        """Normed state -> query_QED, normed by head and rotated."""
        query_QED = self.q_proj(state_QH).unflatten(-1, (-1, self.head_dim))
        return rotate(self.q_norm(query_QED), turn)


class SwiGLU(nn.Module):
    """down(silu(gate) * up)."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.gate_proj = _linear(shape.hidden_size, shape.intermediate_size)
        self.up_proj = _linear(shape.hidden_size, shape.intermediate_size)
        self.down_proj = _linear(shape.intermediate_size, shape.hidden_size)

    def forward(self, state_QH: Tensor) -> Tensor:
        gated: Tensor = F.silu(self.gate_proj(state_QH)) * self.up_proj(state_QH)
        down: Tensor = self.down_proj(gated)
        return down


class Layer(nn.Module):
    """A Qwen3 decoder layer over blocks; keys and values of context never met its input norm."""

    def __init__(self, shape: DrafterShape, layer_type: str) -> None:
        super().__init__()
        self.input_layernorm = Norm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = Attention(shape, layer_type)
        self.post_attention_layernorm = Norm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = SwiGLU(shape)

    def forward(
        self, block_QH: Tensor, turn_Q: Turn, context_NGD: KeyValue, attend: Attend
    ) -> Tensor:
        attention = self.self_attn
        normed_QH = self.input_layernorm(block_QH)
        query_QED = attention.query(normed_QH, turn_Q)
        block_QGD = attention.key_value(normed_QH, turn_Q)
        mixed_QED = attend(attention.layer_type, query_QED, context_NGD, block_QGD)
        block_QH = block_QH + attention.o_proj(mixed_QED.flatten(-2))
        mixed_QH: Tensor = self.mlp(self.post_attention_layernorm(block_QH))
        return block_QH + mixed_QH


class Drafter(nn.Module):
    """Features of the context and embedded blocks -> hidden states for the target's own head.

    Parameter names are z-lab's, except that `fc` is one matrix a captured layer (joined on export).
    """

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.shape = shape
        self.fc = nn.ModuleList(
            _linear(shape.hidden_size, shape.hidden_size) for _ in shape.layer_ids
        )
        self.hidden_norm = Norm(shape.hidden_size, shape.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(shape, layer_type) for layer_type in shape.layer_types)
        self.norm = Norm(shape.hidden_size, shape.rms_norm_eps)
        self.rotary = Rotary(
            shape.head_dim, shape.rope_theta, shape.rope_scaling, shape.max_position_embeddings
        )

    def initialise(self, seed: int) -> None:
        """Matrices ~ normal(0, init_std), norms 1; drawn on the CPU, so alike on every device.

        Each matrix has numbers of its own, so that several are drawn at the same time: one after
        the other the billion of Qwen3-8B's drafter takes 7 s.
        """
        num_threads = min(_MOST_DRAWN, torch.get_num_threads())
        Threads(num_threads).map(partial(self._draw, seed), enumerate(self.parameters()))

    @torch.no_grad()
    def _draw(self, seed: int, numbered: tuple[int, nn.Parameter]) -> None:
        place, parameter = numbered
        if parameter.dim() == 1:
            parameter.fill_(1.0)
            return
        (own,) = np.random.SeedSequence((seed % (1 << 64), place)).generate_state(1, np.uint64)
        generator = torch.Generator().manual_seed(int(own))
        drawn = torch.empty(parameter.shape, dtype=torch.float32, device="cpu")
        parameter.copy_(drawn.normal_(0.0, self.shape.init_std, generator=generator))

    def context(self, feature_NKH: Tensor) -> Tensor:
        """hidden_norm(sum_k W_k h_k) [N, H]; K products instead of one over a concatenation."""
        first, *others = self.fc
        mixed_NH: Tensor = first(feature_NKH[:, 0])
        for index, other in enumerate(others, start=1):
            assert isinstance(other, nn.Linear)
            mixed_NH = torch.addmm(mixed_NH, feature_NKH[:, index], other.weight.t())
        normed_NH: Tensor = self.hidden_norm(mixed_NH)
        return normed_NH

    def context_keys_values(self, context_NH: Tensor, position_N: Tensor) -> list[KeyValue]:
        """Each layer's (key, value) [N, G, D] of the context; more rows are appended on axis 0."""
        turn_N = self.rotary(position_N, context_NH.dtype)
        return [layer.self_attn.key_value(context_NH, turn_N) for layer in self._layers()]

    def forward(
        self,
        context_NH: Tensor,
        position_N: Tensor,
        block_QH: Tensor,
        position_Q: Tensor,
        attend: Attend,
    ) -> Tensor:
        """All blocks of a batch at once -> hidden_QH after the final norm."""
        turn_Q = self.rotary(position_Q, block_QH.dtype)
        keys_values = self.context_keys_values(context_NH, position_N)
        for layer, context_NGD in zip(self._layers(), keys_values, strict=True):
            block_QH = layer(block_QH, turn_Q, context_NGD, attend)
        normed_QH: Tensor = self.norm(block_QH)
        return normed_QH

    def draft(
        self,
        keys_values: Sequence[KeyValue],
        num_context_B: Sequence[int],
        block_BSH: Tensor,
    ) -> Tensor:
        """A block of each of B texts after its whole context -> hidden_BSH after the final norm.

        `keys_values`: of each layer [B, X, G, D]; text b has the first num_context_B[b] of X
        positions, and its block begins at the next one.
        """
        num_context_BA = [[num_context] for num_context in num_context_B]
        return self.draft_blocks(keys_values, num_context_BA, block_BSH[:, None])[:, 0]

    def draft_blocks(
        self,
        keys_values: Sequence[KeyValue],
        num_context_BA: Sequence[Sequence[int]],
        block_BASH: Tensor,
    ) -> Tensor:
        """The same of A blocks a text, of which each sees a context of its own and no other block.

        Block a of text b begins at position num_context_BA[b][a], after the positions before it.
        """
        num_slots, device = block_BASH.shape[2], block_BASH.device
        start_BA = torch.tensor(num_context_BA, device=device)
        position_BAS = start_BA[:, :, None] + torch.arange(num_slots, device=device)
        turn_Q = self.rotary(position_BAS.flatten(), block_BASH.dtype)
        attend = _BlockAttention(self.shape.sliding_window, num_context_BA, position_BAS)
        block_QH = block_BASH.flatten(0, 2)
        for layer, context_BXGD in zip(self._layers(), keys_values, strict=True):
            block_QH = layer(block_QH, turn_Q, context_BXGD, attend)
        normed_QH: Tensor = self.norm(block_QH)
        return normed_QH.view(block_BASH.shape)

    def _layers(self) -> list[Layer]:
        return [layer for layer in self.layers if isinstance(layer, Layer)]


class _BlockAttention:
    """Blocks of each text, which may see the whole context before them; on sliding layers what the
    window leaves of it, and no later slot. Context comes as [B, X, G, D]."""

    def __init__(
        self, window: int, num_context_BA: Sequence[Sequence[int]], position_BAS: Tensor
    ) -> None:
        self._window, self._position_BAS = window, position_BAS
        self._num_context = {tuple(of_text) for of_text in num_context_BA}
        self._visible: dict[str, Tensor | None] = {}

    def __call__(
        self, layer_type: str, query_QED: Tensor, context_NGD: KeyValue, block_QGD: KeyValue
    ) -> Tensor:
        num_texts, num_blocks, num_slots = self._position_BAS.shape
        size = (num_texts, num_blocks * num_slots)
        key_BXGD, value_BXGD = (
            torch.cat((context_BXGD, block.unflatten(0, size)), dim=1)
            for context_BXGD, block in zip(context_NGD, block_QGD, strict=True)
        )
        if layer_type not in self._visible:
            room = context_NGD[0].shape[1]
            self._visible[layer_type] = self._made_visible(layer_type == SLIDING, room)
        return grouped_attention(
            query_QED.unflatten(0, size), key_BXGD, value_BXGD, self._visible[layer_type]
        ).flatten(0, 1)

    def _made_visible(self, is_sliding: bool, room: int) -> Tensor | None:
        """[B, 1, Q, X + Q], Q = A x S of a text; None: all of it."""
        if self._num_context == {(room,)} and not is_sliding:
            return None
        num_texts, num_blocks, num_slots = self._position_BAS.shape
        device = self._position_BAS.device
        place_X = torch.arange(room, device=device)
        slot_S = torch.arange(num_slots, device=device)
        context_BASX = (place_X < self._position_BAS[:, :, :1, None]).expand(-1, -1, num_slots, -1)
        own_SS = torch.ones(num_slots, num_slots, dtype=torch.bool, device=device)
        if is_sliding:
            context_BASX = context_BASX & (place_X > self._position_BAS[..., None] - self._window)
            own_SS = (slot_S <= slot_S[:, None]) & (slot_S > slot_S[:, None] - self._window)
        block_AA = torch.eye(num_blocks, dtype=torch.bool, device=device)
        own_ASAS = block_AA[:, None, :, None] & own_SS[:, None]
        own_QQ = own_ASAS.flatten(2, 3).flatten(0, 1)
        context_BQX = context_BASX.flatten(1, 2)
        return torch.cat((context_BQX, own_QQ.expand(num_texts, -1, -1)), dim=2)[:, None]


def dense_attention(
    query_QED: Tensor, key_XGD: Tensor, value_XGD: Tensor, visible_QX: Tensor | None
) -> Tensor:
    """Plain grouped-query attention under a boolean mask -> [Q, E, D]; None: all is visible."""
    return grouped_attention(query_QED[None], key_XGD[None], value_XGD[None], visible_QX)[0]


def grouped_attention(
    query_BQED: Tensor, key_BXGD: Tensor, value_BXGD: Tensor, visible: Tensor | None
) -> Tensor:
    """The same of B texts; `visible` broadcasts to [B, E, Q, X]."""
    mixed = F.scaled_dot_product_attention(
        query_BQED.transpose(1, 2),
        key_BXGD.transpose(1, 2),
        value_BXGD.transpose(1, 2),
        attn_mask=visible,
        enable_gqa=True,
    )
    return mixed.transpose(1, 2)
