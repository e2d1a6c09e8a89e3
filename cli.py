"""The commands. A body resolves one `Run`, launches its stage, and says what to run next.

Nothing heavy is imported here: the stages load in their own processes.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import count
from pathlib import Path
from typing import Any, NoReturn, TextIO

import click

from dflash_pipeline.capture import sources
from dflash_pipeline.configs import (
    child,
    counts,
    fleet,
    gpus,
    inputs,
    measuring,
    prediction,
    recorded,
    refusal,
    status,
    torchrun,
)
from dflash_pipeline.configs.errors import UsageError
from dflash_pipeline.configs.gpus import Devices, listed
from dflash_pipeline.configs.launch import grouped, launch
from dflash_pipeline.configs.load import RUN_FILE, to_toml
from dflash_pipeline.configs.mounts import root_of, split
from dflash_pipeline.configs.options import (
    DATA,
    TEMPLATE,
    SchemaOption,
    configured,
    give,
    given,
    line,
    option,
    options,
    placed,
    resolve,
)
from dflash_pipeline.configs.place import Place
from dflash_pipeline.configs.prediction import Predictor
from dflash_pipeline.configs.schema import Run
from dflash_pipeline.configs.scratch import scratch
from dflash_pipeline.configs.screen import duration, progress_line
from dflash_pipeline.configs.shares import parse_stores
from dflash_pipeline.configs.status import Status
from dflash_pipeline.configs.sweep import Variant, read_variants

ONE_CPU = Devices("cpu", (0,))
# how long a trainer waits for a capture that was started at the same time to be seen at work
APPEAR_S = 5.0
# of a check where --limit does not say
CHECK_PROMPTS = 300


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run one command. Exit codes: 0 done, 1 the work failed, 2 wrong usage, 128 + n signal n."""
    try:
        code = dflash.main(arguments, prog_name="dflash", standalone_mode=False)
    except click.ClickException as error:
        context = getattr(error, "ctx", None)
        command = context.command_path if context else "dflash"
        _fail(f"{error.format_message().rstrip('.')} (see {command} --help)", 2)
    except UsageError as error:
        _fail(child.one_line(error), 2)
    except SystemExit:
        # click's end where nobody reads the output any longer, as behind `| head`
        code = child.BROKEN_PIPE if child.is_unread(sys.stdout) else 1
    except (ValueError, OSError) as error:
        _fail(child.one_line(error), 1)
    except (KeyboardInterrupt, click.Abort):
        _fail("stopped", 130)
    sys.exit(code or 0)


@click.group(
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    invoke_without_command=True,
)
@click.version_option(package_name="dflash-pipeline")
@click.pass_context
def dflash(context: click.Context) -> None:
    """Train DFlash drafters offline: answers, hidden states in a store, a drafter, its score.

    The usual order: generate, capture, train, eval, export. `demo` does all of it in minutes.
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


@dflash.command()
@options(("--target", "target.id"), *DATA, ("--out", "generate.out"))
@options(("--samples", "generate.samples"), ("--temperature", "generate.temperature"))
@options(("--max-new-tokens", "generate.max_new_tokens"), ("--endpoint", "generate.endpoints"))
@options(*TEMPLATE)
@option("--gpus-per-target", "target.num_gpus")
@placed
@configured
@click.pass_context
def generate(
    context: click.Context, gpus: str, share_gpu: bool, config: str, sets: tuple[str, ...]
) -> int:
    """Let the target answer prompts: conversations in, JSONL out. Run again to resume."""
    run = resolve(context, config, sets)
    _need(run.data.files, "--data FILE", "data.files")
    if not run.generate.endpoints:
        _need(run.target.id, "--target MODEL", "target.id")
    out = _need(run.generate.out, "--out FILE", "generate.out")
    inputs.check_target(run.target.id)
    sources.check(run.data.files)
    inputs.check_out_file(out, "--out")
    # where servers answer, one process asks and no GPU is needed
    devices = ONE_CPU if run.generate.endpoints else _devices(gpus, share_gpu)
    entry = "dflash_pipeline.capture.generate:main"
    per_target = 1 if run.generate.endpoints else run.target.num_gpus
    code = _stage(entry, run, devices, "generate", f"{out}.logs", {}, share_gpu, per_target)
    if code == 0 and Path(out).is_file() and Path(out).stat().st_size == 0:
        raise ValueError(
            f"no prompt of {', '.join(run.data.files)} was answered, {out} is empty: the lines "
            "above say why each was left out"
        )
    # servers alone do not say which target to capture
    told: dict[str, object] = {} if run.target.id else {"target.id": "MODEL"}
    told |= {"data.files": (out,), "data.limit": None}
    if not run.store.path:
        told["store.path"] = _free_name(f"{Path(out).stem}.store")
    return _end(code, line(context, capture, told, config, sets), _this_line())


@dflash.command()
@options(("--target", "target.id"), *DATA, ("--store", "store.path"))
@options(("--hidden-mode", "store.hidden_mode"), ("--last-mode", "store.last_mode"))
@option("--quota", "capture.quota")
@option("--calibration-from", "capture.calibration_from")
@option("--force", "capture.force", turns=True)
@option("--price", "capture.price")
@options(*TEMPLATE)
@option("--gpus-per-target", "target.num_gpus")
@click.option("--plan", is_flag=True, help="Count samples, tokens and bytes, and stop.")
@placed
@configured
@click.pass_context
def capture(
    context: click.Context,
    gpus: str,
    share_gpu: bool,
    plan: bool,
    config: str,
    sets: tuple[str, ...],
) -> int:
    """Store the target's hidden states over the data. Run again to resume."""
    run = resolve(context, config, sets)
    _need(run.target.id, "--target MODEL", "target.id")
    _need(run.data.files, "--data FILE", "data.files")
    store, *further = map(str, map(Path, split(_need(run.store.path, "--store DIR", "store.path"))))
    inputs.check_target(run.target.id)
    sources.check(run.data.files)
    inputs.check_store_place(store)
    for mount in further:
        inputs.check_further_mount(mount)
    if run.capture.calibration_from:
        _check_store(run.capture.calibration_from)
    devices = _devices(gpus, share_gpu or plan)
    per_target = run.target.num_gpus
    num_workers = len(grouped(devices, per_target))
    extra = {"kind": devices.kind, "num_workers": num_workers, "only_count": plan}
    entry = "dflash_pipeline.capture.planning:main"
    if plan:
        # counting leaves nothing behind
        with _scratch_logs("plan") as logs:
            code = _stage(entry, run, ONE_CPU, "plan", logs, extra, True)
        return _end(code, shlex.join(one for one in _words() if one != "--plan"), _this_line())
    logs, is_alone = f"{store}.logs", num_workers == 1
    planned = refusal.before(logs, "plan")
    if is_alone:
        # the one process plans as well: how an earlier plan ended says nothing any longer
        status.forget_ended(logs, "plan")
    code = 0 if is_alone else _stage(entry, run, ONE_CPU, "plan", logs, extra, True)
    if code == 0:
        click.echo(f"capture: {store} on {devices}")
        module, function = ("planning", "plan_and_capture") if is_alone else ("worker", "main")
        entry = f"dflash_pipeline.capture.{module}:{function}"
        code = _stage(entry, run, devices, "capture", logs, extra, share_gpu, per_target)
        if code == 2:
            planned.restore()
        workers = [one for one in status.find_statuses(Path(store)) if one.stage == "capture"]
        for text in counts.closing_lines(workers, run.capture.price) if code == 0 else []:
            click.echo(text)
    whole = ",".join((store, *further))
    following = line(context, train, {"train.stores": (whole,)}, config, sets)
    return _end(code, _training_on(whole, following), _this_line())


@dflash.command()
@options(("--target", "target.id"), *DATA, ("--store", "store.path"))
@options(("--hidden-mode", "store.hidden_mode"), ("--last-mode", "store.last_mode"))
@options(("--epochs", "train.epochs"), ("--max-steps", "train.max_steps"))
@option("--price", "capture.price")
@options(*TEMPLATE)
@option("--gpus-per-target", "target.num_gpus")
@click.option("--capture-gpus", default="", metavar="0-4", help="Side by side: those that capture.")
@click.option("--train-gpus", default="", metavar="5-7", help="Side by side: those that train.")
@click.option(
    "--measurement",
    default="",
    metavar="FILE",
    help="Keep what was measured here; a file that is there is used instead of measuring.",
)
@placed
@click.option("--json", "as_json", is_flag=True, help="Print JSON alone.")
@configured
@click.pass_context
def plan(
    context: click.Context,
    capture_gpus: str,
    train_gpus: str,
    measurement: str,
    gpus: str,
    share_gpu: bool,
    as_json: bool,
    config: str,
    sets: tuple[str, ...],
) -> int:
    """Measure for up to a minute on one device, and predict bytes, hours and cost of each stage.

    For capture and training side by side on a split of the devices, and one after the other on
    all of them.
    """
    run = resolve(context, config, sets)
    _need(run.target.id, "--target MODEL", "target.id")
    _need(run.data.files, "--data FILE", "data.files")
    store, *_ = split(_need(run.store.path, "--store DIR", "store.path"))
    inputs.check_target(run.target.id)
    sources.check(run.data.files)
    inputs.check_store_place(store)
    devices, sides = _planned_devices(gpus, capture_gpus, train_gpus)
    out = sys.stderr if as_json else sys.stdout
    try:
        found = _measured(run, devices, Path(store), measurement, share_gpu, out)
    except measuring.MeasuringFailed as failed:
        return _end(failed.code, "", _this_line())
    price = run.capture.price
    ways = [found.one_after_the_other(devices.ids, price)]
    if len(devices.ids) > 1:
        side = found.side_by_side(*sides, price) if sides else found.best_split(devices.ids, price)
        ways += [side] if side else []
    told = found.predicted(ways)
    best = told.ways[0]
    stores: dict[str, object] = {"train.stores": (run.store.path,)}
    lines = [
        f"{line(context, command, stores, config, sets)} --gpus {listed(devices, ids)}"
        for command, ids in ((capture, best.capture_ids), (train, best.train_ids))
    ]
    if as_json:
        click.echo(json.dumps({**asdict(told), "commands": lines}, indent=1))
        return 0
    for text in prediction.lines(told, run.train.epochs, price):
        click.echo(text)
    how = "in two terminals" if best.name == "side by side" else "the second after the first"
    click.echo(f"the better way is {best.name}; its commands, {how}:")
    click.echo(f"  {lines[0]}\n  {lines[1]}")
    return _end(0, lines[0], _this_line())


def _measured(
    run: Run, devices: Devices, store: Path, measurement: str, share: bool, lines: TextIO
) -> Predictor:
    """Measure on the first of the devices, beside the store, where its disk is."""
    first = Devices(devices.kind, devices.ids[: run.target.num_gpus])
    gpus.check(first, share)
    parent = next(folder for folder in store.absolute().parents if folder.is_dir())
    with (
        _scratch_logs("plan") as logs,
        scratch("plan", parent) as folder,
        gpus.reserved(first, "plan", share),
    ):
        return measuring.predictor(run, first, folder, logs, measurement, lines)


def _planned_devices(
    text: str, capture_text: str, train_text: str
) -> tuple[Devices, tuple[tuple[int, ...], tuple[int, ...]] | None]:
    """All devices of a plan, and their split where the line names one."""
    if not capture_text and not train_text:
        return gpus.parse(text), None
    if text or not (capture_text and train_text):
        raise UsageError("--capture-gpus and --train-gpus go together, and without --gpus")
    first, second = gpus.parse(capture_text), gpus.parse(train_text)
    if first.kind == "cpu" == second.kind and not gpus.gpus_are_cpu():
        # CPU workers have no numbers of their own
        later = tuple(len(first.ids) + number for number in second.ids)
        second = Devices("cpu", later)
    if first.kind != second.kind or set(first.ids) & set(second.ids):
        raise UsageError(
            f"--capture-gpus {capture_text} and --train-gpus {train_text}: name different GPUs"
        )
    everything = Devices(first.kind, tuple(sorted((*first.ids, *second.ids))))
    return everything, (first.ids, second.ids)


@dflash.command()
@options(("--store", "train.stores"), ("--out", "train.out"), ("--init-from", "train.init_from"))
@options(("--drop-domain", "train.drop_domains"), ("--drop-sample", "train.drop_samples"))
@options(("--epochs", "train.epochs"), ("--max-steps", "train.max_steps"))
@option("--no-follow", "train.follow", turns=False)
@click.option("--resume", is_flag=True, help="Go on with the run in --out.")
@click.option(
    "--sweep",
    default="",
    metavar="FILE",
    help="TOML file with a table for each variant, [name] above the settings it changes "
    "(drafter.num_layers = 3): each is trained into OUT/name on one device of its own.",
)
@placed
@configured
@click.pass_context
def train(
    context: click.Context,
    gpus: str,
    share_gpu: bool,
    resume: bool,
    sweep: str,
    config: str,
    sets: tuple[str, ...],
) -> int:
    """Train a drafter from one store or several; follows a store that is still being captured."""
    run = resolve(context, config, sets)
    if run.train.drop_samples:
        # the run's record names each of them, so that a run that goes on drops the same
        give(context, "train.drop_samples", inputs.listed(run.train.drop_samples, "--drop-sample"))
        run = resolve(context, config, sets)
    stores = run.train.stores or (run.store.path,)
    _need(stores[0], "--store DIR", "train.stores")
    paths = [root_of(one.path) for one in parse_stores(stores)]
    for path in paths:
        _await_plan(path, run.train.follow)
    if not run.train.out:
        if resume or torchrun.is_rank():
            why = "--resume" if resume else "under torchrun"
            raise UsageError(f"{why}: name the run directory with --out DIR")
        give(context, "train.out", f"runs/{paths[0].name}-{time.strftime('%Y%m%d-%H%M%S')}")
        run = resolve(context, config, sets)
    out = run.train.out
    inputs.check_run_directory(out)
    if resume and not Path(out).is_dir():
        raise UsageError(f"--resume: there is no run directory {out}")
    is_run = (Path(out) / RUN_FILE).is_file()
    if resume and not sweep and not is_run:
        raise UsageError(
            f"{out} holds no {RUN_FILE}: there is no run to resume; leave --resume out, or "
            "name the --sweep that it is of"
        )
    if resume and sweep and is_run:
        raise UsageError(f"{out} is a run, no sweep: leave --sweep out, or name another --out")
    if not resume and Path(out).exists() and not _holds_logs_alone(Path(out)):
        raise UsageError(f"{out} is not empty: go on with it by --resume, or name another --out")
    if sweep:
        variants = read_variants(sweep, config, sets, given(context))
        devices = _devices(gpus, share_gpu)
        best, signal = _train_variants(variants, out, devices, share_gpu, resume)
        code = 128 + signal if signal else 0
        following = _evaluating(context, run, best, paths[0], config, sets)
        return _end(code, following, _resuming(out))
    entry, logs, extra = "dflash_pipeline.train.worker:main", f"{out}/logs", {"resume": resume}
    if torchrun.is_rank():
        return torchrun.run_rank(entry, run, gpus, "train", logs, extra)
    devices = _devices(gpus, share_gpu)
    click.echo(f"train: {', '.join(stores)} -> {out} on {devices}")
    code = _stage(entry, run, devices, "train", logs, extra, share_gpu)
    return _end(code, _evaluating(context, run, out, paths[0], config, sets), _resuming(out))


def _evaluating(
    context: click.Context, run: Run, out: str, store: Path, config: str, sets: tuple[str, ...]
) -> str:
    """The line that measures what this one has trained."""
    told: dict[str, object] = {"eval.drafter": out}
    if not run.eval.prompts and run.train.drop_domains:
        dropped = ", ".join(run.train.drop_domains)
        click.echo(f"held-out samples that the next line replays include those of {dropped}")
    if not run.eval.prompts and run.store.path != str(store):
        told["store.path"] = str(store)
    return line(context, evaluate, told, config, sets)


def _resuming(out: str) -> str:
    """The line that goes on with this one's run."""
    again = [*_words(), "--resume"] if "--resume" not in _words() else _words()
    return shlex.join(again if "--out" in again else [*again, "--out", out])


def _train_variants(
    variants: Sequence[Variant], out: str, devices: Devices, share: bool, resume: bool
) -> tuple[str, int]:
    """Train every variant, and say how they ended; the best one's folder, and a signal or 0.

    ValueError names those that failed.
    """
    if torchrun.is_rank():
        raise UsageError("--sweep under torchrun: run the line itself, it starts a process each")
    if resume:
        fleet.check_done(variants)
    Path(out).mkdir(parents=True, exist_ok=True)
    click.echo(f"train: {len(variants)} variants -> {out} on {devices}")
    entry = "dflash_pipeline.train.worker:main"
    with gpus.reserved(devices, "train", share):
        outcomes, signal = fleet.run_variants(entry, variants, devices, Path(out), resume)
    for text in fleet.table(outcomes):
        click.echo(text)
    failed = [one.name for one in outcomes if one.state == "failed"]
    if failed and not signal:
        raise ValueError(
            f"{len(failed)} of {len(outcomes)} variants failed: {', '.join(failed)}; the errors "
            f"are above and in {out}/{fleet.RESULT_FILE}; to go on with them: {_resuming(out)}"
        )
    best = max(outcomes, key=lambda one: one.best_tau or 0.0)
    return f"{out}/{best.name}", signal


@dflash.command("eval")
@options(("--drafter", "eval.drafter"), ("--target", "target.id"), ("--prompts", "eval.prompts"))
@options(("--store", "store.path"), ("--limit", "eval.limit"), ("--max-len", "data.max_len"))
@options(("--overlong", "data.overlong"), ("--max-new-tokens", "eval.max_new_tokens"))
@options(("--temperature", "eval.temperature"), ("--batch-size", "eval.batch_size"))
@option("--endpoint", "eval.endpoint")
@option("--as-stored", "eval.as_stored", turns=True)
@options(("--json", "eval.json"), ("--plot", "eval.plot"))
@click.option(
    "--compare",
    nargs=2,
    metavar="A B",
    help="Compare two drafters on the same prompts, with the interval of the difference: each a "
    "file that --json wrote, or a drafter to evaluate first.",
)
@click.option(
    "--check",
    is_flag=True,
    help="Try the whole path with a drafter of others first: answers, store, gate, replay and "
    "decoding of 300 prompts (--limit: of so many), held against published figures.",
)
@options(*TEMPLATE)
@placed
@configured
@click.pass_context
def evaluate(
    context: click.Context,
    gpus: str,
    share_gpu: bool,
    compare: tuple[str, str] | None,
    check: bool,
    config: str,
    sets: tuple[str, ...],
) -> int:
    """Measure acceptance by decoding with the target, or by replaying a store without it."""
    run = resolve(context, config, sets)
    if compare:
        return _compare(run, compare, gpus, share_gpu)
    if run.eval.endpoint:
        return _ask_server(run)
    drafter = _need(run.eval.drafter, "--drafter CHECKPOINT", "eval.drafter")
    if check:
        return _check_trust(run, _one_device(gpus, share_gpu), share_gpu)
    _check_evaluation(run)
    entry, devices = "dflash_pipeline.cli:decode_and_score", _one_device(gpus, share_gpu)
    with _logs_near(Path(drafter)) as logs:
        code = _stage(entry, run, devices, "eval", logs, {}, share_gpu)
    arguments = (drafter, "--out", _free_name("drafter"))
    following = line(context, export, {"store.path": None}, config, sets, arguments)
    return _end(code, following, _this_line())


def _check_evaluation(run: Run) -> None:
    """Whether everything that an evaluation names is there."""
    drafter = run.eval.drafter
    if not Path(drafter).is_dir():
        raise UsageError(f"--drafter {drafter}: there is no such run, step or checkpoint directory")
    if run.eval.prompts:
        inputs.check_target(_need(run.target.id, "--target MODEL", "target.id"))
        sources.check(run.eval.prompts)
    elif run.store.path:
        _check_store(run.store.path)
    else:
        raise UsageError("eval needs --prompts to decode, or --store to replay held-out samples")
    if run.eval.json:
        inputs.check_out_file(run.eval.json, "--json")
    if run.eval.plot:
        inputs.check_out_file(run.eval.plot, "--plot")


def _check_trust(run: Run, devices: Devices, share: bool) -> int:
    """All stages on a few prompts, in a directory that is removed afterwards."""
    inputs.check_target(_need(run.target.id, "--target MODEL", "target.id"))
    _need(run.eval.prompts, "--prompts FILE", "eval.prompts")
    sources.check(run.eval.prompts)
    # here and not in the temporary directory: a store of hundreds of prompts is gigabytes
    with tempfile.TemporaryDirectory(prefix="dflash-check-", dir=".") as folder:
        logs, described = f"{folder}/logs", Path(folder) / "drafter.json"
        entry, told = "dflash_pipeline.train.trust:describe", {"out": str(described)}
        if code := _stage(entry, run, ONE_CPU, "check", logs, told, True):
            return code
        drafter = json.loads(described.read_text(encoding="utf-8"))
        capturing = {"kind": devices.kind, "num_workers": 1, "only_count": False}
        for entry, changed in trial(run, folder, drafter):
            if code := _stage(entry, changed, devices, "check", logs, capturing, share):
                return code
        extra = {name: f"{folder}/{name}.json" for name in ("replayed", "decoded")}
        extra["block_size"] = drafter["block_size"]
        return _stage("dflash_pipeline.train.trust:judge", run, ONE_CPU, "check", logs, extra, True)


def trial(run: Run, folder: str, drafter: Mapping[str, Any]) -> list[tuple[str, Run]]:
    """The stages of a check, in order: answers of the target, store, replay, decoding."""
    answers = f"{folder}/answers.jsonl"
    layer_ids, mask_token_id = tuple(drafter["layer_ids"]), drafter["mask_token_id"]
    run = replace(
        run,
        target=replace(run.target, layer_ids=layer_ids, mask_token_id=mask_token_id),
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
        ("dflash_pipeline.cli:decode_and_score", replace(stored, eval=replayed)),
        ("dflash_pipeline.cli:decode_and_score", replace(stored, eval=decoded)),
    ]


def _ask_server(run: Run) -> int:
    """Acceptance as a server counts it; no drafter and no device is needed here."""
    _need(run.eval.prompts, "--prompts FILE", "eval.prompts")
    sources.check(run.eval.prompts)
    if run.eval.json:
        inputs.check_out_file(run.eval.json, "--json")
    with _scratch_logs("eval") as logs:
        return _stage("dflash_pipeline.capture.served:main", run, ONE_CPU, "eval", logs, {}, True)


def _compare(run: Run, pair: tuple[str, str], gpus: str, share: bool) -> int:
    """Two results, or the drafters that they are made of first."""
    if run.eval.json:
        inputs.check_out_file(run.eval.json, "--json")
    with _scratch_logs("compare") as logs:
        files, todo = list(pair), dict[int, Run]()
        for number, one in enumerate(pair):
            if Path(one).is_file():
                continue
            files[number] = f"{logs}/{'ab'[number]}.json"
            changed = replace(run.eval, drafter=one, json=files[number], plot="")
            todo[number] = replace(run, eval=changed)
            _check_evaluation(todo[number])
        for one_run in todo.values():
            devices = _one_device(gpus, share)
            entry = "dflash_pipeline.cli:decode_and_score"
            if code := _stage(entry, one_run, devices, "eval", logs, {}, share):
                return code
        extra = {"files": files, "names": list(pair)}
        entry = "dflash_pipeline.train.compare:main"
        return _stage(entry, run, ONE_CPU, "compare", logs, extra, True)


def decode_and_score(run: Run, place: Place, extra: dict[str, object]) -> None:
    """The process of `eval`: the one place where the target's side meets the drafter's."""
    from dflash_pipeline.capture import decoder
    from dflash_pipeline.train import evaluate

    evaluate.main(run, place, extra, open_target=decoder.open_target)


@dflash.command()
@click.argument("checkpoint")
@click.option("--out", required=True, metavar="DIR", help="Directory to write; must be new.")
@click.option(
    "--layout",
    type=click.Choice(["zlab", "speculators"]),
    default="zlab",
    show_default=True,
    help="zlab is read by vLLM, SGLang and Transformers; speculators by vLLM.",
)
@options(("--store", "store.path"), ("--target", "target.id"))
@configured
@click.pass_context
def export(
    context: click.Context,
    checkpoint: str,
    out: str,
    layout: str,
    config: str,
    sets: tuple[str, ...],
) -> int:
    """Write a run's drafter (best, else last), a step, or another checkpoint for a server."""
    run = resolve(context, config, sets)
    if not Path(checkpoint).is_dir():
        raise UsageError(f"{checkpoint}: there is no such run, step or checkpoint directory")
    inputs.check_new_directory(out, "--out")
    if layout == "speculators":
        # it carries the target's embedding and head
        _check_store(_need(run.store.path, "--store DIR", "store.path"))
    extra = {"checkpoint": checkpoint, "out": out, "layout": layout, "store": run.store.path}
    with _scratch_logs("export") as logs:
        # its last lines are the serving commands, which only that process can write
        return _stage(
            "dflash_pipeline.train.export:main", run, ONE_CPU, "export", logs, extra, True
        )


@dflash.command()
@click.argument("path")
@click.option("--sample", default="", metavar="KEY|NUMBER", help="Show this sample whole.")
@click.option("--follow", is_flag=True, help="A line after each change, until the store is sealed.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON alone.")
def inspect(path: str, sample: str, follow: bool, as_json: bool) -> int:
    """Describe a store; never fails on its data."""
    _check_store(path)
    following = f"dflash verify {shlex.quote(path)}"
    if follow:
        extra: dict[str, object] = {"path": path, "json": as_json}
        return _look("dflash_pipeline.store.watch:main", "inspect", extra, following)
    extra = {"path": path, "json": as_json, "sample": sample}
    return _look("dflash_pipeline.store.describe:main", "inspect", extra, following)


@dflash.command()
@click.argument("path")
@click.option("--deep", is_flag=True, help="Read every row and compare every checksum.")
@click.option(
    "--repair", is_flag=True, help="Uncommit damaged shards, so that the same capture redoes them."
)
@click.option(
    "--sample",
    type=click.IntRange(min=1),
    metavar="N",
    help="Compute N samples again with the target and compare them, instead of checking files.",
)
@option("--target", "target.id")
@placed
@click.option("--json", "as_json", is_flag=True, help="Print JSON alone.")
@click.pass_context
def verify(
    context: click.Context,
    path: str,
    deep: bool,
    repair: bool,
    sample: int | None,
    gpus: str,
    share_gpu: bool,
    as_json: bool,
) -> int:
    """Check a store; exit code 1 and a line for each fault where it is not whole."""
    _check_store(path)
    name = shlex.quote(path)
    training = _training_on(path, lambda: _training_line(path, path))
    if sample is not None:
        if deep or repair:
            raise UsageError("--sample computes, --deep and --repair check files: one at a time")
        run = resolve(context, "", ())
        if run.target.id:
            inputs.check_target(run.target.id)
        extra: dict[str, object] = {"path": path, "sample": sample, "json": as_json}
        devices, entry = _one_device(gpus, share_gpu), "dflash_pipeline.capture.recheck:main"
        return _look(entry, "verify", extra, training, run, devices, share_gpu)
    extra = {"path": path, "deep": deep, "json": as_json}
    if repair:
        entry = "dflash_pipeline.store.repair:main"
        return _look(entry, "verify", extra, lambda: _after_repair(context, path))
    following = training if deep else f"dflash verify --deep {name}"
    return _look("dflash_pipeline.store.check:main", "verify", extra, following)


@dflash.command()
@click.argument("out")
@click.argument("stores", nargs=-1, required=True, metavar="STORE STORE...")
@click.option("--fast", is_flag=True, help="Check the stores without reading every row of them.")
def merge(out: str, stores: tuple[str, ...], fast: bool) -> int:
    """Make one store OUT of sealed ones of the same identity; they stay as they are.

    Nothing is decoded: shards become hard links where that is possible, else copies.
    """
    for path in stores:
        _check_store(path)
    if len({Path(path).resolve() for path in stores}) != len(stores):
        raise UsageError(f"{', '.join(stores)}: a store is named twice")
    if len(stores) < 2:
        raise UsageError(f"{stores[0]} alone: name two stores at least that become {out}")
    inputs.check_new_directory(out, "OUT")
    extra = {"out": out, "stores": list(stores), "deep": not fast}
    with _scratch_logs("merge") as logs:
        code = launch("dflash_pipeline.store.merge:main", Run(), ONE_CPU, "merge", logs, extra)
    return _end(code, lambda: _training_line(out, stores[0]), _this_line())


@dflash.command("status")
@click.argument("directory")
@click.option("--json", "as_json", is_flag=True, help="Print JSON alone.")
@click.option(
    "--drop",
    default="",
    metavar="RUN",
    help="Of a store captured with --quota: wait for this training run no longer.",
)
def show_status(directory: str, as_json: bool, drop: str) -> int:
    """Say what the processes of a run, sweep, store or answer file do, or how they ended."""
    if drop:
        return _drop(directory, drop)
    found = status.find_runs(Path(directory).resolve())
    if not found:
        places = ", ".join(map(str, status.places_of(Path(directory).resolve())))
        raise UsageError(f"{directory}: no run has left its status; looked in {places}")
    if as_json:
        listed = [
            {"variant": variant, **asdict(one), "alive": one.is_alive, "rate": one.rate}
            for variant, one in found
        ]
        click.echo(json.dumps(listed, indent=1))
        return 0
    for variant, one in found:
        is_lost = one.state in status.ACTIVE and not one.is_alive
        state = f"dead, was {one.state}" if is_lost else one.state
        age = duration(max(0.0, time.time() - one.time))
        name = f"{variant}/{one.stage}" if variant else one.stage
        click.echo(f"{name}-{one.rank}  {state}  {one.host}:{one.pid}  {age} ago")
        if one.unit:
            click.echo(f"  {progress_line(one.stage, {**asdict(one), 'rate': one.rate})}")
        if one.error or one.text:
            click.echo(f"  {one.error or one.text}")
    for told in _consumers(Path(directory)):
        click.echo(told)
    click.echo(_remedy(Path(directory), [one for _, one in found]))
    return 0


@dflash.command("config")
@click.argument("config", default="", metavar="[FILE|PRESET]")
@click.option("--set", "sets", multiple=True, metavar="SECTION.KEY=VALUE", help="Repeatable.")
@click.pass_context
def show_config(context: click.Context, config: str, sets: tuple[str, ...]) -> int:
    """Print the resolved configuration as TOML, every value named."""
    run = resolve(context, config, sets)
    click.echo(to_toml(run), nl=False)
    needed = {
        "target.id": run.target.id,
        "data.files": run.data.files,
        "store.path": run.store.path,
    }
    missing = [key for key, value in needed.items() if not value]
    following = line(context, capture, {}, config, sets) + " --plan"
    if missing:
        following = f"set {', '.join(missing)} in dflash.toml, then: dflash capture --plan"
    click.echo(f"next: {following}", err=True)
    return 0


@dflash.command()
@click.option(
    "--target",
    type=click.Choice(["toy", "smollm2"]),
    default="toy",
    show_default=True,
    help="toy comes with the package; smollm2 is a real language model of 135 M parameters.",
)
@click.option("--out", default="demo", show_default=True, metavar="DIR", help="Where it is kept.")
@placed
@click.pass_context
def demo(context: click.Context, target: str, out: str, gpus: str, share_gpu: bool) -> int:
    """Do all of it on a small target: answers, store, drafter, acceptance, export."""
    extra = {"target": target, "out": out, "gpus": gpus, "share_gpu": share_gpu}
    run = resolve(context, target, ())
    entry = "dflash_pipeline.capture.demo:main"
    Path(out).mkdir(parents=True, exist_ok=True)
    code = launch(entry, run, ONE_CPU, "demo", f"{out}/logs", extra, sees_gpus=True)
    return _end(code, f"dflash inspect {shlex.quote(out)}/store", _this_line())


def _remedy(directory: Path, found: Sequence[Status]) -> str:
    """The last line of `status`: what to do, if anything."""
    again = "run the same command again (train: with --resume)"
    num_alive = sum(one.is_alive for one in found)
    if any(not one.is_alive and one.state != "done" for one in found):
        return f"once the others have ended, {again}" if num_alive else f"to go on, {again}"
    if num_alive:
        return f"{num_alive} of {len(found)} at work: nothing to do"
    if (directory / "zarr.json").is_file() and _lacks_shards(directory):
        return f"{directory} lacks shards, as after a repair: to go on, run its capture again"
    return "all of them are done"


def _lacks_shards(store: Path) -> bool:
    """Whether a store is not sealed, as it is once all shards are there."""
    # the parts of a store are its own to name
    from dflash_pipeline.store import paths

    return not (store / paths.SEALED_FILE).exists()


def _consumers(directory: Path) -> list[str]:
    """The training runs that a rolling store waits for."""
    if not (directory / "consumers").is_dir():
        return []
    # the numbers of a store are numpy's to read
    from dflash_pipeline.store.consumers import consumer_lines

    return consumer_lines(directory)


def _drop(store: str, name: str) -> int:
    """Forget a training run that a rolling store waits for."""
    _check_store(store)
    extra = {"path": store, "drop": name, "json": False}
    following = f"dflash status {shlex.quote(store)}"
    return _look("dflash_pipeline.store.drop:main", "status", extra, following)


def _check_store(path: str) -> None:
    """What only reads a store needs one; whether it is whole is the stage's to say."""
    if not root_of(path).is_dir():
        raise UsageError(f"there is no store {path}: name the directory that dflash capture wrote")


def _await_plan(store: Path, follow: bool) -> None:
    """A capture that was started a moment ago makes its store when it has read all the data."""
    began, said = time.monotonic(), ""
    while not store.exists():
        found = status.find_statuses(store)
        is_planning = any(one.is_alive for one in found)
        if not follow or not (is_planning or time.monotonic() - began < APPEAR_S):
            raise UsageError(_no_store(store, is_planning, [one.error for one in found]))
        text = f"train: waiting until the capture into {store} has made its plan"
        if not is_planning:
            text = f"train: there is no store {store}, waiting {APPEAR_S:g} s for its capture"
        if text != said:
            click.echo(text)
            said = text
        time.sleep(0.2)


def _no_store(store: Path, is_planning: bool, errors: Sequence[str]) -> str:
    """Why training cannot begin, and what to do."""
    told = f"there is no store {store}"
    if is_planning:
        return f"{told} yet, its capture is still planning: leave --no-follow out to wait for it"
    if error := next(filter(None, errors), ""):
        return f"{told}, its capture failed: {error}; start dflash capture again"
    return f"{told}: write it with dflash capture; train follows it once that has begun"


def _devices(text: str, share: bool) -> Devices:
    devices = gpus.parse(text)
    gpus.check(devices, share)
    return devices


def _one_device(text: str, share: bool) -> Devices:
    devices = gpus.parse(text)
    if not text:
        devices = Devices(devices.kind, devices.ids[:1])
    if len(devices.ids) > 1:
        raise UsageError(f"--gpus {text}: this command runs on one device")
    gpus.check(devices, share)
    return devices


def _stage(
    entry: str,
    run: Run,
    devices: Devices,
    stage: str,
    logs: str,
    extra: Mapping[str, object],
    share: bool,
    per_process: int = 1,
) -> int:
    if devices is ONE_CPU:
        return launch(entry, run, devices, stage, logs, extra)
    with gpus.reserved(devices, stage, share):
        return launch(entry, run, devices, stage, logs, extra, per_process=per_process)


def _look(
    entry: str,
    stage: str,
    extra: Mapping[str, object],
    following: str | Callable[[], str],
    run: Run | None = None,
    devices: Devices = ONE_CPU,
    share: bool = True,
) -> int:
    """A command that only reads a store, which may stand where nobody can write."""
    with _scratch_logs(stage) as logs:
        # with --json stdout is the process's alone; anything said goes to stderr
        lines = sys.stderr if extra["json"] else sys.stdout
        with gpus.reserved(devices, stage, share):
            code = launch(entry, run or Run(), devices, stage, logs, extra, lines)
    if not extra["json"]:
        return _end(code, following, "")
    return code


@contextlib.contextmanager
def _scratch_logs(stage: str) -> Iterator[str]:
    """A log directory that stays only where an error left its traceback, until the next one."""
    with scratch(f"{stage}-logs", is_kept=_has_failed) as folder:
        yield str(folder)


def _has_failed(logs: Path) -> bool:
    return any(one.state == "failed" for one in status.find_statuses(logs))


def _logs_near(checkpoint: Path) -> contextlib.AbstractContextManager[str]:
    """Those of the run that a checkpoint is of; nothing is left beside any other."""
    for folder in (checkpoint, checkpoint.parent):
        if (folder / "logs").is_dir():
            return contextlib.nullcontext(str(folder / "logs"))
    return _scratch_logs("eval")


def _holds_logs_alone(out: Path) -> bool:
    """Only the logs of a start that failed: nothing there is worth a question."""
    return out.is_dir() and all(one.name == "logs" for one in out.iterdir())


def _need(value: Sequence[str], flag: str, key: str) -> str:
    """The value itself, or UsageError naming both places to set it."""
    if not value:
        raise UsageError(f"nothing says what {key} is: give {flag}, or set it in dflash.toml")
    return str(value)


def _words() -> list[str]:
    return ["dflash", *sys.argv[1:]]


def _this_line() -> str:
    return shlex.join(_words())


def _free_name(name: str) -> str:
    """`name`, or with a number where something of that name stands already."""
    names = (name if number == 1 else f"{name}-{number}" for number in count(1))
    return next(one for one in names if not os.path.lexists(one))


def _recorded_run(store: str) -> Mapping[str, object]:
    """The run that captured a store, or the first of those that were merged; empty: unknown."""
    # a store is its own to read
    from dflash_pipeline.store.metadata import read_root

    try:
        found = read_root(root_of(store))[3].run
    except (OSError, ValueError):
        return {}
    merged = found.get("merged")
    return merged[0] if isinstance(merged, list) and merged else found


def _training_line(store: str, captured: str) -> str:
    """The line that trains on a store, with the preset of the target that `captured` is of."""
    config = recorded.config_of(_recorded_run(captured))
    words = ["dflash", "train", "--store", store, *(["--config", config] if config else [])]
    return shlex.join(words)


def _after_repair(context: click.Context, store: str) -> str:
    """Once more the capture that made the store, where there is something to redo."""
    if not _lacks_shards(root_of(store)):
        return _training_line(store, store)
    keys = {one.schema_key for one in capture.params if isinstance(one, SchemaOption)}
    try:
        again = recorded.retold(_recorded_run(store), keys)
    except UsageError:
        return f"the dflash capture line that made {store}, once more"
    mounts = str(again.told.get("store.path", ""))
    # the record names it as it was typed, perhaps elsewhere
    is_whole = "," in store or "," not in mounts or root_of(mounts) != root_of(store)
    told = {**again.told, "store.path": store if is_whole else mounts}
    return line(context, capture, told, again.config, again.sets)


def _training_on(store: str, usual: str | Callable[[], str]) -> Callable[[], str]:
    """The line that trains on a store, known once the command is done: for most stores `usual`."""

    def found() -> str:
        line = usual if isinstance(usual, str) else usual()
        if not (root_of(store) / "consumers").is_dir():
            return line
        # the numbers of a store are numpy's to read
        from dflash_pipeline.store import open_store

        rolling = open_store(store)
        if rolling.num_released:
            # a new run would be refused: it could not see all samples
            return f"dflash status {shlex.quote(str(rolling.path))}"
        return line if rolling.is_sealed else f"{line} --epochs 1"

    return found


def _end(code: int, following: str | Callable[[], str], again: str) -> int:
    """The last line of a command: what to run next, or how to go on after an interruption."""
    if code == 0:
        click.echo(f"next: {following if isinstance(following, str) else following()}")
    elif code >= 128 and again:
        click.echo(f"stopped; to go on: {again}", err=True)
    return code


def _fail(text: str, code: int) -> NoReturn:
    sys.stderr.write(f"error: {text}\n")
    sys.exit(code)


if __name__ == "__main__":
    main()
