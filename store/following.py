"""What to run next by what a store holds: the lines of `configs/following.py`, and which of them.

Asked when a command is done: a capture, a check or a training run may have changed the store.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

import click

from dflash_pipeline.configs import following
from dflash_pipeline.configs.following import Following
from dflash_pipeline.configs.schema import Run
from dflash_pipeline.store import glance

# how conversations are rendered, which a drafter must be measured with as it was trained
_RENDERED = ("id", "thinking", "template_args", "system_prompt")


def training_line(store: str, captured: str) -> str:
    """The line that trains on a store, with the preset of the target that `captured` is of."""
    if not glance.may_be_trained_on(store):
        return _evaluating(store)
    return following.training_line(store, glance.recorded_run(captured))


def training_on(store: str, usual: Following) -> str:
    """The line that trains on a store: for most `usual`."""
    if not glance.may_be_trained_on(store):
        return _evaluating(store)
    line = usual if isinstance(usual, str) else usual()
    rolling = glance.rolling(store)
    if rolling is None:
        return line
    return following.training_on_rolling(store, line, rolling.num_released, rolling.is_sealed)


def after_repair(capture: click.Command, store: str, deep: bool) -> str:
    """Once more the capture that made a store, where there is something to redo.

    deep: every row was read. Where not, nothing says yet that it may be trained on.
    """
    captured = glance.recorded_run(store)
    if not glance.is_open(store):
        if not deep:
            return f"dflash verify --deep {shlex.quote(store)}"
        return training_line(store, store)
    return following.capturing_again(capture, store, captured)


def after_check(store: str) -> str:
    """The line that trains on a store whose rows were found good."""
    return training_on(store, lambda: training_line(store, store))


def finishing(capture: click.Command, store: str) -> str:
    """Once more the capture that made a store, where shards are missing and nobody captures them;
    empty: of any other store."""
    if not glance.is_abandoned(store):
        return ""
    captured = glance.recorded_run(store)
    if not captured:
        return f"the dflash capture line that made {store}, once more"
    return following.capturing_again(capture, store, captured)


def measuring(
    context: click.Context,
    commands: Mapping[str, click.Command],
    run: Run,
    out: str,
    stores: Sequence[str],
) -> str:
    """The line that measures what a training run on `stores` has made in `out`.

    With prompts by decoding, else by replay of a store with held-out samples. Where none has any
    there is nothing to replay: that is said, and the line exports. commands: by their names.
    """
    told: dict[str, object] = {"eval.drafter": out}
    if run.eval.prompts:
        return following.line(context, commands["eval"], told)
    replayed = next(filter(glance.may_be_replayed, stores), None)
    if replayed is None:
        told |= {"eval.prompts": ("FILE",), **_rendered(run, stores[0])}
        decoding = following.line(context, commands["eval"], told)
        click.echo(
            f"no held-out sample in {', '.join(stores)} to replay; with a FILE of prompts that "
            f"were not trained on: {decoding}"
        )
        arguments = (out, "--out", following.free_name("drafter"))
        return following.line(context, commands["export"], {}, arguments)
    if run.train.drop_domains:
        dropped = ", ".join(run.train.drop_domains)
        click.echo(f"held-out samples that the next line replays include those of {dropped}")
    if run.store.path != replayed:
        told["store.path"] = replayed
    return following.line(context, commands["eval"], told)


def _evaluating(store: str) -> str:
    """What is left of a store whose samples are all held out: to be looked at, and evaluated on."""
    quoted = shlex.quote(store)
    click.echo(
        f"every sample of {store} is held out, none is trained on; with a DRAFTER: "
        f"dflash eval --drafter DRAFTER --store {quoted}"
    )
    return f"dflash inspect {quoted}"


def _rendered(run: Run, store: str) -> dict[str, object]:
    """What a line must say of the target to render prompts as the store's conversations were."""
    target = glance.recorded_run(store).get("target")
    captured = target if isinstance(target, dict) else {}
    differing = {
        f"target.{name}": captured[name]
        for name in _RENDERED
        if name in captured and captured[name] != getattr(run.target, name)
    }
    return {key: tuple(one) if isinstance(one, list) else one for key, one in differing.items()}
