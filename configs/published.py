"""Acceptance that others have published of DFlash drafters, with where each figure stands.

Figures of different harnesses do not compare to the last tenth: prompts, answer length and whether
the last cycle is cut differ (and thinking on instead of off changes tau by more than half).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Published:
    """Greedy tau, bonus included, of one target's drafter."""

    target: str
    """The target's hub name without its owner."""
    block_size: int
    taus: Mapping[str, float]
    """By task."""
    how: str
    source: str


_PAPER = "arXiv 2602.06036, table 1"
_PAPER_HOW = "temperature 0, thinking off, at most 2,048 new tokens, mean of the prompts' taus"

PUBLISHED = (
    Published(
        target="Qwen3-4B",
        block_size=16,
        taus={
            "gsm8k": 6.53,
            "math500": 7.84,
            "aime25": 7.27,
            "humaneval": 6.64,
            "mbpp": 6.09,
            "livecodebench": 7.09,
            "mtbench": 4.35,
        },
        how=_PAPER_HOW,
        source=_PAPER,
    ),
    Published(
        target="Qwen3-8B",
        block_size=16,
        taus={
            "gsm8k": 6.54,
            "math500": 7.87,
            "aime25": 7.08,
            "humaneval": 6.50,
            "mbpp": 5.95,
            "livecodebench": 7.27,
            "mtbench": 4.24,
        },
        how=_PAPER_HOW,
        source=_PAPER,
    ),
    Published(
        target="Llama-3.1-8B-Instruct",
        block_size=10,
        taus={"gsm8k": 4.32, "humaneval": 4.91, "alpaca": 3.73},
        how="temperature 0",
        source="arXiv 2602.06036",
    ),
)


def published(target: str, block_size: int) -> Published | None:
    """The figures of drafters of `target` (a hub name or a directory) with such blocks."""
    name = _plain(target.rstrip("/").rpartition("/")[2])
    for one in PUBLISHED:
        if _plain(one.target) == name and one.block_size == block_size:
            return one
    return None


def task_of(domain: str, taus: Mapping[str, float]) -> str | None:
    """The task of `taus` that a domain is called like: `MATH-500` is math500."""
    return _plain(domain) if _plain(domain) in taus else None


def _plain(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())
