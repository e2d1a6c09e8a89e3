"""What a file of answers was generated with, kept beside it, so that two runs never mix in one.

Loads neither torch nor transformers: the command line asks before anything else does.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dflash_pipeline.capture.arguments import template_arguments_text
from dflash_pipeline.configs.disk import write_whole
from dflash_pipeline.configs.errors import UsageError
from dflash_pipeline.configs.jsonfile import read_object
from dflash_pipeline.configs.schema import GenerateConfig, Run


def settings_path(out: str) -> Path:
    """Where the settings of the answers in `out` stand."""
    return Path(f"{out}.logs") / "settings.json"


def recorded(path: Path) -> dict[str, Any] | None:
    """The settings in a file; None if there is none."""
    if not path.is_file():
        return None
    try:
        return read_object(path)
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}): remove it and its answers") from error


def sampling(config: GenerateConfig) -> dict[str, object]:
    """The settings that an answer depends on."""
    names = ("temperature", "top_p", "top_k", "max_new_tokens", "seed")
    return {name: getattr(config, name) for name in names}


def told_settings(run: Run) -> dict[str, object]:
    """What answers depend on besides prompts and target."""
    return sampling(run.generate) | {
        "samples": run.generate.samples,
        "template_args": template_arguments_text(run.target),
        "max_len": run.data.max_len,
        "overlong": run.data.overlong,
    }


def check_generated(files: Sequence[str], wanted: Mapping[str, object]) -> None:
    """Raise UsageError when data files hold answers of another tokenizer or template."""
    for file in files:
        found = recorded(settings_path(file))
        for name, value in wanted.items():
            if found is not None and found.get(name, value) != value:
                raise UsageError(
                    f"{file} was generated with {name} {found[name]!r}, this run has {value!r}: "
                    "capture with the target and template arguments of generate"
                )


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
        text = json.dumps(dict(settings), indent=1, sort_keys=True) + "\n"
        write_whole(path, text.encode())
        return
    _check_same(out, found, settings, sorted(set(found) | set(settings)))


def check_told(out: str, settings: Mapping[str, object]) -> None:
    """Raise UsageError where answers that are there were made with others of these settings."""
    found = recorded(settings_path(out))
    if found is not None and Path(out).is_file() and Path(out).stat().st_size > 0:
        _check_same(out, found, settings, sorted(settings))


def _check_same(
    out: str, found: Mapping[str, Any], settings: Mapping[str, object], names: Sequence[str]
) -> None:
    wanted = json.loads(json.dumps(dict(settings)))
    different = [
        f"{name}: {found.get(name)!r}, now {wanted.get(name)!r}"
        for name in names
        if found.get(name) != wanted.get(name)
    ]
    if different:
        raise UsageError(
            f"{out} was generated with other settings: {'; '.join(different)}. Use another --out"
        )
