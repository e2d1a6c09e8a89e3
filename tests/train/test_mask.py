"""Who may see whom."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from dflash_pipeline.train.drafter import Attend
from dflash_pipeline.train.mask import (
    TILE,
    Visibility,
    dense_attend,
    flex_attend,
    grouped_attend,
    is_hopper,
)
from dflash_pipeline.train.shape import FULL, SLIDING

KINDS = [FULL, SLIDING]


def _ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _by_hand(visible: Visibility, layer_type: str) -> torch.Tensor:
    size, num_rows = visible.block_size, visible.num_rows
    seen = torch.zeros(num_rows, num_rows + visible.num_context, dtype=torch.bool)
    for row in range(num_rows):
        block, slot = divmod(row, size)
        anchor, start = int(visible.anchor_A[block]), int(visible.start_A[block])
        for context in range(start, anchor):
            is_near = context >= anchor + slot - (visible.window - 1)
            seen[row, num_rows + context] = layer_type == FULL or is_near
        for other in range(size):
            is_near = other <= slot and other > slot - visible.window
            seen[row, block * size + other] = layer_type == FULL or is_near
    return seen


@pytest.mark.parametrize("layer_type", KINDS)
def test_the_dense_mask_is_the_rule_written_out(layer_type: str) -> None:
    # two documents of 6 and 8 rows; the last block is padding
    visible = Visibility(_ints(2, 5, 7, 13, 0), _ints(0, 0, 6, 6, 0), 14, 4, 3)
    assert torch.equal(visible.dense(layer_type), _by_hand(visible, layer_type))


def test_a_block_never_sees_its_own_anchors_feature_nor_another_document() -> None:
    visible = Visibility(_ints(2, 9), _ints(0, 6), 12, 2, 0)
    seen = visible.dense(FULL)[:, visible.num_rows :]
    assert seen[0].nonzero().flatten().tolist() == [0, 1]
    assert seen[2].nonzero().flatten().tolist() == [6, 7, 8]


def test_a_padding_block_sees_itself_alone() -> None:
    visible = Visibility(_ints(3, 0), _ints(0, 0), 8, 4, 2)
    for layer_type in KINDS:
        padding = visible.dense(layer_type)[4:]
        assert not padding[:, 8:].any()
        assert padding.any(1).all()


def _packed(num_anchors: int, block_size: int, window: int, seed: int) -> Visibility:
    """Documents packed into 768 rows; the last three blocks are padding."""
    random = torch.Generator().manual_seed(seed)
    starts = torch.tensor([0, 200, 333, 690])
    row = torch.randperm(760, generator=random)[: num_anchors - 3].sort().values
    start = starts[torch.searchsorted(starts, row, right=True) - 1]
    padding = torch.zeros(3, dtype=torch.int64)
    return Visibility(
        torch.cat((row, padding)).int(), torch.cat((start, padding)).int(), 768, block_size, window
    )


def _expanded(mask: BlockMask, visible: Visibility, layer_type: str) -> torch.Tensor:
    """What the tiles let through: full ones whole, partial ones by the rule."""
    dense = visible.dense(layer_type)
    seen = torch.zeros_like(dense)
    assert mask.full_kv_num_blocks is not None
    assert mask.full_kv_indices is not None
    for row in range(mask.kv_num_blocks.shape[-1]):
        rows = slice(row * TILE, (row + 1) * TILE)
        for index in mask.kv_indices[0, 0, row, : int(mask.kv_num_blocks[0, 0, row])].tolist():
            columns = slice(index * TILE, (index + 1) * TILE)
            seen[rows, columns] |= dense[rows, columns]
        full = mask.full_kv_indices[0, 0, row, : int(mask.full_kv_num_blocks[0, 0, row])]
        for index in full.tolist():
            seen[rows, index * TILE : (index + 1) * TILE] = True
    return seen


@pytest.mark.parametrize("layer_type", KINDS)
@pytest.mark.parametrize(("num_anchors", "block_size"), [(64, 16), (64, 10), (48, 8)])
@pytest.mark.parametrize("window", [7, 150])
def test_the_block_mask_equals_the_dense_mask_entry_by_entry(
    layer_type: str, num_anchors: int, block_size: int, window: int
) -> None:
    for seed in range(2):
        visible = _packed(num_anchors, block_size, window, seed)
        mask = visible.block_mask(layer_type)
        dense = visible.dense(layer_type)
        assert torch.equal(_expanded(mask, visible, layer_type), dense)
        made = create_block_mask(
            visible.rule(layer_type), None, None, *dense.shape, device="cpu", BLOCK_SIZE=TILE
        )
        assert torch.equal(_expanded(made, visible, layer_type), dense)
        # no full tile is missed, no tile is read for nothing but at the ends of documents
        assert made.full_kv_num_blocks is not None
        assert mask.full_kv_num_blocks is not None
        assert torch.equal(made.full_kv_num_blocks, mask.full_kv_num_blocks)
        surplus = mask.kv_num_blocks - made.kv_num_blocks
        assert int(surplus.min()) >= 0
        assert float(surplus.sum()) <= 0.25 * float(made.kv_num_blocks.sum())


def _attended(attend: Attend, layer_type: str, inputs: list[torch.Tensor]) -> torch.Tensor:
    """Of the query, then keys and values of context and blocks."""
    query, key_N, value_N, key_Q, value_Q = inputs
    return attend(layer_type, query, (key_N, value_N), (key_Q, value_Q))


@pytest.mark.parametrize("layer_type", KINDS)
def test_groups_of_blocks_equal_the_dense_way_with_their_gradients(layer_type: str) -> None:
    torch.manual_seed(0)
    # 53 blocks do not fill the last group; the last three are padding
    visible = _packed(53, 4, 20, 0)
    sizes = [(visible.num_rows, 4), *[(768, 2)] * 2, *[(visible.num_rows, 2)] * 2]
    inputs = [torch.randn(rows, heads, 8, requires_grad=True) for rows, heads in sizes]
    results = []
    for attend in (
        dense_attend({layer_type: visible.dense(layer_type)}),
        grouped_attend(visible, KINDS),
    ):
        mixed = _attended(attend, layer_type, inputs)
        results.append((mixed, *torch.autograd.grad(mixed.square().sum(), inputs)))
    for plain, fast in zip(*results, strict=True):
        torch.testing.assert_close(fast, plain, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("layer_type", KINDS)
@pytest.mark.parametrize(
    ("width", "dtype", "tolerance"),
    [(64, torch.float32, 2e-2), (128, torch.float32, 2e-2), (128, torch.bfloat16, 5e-2)],
    ids=["64-fp32", "128-fp32", "128-bf16"],
)
def test_flex_attention_and_its_gradients_equal_the_dense_way(
    layer_type: str, width: int, dtype: torch.dtype, tolerance: float
) -> None:
    torch.manual_seed(0)
    compiled = torch.compile(flex_attention, dynamic=True)
    for num_context in (768, 1024, 1280):
        visible = _packed(64, 16, 150, num_context)
        visible = Visibility(
            visible.anchor_A.cuda(), visible.start_A.cuda(), num_context, 16, visible.window
        )
        sizes = [(visible.num_rows, 8), *[(num_context, 2)] * 2, *[(visible.num_rows, 2)] * 2]
        inputs = [
            torch.randn(rows, heads, width, device="cuda", dtype=dtype, requires_grad=True)
            for rows, heads in sizes
        ]
        ways = (
            dense_attend({layer_type: visible.dense(layer_type)}),
            flex_attend(
                {layer_type: visible.block_mask(layer_type)},
                compiled,
                on_hopper=is_hopper(visible.anchor_A.device),
            ),
        )
        results = []
        # the plain way in fp32: two ways that round each their own way would differ by more
        for attend, own in zip(
            ways, ([one.detach().float() for one in inputs], inputs), strict=True
        ):
            rows = [one.requires_grad_() for one in own]
            mixed = _attended(attend, layer_type, rows)
            gradients = torch.autograd.grad(mixed.float().square().sum(), rows)
            results.append([one.float() for one in (mixed, *gradients)])
        for plain, fast in zip(*results, strict=True):
            torch.testing.assert_close(fast, plain, rtol=tolerance, atol=tolerance)
