"""What the workers of a capture have done, as sums; rates and shares are formed where it is told.

Those of several workers are added up and divided once: the total is no average of averages.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields

from dflash_pipeline.configs.memory import gib
from dflash_pipeline.configs.status import Status


@dataclass(kw_only=True, slots=True)
class Counts:
    """Of one worker, or of several added up."""

    num_workers: float = 1
    held_s: float = 0.0
    """Seconds since the process began: for so long it has held its device."""
    seconds: float = 0.0
    """Of these, since the target was ready."""
    device_s: float = 0.0
    """Of these, with the device at work on batches."""
    buffer_wait_s: float = 0.0
    """Waiting for a host buffer, or for room in the writer's queue: the disk is slower."""
    idle_s: float = 0.0
    """Waiting for a shard to take: others have the rest, or the quota is full."""
    num_tokens: float = 0
    num_places: float = 0
    """Tokens with padding."""
    size_bytes: float = 0
    """Rows on their way to the disk."""
    device_bytes: float = 0
    """Most that torch held of the device's memory."""
    host_bytes: float = 0
    """Most of the machine's memory that the process held."""

    @property
    def tokens_per_s(self) -> float:
        """Real tokens a second of all workers together."""
        return _ratio(self.num_tokens * self.num_workers, self.seconds)

    def numbers(self) -> dict[str, float]:
        """What the progress line and the status show."""
        return {
            "tok_s": round(self.tokens_per_s, 1),
            "padding": round(self.padding, 4),
            "busy": round(_ratio(self.device_s, self.seconds), 3),
            "mb_s": round(_ratio(self.size_bytes * self.num_workers, self.seconds) / 1e6, 1),
            "disk_wait": round(_ratio(self.buffer_wait_s, self.seconds), 3),
            "idle": round(_ratio(self.idle_s, self.seconds), 3),
            "gib": round(gib(self.device_bytes), 2),
            "host_gib": round(gib(self.host_bytes), 2),
        }

    @property
    def padding(self) -> float:
        """Share of the computed tokens that are none."""
        return 1 - _ratio(self.num_tokens, self.num_places) if self.num_places else 0.0

    def text(self) -> str:
        """One line for the end and for the log."""
        shares = [
            f"{name} {100 * _ratio(seconds, self.seconds):.1f} %"
            for name, seconds in (
                ("device busy", self.device_s),
                ("waiting for the disk", self.buffer_wait_s),
                ("for a shard", self.idle_s),
            )
        ]
        return (
            f"{self.num_tokens:,.0f} tokens in {self.seconds / self.num_workers:,.1f} s, "
            f"{self.tokens_per_s:,.0f} tok/s, {100 * self.padding:.1f} % padding, "
            f"{', '.join(shares)}, {self.numbers()['mb_s']:,.1f} MB/s, device "
            f"{gib(self.device_bytes):.2f} GiB, host {gib(self.host_bytes):.2f} GiB"
        )

    def cost_text(self, price: float) -> str:
        """What it cost at a price for a device and hour, the start included."""
        cost = price * self.held_s / 3600
        return (
            f"{cost:,.2f} for {self.held_s / 3600:.3f} device hours at {price:g} each: "
            f"{_ratio(cost * 1e6, self.num_tokens):,.3f} per million tokens"
        )


def of(values: Mapping[str, float]) -> Counts:
    """Counts out of a status file or a message; what it does not know is left out."""
    names = {one.name for one in fields(Counts)}
    return Counts(**{name: value for name, value in values.items() if name in names})


def total(counts: Iterable[Counts]) -> Counts:
    """All workers together."""
    added = Counts(num_workers=0)
    for one in counts:
        for name in (field.name for field in fields(Counts)):
            setattr(added, name, getattr(added, name) + getattr(one, name))
    return added


def closing_lines(statuses: Iterable[Status], price: float) -> list[str]:
    """How the workers of a capture did, and all of them; none where nothing was computed."""
    found = {one.number: of(one.counts) for one in statuses if one.counts}
    if not found:
        return []
    lines = [f"worker {number}: {one.text()}" for number, one in sorted(found.items())]
    together = total(found.values())
    lines = [*lines, f"together: {together.text()}"] if len(found) > 1 else [together.text()]
    return [*lines, together.cost_text(price)] if price else lines


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
