"""A TOML file, a preset, `--set a.b=c` and the options on the line become one frozen `Run`.

The nearer to the line wins: option, `--set`, file, preset, the schema's default. Relative paths
in a file are relative to the directory the command runs in.
"""

from __future__ import annotations

import difflib
import functools
import json
import math
import os
import tomllib
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from dflash_pipeline.configs.errors import UsageError
from dflash_pipeline.configs.schema import Run

DEFAULT_FILE = "dflash.toml"
CONFIG_VARIABLE = "DFLASH_CONFIG"
RUN_FILE = "run.json"
"""In a run directory: the resolved run that it was begun with."""

Sections = dict[str, dict[str, object]]


def load(
    config: str,
    sets: Sequence[str],
    options: Mapping[str, object],
    above: tuple[str, Mapping[str, object]] | None = None,
) -> Run:
    """The run that is asked for, or UsageError naming the key and where it stands.

    config: a file, a preset's name, or "" for $DFLASH_CONFIG, else ./dflash.toml where there is
    one. sets: `section.key=value`, value as TOML or plain text. options: `section.key` -> value
    given on the line; None: not given. above: where they stand, and sections over all of these.
    """
    values: Sections = {}
    for origin, layer in _layers(config):
        _merge(values, layer, origin)
    for text in sets:
        key, equals, value = text.partition("=")
        if not equals:
            raise UsageError(f"--set {text}: write section.key=value")
        section, name = _known(key.strip(), "--set")
        kind = _types(section)[name]
        values.setdefault(section, {})[name] = _checked(
            _from_text(value.strip(), kind), kind, f"--set {section}.{name}"
        )
    for key, option in options.items():
        if option is not None:
            section, name = _known(key, "the command line")
            values.setdefault(section, {})[name] = _checked(option, _types(section)[name], key)
    if above is None:
        return _build(values)
    origin, sections = above
    _merge(values, sections, origin)
    try:
        return _build(values)
    except UsageError as error:
        raise UsageError(f"{origin}: {error}") from None


def from_dict(value: Mapping[str, object]) -> Run:
    """The inverse of `to_dict`, also after a round trip through JSON."""
    values: Sections = {}
    _merge(values, value, "the recorded run")
    return _build(values)


def to_dict(run: Run) -> Sections:
    """Sections of plain values, fit for JSON."""
    sections: Sections = json.loads(json.dumps(asdict(run)))
    return sections


def to_toml(run: Run) -> str:
    """The resolved run as a file that `load` reads back to the same run."""
    lines: list[str] = []
    for section, values in to_dict(run).items():
        lines.append(f"[{section}]")
        # a JSON scalar or list of scalars is written the same in TOML
        lines += [f"{name} = {_toml(value)}" for name, value in values.items()]
        lines.append("")
    return "\n".join(lines)


def differences(first: Run, second: Run, sections: Sequence[str]) -> list[str]:
    """Each value of the named sections that is not the same: `drafter.block_size: 16, now 8`."""
    one, two = to_dict(first), to_dict(second)
    return [
        f"{section}.{name}: {value!r}, now {two[section][name]!r}"
        for section in sections
        for name, value in one[section].items()
        if value != two[section][name]
    ]


def is_file_in_use() -> bool:
    """Whether a line without --config takes settings from a file or a preset."""
    return bool(os.environ.get(CONFIG_VARIABLE)) or Path(DEFAULT_FILE).is_file()


def preset_names() -> list[str]:
    """Every preset that comes with the package."""
    folder = resources.files("dflash_pipeline.configs")
    return sorted(one.name[:-5] for one in folder.iterdir() if one.name.endswith(".toml"))


def _layers(config: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(where it stands, its sections), the weakest first."""
    config = config or os.environ.get(CONFIG_VARIABLE, "")
    if not config:
        if not Path(DEFAULT_FILE).is_file():
            return
        config = DEFAULT_FILE
    if config in preset_names() and not Path(config).is_file():
        yield f"preset {config}", _preset(config)
        return
    path = Path(config)
    if path.is_dir():
        raise UsageError(f"--config {config} is a directory: name a TOML file or a preset")
    if not path.is_file():
        raise UsageError(f"no file and no preset {config}{_presets(config)}")
    sections = parse_file(config)
    preset = sections.pop("preset", "")
    if preset:
        if preset not in preset_names():
            raise UsageError(f"{config}: no preset {preset!r}{_presets(str(preset))}")
        yield f"preset {preset}", _preset(str(preset))
    yield config, sections


def _preset(name: str) -> dict[str, Any]:
    file = resources.files("dflash_pipeline.configs") / f"{name}.toml"
    return _parse(file.read_text(encoding="utf-8"), f"preset {name}")


def parse_file(path: str) -> dict[str, Any]:
    """The tables of a TOML file. UsageError where it cannot be read or is none."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {path}: {error}") from None
    return _parse(text, path)


def _parse(text: str, origin: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{origin} is not TOML: {error}") from None


def _merge(values: Sections, layer: Mapping[str, object], origin: str) -> None:
    for section, entries in layer.items():
        if section not in _sections():
            what = f"section [{section}]" if isinstance(entries, Mapping) else f"key {section}"
            raise UsageError(f"{origin}: unknown {what}{_near(section, list(_sections()))}")
        if not isinstance(entries, Mapping):
            raise UsageError(f"{origin}: {section} is a section, write [{section}] above its keys")
        for key, value in entries.items():
            _known(f"{section}.{key}", origin)
            kind = _types(section)[key]
            place = f"{origin}: {section}.{key}"
            values.setdefault(section, {})[key] = _checked(value, kind, place)


def _build(values: Sections) -> Run:
    try:
        sections = {name: kind(**values.get(name, {})) for name, kind in _sections().items()}
    except UsageError:
        raise
    except ValueError as error:
        raise UsageError(str(error)) from None
    return Run(**sections)


@functools.cache
def _sections() -> dict[str, Any]:
    return typing.get_type_hints(Run)


@functools.cache
def _types(section: str) -> dict[str, Any]:
    return typing.get_type_hints(_sections()[section])


def all_keys() -> list[str]:
    """Every `section.key`, in the schema's order."""
    return [f"{name}.{one.name}" for name, kind in _sections().items() for one in fields(kind)]


def _known(key: str, origin: str) -> tuple[str, str]:
    if key not in all_keys():
        raise UsageError(f"{origin}: unknown key {key}{_near(key, all_keys())}")
    section, _, name = key.partition(".")
    return section, name


def _near(word: str, names: Sequence[str]) -> str:
    """`; did you mean ...?`, or nothing where no name is near."""
    tail = word.rpartition(".")[2]
    # the right key under the wrong section, or without one, is nearer than any misspelling
    found = [name for name in names if "." in name and name.partition(".")[2] == tail]
    found = found or difflib.get_close_matches(word, names, n=1, cutoff=0.6)
    return f"; did you mean {found[0]}?" if found else ""


def _presets(word: str) -> str:
    """What follows a name that no preset has: the one that is near, and all of them."""
    near, names = _near(word, preset_names()), ", ".join(preset_names())
    return f"{near} Presets: {names}" if near else f"; presets: {names}"


def _from_text(text: str, kind: Any) -> object:
    """The value of `--set`: text where text is wanted, else TOML, else a list by commas."""
    if kind is str or typing.get_origin(kind) is Literal:
        return text[1:-1] if len(text) > 1 and text[0] == text[-1] in "\"'" else text
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        pass
    if typing.get_origin(kind) is tuple:
        item = typing.get_args(kind)[0]
        return [_from_text(one.strip(), item) for one in text.split(",") if one.strip()]
    return text


def _checked(value: object, kind: Any, place: str) -> object:
    """The value as the schema's type, or UsageError saying what is expected."""
    origin = typing.get_origin(kind)
    if origin is Literal:
        allowed = typing.get_args(kind)
        if value not in allowed or isinstance(value, bool) != isinstance(allowed[0], bool):
            listed = ", ".join(repr(one) for one in allowed)
            raise UsageError(f"{place} must be one of {listed}, got {value!r}")
        return value
    if origin is tuple:
        item = typing.get_args(kind)[0]
        items = [value] if isinstance(value, item) and not isinstance(value, bool) else value
        if not isinstance(items, (list, tuple)):
            raise UsageError(f"{place} must be a list of {item.__name__}, got {value!r}")
        return tuple(_checked(one, item, f"{place}[{i}]") for i, one in enumerate(items))
    assert isinstance(kind, type), f"the schema holds a type that is not read here: {kind}"
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
        # a float, which would be shorter, cannot hold each of them
        raise UsageError(f"{place} is too large a number: it has {len(str(abs(value)))} digits")
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, float) and not math.isfinite(value):
        raise UsageError(f"{place} must be a finite number, got {value}")
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        wanted = "true or false" if kind is bool else kind.__name__
        raise UsageError(f"{place} must be {wanted}, got {value!r}")
    return value


def _toml(value: object) -> str:
    # json writes 1e-08 and 1e22 as TOML reads them; `_checked` lets no other kind of number in
    return json.dumps(value, ensure_ascii=False)
