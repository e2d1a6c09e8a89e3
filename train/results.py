"""What `dflash eval --json` wrote, read back. Loads no torch: the command line asks as well."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

PLAIN, TRAINED, UNTRAINED, LOOKUP = "plain", "trained", "untrained", "lookup"
"""What an evaluation sets beside one another, by name in its results."""


def read_results(path: Path) -> dict[str, Any]:
    """What `--json` wrote. ValueError when it is something else."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        prompts = found["per_prompt"][TRAINED]
        keys = [one["key"] for one in prompts]
        if len(set(keys)) != len(keys) or not isinstance(found["settings"], dict):
            raise ValueError("a prompt stands in it twice, or it has no settings")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} is no result of an evaluation with per-prompt counts ({error!r}): write one "
            "with dflash eval --json FILE"
        ) from error
    return dict(found)
