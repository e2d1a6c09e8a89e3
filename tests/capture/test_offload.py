"""Buffers are lent to one reader at a time and carry each batch unchanged, whatever its size."""

from __future__ import annotations

import queue
import threading

import numpy as np
import pytest
import torch

from dflash_pipeline.capture.offload import BatchSizes, DeviceBuffer, Offload, Parcel
from dflash_pipeline.capture.pack import Packer, index_batch
from dflash_pipeline.store.calibration import Calibrated

SIZES = BatchSizes(
    num_places=96,
    num_sequences=6,
    num_rows=90,
    num_last_rows=40,
    num_layers=2,
    num_bounds=3,
    row_bytes=16,
    last_row_bytes=16,
)
PACKER = Packer(Calibrated(), torch.device("cpu"))


def _fill(buffer: DeviceBuffer, hidden_BTH: torch.Tensor, lengths: list[int]) -> None:
    num_positions = hidden_BTH.shape[1]
    teachers = [np.arange(length // 3) for length in lengths]
    ids_BT = np.arange(hidden_BTH.shape[0] * num_positions).reshape(-1, num_positions)
    part = buffer.part(ids_BT, index_batch(lengths, teachers, num_positions))
    assert part.ids_BT.shape == ids_BT.shape

    PACKER.begin(part.out)
    PACKER.layer(0, hidden_BTH, part.index, part.out)
    PACKER.layer(1, -hidden_BTH, part.index, part.out)
    PACKER.last(2 * hidden_BTH, part.index, part.out)


CUDA = pytest.param(
    "cuda",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    ],
)


def _nothing() -> None:
    pass


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_a_thousand_random_batches_come_back_bit_equal_from_poisoned_buffers(
    device: str,
) -> None:
    random = np.random.default_rng(0)
    inbox: queue.SimpleQueue[tuple[Parcel, np.ndarray, np.ndarray] | None] = queue.SimpleQueue()
    wrong: list[str] = []

    def read_slowly() -> None:
        held = []
        while (item := inbox.get()) is not None:
            held.append(item)
            # keep a few, so that a buffer lent too early would be overwritten under us
            while len(held) > int(random.integers(0, 3)):
                parcel, hidden, last = held.pop(0)
                parcel.wait()
                if not (
                    np.array_equal(parcel.hidden_NKR, hidden)
                    and np.array_equal(parcel.last_MR, last)
                ):
                    wrong.append("rows differ")
                parcel.release()

    thread = threading.Thread(target=read_slowly)
    thread.start()

    def alive() -> None:
        assert thread.is_alive(), "the reader has failed: see its traceback above"

    with Offload(
        SIZES, torch.device(device), num_device_buffers=2, num_host_buffers=4, poison=True
    ) as offload:
        sizes = np.random.default_rng(1)
        for _ in range(1000):
            num_sequences = int(sizes.integers(1, 7))
            lengths = [int(n) for n in sizes.integers(1, 16, num_sequences)]
            hidden_BTH = torch.randn(num_sequences, max(lengths), 8)
            buffer = offload.device_buffer()
            _fill(buffer, hidden_BTH.to(device), lengths)
            half_BTH = hidden_BTH.bfloat16()
            rows = torch.cat([half_BTH[b, :n] for b, n in enumerate(lengths)])
            last = torch.cat([2 * half_BTH[b, : n // 3] for b, n in enumerate(lengths)])
            hidden = torch.stack([rows, -rows], 1).contiguous().view(torch.uint8).numpy()
            inbox.put((offload.send(buffer, alive), hidden, last.view(torch.uint8).numpy()))
        inbox.put(None)
        thread.join(timeout=60)
        assert not thread.is_alive()
    assert wrong == []


def test_ids_and_index_arrive_as_they_were_sent() -> None:
    with Offload(
        SIZES, torch.device("cpu"), num_device_buffers=1, num_host_buffers=1, poison=True
    ) as offload:
        buffer = offload.device_buffer()
        for first in (0, 50):
            ids_BT = np.arange(first, first + 6).reshape(2, 3)
            index = index_batch([3, 2], [np.array([1]), np.array([0])], 3)
            part = buffer.part(ids_BT, index)
            assert part.ids_BT.tolist() == ids_BT.tolist()
            assert part.index.row_N.tolist() == [0, 1, 2, 3, 4]
            assert part.index.sequence_N.tolist() == [0, 0, 0, 1, 1]
            assert part.index.teacher_M.tolist() == [1, 3]
            assert part.index.teacher_sequence_M.tolist() == [0, 1]


def test_a_released_buffer_reads_as_nan() -> None:
    with Offload(
        SIZES, torch.device("cpu"), num_device_buffers=1, num_host_buffers=1, poison=True
    ) as offload:
        buffer = offload.device_buffer()
        _fill(buffer, torch.ones(1, 4, 8), [4])
        parcel = offload.send(buffer, _nothing)
        parcel.release()
        assert np.unique(parcel.hidden_NKR).tolist() == [0xFF]
        assert np.isnan(parcel.largest_BL).all()
        with pytest.raises(AssertionError, match="released twice"):
            parcel.release()


def test_two_halves_of_a_batch_stand_behind_each_other_in_one_slot() -> None:
    hidden_BTH = torch.randn(4, 5, 8)
    whole: list[Parcel] = []
    with Offload(
        SIZES, torch.device("cpu"), num_device_buffers=2, num_host_buffers=2, poison=True
    ) as offload:
        buffer = offload.device_buffer()
        _fill(buffer, hidden_BTH, [5, 4, 3, 2])
        whole.append(offload.send(buffer, _nothing))
        buffer = offload.device_buffer()
        _fill(buffer, hidden_BTH[:2], [5, 4])
        _fill(buffer, hidden_BTH[2:], [3, 2])
        whole.append(offload.send(buffer, _nothing))
        for name in ("hidden_NKR", "last_MR", "largest_BL", "faintest_BL"):
            np.testing.assert_array_equal(getattr(whole[0], name), getattr(whole[1], name))


def test_a_failure_elsewhere_ends_the_wait_for_a_buffer() -> None:
    def writer_has_failed() -> None:
        raise OSError(28, "No space left on device")

    with Offload(
        SIZES, torch.device("cpu"), num_device_buffers=1, num_host_buffers=1, poison=True
    ) as offload:
        buffer = offload.device_buffer()
        _fill(buffer, torch.ones(1, 4, 8), [4])
        offload.send(buffer, _nothing)
        with pytest.raises(OSError, match="No space left"):
            offload.send(buffer, writer_has_failed)


def test_a_batch_beyond_the_plans_largest_is_refused() -> None:
    with Offload(
        SIZES, torch.device("cpu"), num_device_buffers=1, num_host_buffers=1, poison=False
    ) as offload:
        buffer = offload.device_buffer()
        with pytest.raises(ValueError, match="larger than the largest batch"):
            _fill(buffer, torch.ones(7, 14, 8), [14] * 7)
