"""The DFlash rule for captured layers, against the published ids."""

from __future__ import annotations

import pytest

from dflash_pipeline.configs.errors import UsageError
from dflash_pipeline.configs.layers import check_layer_ids, layer_ids
from dflash_pipeline.configs.load import load


@pytest.mark.parametrize(
    ("num_target_layers", "num", "expected"),
    [
        (24, 5, (1, 6, 11, 16, 21)),
        (28, 5, (1, 7, 13, 19, 25)),
        (28, 8, (1, 4, 8, 11, 15, 18, 22, 25)),
        (32, 5, (1, 8, 15, 22, 29)),
        (36, 3, (1, 17, 33)),
        (36, 5, (1, 9, 17, 25, 33)),
        (36, 8, (1, 6, 10, 15, 19, 24, 28, 33)),
        (40, 8, (1, 6, 11, 16, 22, 27, 32, 37)),
        (48, 5, (1, 12, 23, 34, 45)),
        (64, 8, (1, 10, 18, 27, 35, 44, 52, 61)),
        (36, 1, (18,)),
        (8, 5, (1, 2, 3, 4, 5)),
    ],
)
def test_the_rule_gives_the_published_ids(
    num_target_layers: int, num: int, expected: tuple[int, ...]
) -> None:
    assert layer_ids(num_target_layers, num) == expected
    check_layer_ids(expected, num_target_layers)


@pytest.mark.parametrize(
    ("num_target_layers", "num", "named"),
    [(7, 5, (0, 1, 2, 4, 5)), (5, 5, (0, 1, 2, 3)), (2, 5, (0,)), (3, 1, (0,))],
)
def test_too_shallow_a_target_is_told_how_to_name_its_layers(
    num_target_layers: int, num: int, named: tuple[int, ...]
) -> None:
    with pytest.raises(UsageError) as refused:
        layer_ids(num_target_layers, num)
    _, is_told, setting = str(refused.value).partition("name them, as by --set ")
    assert is_told
    assert load("", [setting], {}).target.layer_ids == named
    check_layer_ids(named, num_target_layers)


def test_of_a_single_layer_none_can_be_captured() -> None:
    with pytest.raises(UsageError, match="none to capture: use a deeper target"):
        layer_ids(1, 1)
    # as the preset tiny names it
    with pytest.raises(UsageError, match=r"one layer alone.*of two layers or more"):
        check_layer_ids((0,), 1)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ((-1, 2), "negative"),
        ((1, 5), "ids go from 0 to 4"),
        ((1, 6), "ids go from 0 to 4"),
        ((1, 1), "twice"),
        ((), "empty"),
    ],
)
def test_ids_that_no_server_can_capture_are_refused(ids: tuple[int, ...], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        check_layer_ids(ids, 6)
