"""What the command line finds out about a training run or a drafter before it launches anything.

Everything here is told again by the stage itself, with all it knows; this spares a person the wait
for its imports. Where something cannot be read, that is the stage's to say.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

from dflash_pipeline.configs import torchrun
from dflash_pipeline.configs.errors import UsageError
from dflash_pipeline.configs.inputs import check_checkpoint
from dflash_pipeline.configs.jsonfile import read_object
from dflash_pipeline.configs.load import RUN_FILE
from dflash_pipeline.configs.mounts import root_of, split
from dflash_pipeline.configs.schema import Run
from dflash_pipeline.configs.shares import parse_stores
from dflash_pipeline.store import glance
from dflash_pipeline.store.stripes import check_named, missing_mounts
from dflash_pipeline.train.layoutname import layout_name
from dflash_pipeline.train.record import check_free, check_same
from dflash_pipeline.train.remembered import (
    check_rendering,
    checkpoint_directory,
    remembered,
    rendering,
)
from dflash_pipeline.train.results import check_comparable, read_results
from dflash_pipeline.train.selection import kept_samples, none_held_out
from dflash_pipeline.train.shape import drafter_shape


def check_runs(runs: Sequence[Run]) -> None:
    """UsageError where a run drops a domain or a sample that none of its stores has, begins with a
    drafter that is not there, wants one of another shape than its store allows or names other
    mounts than its store's, or where its directory holds a run that is at work, has other settings
    or is of other stores."""
    for run in runs:
        try:
            _check_run(run)
        except UsageError as error:
            if len(runs) == 1:
                raise
            # of a sweep: each has a folder of its name
            raise UsageError(f"variant {Path(run.train.out).name}: {error}") from None


def _check_run(run: Run) -> None:
    _check_mounts(run)
    _check_shape(run)
    if run.train.init_from:
        check_checkpoint(run.train.init_from, "--init-from")
        check_is_drafter(run.train.init_from)
    if run.train.drop_domains or run.train.drop_samples:
        _check_drops(run)
    if (Path(run.train.out) / RUN_FILE).is_file():
        _check_continued(run)


def _check_mounts(run: Run) -> None:
    for path in _paths(run):
        found = glance.root(path)
        if found is not None:
            directory, layout = root_of(path), found[2]
            try:
                check_named(directory, layout, split(path)[1:])
            except ValueError as error:
                raise UsageError(str(error)) from None
            if missing := missing_mounts(directory, layout):
                raise UsageError("; ".join(missing))


def _check_shape(run: Run) -> None:
    about, config = glance.root(_paths(run)[0]), glance.target_config(_paths(run)[0])
    if about is None or config is None:
        return
    try:
        drafter_shape(run.drafter, config, about[1], about[3].mask_token_id)
    except ValueError as error:
        raise UsageError(str(error)) from None
    except (KeyError, TypeError):
        return


def _check_drops(run: Run) -> None:
    stores = [glance.opened(path) for path in _paths(run)]
    tables = [store.table for store in stores if store is not None]
    if len(tables) == len(stores):
        kept_samples(tables, run.train)


def _check_continued(run: Run) -> None:
    if not torchrun.is_rank():
        # one of the ranks that were started with this one may be at work already
        with contextlib.suppress(OSError):
            check_free(Path(run.train.out))
    found = [glance.root(path) for path in _paths(run)]
    # a store that is not calibrated yet has no whole identity
    roots = [one[0] for one in found if one is not None and one[1].is_calibrated]
    check_same(Path(run.train.out), run, roots if len(roots) == len(found) else None)


def check_is_drafter(drafter: str) -> None:
    """UsageError for a run without a checkpoint, a store or another directory without a drafter,
    and for one of another kind of model, as a target. What cannot be read is the stage's to
    refuse."""
    try:
        directory = checkpoint_directory(Path(drafter))
        config = read_object(directory / "config.json")
    except UsageError:
        raise
    except (OSError, ValueError):
        return
    try:
        layout_name(config)
    except ValueError as error:
        raise UsageError(f"{directory} is not a drafter: {error}") from None
    except (TypeError, AttributeError, KeyError):
        return


def check_drafter(run: Run, drafter: str, template_args: str) -> None:
    """UsageError where a drafter is none or another kind of model, was trained on conversations
    that were rendered otherwise, or shall replay a store without a held-out sample; of a file,
    where it holds no results.

    drafter: empty: none is named. template_args: what this line passes to the chat template.
    """
    if not drafter:
        return
    if Path(drafter).is_file():
        _check_results(run, Path(drafter), is_measured_here=False)
        return
    check_is_drafter(drafter)
    try:
        directory = checkpoint_directory(Path(drafter))
        trained_on = remembered(directory)
    except (OSError, ValueError):
        return
    if run.eval.prompts:
        told = {"template_args": template_args}
        check_rendering(directory, trained_on, told, "this command")
    elif run.store.path and (store := glance.opened(run.store.path)) is not None:
        check_rendering(directory, trained_on, rendering(store.spec), f"store {run.store.path}")
        if not glance.has_held_out(store):
            raise UsageError(none_held_out(store))


def check_pair(run: Run, pair: Sequence[str]) -> None:
    """UsageError where one of the two is a file of results, and what this line would measure of the
    other cannot be compared with it."""
    files = [Path(one) for one in pair if Path(one).is_file()]
    if len(files) == 1:
        _check_results(run, files[0], is_measured_here=True)


def _check_results(run: Run, path: Path, is_measured_here: bool) -> None:
    try:
        found = read_results(path)
        if is_measured_here:
            check_comparable(run, path, found)
    except ValueError as error:
        raise UsageError(str(error)) from None


def _paths(run: Run) -> list[str]:
    return [one.path for one in parse_stores(run.train.stores or (run.store.path,))]
