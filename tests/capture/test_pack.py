"""Rows come out of a padded batch in the store's order and bits, and bad ones are found."""

from __future__ import annotations

import numpy as np
import torch

from dflash_pipeline.capture.pack import DeviceIndex, PackedRows, bad_sequences, index_batch, pack
from dflash_pipeline.store.rows import bf16_bits


def _packed(
    hidden_KBTH: list[torch.Tensor],
    last_BTH: torch.Tensor,
    lengths: list[int],
    teachers: list[list[int]],
) -> PackedRows:
    index = index_batch(lengths, [np.array(t, np.int64) for t in teachers], last_BTH.shape[1])
    num_layers, hidden_size = len(hidden_KBTH), last_BTH.shape[2]
    num_bounds = num_layers + (len(index.teacher_M) > 0)
    out = PackedRows(
        hidden_NKH=torch.empty(len(index.row_N), num_layers, hidden_size, dtype=torch.bfloat16),
        last_MH=torch.empty(len(index.teacher_M), hidden_size, dtype=torch.bfloat16),
        largest_BL=torch.empty(len(lengths), num_bounds),
        faintest_BL=torch.empty(len(lengths), num_bounds),
    )
    columns = (index.row_N, index.sequence_N, index.teacher_M, index.teacher_sequence_M)
    pack(hidden_KBTH, last_BTH, DeviceIndex(*map(torch.from_numpy, columns)), out)
    return out


def test_the_index_lists_each_sequences_places_in_order() -> None:
    index = index_batch([2, 3], [np.array([1]), np.array([0, 2])], 4)
    assert index.row_N.tolist() == [0, 1, 4, 5, 6]
    assert index.sequence_N.tolist() == [0, 0, 1, 1, 1]
    assert index.teacher_M.tolist() == [1, 4, 6]
    assert index.teacher_sequence_M.tolist() == [0, 1, 1]


def test_padding_is_gone_and_rows_stand_by_token_then_layer() -> None:
    hidden_KBTH = [
        torch.tensor([[[1.0], [2.0], [99.0]], [[3.0], [4.0], [5.0]]]) + 10 * layer
        for layer in range(2)
    ]
    last_BTH = torch.tensor([[[-1.0], [-2.0], [99.0]], [[-3.0], [-4.0], [-5.0]]])
    out = _packed(hidden_KBTH, last_BTH, [2, 3], [[1], [0, 2]])
    assert out.hidden_NKH[:, :, 0].tolist() == [[1, 11], [2, 12], [3, 13], [4, 14], [5, 15]]
    assert out.last_MH[:, 0].tolist() == [-2, -3, -5]
    assert out.largest_BL.tolist() == [[2, 12, 2], [5, 15, 5]]
    assert out.faintest_BL.tolist() == [[1, 11, 2], [3, 13, 3]]


def test_fp32_states_are_rounded_to_the_bits_of_the_store() -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(1, 64, 512, generator=generator) * 10.0 ** torch.randint(
        -30, 30, (1, 64, 512), generator=generator
    )
    # ties, both ways, the largest finite number, subnormals and signed zeros
    special = [1 + 2**-8, 1 + 3 * 2**-8, -(1 + 2**-8), 3.3895314e38, 1e-40, -1e-45, 0.0, -0.0]
    values[0, 0, : len(special)] = torch.tensor(special)
    out = _packed([values], values, [64], [[]])
    found = out.hidden_NKH[:, 0].view(torch.uint16).numpy()
    np.testing.assert_array_equal(found, bf16_bits(values[0].numpy()))


def test_a_sequence_with_a_nan_an_inf_or_a_row_of_zeros_is_named() -> None:
    hidden_BTH = torch.ones(5, 3, 4)
    last_BTH = torch.ones(5, 3, 4)
    hidden_BTH[1, 2, 3] = torch.nan
    hidden_BTH[2, 0, 0] = -torch.inf
    hidden_BTH[3, 1] = 0
    last_BTH[4, 2] = 0
    hidden_BTH[0, 2] = torch.nan  # padding of a sequence of two
    out = _packed([torch.ones(5, 3, 4), hidden_BTH], last_BTH, [2, 3, 3, 3, 3], [[0]] * 4 + [[2]])
    assert bad_sequences(out.largest_BL.numpy(), out.faintest_BL.numpy()) == {
        1: "not_finite",
        2: "not_finite",
        3: "zero_rows",
        4: "zero_rows",
    }
