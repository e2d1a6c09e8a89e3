"""The last line of a command: what to run next, ready to be typed, or how to go on after a stop.

A line is found when the command is done: what comes next may depend on what it left behind.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from pathlib import Path

import click

from dflash_pipeline.configs import recorded
from dflash_pipeline.configs.errors import UsageError
from dflash_pipeline.configs.inputs import is_free_for_run
from dflash_pipeline.configs.launch import Killed
from dflash_pipeline.configs.load import is_file_in_use, load
from dflash_pipeline.configs.mounts import root_of
from dflash_pipeline.configs.options import SchemaOption, config_of, does_read, given, sets_of
from dflash_pipeline.configs.schema import CE_ALONE, PACKAGED, LossConfig, Run, TargetConfig

Following = str | Callable[[], str]


def end(code: int, following: Following, again: str = "") -> int:
    """Say what to run next, or after a signal, also one that ended a worker alone, how to go on;
    the exit code as it came."""
    if code == 0:
        click.echo(f"next: {following if isinstance(following, str) else following()}")
    elif code >= 128 and again:
        click.echo(f"stopped; to go on: {again}", err=True)
    elif isinstance(code, Killed) and again:
        click.echo(f"to go on: {again}", err=True)
    return code


def words() -> list[str]:
    """Those of this line."""
    return ["dflash", *sys.argv[1:]]


def this_line() -> str:
    """As it was typed."""
    return shlex.join(words())


def resuming(out: str) -> str:
    """The line that goes on with the training run, or the sweep, of this one."""
    again = words()
    # one that was stopped before it began has left its logs alone, and is begun anew
    has_begun = any(one.name != "logs" for one in Path(out).glob("*"))
    if has_begun and "--resume" not in again:
        again = [*again, "--resume"]
    return shlex.join(again if "--out" in again else [*again, "--out", out])


def free_name(name: str, suffix: str = "") -> str:
    """`name` and `suffix`, with a number between them where something stands there already."""
    names = (
        f"{name}{suffix}" if number == 1 else f"{name}-{number}{suffix}" for number in count(1)
    )
    return next(one for one in names if not os.path.lexists(one))


def line(
    context: click.Context,
    command: click.Command,
    told: Mapping[str, object],
    arguments: Sequence[str] = (),
) -> str:
    """The line of another command of the same run, as it can be typed; `arguments` come first.

    It says what `told` has (schema key -> value; None: nothing), what the options of this line set
    where the other command has an option for it, this line's --config, and of its --set what the
    other command reads.
    """
    values = {**given(context), **told}
    return _written(command, values, config_of(context), sets_of(context), arguments)


def capturing_answers(
    context: click.Context, command: click.Command, run: Run, told: Mapping[str, object]
) -> str:
    """`line` of the capture of what `run` has generated.

    A packaged target needs what the preset of its name says: the preset is named in its place, or
    beside a file that is in use, which the preset would replace, the target's settings are said.
    """
    name, sets = run.target.id, sets_of(context)
    values, config = {**given(context), **told}, config_of(context)
    if name in PACKAGED and not config and not run.target.layer_ids:
        if is_file_in_use():
            target, unset = load(name, (), {}).target, TargetConfig()
            sets += (f"target.layer_ids={','.join(map(str, target.layer_ids))}",)
            if run.target.mask_token_id == unset.mask_token_id != target.mask_token_id:
                sets += (f"target.mask_token_id={target.mask_token_id}",)
        else:
            values, config = {**values, "target.id": None}, name
    return _written(command, values, config, sets)


def _written(
    command: click.Command,
    values: Mapping[str, object],
    config: str,
    sets: Sequence[str],
    arguments: Sequence[str] = (),
) -> str:
    found = ["dflash", str(command.name), *arguments]
    values = {**values, "train.out": values.get("train.out") or _other_directory(config, sets)}
    for parameter in command.params:
        if isinstance(parameter, SchemaOption):
            found += parameter.words(values.get(parameter.schema_key))
    found += ["--config", config] if config else []
    for text in sets:
        # a key that it does not read would only be in the way
        if does_read(command, text.partition("=")[0].strip()):
            found += ["--set", text]
    return shlex.join(found)


def _other_directory(config: str, sets: Sequence[str]) -> str | None:
    """For a new run, in place of the configured directory where that has one already; else None."""
    try:
        out = load(config, sets, {}).train.out
    except UsageError:
        # of a file that the command which asks does not need
        return None
    return None if not out or is_free_for_run(out) else free_name(str(Path(out)))


def training_line(store: str, captured: Mapping[str, object]) -> str:
    """The line that trains on a store, with the preset of the target of a recorded capture."""
    config = recorded.config_of(captured)
    out = _other_directory(config, ())
    found = ["dflash", "train", "--store", store, *(["--out", out] if out else [])]
    line = shlex.join([*found, *(["--config", config] if config else [])])
    try:
        loss = load(config, (), {}).loss
    except UsageError:
        # of a file that the command which asks does not need
        return line
    rows = captured.get("store")
    return for_rows(line, rows.get("last_mode") if isinstance(rows, dict) else "", loss)


def for_rows(line: str, last_mode: object, loss: LossConfig) -> str:
    """A line that trains with `loss`, or with cross-entropy where the store lacks what it needs."""
    if last_mode != "none" or not loss.needs_last:
        return line
    return f"{line} {CE_ALONE}"


def training_on_open(store: str, captured: Mapping[str, object]) -> str:
    """The same for a rolling store that is being captured: each sample is there once."""
    return f"{training_line(store, captured)} --epochs 1"


ONLY_BY_RESUMING = (
    "and a new one would miss the released shards: go on with one that used them (its dflash train "
    "line with --resume), or run capture again with a larger --quota"
)
"""What helps a rolling store that has released shards and is followed by no run any longer."""


def capturing_again(command: click.Command, store: str, captured: Mapping[str, object]) -> str:
    """Once more the capture that made a store, out of what the store records of it."""
    keys = {one.schema_key for one in command.params if isinstance(one, SchemaOption)}
    try:
        again = recorded.retold(captured, keys)
    except UsageError:
        return f"the dflash capture line that made {store}, once more"
    mounts = str(again.told.get("store.path", ""))
    # the record names it as it was typed, perhaps elsewhere
    is_whole = "," in store or "," not in mounts or root_of(mounts) != root_of(store)
    told = {**again.told, "store.path": store if is_whole else mounts}
    return _written(command, told, again.config, again.sets)


def training_on_rolling(store: str, usual: str, num_released: int, is_sealed: bool) -> str:
    """The line that trains on a store whose shards are released once they were used."""
    if num_released:
        # a new run would be refused: it could not see all samples
        return f"dflash status {shlex.quote(str(root_of(store)))}"
    return usual if is_sealed else f"{usual} --epochs 1"
