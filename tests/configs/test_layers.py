"""The DFlash rule for captured layers, against the published ids."""

from __future__ import annotations

import pytest

from dflash_pipeline.configs.errors import UsageError
from dflash_pipeline.configs.layers import check_layer_ids, layer_ids


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


def test_too_shallow_a_target_must_name_its_layers() -> None:
    with pytest.raises(UsageError, match=r"name them with target\.layer_ids"):
        layer_ids(7, 5)


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
