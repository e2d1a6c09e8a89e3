"""What an evaluation found, as a table of text and as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dflash_pipeline.store import durable
from dflash_pipeline.train import intervals
from dflash_pipeline.train.intervals import Interval
from dflash_pipeline.train.tally import Answer, Tally

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
class Scored:
    """One prompt's answers, or one sample's, in one arm."""

    key: str
    domain: str
    num_tokens: int
    """New tokens, the prefill's own included."""
    whole: Tally
    loop_free: Tally
    """Of the part before its first repeated 4-gram."""


def scored(key: str, domain: str, answers: Sequence[Answer], num_drafts: int) -> Scored:
    """Count the answers to one prompt, or the turns of one sample."""
    whole, loop_free = Tally(num_drafts=num_drafts), Tally(num_drafts=num_drafts)
    for answer in answers:
        whole.add(answer.cycles)
        loop_free.add(answer.loop_free_cycles)
    return Scored(
        key=key,
        domain=f"{domain}_" if domain in RESERVED else domain,
        num_tokens=sum(len(answer.tokens) for answer in answers),
        whole=whole,
        loop_free=loop_free,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Pace:
    """How long new tokens took, by domain."""

    tokens: Mapping[str, int]
    seconds: Mapping[str, float]

    def rate(self, domain: str) -> float:
        """New tokens a second of a domain, or of `all`; 0 when nothing took any time."""
        if domain == ALL:
            return sum(self.tokens.values()) / (sum(self.seconds.values()) or 1.0)
        return self.tokens[domain] / (self.seconds[domain] or 1.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Arm:
    """One row group of the table."""

    prompts: Sequence[Scored]
    pace: Pace

    @property
    def domains(self) -> list[str]:
        """`all`, then each by name."""
        return [ALL, *sorted({one.domain for one in self.prompts})]

    def of(self, domain: str) -> list[Scored]:
        """Its prompts of a domain, or all."""
        return [one for one in self.prompts if domain in (ALL, one.domain)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """The figures of one arm and domain."""

    whole: Tally
    loop_free: Tally
    tau: Interval
    tau_per_prompt: Interval
    tau_loop_free: Interval
    gain: float | None
    """Tokens a second over plain decoding's; None where nothing was decoded."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What was measured."""

    mode: str
    """`decode` or `replay`."""
    settings: Mapping[str, Any]
    """What the figures depend on; only reports of equal settings are compared."""
    arms: Mapping[str, Arm]
    plain: Pace | None
    """None: nothing was decoded."""
    mismatches: Sequence[Mismatch]
    is_judged: bool
    """Greedy outputs were compared in fp32, where a difference is a fault."""
    seed: int
    """Of the resamples that intervals come from."""

    @property
    def num_prompts(self) -> int:
        return len(next(iter(self.arms.values())).prompts)

    @property
    def is_sampled(self) -> bool:
        return bool(self.settings.get("temperature"))

    @property
    def is_identical(self) -> bool | None:
        """No mismatch that counts: in fp32 those at a tiny gap are exempt. None: not compared."""
        if self.plain is None or self.is_sampled:
            return None
        return not any(not (self.is_judged and found.is_exempt) for found in self.mismatches)

    def summary(self, name: str, domain: str) -> Summary:
        """The figures of arm `name` on `domain`, or on `all`."""
        arm = self.arms[name]
        prompts = arm.of(domain)
        num_drafts = prompts[0].whole.num_drafts
        whole, loop_free = Tally(num_drafts=num_drafts), Tally(num_drafts=num_drafts)
        for one in prompts:
            whole.merge(one.whole)
            loop_free.merge(one.loop_free)
        counted = intervals.counts([one.whole for one in prompts])
        counted_free = intervals.counts([one.loop_free for one in prompts])
        gain = None
        if self.plain is not None and self.plain.rate(domain):
            gain = arm.pace.rate(domain) / self.plain.rate(domain)
        return Summary(
            whole=whole,
            loop_free=loop_free,
            tau=intervals.pooled_tau(counted, self.seed),
            tau_per_prompt=intervals.tau_per_prompt(counted, self.seed),
            tau_loop_free=intervals.pooled_tau(counted_free, self.seed),
            gain=gain,
        )


HEADS = (
    "drafter",
    "domain",
    "prompts",
    "cycles",
    "tau",
    "95 %",
    "per prompt",
    "95 %",
    "loop-free",
    "gain",
    "accepted",
)


def table(report: Report) -> list[str]:
    """Plain text columns, a line for each arm and domain; accepted: share of cycles, by slot."""
    lines: list[tuple[str, ...]] = [HEADS]
    for name, arm in report.arms.items():
        for domain in arm.domains:
            found = report.summary(name, domain)
            whole = found.whole
            lines.append(
                (
                    name,
                    domain,
                    f"{whole.num_prompts}",
                    f"{whole.num_cycles}",
                    f"{whole.tau:.3f}",
                    f"{found.tau.low:.2f}-{found.tau.high:.2f}",
                    f"{whole.tau_per_prompt:.3f}",
                    f"{found.tau_per_prompt.low:.2f}-{found.tau_per_prompt.high:.2f}",
                    f"{found.loop_free.tau:.3f}",
                    "" if found.gain is None else f"{found.gain:.2f}x",
                    " ".join(f"{share:.2f}" for share in whole.accepted_by_slot),
                )
            )
    return [*columns(lines, left=(0, 1, len(HEADS) - 1)), *_closing(report)]


def columns(lines: Sequence[Sequence[str]], left: Sequence[int]) -> list[str]:
    """Cells under one another; columns `left` begin together, the others end together."""
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return [
        "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]


def _closing(report: Report) -> list[str]:
    if report.plain is None:
        return [f"replayed {report.num_prompts} held-out samples, no target was run"]
    text = [
        f"plain decoding: {sum(report.plain.tokens.values())} tokens of {report.num_prompts} "
        f"prompts in {sum(report.plain.seconds.values()):.1f} s"
    ]
    if report.is_sampled:
        return [*text, "sampled, each arm with draws of its own: outputs are not compared"]
    text += [
        f"differs: {found.arm}, prompt {found.key}, new token {found.place}, top-2 gap "
        f"{found.gap:.2e}{' (exempt)' if report.is_judged and found.is_exempt else ''}"
        for found in report.mismatches
    ]
    verdict = "yes" if report.is_identical else "no"
    judged = "" if report.is_judged else " (not fp32: reported, not judged)"
    return [*text, f"outputs identical to plain greedy decoding: {verdict}{judged}"]


def to_json(report: Report) -> dict[str, Any]:
    """The report as plain JSON values; `seconds` stands beside an arm's domains.

    `per_prompt` has the counts of each prompt, which `--compare` needs.
    """
    arms = {
        name: {domain: _numbers(report.summary(name, domain)) for domain in arm.domains}
        | {"seconds": sum(arm.pace.seconds.values())}
        for name, arm in report.arms.items()
    }
    plain = report.plain or Pace(tokens={}, seconds={})
    return {
        "mode": report.mode,
        "settings": dict(report.settings),
        "arms": arms,
        "plain": {
            "tokens": sum(plain.tokens.values()),
            "seconds": sum(plain.seconds.values()),
        },
        "identical": report.is_identical,
        "judged": report.is_judged,
        "num_prompts": report.num_prompts,
        "mismatches": [asdict(found) for found in report.mismatches],
        "per_prompt": {
            name: [
                {
                    "key": one.key,
                    "domain": one.domain,
                    "tokens": one.num_tokens,
                    "kept": one.whole.num_kept,
                    "cycles": one.whole.num_cycles,
                    "loop_free_kept": one.loop_free.num_kept,
                    "loop_free_cycles": one.loop_free.num_cycles,
                }
                for one in arm.prompts
            ]
            for name, arm in report.arms.items()
        },
    }


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Written aside and renamed: the file is whole or absent."""
    durable.make_directories(path.parent)
    durable.write_durably(path, (json.dumps(dict(values), indent=2) + "\n").encode())


def _numbers(found: Summary) -> dict[str, Any]:
    whole = found.whole
    return {
        "tau": whole.tau,
        "tau_interval": list(found.tau),
        "tau_per_prompt": whole.tau_per_prompt,
        "tau_per_prompt_interval": list(found.tau_per_prompt),
        "tau_loop_free": found.loop_free.tau,
        "tau_loop_free_interval": list(found.tau_loop_free),
        "gain": found.gain,
        "prompts": whole.num_prompts,
        "cycles": whole.num_cycles,
        "kept": whole.num_kept,
        "loop_free_kept": found.loop_free.num_kept,
        "accepted_by_slot": whole.accepted_by_slot,
    }
