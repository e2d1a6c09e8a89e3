"""A server's own count of accepted drafts: vLLM's and SGLang's metrics, read before and after.

vLLM counts drafts and accepted tokens by slot; SGLang counts verify calls beside generated tokens
(`--enable-metrics`), or tells only an average since it was started.
"""

from __future__ import annotations

import json
import os
import re
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from dflash_pipeline.configs.errors import UsageError

_TIMEOUT_S = 10.0
_LINE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+\d+)?$")
_POSITION = re.compile(r'(?:^|,)\s*position="(\d+)"')
_VLLM, _SGLANG = "vllm:spec_decode_num_", "sglang:spec_"
# the older name first: later servers keep it for a while
_INFO_PATHS = ("/get_server_info", "/server_info")
_MISSING = (
    "an acceptance cannot be measured there: start vLLM with --speculative-config, SGLang with "
    "--speculative-algorithm DFLASH and --enable-metrics"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Counters:
    """Sums since the server was started."""

    server: str
    """`vllm` or `sglang`."""
    tokens: float
    """Generated, each answer's first included."""
    cycles: float
    """Verifications, of one request each."""
    accepted: float | None = None
    """Drafts kept; None: the server does not count them."""
    accepted_S: tuple[float, ...] = ()
    """The same by slot."""
    average: float | None = None
    """SGLang without metrics: tokens a verification, bonus included; None before the first."""
    is_average: bool = False
    """Nothing but `average` is known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Served:
    """What a server did between two readings."""

    tau: float
    tokens: float
    cycles: float
    accepted_by_slot: tuple[float, ...]
    """Share of cycles; empty: not told."""


def read(url: str) -> Counters:
    """The counters of the server at `url` (http://host:port/v1).

    UsageError when it has none: it does not speculate, or does not tell.
    """
    parts = urlsplit(url)
    base = f"{parts.scheme}://{parts.netloc}{parts.path.removesuffix('/').removesuffix('/v1')}"
    text = _fetch(f"{base}/metrics")
    if (counters := counted(text or "")) is not None:
        return counters
    for path in _INFO_PATHS:
        if (info := _fetch(base + path)) is not None:
            return _of_info(base, info)
    told = "/metrics does not answer" if text is None else "/metrics has no spec_decode counters"
    raise UsageError(f"server {url}: {told}, and neither does /get_server_info; {_MISSING}")


def counted(text: str) -> Counters | None:
    """The counters in a server's metrics (Prometheus text); None: it does not count there."""
    values = parsed(text)
    if any(name.startswith(_VLLM) for name, _ in values):
        return _of_vllm(values)
    if any(name == f"{_SGLANG}verify_calls_total" for name, _ in values):
        return Counters(
            server="sglang",
            tokens=_sum(values, "sglang:generation_tokens_total"),
            cycles=_sum(values, f"{_SGLANG}verify_calls_total"),
        )
    return None


def parsed(text: str) -> dict[tuple[str, int | None], float]:
    """Prometheus text -> (name, `position` label or None) -> sum over all other labels."""
    values: dict[tuple[str, int | None], float] = {}
    for line in text.splitlines():
        found = None if line.startswith("#") else _LINE.match(line.strip())
        if found is None:
            continue
        name, labels, number = found.groups()
        position = _POSITION.search(labels or "")
        key = (name, int(position[1]) if position else None)
        values[key] = values.get(key, 0.0) + float(number)
    return values


def difference(before: Counters, after: Counters, num_answers: int) -> Served:
    """What happened between; `num_answers`: whose first token no verification made.

    ValueError when nothing was verified or the server was started anew.
    """
    if after.is_average:
        return _since_start(before, after)
    tokens, cycles = after.tokens - before.tokens, after.cycles - before.cycles
    if cycles < 0 or tokens < 0:
        raise ValueError("the server's counters fell: it was started anew meanwhile; run it again")
    if cycles == 0:
        raise ValueError(
            f"the server verified nothing while it wrote {tokens:.0f} tokens: its drafter is off "
            "for these requests"
        )
    if after.accepted is None:
        return Served(
            tau=(tokens - num_answers) / cycles, tokens=tokens, cycles=cycles, accepted_by_slot=()
        )
    accepted = after.accepted - (before.accepted or 0.0)
    earlier_S = before.accepted_S or (0.0,) * len(after.accepted_S)
    by_slot = [
        (late - early) / cycles for early, late in zip(earlier_S, after.accepted_S, strict=True)
    ]
    return Served(
        tau=1 + accepted / cycles, tokens=tokens, cycles=cycles, accepted_by_slot=tuple(by_slot)
    )


def _since_start(before: Counters, after: Counters) -> Served:
    if before.average is not None:
        raise ValueError(
            f"this SGLang tells only an average since it was started, and it has answered before "
            f"({before.average:g} tokens a verification): start it anew, or with --enable-metrics"
        )
    if after.average is None:
        raise ValueError("the server verified nothing: its drafter is off for these requests")
    return Served(tau=after.average, tokens=0.0, cycles=0.0, accepted_by_slot=())


def _of_vllm(values: Mapping[tuple[str, int | None], float]) -> Counters:
    by_slot = f"{_VLLM}accepted_tokens_per_pos_total"
    slots = sorted(slot for name, slot in values if name == by_slot and slot is not None)
    return Counters(
        server="vllm",
        tokens=_sum(values, "vllm:generation_tokens_total"),
        cycles=_sum(values, f"{_VLLM}drafts_total"),
        accepted=_sum(values, f"{_VLLM}accepted_tokens_total"),
        accepted_S=tuple(values[by_slot, slot] for slot in slots),
    )


def _of_info(base: str, text: str) -> Counters:
    try:
        info = json.loads(text)
        states = info["internal_states"]
        averages = [state.get("avg_spec_accept_length") for state in states]
        algorithm = info.get("speculative_algorithm")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f"server {base}: /get_server_info is not SGLang's ({error!r}); {_MISSING}"
        ) from error
    told = [float(one) for one in averages if one]
    if not algorithm and not told:
        raise UsageError(f"server {base} runs without a drafter; {_MISSING}")
    average = sum(told) / len(told) if told else None
    return Counters(server="sglang", tokens=0.0, cycles=0.0, average=average, is_average=True)


def _sum(values: Mapping[tuple[str, int | None], float], name: str) -> float:
    if (name, None) not in values:
        raise UsageError(f"the server's metrics have no {name}: this version counts otherwise")
    return values[name, None]


def _fetch(url: str) -> str | None:
    """The text there; None when there is none. ValueError when no server answers."""
    request = urllib.request.Request(url)
    if key := os.environ.get("OPENAI_API_KEY"):
        request.add_header("Authorization", f"Bearer {key}")
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as reply:
            text: str = reply.read().decode("utf-8", "replace")
            return text
    except urllib.error.HTTPError as error:
        if error.code in (401, 403):
            raise UsageError(f"{url}: HTTP {error.code}; set OPENAI_API_KEY") from error
        return None
    except OSError as error:
        raise ValueError(f"no server answers at {url}: {error}") from error
