"""What `dflash eval --json` wrote, read back. Loads no torch: the command line asks as well."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dflash_pipeline.configs.jsonfile import read_object
from dflash_pipeline.configs.schema import Run

PLAIN, TRAINED, UNTRAINED, LOOKUP = "plain", "trained", "untrained", "lookup"
"""What an evaluation sets beside one another, by name in its results."""


DECODE, REPLAY = "decode", "replay"
"""How acceptance was measured, by name in its results."""


def settings(run: Run) -> dict[str, Any]:
    """What two evaluations must share to be compared."""
    names = ("max_new_tokens", "temperature", "top_p", "top_k", "as_stored")
    return {name: getattr(run.eval, name) for name in names}


def check_comparable(run: Run, path: Path, found: dict[str, Any]) -> None:
    """ValueError where what this line would measure cannot be compared with the results `found`."""
    mine = settings(run) | {"mode": DECODE if run.eval.prompts else REPLAY}
    theirs = {**found["settings"], "mode": found.get("mode")}
    problems = [
        f"{name} {theirs[name]!r}, here {value!r}"
        for name, value in mine.items()
        if name in theirs and theirs[name] != value
    ]
    if problems:
        raise ValueError(
            f"{path} was measured with {'; '.join(problems)}: measure the other drafter in the same"
            " way (--prompts decodes, --store replays)"
        )


def read_results(path: Path) -> dict[str, Any]:
    """What `--json` wrote. ValueError when it is something else."""
    try:
        found = read_object(path)
        prompts = found["per_prompt"][TRAINED]
        keys = [one["key"] for one in prompts]
        if len(set(keys)) != len(keys) or not isinstance(found["settings"], dict):
            raise ValueError("a prompt stands in it twice, or it has no settings")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} is no result of an evaluation with per-prompt counts ({error!r}): write one "
            "with dflash eval --json FILE"
        ) from error
    return found
