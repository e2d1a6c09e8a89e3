"""What a file of answers was generated with, kept beside it, so that two runs never mix in one."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dflash_pipeline.configs.errors import UsageError


def settings_path(out: str) -> Path:
    """Where the settings of the answers in `out` stand."""
    return Path(f"{out}.logs") / "settings.json"


def recorded(path: Path) -> dict[str, Any] | None:
    """The settings in a file; None if there is none."""
    if not path.is_file():
        return None
    try:
        found = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}): remove it and its answers") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} is damaged (no JSON object): remove it and its answers")
    return found


def claim(out: str, settings: Mapping[str, object]) -> None:
    """Write the settings of a new file of answers, or compare them with an old one's.

    Raises UsageError naming each difference.
    """
    path = settings_path(out)
    found = recorded(path)
    has_answers = Path(out).is_file() and Path(out).stat().st_size > 0
    if found is None and has_answers:
        raise UsageError(
            f"{out} exists, but not what it was generated with ({path}): use another --out"
        )
    if found is None or not has_answers:
        path.parent.mkdir(parents=True, exist_ok=True)
        written = path.with_name(f"{path.name}.{os.getpid()}")
        written.write_text(json.dumps(dict(settings), indent=1, sort_keys=True) + "\n")
        written.replace(path)
        return
    wanted = json.loads(json.dumps(dict(settings)))
    different = [
        f"{name}: {found.get(name)!r}, now {wanted.get(name)!r}"
        for name in sorted(set(found) | set(wanted))
        if found.get(name) != wanted.get(name)
    ]
    if different:
        raise UsageError(
            f"{out} was generated with other settings: {'; '.join(different)}. Use another --out"
        )
