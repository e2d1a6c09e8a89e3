"""Gradients added up over ranks while backward runs: the same numbers as all of them after it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from dflash_pipeline.configs.gpus import Devices
from dflash_pipeline.configs.launch import launch
from dflash_pipeline.configs.place import Place
from dflash_pipeline.configs.schema import Run
from dflash_pipeline.train.group import Group
from dflash_pipeline.train.reduction import Reduction, bucketed

NUM_WINDOWS, BAD_WINDOW = 6, 1


def test_buckets_hold_each_parameter_once_in_the_order_in_which_backward_ends() -> None:
    # three matrices of a layer, two of the one before; three vectors
    rooms = [64, 128, 64, 192, 64, 64, 64, 64]
    assert bucketed(rooms, 5, 200) == [range(3, 5), range(3), range(5, 8)]
    assert bucketed(rooms, 5, 1) == [*(range(i, i + 1) for i in (4, 3, 2, 1, 0)), range(5, 8)]
    assert bucketed(rooms, 5, 1 << 30) == [range(5), range(5, 8)]
    assert bucketed([64, 64], 0, 100) == [range(2)]


def test_sums_begin_in_one_order_whatever_order_gradients_come_in() -> None:
    begun: list[int] = []

    class Noted(Group):
        world = 2

        def __init__(self) -> None:
            pass

        def add_up_aside(self, tensor: torch.Tensor) -> Callable[[], None]:
            begun.append(tensor.storage_offset())
            return lambda: None

    rooms = [1 << 24] * 3
    gradient = torch.empty(sum(rooms) + 3, device="meta")
    summed = Reduction(gradient, rooms, 3, Noted())
    for index in (0, 1):
        summed.note(index)
    # the last matrix, which is to go first, is still missing
    assert begun == []
    summed.note(2)
    assert begun == [2 << 24, 1 << 24, 0]
    with pytest.raises(AssertionError, match="after the window's last batch"):
        summed.note(2)


def test_the_length_is_of_this_ranks_own_gradient_however_soon_sums_come() -> None:
    class Doubling(Group):
        world = 2

        def __init__(self) -> None:
            pass

        def add_up_aside(self, tensor: torch.Tensor) -> Callable[[], None]:
            tensor.mul_(2)
            return lambda: None

    gradient = torch.cat((torch.full((64,), 3.0), torch.full((64,), 4.0), torch.ones(3)))
    summed = Reduction(gradient, [64, 64], 1, Doubling())
    assert float(summed.finish()) == pytest.approx((64 * 9 + 64 * 16) ** 0.5)
    assert gradient.tolist() == [6.0] * 64 + [8.0] * 64 + [2.0] * 3


@pytest.mark.parametrize(("world", "dtype"), [(2, "fp32"), (2, "bf16"), (3, "bf16")])
def test_ranks_that_sum_within_backward_get_what_a_sum_after_it_gives(
    world: int, dtype: str, place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Uneven windows, ranks without a batch, batches without a row or without some layers, NaN."""
    folder = Path(__file__).parent
    monkeypatch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    devices = Devices(kind="cpu", ids=tuple(range(world)))
    extra: dict[str, object] = {"out": str(tmp_path), "dtype": dtype}
    assert launch("rank_tasks:sums", Run(), devices, "train", place.log_dir, extra) == 0
    told = [torch.load(tmp_path / f"{rank}.pt") for rank in range(world)]
    for rank, one in enumerate(told):
        masters = one["masters"]
        for window in range(NUM_WINDOWS):
            within, after, plain = (masters[way][window] for way in ("within", "after", "plain"))
            assert torch.equal(within, after)
            assert torch.equal(within, told[0]["masters"]["within"][window])
            if world == 2:
                assert torch.equal(within, plain)
            else:
                torch.testing.assert_close(within, plain, rtol=1e-5, atol=1e-6)
        # steps that are not finite anywhere change nothing anywhere, and their rank knows of it
        before, bad = masters["within"][BAD_WINDOW - 1 : BAD_WINDOW + 1]
        assert torch.equal(before, bad)
        assert one["num_bad"] == 1
        named = [number for number, where in enumerate(one["bad"]["within"]) if where]
        assert named == ([BAD_WINDOW] if rank == 0 else [])
        assert one["bad"]["within"] == one["bad"]["after"]
    # a batch that reaches all layers has all matrices on their way when its backward ends
    assert told[0]["begun"][0] == 3
    assert told[0]["begun"][3] == 0
