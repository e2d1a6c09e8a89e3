"""Who may see whom: the rule, its dense mask, and the block mask that needs no dense grid.

A drafted row sees context rows of its own document strictly before its anchor, and its own block.
On full layers a block sees all of itself; on sliding layers (z-lab's semantics) only slots up to
the row's own, and nothing further back than window - 1 positions from the row itself.

Keys are laid out [blocks ; context]: the rows of the blocks are a constant number, so nothing in
the compiled mask depends on how much context a batch has.

Shape letters: N context rows, A anchors, S slots, Q = A x S, X = Q + N keys, E query heads,
G key/value heads, D width of a head, J tiles of L rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex

from dflash_pipeline.train.drafter import Attend, KeyValue, dense_attention
from dflash_pipeline.train.shape import SLIDING

# rows and columns of a FlexAttention tile; context and drafted rows come in whole tiles on CUDA
TILE = 128
# one attention over 128 x 8 drafted rows of five documents took 93 ms of CPU, in groups 18 ms
_GROUP_BLOCKS = 16

MaskRule = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
FlexAttention = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Visibility:
    """The blocks of one batch. An anchor at its document's first row has no context: padding."""

    anchor_A: Tensor
    """Packed context row of each anchor, int32; ascending, padding last."""
    start_A: Tensor
    """Packed row at which the anchor's document begins, int32."""
    num_context: int
    block_size: int
    window: int
    """Positions that a row of a sliding layer sees, its own included."""

    @property
    def num_rows(self) -> int:
        """Q."""
        return len(self.anchor_A) * self.block_size

    def context_range(self, layer_type: str) -> tuple[Tensor, Tensor]:
        """First and one past the last context row that each drafted row sees, int32 [Q].

        A row without context has the range [N, 0).
        """
        slot_S = torch.arange(self.block_size, dtype=torch.int32, device=self.anchor_A.device)
        low_AS = self.start_A[:, None].expand(-1, self.block_size)
        high_AS = self.anchor_A[:, None].expand(-1, self.block_size)
        if layer_type == SLIDING:
            low_AS = torch.maximum(low_AS, high_AS + slot_S - (self.window - 1))
        is_empty = low_AS >= high_AS
        low_Q = low_AS.masked_fill(is_empty, self.num_context).flatten()
        return low_Q, high_AS.masked_fill(is_empty, 0).flatten()

    def rule(self, layer_type: str) -> MaskRule:
        """The mask as a function of (batch, head, drafted row, key), as FlexAttention wants it."""
        low_Q, high_Q = self.context_range(layer_type)
        num_rows, block_size, window = self.num_rows, self.block_size, self.window

        def full(_batch: Tensor, _head: Tensor, row: Tensor, key: Tensor) -> Tensor:
            context = key - num_rows
            is_own = (key < num_rows) & (key // block_size == row // block_size)
            return ((context >= low_Q[row]) & (context < high_Q[row])) | is_own

        def sliding(_batch: Tensor, _head: Tensor, row: Tensor, key: Tensor) -> Tensor:
            context = key - num_rows
            is_own = (key // block_size == row // block_size) & (key <= row) & (key > row - window)
            return ((context >= low_Q[row]) & (context < high_Q[row])) | is_own

        return sliding if layer_type == SLIDING else full

    def dense(self, layer_type: str) -> Tensor:
        """The whole mask, bool [Q, X]: the truth that the block mask is compared with."""
        device = self.anchor_A.device
        row_Q = torch.arange(self.num_rows, device=device)
        key_X = torch.arange(self.num_rows + self.num_context, device=device)
        none = torch.zeros((), dtype=torch.int64, device=device)
        return self.rule(layer_type)(none, none, row_Q[:, None], key_X[None])

    def block_mask(self, layer_type: str) -> flex.BlockMask:
        """The same mask as FlexAttention's tiles, from the ranges alone.

        Since anchors are sorted, a tile's rows see nearly the same context: most tiles are full.
        Needs Q and N in whole tiles.
        """
        low_JL, high_JL = (bound.view(-1, TILE) for bound in self.context_range(layer_type))
        tile = torch.arange(len(low_JL), dtype=torch.int32, device=low_JL.device)
        first, last = tile * TILE, tile * TILE + TILE - 1
        block_size = self.block_size
        own_first = first // block_size * block_size
        own_end = (last // block_size + 1) * block_size
        own = (first < own_end[:, None]) & (last >= own_first[:, None])
        begin = torch.arange(0, self.num_context, TILE, dtype=torch.int32, device=low_JL.device)
        end = begin + TILE
        is_full = (begin >= low_JL.amax(1)[:, None]) & (end <= high_JL.amin(1)[:, None])
        is_seen = (end > low_JL.amin(1)[:, None]) & (begin < high_JL.amax(1)[:, None])
        partial = torch.cat((own, is_seen & ~is_full), dim=1)
        whole = torch.cat((torch.zeros_like(own), is_full), dim=1)
        return flex.BlockMask.from_kv_blocks(
            *_listed(partial),
            *_listed(whole),
            BLOCK_SIZE=TILE,
            mask_mod=self.rule(layer_type),
            seq_lengths=(self.num_rows, self.num_rows + self.num_context),
        )


def _listed(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """bool [rows, columns] -> count and indices (chosen columns first), as BlockMask wants them."""
    chosen = tiles.to(torch.int32)[None, None]
    order = torch.argsort(chosen, dim=-1, descending=True, stable=True)
    return chosen.sum(-1, dtype=torch.int32), order.to(torch.int32)


def _joined(block_QGD: KeyValue, context_NGD: KeyValue) -> KeyValue:
    """Keys and values of all that a mask speaks of: [blocks ; context]."""
    (block_key, block_value), (context_key, context_value) = block_QGD, context_NGD
    return torch.cat((block_key, context_key)), torch.cat((block_value, context_value))


def dense_attend(mask_by_type: dict[str, Tensor]) -> Attend:
    """The plain way: every row against every key. What the other two must equal."""

    def attend(
        layer_type: str, query_QED: Tensor, context_NGD: KeyValue, block_QGD: KeyValue
    ) -> Tensor:
        key_XGD, value_XGD = _joined(block_QGD, context_NGD)
        return dense_attention(query_QED, key_XGD, value_XGD, mask_by_type[layer_type])

    return attend


def grouped_attend(visibility: Visibility, layer_types: Iterable[str]) -> Attend:
    """The eager way: neighbouring blocks against the context between their documents' starts and
    their last anchor; packed documents then cost what they cost alone."""
    # one wait for the device, not two a group
    starts, anchors = visibility.start_A.tolist(), visibility.anchor_A.tolist()
    groups = []
    for first in range(0, len(anchors), _GROUP_BLOCKS):
        blocks = slice(first, first + _GROUP_BLOCKS)
        context = slice(min(starts[blocks]), max(*anchors[blocks], *starts[blocks]))
        groups.append(_group(visibility, first, context, set(layer_types)))

    def attend(
        layer_type: str, query_QED: Tensor, context_NGD: KeyValue, block_QGD: KeyValue
    ) -> Tensor:
        mixed = []
        for rows, context, mask_by_type in groups:
            key_XGD, value_XGD = _joined(
                (block_QGD[0][rows], block_QGD[1][rows]),
                (context_NGD[0][context], context_NGD[1][context]),
            )
            mask = mask_by_type[layer_type]
            mixed.append(dense_attention(query_QED[rows], key_XGD, value_XGD, mask))
        return torch.cat(mixed) if mixed else query_QED

    return attend


def _group(
    visibility: Visibility, first: int, context: slice, layer_types: set[str]
) -> tuple[slice, slice, dict[str, Tensor]]:
    """Rows of a group of blocks, the context that any of them may see, and its masks."""
    device = visibility.anchor_A.device
    end = min(first + _GROUP_BLOCKS, len(visibility.anchor_A))
    rows = slice(first * visibility.block_size, end * visibility.block_size)
    row = torch.arange(rows.start, rows.stop, device=device)
    seen = torch.arange(context.start, context.stop, device=device)
    key = torch.cat((row, seen + visibility.num_rows))
    none = torch.zeros((), dtype=torch.int64, device=device)
    masks = {
        layer_type: visibility.rule(layer_type)(none, none, row[:, None], key[None])
        for layer_type in layer_types
    }
    return rows, context, masks


def flex_attend(
    mask_by_type: dict[str, flex.BlockMask], attention: FlexAttention, *, on_hopper: bool
) -> Attend:
    """The fast way, where `attention` is FlexAttention under a compiler: tiles that nobody sees
    are never read. `on_hopper`: what `is_hopper` says of the device."""

    def attend(
        layer_type: str, query_QED: Tensor, context_NGD: KeyValue, block_QGD: KeyValue
    ) -> Tensor:
        key_XGD, value_XGD = _joined(block_QGD, context_NGD)
        mixed: Tensor = attention(
            query_QED.transpose(0, 1)[None],
            key_XGD.transpose(0, 1)[None],
            value_XGD.transpose(0, 1)[None],
            block_mask=mask_by_type[layer_type],
            enable_gqa=True,
            kernel_options=_kernel_options(query_QED.shape[-1], query_QED.dtype, on_hopper),
        )
        return mixed[0].transpose(0, 1)

    return attend


def is_hopper(device: torch.device) -> bool:
    """Whether the device is of the kind that the sizes of backward tiles were measured on."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def _kernel_options(width: int, dtype: torch.dtype, on_hopper: bool) -> dict[str, Any]:
    # unforced, short batches may pick a kernel that has no configuration for them. Not set, though
    # every row sees itself: ROWS_GUARANTEED_SAFE. Part of an own tile is hidden from most of its
    # rows, and meeting that part first gives NaN (seen on an H200).
    options: dict[str, Any] = {"BACKEND": "TRITON"} if _KNOWS_BACKENDS else {}
    # float32 rows take twice the processor's memory: torch chooses tiles of 16 for them
    if on_hopper and width == 128 and dtype == torch.bfloat16:
        # 3.52 ms a layer backward against 3.86 with the sizes that torch 2.11 chooses (H200,
        # tests/bench/attention.py)
        options |= {
            "bwd_BLOCK_M1": 32,
            "bwd_BLOCK_N1": 64,
            "bwd_BLOCK_M2": 64,
            "bwd_BLOCK_N2": 32,
            "bwd_num_stages": 3,
            "bwd_num_warps": 4,
        }
    return options


_KNOWS_BACKENDS = "BACKEND" in getattr(
    getattr(flex, "FlexKernelOptions", None), "__annotations__", {}
)
