"""How fast a run was, for planning another: sums over its log lines, divided once."""

from __future__ import annotations

from dataclasses import dataclass

_HOUR_S = 3600.0
_MILLION = 1e6


@dataclass(frozen=True, kw_only=True, slots=True)
class Stretch:
    """What all ranks did between two log lines."""

    num_steps: int
    elapsed_s: float
    wait_s: float
    """Seconds of it that a rank waited for data, on average."""
    num_samples: float
    num_rows: float
    """Drafted positions."""
    num_tokens: float

    def __add__(self, other: Stretch) -> Stretch:
        return Stretch(
            num_steps=self.num_steps + other.num_steps,
            elapsed_s=self.elapsed_s + other.elapsed_s,
            wait_s=self.wait_s + other.wait_s,
            num_samples=self.num_samples + other.num_samples,
            num_rows=self.num_rows + other.num_rows,
            num_tokens=self.num_tokens + other.num_tokens,
        )


class Speed:
    """The steps of this process; those of the first line, which warm up and may compile, count only
    while there are no others."""

    def __init__(self, world: int) -> None:
        self._world = world
        self._first: Stretch | None = None
        self._rest: Stretch | None = None

    def add(self, stretch: Stretch) -> None:
        """A line was written."""
        if self._first is None:
            self._first = stretch
        else:
            self._rest = stretch if self._rest is None else self._rest + stretch

    def line(self) -> str:
        """All rates of the run in one line, checkpoints and validations included; empty: it did no
        step."""
        whole = self._rest or self._first
        if whole is None or not whole.num_samples:
            return ""
        hours = _MILLION / whole.num_samples * whole.elapsed_s / _HOUR_S
        processes = f"{self._world} process" + "es" * (self._world > 1)
        return (
            f"speed of the last {whole.num_steps:,} steps: "
            f"{whole.num_samples / whole.elapsed_s:,.1f} samples/s, "
            f"{whole.num_rows / whole.elapsed_s:,.0f} draft rows/s, "
            f"{whole.num_tokens / whole.elapsed_s:,.0f} context tok/s, "
            f"{whole.wait_s / whole.elapsed_s:.1%} of the time waiting for data; a million samples "
            f"take {hours:,.2f} h on {processes} ({hours * self._world:,.2f} device hours)"
        )
