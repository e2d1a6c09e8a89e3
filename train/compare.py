"""`dflash eval --compare A B`: two evaluations of the same prompts, prompt by prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dflash_pipeline.configs.errors import UsageError
from dflash_pipeline.configs.place import Place
from dflash_pipeline.configs.schema import Run
from dflash_pipeline.store.runlog import RunLog
from dflash_pipeline.train import intervals
from dflash_pipeline.train.intervals import Counts, Interval
from dflash_pipeline.train.report import ALL, columns, write_json
from dflash_pipeline.train.results import TRAINED, read_results

HEADS = ("domain", "prompts", "tau A", "tau B", "A - B", "95 %", "A / B", "loop-free A - B", "95 %")


def main(run: Run, place: Place, extra: Mapping[str, object]) -> None:
    """extra: `files`, the results of two evaluations, and `names` of the two for the table."""
    log = RunLog(place)
    one, other = (read_results(Path(str(file))) for file in _pair(extra["files"]))
    check_same(one, other)
    found = differences(one, other, run.eval.seed)
    names = _pair(extra["names"])
    log.say(f"A: {names[0]}; B: {names[1]}")
    for line in table(found):
        log.say(line)
    if run.eval.json:
        values = {"a": names[0], "b": names[1], "settings": one["settings"], "domains": found}
        write_json(Path(run.eval.json), values)
        log.say(f"results are in {run.eval.json}")


def check_same(one: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    """Raise UsageError unless both are of the same prompts, answered in the same way."""
    names = one["settings"].keys() | other["settings"].keys()
    pairs = {
        name: (one["settings"].get(name), other["settings"].get(name)) for name in sorted(names)
    }
    pairs["mode"] = (one["mode"], other["mode"])
    problems = [f"{name} {a!r} and {b!r}" for name, (a, b) in pairs.items() if a != b]
    if problems:
        raise UsageError(
            f"A and B differ by more than the drafter: {'; '.join(problems)}; evaluate both in the "
            "same way (--prompts decodes, --store replays)"
        )
    only = [
        set(_by_key(first)) - set(_by_key(second)) for first, second in ((one, other), (other, one))
    ]
    if any(only):
        raise UsageError(
            f"A and B are not of the same prompts: {len(only[0])} are in A alone, {len(only[1])} in"
            f" B alone, {min(only[0] | only[1])} for one; evaluate both with the same --prompts, "
            "--limit and --store"
        )


def differences(
    one: Mapping[str, Any], other: Mapping[str, Any], seed: int
) -> dict[str, dict[str, Any]]:
    """By domain, and under `all`: both taus, and the difference with its 95 % interval."""
    mine, theirs = _by_key(one), _by_key(other)
    found = {}
    for domain in (ALL, *sorted({prompt["domain"] for prompt in mine.values()})):
        keys = sorted(key for key, prompt in mine.items() if domain in (ALL, prompt["domain"]))
        whole = _difference([mine[key] for key in keys], [theirs[key] for key in keys], "", seed)
        free = _difference(
            [mine[key] for key in keys], [theirs[key] for key in keys], "loop_free_", seed
        )
        found[domain] = whole | {"loop_free": free}
    return found


def table(found: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Plain text columns, a line a domain, and what the line of `all` says."""
    lines: list[tuple[str, ...]] = [HEADS]
    for domain, one in found.items():
        free = one["loop_free"]
        lines.append(
            (
                domain,
                f"{one['prompts']}",
                f"{one['tau_a']:.3f}",
                f"{one['tau_b']:.3f}",
                f"{one['difference']:+.3f}",
                _range(one["interval"]),
                f"{one['ratio']:.3f}",
                f"{free['difference']:+.3f}",
                _range(free["interval"]),
            )
        )
    pooled = found[ALL]
    low, high = pooled["interval"]
    # an interval that holds 0 is no sign that there is none: more prompts might show which
    undecided = f"{pooled['prompts']} prompts do not tell them apart"
    verdict = "A accepts more" if low > 0 else "B accepts more" if high < 0 else undecided
    return [*columns(lines, left=(0,)), f"at 95 %: {verdict}"]


def _difference(
    mine: Sequence[Mapping[str, Any]],
    theirs: Sequence[Mapping[str, Any]],
    prefix: str,
    seed: int,
) -> dict[str, Any]:
    """Over prompts with a cycle in both; each has its kept tokens and cycles under `prefix`."""
    table_NC = np.array(
        [
            (*_counted(one, prefix), *_counted(two, prefix))
            for one, two in zip(mine, theirs, strict=True)
            if one[f"{prefix}cycles"] and two[f"{prefix}cycles"]
        ],
        np.float64,
    ).reshape(-1, 4)
    a, b = Counts(table_NC[:, 0], table_NC[:, 1]), Counts(table_NC[:, 2], table_NC[:, 3])
    tau_a, tau_b = _tau(a), _tau(b)
    interval: Interval = intervals.pooled_difference(a, b, seed)
    return {
        "prompts": len(table_NC),
        "tau_a": tau_a,
        "tau_b": tau_b,
        "difference": tau_a - tau_b,
        "interval": list(interval),
        "ratio": tau_a / tau_b if tau_b else 0.0,
    }


def _counted(prompt: Mapping[str, Any], prefix: str) -> tuple[int, int]:
    return prompt[f"{prefix}kept"], prompt[f"{prefix}cycles"]


def _tau(counted: Counts) -> float:
    return float(counted.kept_N.sum() / max(counted.cycles_N.sum(), 1.0))


def _by_key(results: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    return {prompt["key"]: prompt for prompt in results["per_prompt"][TRAINED]}


def _range(interval: Sequence[float]) -> str:
    return f"{interval[0]:+.3f} to {interval[1]:+.3f}"


def _pair(values: object) -> tuple[str, str]:
    assert isinstance(values, (list, tuple))
    first, second = values
    return str(first), str(second)
