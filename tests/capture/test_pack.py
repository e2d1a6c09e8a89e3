"""Rows come out of a padded batch in the store's order and bits, and bad ones are found."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dflash_pipeline.capture.pack import DeviceIndex, PackedRows, Packer, bad_sequences, index_batch
from dflash_pipeline.store.bf16 import bf16_bits
from dflash_pipeline.store.calibration import Calibrated, calibrate
from dflash_pipeline.store.rows import encode, row_bytes

PLAIN = Calibrated()


def _packed(
    hidden_KBTH: list[torch.Tensor],
    last_BTH: torch.Tensor,
    lengths: list[int],
    teachers: list[list[int]],
    mode: str = "bf16",
    calibrated: Calibrated = PLAIN,
) -> PackedRows:
    index = index_batch(lengths, [np.array(t, np.int64) for t in teachers], last_BTH.shape[1])
    num_layers, hidden_size = len(hidden_KBTH), last_BTH.shape[2]
    num_bounds = num_layers + (len(index.teacher_M) > 0)
    out = PackedRows(
        hidden_NKR=torch.empty(
            len(index.row_N),
            num_layers,
            row_bytes(mode, hidden_size),
            dtype=torch.uint8,
        ),
        last_MR=torch.empty(len(index.teacher_M), row_bytes(mode, hidden_size), dtype=torch.uint8),
        largest_BL=torch.empty(len(lengths), num_bounds),
        faintest_BL=torch.empty(len(lengths), num_bounds),
    )
    columns = (index.row_N, index.sequence_N, index.teacher_M, index.teacher_sequence_M)
    device_index = DeviceIndex(*map(torch.from_numpy, columns))
    packer = Packer(calibrated, torch.device("cpu"))
    packer.begin(out)
    # as the target's hooks do: in the order of its layers, not of the store
    for place in reversed(range(num_layers)):
        packer.layer(place, hidden_KBTH[place], device_index, out)
    packer.last(last_BTH, device_index, out)
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
    hidden_NKH = out.hidden_NKR.view(torch.bfloat16)
    assert hidden_NKH[:, :, 0].tolist() == [[1, 11], [2, 12], [3, 13], [4, 14], [5, 15]]
    assert out.last_MR.view(torch.bfloat16)[:, 0].tolist() == [-2, -3, -5]
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
    found = out.hidden_NKR[:, 0].view(torch.uint16).numpy()
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


@pytest.mark.parametrize("mode", ["int8", "int4"])
def test_quantised_rows_are_the_stores_and_bad_ones_are_found(mode: str) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden_KBTH = [torch.randn(3, 5, 32, generator=generator) for _ in range(2)]
    last_BTH = torch.randn(3, 5, 32, generator=generator)
    states_NKH = torch.stack(hidden_KBTH, 2).flatten(0, 1).numpy()
    found = calibrate(states_NKH, last_BTH.flatten(0, 1).numpy(), mode, mode)
    calibrated = Calibrated.of(found, 2, {})
    hidden_KBTH[1][1, 2, 3] = torch.inf
    hidden_KBTH[0][2, 1] = 0
    lengths, teachers = [2, 5, 4], [[0], [1, 3], [0]]
    out = _packed(hidden_KBTH, last_BTH, lengths, teachers, mode, calibrated)
    states_KBTH = torch.stack(hidden_KBTH)
    rows_NKH = torch.cat([states_KBTH[:, b, :n].transpose(0, 1) for b, n in enumerate(lengths)])
    wanted_NKR = encode(rows_NKH.numpy(), mode, calibrated.hidden)
    np.testing.assert_array_equal(out.hidden_NKR.numpy(), wanted_NKR)
    last_MH = torch.cat([last_BTH[b, places] for b, places in enumerate(teachers)])
    wanted_MR = encode(last_MH.numpy(), mode, calibrated.last)
    np.testing.assert_array_equal(out.last_MR.numpy(), wanted_MR)
    assert out.largest_BL[0, 0] == hidden_KBTH[0][0, :2].abs().max()
    bad = bad_sequences(out.largest_BL.numpy(), out.faintest_BL.numpy())
    assert bad == {1: "not_finite", 2: "zero_rows"}
