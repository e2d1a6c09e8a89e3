"""What an evaluation found, as a table of text and as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dflash_pipeline.store import durable
from dflash_pipeline.train.decode import Tally

ALL = "all"
"""The row of all domains, pooled."""
RESERVED = (ALL, "seconds")
"""Keys of an arm that are not the name of a domain."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mismatch:
    """An output that differs from plain greedy decoding's."""

    arm: str
    key: str
    place: int
    """First token that differs, counted in new tokens."""
    gap: float
    """Top-2 logit gap of plain decoding there."""
    is_exempt: bool
    """Below EXEMPT_GAP fp32 rounding may choose either token."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Arm:
    """One row group of the table."""

    tallies: Mapping[str, Tally]
    """By domain, and under `all` pooled."""
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What was measured."""

    mode: str
    """`decode` or `replay`."""
    arms: Mapping[str, Arm]
    num_prompts: int
    plain_tokens: int
    plain_seconds: float
    mismatches: Sequence[Mismatch]
    is_judged: bool
    """Outputs were compared in fp32, where a difference is a fault."""

    @property
    def is_identical(self) -> bool | None:
        """No mismatch that counts: in fp32 those at a tiny gap are exempt. Replay: None."""
        if self.mode == "replay":
            return None
        return not any(not (self.is_judged and found.is_exempt) for found in self.mismatches)


def table(report: Report) -> list[str]:
    """Plain text columns, a line for each arm and domain; accepted: share of cycles, by slot."""
    heads = ("drafter", "domain", "prompts", "cycles", "tau", "per prompt", "seconds", "accepted")
    lines: list[tuple[str, ...]] = [heads]
    for name, arm in report.arms.items():
        for domain, tally in arm.tallies.items():
            slots = " ".join(f"{share:.2f}" for share in tally.accepted_by_slot)
            lines.append(
                (
                    name,
                    domain,
                    f"{tally.num_prompts}",
                    f"{tally.num_cycles}",
                    f"{tally.tau:.3f}",
                    f"{tally.tau_per_prompt:.3f}",
                    f"{arm.seconds:.1f}" if domain == ALL else "",
                    slots,
                )
            )
    widths = [max(len(line[column]) for line in lines) for column in range(len(heads))]
    text = [
        "  ".join(
            cell.ljust(width) if column in (0, 1, 7) else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]
    if report.mode == "replay":
        return [*text, f"replayed {report.num_prompts} held-out samples, no target was run"]
    text.append(
        f"plain decoding: {report.plain_tokens} tokens of {report.num_prompts} prompts in "
        f"{report.plain_seconds:.1f} s"
    )
    text += [
        f"differs: {found.arm}, prompt {found.key}, new token {found.place}, top-2 gap "
        f"{found.gap:.2e}{' (exempt)' if report.is_judged and found.is_exempt else ''}"
        for found in report.mismatches
    ]
    verdict = "yes" if report.is_identical else "no"
    judged = "" if report.is_judged else " (not fp32: reported, not judged)"
    return [*text, f"outputs identical to plain greedy decoding: {verdict}{judged}"]


def to_json(report: Report) -> dict[str, Any]:
    """The report as plain JSON values; `seconds` stands beside an arm's domains."""
    arms = {
        name: {domain: _numbers(tally) for domain, tally in arm.tallies.items()}
        | {"seconds": arm.seconds}
        for name, arm in report.arms.items()
    }
    return {
        "mode": report.mode,
        "arms": arms,
        "plain": {"tokens": report.plain_tokens, "seconds": report.plain_seconds},
        "identical": report.is_identical,
        "judged": report.is_judged,
        "num_prompts": report.num_prompts,
        "mismatches": [asdict(found) for found in report.mismatches],
    }


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Written aside and renamed: the file is whole or absent."""
    durable.make_directories(path.parent)
    durable.write_durably(path, (json.dumps(dict(values), indent=2) + "\n").encode())


def _numbers(tally: Tally) -> dict[str, Any]:
    return {
        "tau": tally.tau,
        "tau_per_prompt": tally.tau_per_prompt,
        "prompts": tally.num_prompts,
        "cycles": tally.num_cycles,
        "kept": tally.num_kept,
        "accepted_by_slot": tally.accepted_by_slot,
    }
