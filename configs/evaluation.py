"""The ways of `dflash eval`: decoding or replay, a server's counters, two compared, the whole path.

Which one a line asks for, whether all that it names is there, and the stages that it takes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from dflash_pipeline.configs import inputs
from dflash_pipeline.configs.errors import UsageError
from dflash_pipeline.configs.inputs import need
from dflash_pipeline.configs.jsonfile import read_object
from dflash_pipeline.configs.options import PLACED, TEMPLATE, refuse_unheeded, setter
from dflash_pipeline.configs.schema import Run
from dflash_pipeline.configs.scratch import scratch
from dflash_pipeline.configs.stage import ONE_CPU, logs_near, one_device, run_stage, scratch_logs

# the one place where the target's side meets the drafter's
DECODE_AND_SCORE = "dflash_pipeline.cli:decode_and_score"
# of a check where --limit does not say
CHECK_PROMPTS = 300
# keys of what evaluations write: of drafters, of a server's counters, of two compared
_RESULTS = ({"mode", "settings", "arms"}, {"mode", "server"}, {"a", "b", "settings"})
_PNG = b"\x89PNG"
_RENDERING = ("--max-len", "--overlong", *(flag for flag, _ in TEMPLATE))


def check_heeded(
    context: click.Context, run: Run, compared: tuple[str, str] | None, check_path: bool
) -> None:
    """UsageError where the line gives options that its way of evaluating would leave aside."""
    replayed = ("--as-stored", "--batch-size", "--gpus-per-target", *_RENDERING, "--target")
    if compared:
        why = "--compare measures both drafters alike and draws nothing: leave it out"
        refuse_unheeded(context, ("--drafter", "--endpoint", "--plot"), why)
        if all(Path(one).is_file() for one in compared):
            measured = ("--prompts", "--store", "--limit", "--max-new-tokens", "--temperature")
            why = "--compare of two files measures nothing: leave it out, or name drafters"
            refuse_unheeded(context, (*measured, *replayed, *PLACED), why)
            return
    elif check_path:
        why = "--check makes a store of its own, replays and decodes it greedily: leave it out"
        refuse_unheeded(context, ("--store", "--as-stored", "--temperature", "--plot"), why)
        return
    elif run.eval.endpoint:
        why = (
            "the server (--endpoint, eval.endpoint) runs target and drafter, nothing is computed "
            "here: leave it out"
        )
        flags = ("--store", "--as-stored", "--batch-size", "--max-len", "--overlong", "--plot")
        refuse_unheeded(context, (*flags, *PLACED), why)
        return
    if not run.eval.prompts:
        why = "a replay takes samples and target from the store: leave it out, or give --prompts"
        refuse_unheeded(context, replayed, why)
    elif not run.eval.as_stored:
        why = (
            "prompts (--prompts, eval.prompts) are decoded without a store: give --as-stored to "
            "round as it does, or --set eval.prompts=[] to replay it"
        )
        refuse_unheeded(context, ("--store",), why)


def check(run: Run) -> None:
    """UsageError unless everything that an evaluation names is there."""
    inputs.check_checkpoint(run.eval.drafter, "--drafter")
    if run.eval.prompts:
        inputs.check_target(need(run.target.id, "--target MODEL", "target.id"))
        inputs.check_data(run.eval.prompts)
    elif run.store.path:
        inputs.check_store(run.store.path)
    else:
        raise UsageError("eval needs --prompts to decode, or --store to replay held-out samples")
    _check_outputs(run)


def _check_outputs(run: Run, read: Sequence[str] = ()) -> None:
    """UsageError where what is written cannot be, or would take the place of what is no result of
    an earlier evaluation, of a file of `read`, or of each other."""
    results, figure = run.eval.json, run.eval.plot
    named, drawn = setter("--json", "eval.json"), setter("--plot", "eval.plot")
    if results:
        inputs.check_out_file(results, named)
        if Path(results).resolve() in {Path(one).resolve() for one in read}:
            raise UsageError(
                f"{named} {results} is read by this line: name another file with --json"
            )
        if not _may_be_replaced(Path(results), is_result):
            raise UsageError(
                f"{named} {results} holds something else than results of dflash eval, which would "
                "be lost: name another file with --json"
            )
    if figure:
        inputs.check_out_file(figure, drawn)
        if results and Path(figure).resolve() == Path(results).resolve():
            raise UsageError(
                f"{drawn} {figure} is the file of --json: name another one with --plot"
            )
        if not _may_be_replaced(Path(figure), _is_figure):
            raise UsageError(
                f"{drawn} {figure} holds something else than a PNG figure, which would be lost: "
                "name another file with --plot"
            )


def _may_be_replaced(path: Path, is_ours: Callable[[Path], bool]) -> bool:
    """Whether there is nothing, or what such a line wrote; what is no plain file keeps nothing."""
    try:
        return not path.is_file() or path.stat().st_size == 0 or is_ours(path)
    except (OSError, ValueError):
        return False


def is_result(path: Path) -> bool:
    """Whether a JSON file is what some way of evaluating wrote. OSError or ValueError where it is
    no JSON object."""
    found = read_object(path)
    return any(names <= found.keys() for names in _RESULTS)


def _is_figure(path: Path) -> bool:
    with path.open("rb") as stream:
        return stream.read(len(_PNG)) == _PNG


def measure(run: Run, gpus: str, share: bool) -> int:
    """One drafter, by decoding or by replay; the exit code."""
    check(run)
    with logs_near(Path(run.eval.drafter)) as logs:
        return _decode_and_score(run, gpus, share, logs, passing=False)


def _decode_and_score(run: Run, gpus: str, share: bool, logs: str, passing: bool) -> int:
    # a replay needs no target
    count = run.target.num_gpus if run.eval.prompts else 1
    devices = one_device(gpus, share, count)
    extra = {"passing": passing}
    return run_stage(DECODE_AND_SCORE, run, devices, "eval", logs, extra, share, count)


def ask_server(run: Run) -> int:
    """Acceptance as a server counts it; no drafter and no device is needed here."""
    need(run.eval.prompts, "--prompts FILE", "eval.prompts")
    inputs.check_data(run.eval.prompts)
    _check_outputs(run)
    with scratch_logs("eval") as logs:
        return run_stage("dflash_pipeline.capture.served:main", run, ONE_CPU, "eval", logs, {})


def compare(run: Run, pair: tuple[str, str], gpus: str, share: bool) -> int:
    """Two results, or the drafters that they are made of first."""
    _check_outputs(run, pair)
    with scratch_logs("compare") as logs:
        files, todo = list(pair), dict[int, Run]()
        for number, one in enumerate(pair):
            if Path(one).is_file():
                continue
            files[number] = f"{logs}/{'ab'[number]}.json"
            changed = replace(run.eval, drafter=one, json=files[number], plot="")
            todo[number] = replace(run, eval=changed)
            check(todo[number])
        for one_run in todo.values():
            if code := _decode_and_score(one_run, gpus, share, logs, passing=True):
                return code
        extra = {"files": files, "names": list(pair)}
        return run_stage("dflash_pipeline.train.compare:main", run, ONE_CPU, "compare", logs, extra)


def check_path(run: Run, gpus: str, share: bool) -> int:
    """`--check`: all stages on a few prompts, in a directory that is removed afterwards.

    Logs are not in it: those of a failure stay where its line says, until the next check.
    """
    need(run.eval.drafter, "--drafter CHECKPOINT", "eval.drafter")
    count = run.target.num_gpus
    devices = one_device(gpus, share, count)
    inputs.check_target(need(run.target.id, "--target MODEL", "target.id"))
    need(run.eval.prompts, "--prompts FILE", "eval.prompts")
    inputs.check_data(run.eval.prompts)
    # here and not in the temporary directory: a store of hundreds of prompts is gigabytes
    with scratch_logs("check") as logs, scratch("trial", Path()) as path:
        folder, described = str(path), path / "drafter.json"
        entry, told = "dflash_pipeline.train.trust:describe", {"out": str(described)}
        if code := run_stage(entry, run, ONE_CPU, "check", logs, told):
            return code
        drafter = read_object(described)
        # what any of its stages is told beside the run
        told_all = {
            "kind": devices.kind,
            "num_workers": 1,
            "only_count": False,
            "passing": True,
        }
        for entry, changed in trial(run, folder, drafter):
            if code := run_stage(entry, changed, devices, "check", logs, told_all, share, count):
                return code
        extra = {name: f"{folder}/{name}.json" for name in ("replayed", "decoded")}
        extra["block_size"] = drafter["block_size"]
        return run_stage("dflash_pipeline.train.trust:judge", run, ONE_CPU, "check", logs, extra)


def trial(run: Run, folder: str, drafter: Mapping[str, Any]) -> list[tuple[str, Run]]:
    """The stages of a check, in order: answers of the target, store, replay, decoding."""
    answers = f"{folder}/answers.jsonl"
    layer_ids, mask_token_id = tuple(drafter["layer_ids"]), drafter["mask_token_id"]
    run = replace(
        run,
        target=replace(run.target, layer_ids=layer_ids, mask_token_id=mask_token_id),
        # of the store that the configuration is about, not of this one
        capture=replace(run.capture, quota="", num_consumers=1, calibration_from=""),
        data=replace(run.data, files=run.eval.prompts, limit=run.eval.limit or CHECK_PROMPTS),
        generate=replace(
            run.generate,
            out=answers,
            endpoints=(),
            samples=1,
            temperature=0.0,
            max_new_tokens=run.eval.max_new_tokens,
        ),
        eval=replace(run.eval, drafter=drafter["path"], limit=0, plot="", temperature=0.0),
    )
    stored = replace(
        run,
        data=replace(run.data, files=(answers,), limit=0, heldout=1.0),
        store=replace(run.store, path=f"{folder}/store"),
    )
    replayed = replace(run.eval, prompts=(), json=f"{folder}/replayed.json")
    decoded = replace(run.eval, prompts=(answers,), json=f"{folder}/decoded.json", as_stored=True)
    return [
        ("dflash_pipeline.capture.generate:main", run),
        ("dflash_pipeline.capture.planning:plan_and_capture", stored),
        (DECODE_AND_SCORE, replace(stored, eval=replayed)),
        (DECODE_AND_SCORE, replace(stored, eval=decoded)),
    ]
