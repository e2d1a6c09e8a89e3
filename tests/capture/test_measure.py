"""What `dflash plan` makes of a capture that it listens to."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from dflash_pipeline.capture import measure
from dflash_pipeline.configs.counts import Counts


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[float | None]], measure._Heard]:
    """Of batches of a second each, told at these times; None: the gate."""

    def hear(times: list[float | None]) -> measure._Heard:
        found, num_batches = measure._Heard(), 0
        for at in times:
            if at is None:
                found.say("gate: ")
                continue
            num_batches += 1
            monkeypatch.setattr(measure.time, "monotonic", lambda at=at: at)
            found.counted(num_batches, 9, "tokens", Counts(device_s=num_batches))
        return found

    return hear


Hear = Callable[[list[float | None]], measure._Heard]


def test_busy_is_told_between_batches_that_have_another_one_behind_them(heard: Hear) -> None:
    """Each batch is told once the next is queued; the last one, at 16, has none behind it."""
    assert heard([1.0, 2.0, None, 10.0, 12.0, 14.0, 16.0]).busy() == pytest.approx(1 / 2)
    # on a CPU, where a batch is over when it is queued, the last one is told at once
    assert heard([1.0, 2.0, None, 12.0, 14.0, 16.0, 16.0]).busy() == pytest.approx(1 / 2)


def test_a_device_is_taken_for_busy_where_too_few_batches_tell(heard: Hear) -> None:
    assert heard([1.0, None, 10.0, 12.0]).busy() == 1.0
    assert heard([1.0, None]).busy() == 1.0
