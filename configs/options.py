"""Options and arguments of the commands; what they mean and their defaults the schema says."""

from __future__ import annotations

import typing
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

import click
from click.core import ParameterSource

from dflash_pipeline.configs.docs import field_docs
from dflash_pipeline.configs.errors import UsageError
from dflash_pipeline.configs.load import load, preset_names
from dflash_pipeline.configs.schema import Run

Function = TypeVar("Function", bound=Callable[..., Any])

# what is kept of a line until the body resolves it: what its options set in the run, and the rest
_GIVEN, _CONFIG, _SETS = (f"dflash_pipeline.{name}" for name in ("given", "config", "sets"))


class Command(click.Command):
    """A command whose --help also says what its arguments may be.

    reads: sections (`loss`) and keys (`store.path`) of the schema that decide what it does.
    """

    def __init__(self, *arguments: Any, reads: Sequence[str] = (), **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.reads = tuple(reads)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The arguments above the options."""
        told = [one.record for one in self.params if isinstance(one, Argument)]
        if told:
            with formatter.section("Arguments"):
                formatter.write_dl(told)
        super().format_options(ctx, formatter)


class Commands(click.Group):
    """All of them."""

    command_class = Command


def does_read(command: click.Command, key: str) -> bool:
    """Whether `section.key` of the schema has a meaning for a command."""
    assert isinstance(command, Command)
    return key in command.reads or key.partition(".")[0] in command.reads


class Argument(click.Argument):
    """An argument that says what it may be."""

    def __init__(self, *declarations: Any, metavar: str, about: str, **keywords: Any) -> None:
        super().__init__(*declarations, metavar=metavar, **keywords)
        # not `help`: only some versions of click have that, and show it
        self.record = metavar, about

    def type_cast_value(self, ctx: click.Context, value: Any) -> Any:
        """Refuse an empty word, as of a variable that is not set: as a path it is the working
        directory."""
        words = value if isinstance(value, tuple) else (value,)
        if self.required and "" in words:
            raise UsageError(f"{self.record[0]} is empty; it is: {self.record[1]}")
        return super().type_cast_value(ctx, value)


def argument(
    name: str, metavar: str, about: str, **keywords: Any
) -> Callable[[Function], Function]:
    """An argument of a command, shown as `metavar`; about: what it may be."""
    return click.argument(name, cls=Argument, metavar=metavar, about=about, **keywords)


class SchemaOption(click.Option):
    """An option that stands for one field of the schema; `turns`: a flag that sets it to this."""

    def __init__(
        self, *declarations: Any, schema_key: str, turns: bool | None, **keywords: Any
    ) -> None:
        super().__init__(*declarations, **keywords)
        self.schema_key, self.turns = schema_key, turns

    def words(self, value: object) -> list[str]:
        """What says `value` on a line; nothing for None, or where a flag cannot say it."""
        if self.turns is not None or value is None:
            return [self.opts[0]] if value is not None and value == self.turns else []
        several = value if isinstance(value, tuple) else (value,)
        return [word for one in several for word in (self.opts[0], str(one))]


def resolve(context: click.Context) -> Run:
    """The run of this line: its options over `--set`, over the file, the preset, the schema."""
    return load(config_of(context), sets_of(context), given(context))


def given(context: click.Context) -> dict[str, object]:
    """`section.key` -> value, of the line's own options."""
    found: dict[str, object] = context.meta.get(_GIVEN, {})
    return found


def give(context: click.Context, key: str, value: object) -> None:
    """As if an option of the line had set the schema's field `key`."""
    context.meta.setdefault(_GIVEN, {})[key] = value


def refuse_unheeded(context: click.Context, flags: Sequence[str], why: str) -> None:
    """UsageError where the line gives options that would change nothing.

    why: what would leave them aside, and what to do, after their names.
    """
    typed = [
        parameter.opts[0]
        for parameter in context.command.params
        if parameter.opts[0] in flags
        and context.get_parameter_source(str(parameter.name)) is ParameterSource.COMMANDLINE
    ]
    if typed:
        raise UsageError(f"{', '.join(typed)}: {why}")


def setter(flag: str, key: str) -> str:
    """What gave `key` its value, as an error names it in front of that: the option of the line at
    hand, else the key of --set, a file or a preset."""
    context = click.get_current_context(silent=True)
    return flag if context is None or key in given(context) else f"{key} ="


def config_of(context: click.Context) -> str:
    """The file or preset that the line names; empty: none."""
    return str(context.meta.get(_CONFIG, ""))


def sets_of(context: click.Context) -> tuple[str, ...]:
    """The line's `--set`, each `section.key=value`."""
    found: tuple[str, ...] = context.meta.get(_SETS, ())
    return found


def _keep_config(context: click.Context, _parameter: click.Parameter, value: str) -> None:
    context.meta[_CONFIG] = value


def _keep_sets(context: click.Context, _parameter: click.Parameter, value: tuple[str, ...]) -> None:
    context.meta[_SETS] = value


_CONFIG_METAVAR = "FILE|PRESET"
# what a text stands for, where its field's type does not say it
_STANDS_FOR = {
    "capture.calibration_from": "STORE",
    "capture.quota": "SIZE",
    "data.files": "FILE",
    "eval.drafter": "DRAFTER",
    "eval.endpoint": "URL",
    "eval.json": "FILE",
    "eval.plot": "FILE",
    "eval.prompts": "FILE",
    "generate.endpoints": "URL",
    "generate.out": "FILE",
    "store.path": "DIR",
    "target.id": "MODEL",
    "target.system_prompt": "TEXT",
    "target.template_args": "KEY=VALUE",
    "train.drop_domains": "NAME",
    "train.drop_samples": "KEY|@FILE",
    "train.init_from": "DRAFTER",
    "train.out": "DIR",
    "train.stores": "DIR[:SHARE]",
}


def option(
    flag: str, key: str, *, turns: bool | None = None, more: str = ""
) -> Callable[[Function], Function]:
    """An option whose meaning, type and default are the schema's field `key`.

    turns: the flag takes no value and sets the field to this. more: what is so of the command at
    hand alone.
    """
    doc = field_docs()[key]
    is_list = typing.get_origin(doc.kind) is tuple
    kind: Any = typing.get_args(doc.kind)[0] if is_list else doc.kind
    if typing.get_origin(kind) is Literal:
        kind = click.Choice(typing.get_args(kind))
    # a flag that turns a field off is told what off means
    text = doc.text.partition("; off: ")[2].capitalize() if turns is False else doc.text
    text += " Repeatable." if is_list else ""
    text += f" {more}" if more else ""
    if turns is None and doc.default not in ("", ()):
        text += f"  [default: {doc.default}]"
    elif turns is None and "empty:" not in text.lower():
        text += "  [default: the configuration file's]"

    # of two the parser would keep the last and drop the other in silence
    is_one_store = key == "store.path"

    def keep(context: click.Context, _parameter: click.Parameter, value: Any) -> None:
        if value in (None, ()):
            return
        if is_one_store:
            value = _one_store(context, flag, value)
        give(context, key, turns if turns is not None else value)

    declared: dict[str, Any] = {"multiple": is_list or is_one_store, "type": kind}
    if kind is str:
        declared["metavar"] = _STANDS_FOR[key]
    if turns is not None:
        declared = {"is_flag": True, "flag_value": True, "default": None, "type": bool}
    return click.option(
        flag,
        cls=SchemaOption,
        schema_key=key,
        turns=turns,
        help=text,
        expose_value=False,
        callback=keep,
        **declared,
    )


def _one_store(context: click.Context, flag: str, named: Sequence[str]) -> str:
    if len(named) > 1:
        typed = " ".join(f"{flag} {one}" for one in named)
        raise UsageError(
            f"{typed}: {context.info_name} takes one store, name it once; one that lies on several "
            f"mounts is written {flag} A,B"
        )
    return named[0]


def options(*pairs: tuple[str, str]) -> Callable[[Function], Function]:
    """Several of them, in the order of the help text."""

    def decorate(function: Function) -> Function:
        for flag, key in reversed(pairs):
            function = option(flag, key)(function)
        return function

    return decorate


def configured(function: Function) -> Function:
    """--config and --set."""
    return click.option(
        "--config",
        default="",
        metavar=_CONFIG_METAVAR,
        expose_value=False,
        callback=_keep_config,
        help=_config_help(),
    )(sets("Any value. Repeatable.")(function))


def config_argument(function: Function) -> Function:
    """CONFIG in the place of --config."""
    return argument(
        "config",
        f"[{_CONFIG_METAVAR}]",
        _config_help(),
        default="",
        expose_value=False,
        callback=_keep_config,
    )(function)


def _config_help() -> str:
    return (
        "A TOML file or a preset; empty: $DFLASH_CONFIG, else ./dflash.toml where there is one. "
        f"Presets: {', '.join(preset_names())}."
    )


def sets(text: str) -> Callable[[Function], Function]:
    """--set, with its help."""
    return click.option(
        "--set",
        multiple=True,
        metavar="SECTION.KEY=VALUE",
        expose_value=False,
        callback=_keep_sets,
        help=text,
    )


def placed(function: Function) -> Function:
    """--gpus and --share-gpu."""
    function = click.option(
        "--share-gpu", is_flag=True, help="Use a GPU even if another process holds memory on it."
    )(function)
    return click.option(
        "--gpus",
        default="",
        metavar="0-4,6|cpu|cpu:N",
        help="Devices, one process each; numbers index the visible GPUs. Empty: every visible "
        "GPU, else one CPU process.",
    )(function)


STORE_ARGUMENT = argument(
    "path",
    "STORE",
    "The directory of a store; of one over several mounts its own, which holds all but the rows, "
    "or all of them separated by commas.",
)
PLACED = ("--gpus", "--share-gpu", "--gpus-per-target")
DATA = (
    ("--data", "data.files"),
    ("--max-len", "data.max_len"),
    ("--overlong", "data.overlong"),
    ("--limit", "data.limit"),
)
TEMPLATE = (
    ("--thinking", "target.thinking"),
    ("--template-arg", "target.template_args"),
    ("--system-prompt", "target.system_prompt"),
)
