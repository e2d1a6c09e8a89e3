"""`dflash eval --endpoint`: acceptance as a vLLM or SGLang server of target and drafter counts it.

Domains are asked one after another, so that a difference of the server's counters is one domain's.
The server must answer nobody else meanwhile: its count of tokens is held against the answers'.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from dflash_pipeline.capture import counters, samples
from dflash_pipeline.capture.answers import answer_seed
from dflash_pipeline.capture.counters import Counters, Served
from dflash_pipeline.capture.endpoint import chat_request
from dflash_pipeline.capture.samples import Conversation, Dropped
from dflash_pipeline.capture.servers import Servers
from dflash_pipeline.configs.errors import UsageError
from dflash_pipeline.configs.place import Place
from dflash_pipeline.configs.schema import Run
from dflash_pipeline.store import durable
from dflash_pipeline.store.runlog import RunLog

# a server counts a step shortly after it has sent its tokens
_SETTLE_S = 5.0
_LOOK_EVERY_S = 0.1
# of other requests' tokens in the server's count
_STRANGE_SHARE = 0.01


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """One domain's answers."""

    prompts: int
    tokens: int
    seconds: float
    served: Served


def main(run: Run, place: Place, extra: Mapping[str, object]) -> None:
    """Ask the server of `run.eval.endpoint` every prompt; print its acceptance by domain."""
    log = RunLog(place)
    url = run.eval.endpoint
    dropped = Dropped()
    by_domain: dict[str, list[Conversation]] = {}
    for one in samples.read(run.eval.prompts, 0, dropped):
        of_domain = by_domain.setdefault(one.domain, [])
        if one.prompt_messages() and (not run.eval.limit or len(of_domain) < run.eval.limit):
            of_domain.append(one)
    by_domain = {domain: asked for domain, asked in sorted(by_domain.items()) if asked}
    dropped.check(run.data.max_bad_share)
    for line in dropped.lines():
        log.say(f"not used: {line}")
    if not by_domain:
        raise UsageError(f"no usable prompt in {', '.join(run.eval.prompts)}")
    # refused before anything is asked
    begin = counters.read(url)
    if begin.is_average:
        if begin.average is not None:
            counters.difference(begin, begin, 0)
        by_domain = {"all": [one for asked in by_domain.values() for one in asked]}
    servers = Servers(replace(run.generate, endpoints=(url,)), log.say)
    servers.start()
    log.say(f"{begin.server} server {url}, {run.generate.concurrency} requests at a time")
    found, total = dict[str, Asked](), sum(map(len, by_domain.values()))
    try:
        for domain, asked in by_domain.items():
            found[domain] = _ask(run, servers, asked)
            log.progress(sum(one.prompts for one in found.values()), total, "answers")
    finally:
        servers.close()
    for line in table(found):
        log.say(line)
    if run.eval.json:
        write_json(Path(run.eval.json), begin.server, run, found)
        log.say(f"results are in {run.eval.json}")


def table(found: Mapping[str, Asked]) -> list[str]:
    """A line a domain; the last line says whose count it is."""
    heads = ("domain", "prompts", "tokens", "cycles", "tau", "tokens/s", "accepted")
    lines = [
        (
            domain,
            f"{one.prompts}",
            f"{one.tokens}",
            f"{one.served.cycles:.0f}" if one.served.cycles else "not told",
            f"{one.served.tau:.3f}",
            f"{one.tokens / max(one.seconds, 1e-9):.1f}",
            " ".join(f"{share:.2f}" for share in one.served.accepted_by_slot) or "not told",
        )
        for domain, one in found.items()
    ]
    widths = [max(len(line[column]) for line in (heads, *lines)) for column in range(len(heads))]
    text = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in (heads, *lines)
    ]
    return [*text, "tau as the server counts it: a cycle is not cut at an answer's end"]


def write_json(path: Path, server: str, run: Run, found: Mapping[str, Asked]) -> None:
    """Written aside and renamed."""
    names = ("max_new_tokens", "temperature", "top_p", "top_k", "seed", "endpoint")
    values = {
        "mode": "endpoint",
        "server": server,
        "settings": {name: getattr(run.eval, name) for name in names},
        "domains": {domain: asdict(one) for domain, one in found.items()},
    }
    durable.make_directories(path.parent)
    durable.write_durably(path, (json.dumps(values, indent=2) + "\n").encode())


def _ask(run: Run, servers: Servers, asked: Sequence[Conversation]) -> Asked:
    before = counters.read(run.eval.endpoint)
    began = time.perf_counter()
    with ThreadPoolExecutor(max_workers=run.generate.concurrency) as pool:
        tokens = sum(pool.map(lambda one: _answer(run, servers, one), asked))
    seconds = time.perf_counter() - began
    after = _settled(run.eval.endpoint, before, tokens)
    served = counters.difference(before, after, len(asked))
    if not after.is_average and abs(served.tokens - tokens) > _STRANGE_SHARE * tokens:
        raise ValueError(
            f"the server counts {served.tokens:.0f} tokens, its answers here have {tokens}: "
            "somebody else uses it, and acceptance would be of both; run this when it is idle"
        )
    return Asked(prompts=len(asked), tokens=tokens, seconds=seconds, served=served)


def _answer(run: Run, servers: Servers, conversation: Conversation) -> int:
    """The number of tokens of the server's answer."""
    config = run.eval
    request = chat_request(
        conversation.prompt_messages(),
        run.target,
        max_tokens=config.max_new_tokens,
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        seed=answer_seed(config.seed, conversation.key, 0),
    )
    reply = servers.complete(request)
    try:
        return int(reply["usage"]["completion_tokens"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"the server does not tell usage.completion_tokens ({error!r})") from error


def _settled(url: str, before: Counters, tokens: int) -> Counters:
    """The counters once they hold the answers, or as they are after a few seconds."""
    give_up = time.monotonic() + _SETTLE_S
    while True:
        after = counters.read(url)
        is_whole = after.is_average or after.tokens - before.tokens >= tokens
        if is_whole or time.monotonic() > give_up:
            return after
        time.sleep(_LOOK_EVERY_S)
