"""The commands. A body resolves one `Run`, launches its stage, and says what to run next.

Nothing heavy is imported here: the stages load in their own processes.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

import click

from dflash_pipeline.configs import (
    answering,
    capturing,
    child,
    effects,
    evaluation,
    fleet,
    following,
    foretold,
    inputs,
    measuring,
    overview,
    recorded,
    torchrun,
    training,
)
from dflash_pipeline.configs.arrival import await_store
from dflash_pipeline.configs.docs import field_docs
from dflash_pipeline.configs.errors import UsageError
from dflash_pipeline.configs.following import end, this_line
from dflash_pipeline.configs.gpus import listed
from dflash_pipeline.configs.inputs import need
from dflash_pipeline.configs.launch import launch
from dflash_pipeline.configs.load import load, to_toml
from dflash_pipeline.configs.mounts import root_of
from dflash_pipeline.configs.options import (
    DATA,
    PLACED,
    STORE_ARGUMENT,
    TEMPLATE,
    Commands,
    argument,
    config_argument,
    config_of,
    configured,
    given,
    option,
    options,
    placed,
    refuse_unheeded,
    resolve,
    sets,
    sets_of,
)
from dflash_pipeline.configs.place import Place
from dflash_pipeline.configs.schema import PACKAGED, Run
from dflash_pipeline.configs.sizes import parse_size
from dflash_pipeline.configs.stage import (
    ONE_CPU,
    devices_of,
    look,
    one_device,
    run_stage,
    scratch_logs,
)
from dflash_pipeline.configs.sweep import read_variants

TRAINING = effects.sections()


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
    cls=Commands,
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


@dflash.command(reads=("target", "data", "generate"))
@options(("--target", "target.id"), *DATA, ("--out", "generate.out"))
@options(("--samples", "generate.samples"), ("--temperature", "generate.temperature"))
@options(("--max-new-tokens", "generate.max_new_tokens"), ("--endpoint", "generate.endpoints"))
@options(*TEMPLATE)
@option("--gpus-per-target", "target.num_gpus")
@placed
@configured
@click.pass_context
def generate(context: click.Context, gpus: str, share_gpu: bool) -> int:
    """Let the target answer prompts: conversations in, JSONL out. Run again to resume."""
    from dflash_pipeline.capture import glance

    run = resolve(context)
    out = answering.check(run)
    if run.generate.endpoints:
        why = "servers (--endpoint, generate.endpoints) answer, by their own limits of length"
        flags = (*PLACED, "--max-len", "--overlong")
        refuse_unheeded(context, flags, f"{why}, nothing is computed here: leave it out")
    glance.check_data(run, click.echo)
    glance.check_generate(run)
    code = answering.answer(run, gpus, share_gpu)
    # servers alone do not say which target to capture
    told: dict[str, object] = {} if run.target.id else {"target.id": "MODEL"}
    told |= {"data.files": (out,), "data.limit": None}
    if not run.store.path or glance.is_of_other_data(run.store.path, out):
        told["store.path"] = following.free_name(f"{Path(out).stem}.store")
    return end(code, following.capturing_answers(context, capture, run, told), this_line())


@dflash.command(reads=("target", "data", "store", "capture"))
@options(("--target", "target.id"), *DATA, ("--store", "store.path"))
@options(("--hidden-mode", "store.hidden_mode"), ("--last-mode", "store.last_mode"))
@option("--quota", "capture.quota")
@option("--consumers", "capture.num_consumers")
@option("--calibration-from", "capture.calibration_from")
@option("--force", "capture.force", turns=True)
@option("--price", "capture.price")
@options(*TEMPLATE)
@option("--gpus-per-target", "target.num_gpus")
@click.option("--plan", is_flag=True, help="Count samples, tokens and bytes, and stop.")
@placed
@configured
@click.pass_context
def capture(context: click.Context, gpus: str, share_gpu: bool, plan: bool) -> int:
    """Store the target's hidden states over the data. Run again to resume."""
    from dflash_pipeline.capture import glance
    from dflash_pipeline.store.following import training_on

    run = resolve(context)
    mounts = capturing.check(run)
    glance.check_data(run, click.echo)
    glance.check_capture(run, only_count=plan)
    devices = devices_of(gpus, share_gpu or plan)
    if plan:
        again = shlex.join(one for one in following.words() if one != "--plan")
        return end(capturing.count(run, devices), again, this_line())
    code = capturing.capture(run, mounts[0], devices, share_gpu)
    whole = ",".join(mounts)
    line = following.line(context, train, {"train.stores": (whole,)})
    usual = following.for_rows(line, run.store.last_mode, run.loss)
    return end(code, lambda: training_on(whole, usual), this_line())


@dflash.command(reads=("target", "data", "store", "generate", "capture", *TRAINING))
@options(("--target", "target.id"), *DATA, ("--store", "store.path"))
@options(("--hidden-mode", "store.hidden_mode"), ("--last-mode", "store.last_mode"))
@options(("--drop-domain", "train.drop_domains"), ("--drop-sample", "train.drop_samples"))
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
) -> int:
    """Measure capture and training for seconds on one device; predict bytes, hours and cost.

    For capture and training side by side on a split of the devices, and one after the other on
    all of them.
    """
    from dflash_pipeline.capture import glance
    from dflash_pipeline.store.following import training_on
    from dflash_pipeline.store.glance import is_whole, own_capture

    run = resolve(context)
    run = recorded.as_captured(run, own_capture(run.store.path), given(context))
    store, *_ = capturing.check(run)
    measuring.check_measurement(context, measurement)
    measuring.check_loss(run)
    glance.check_data(run, lambda text: click.echo(text, err=as_json))
    glance.check_capture(run, only_count=True)
    devices, sides = measuring.planned_devices(gpus, capture_gpus, train_gpus)
    out = sys.stderr if as_json else sys.stdout
    try:
        # a measurement that is kept may be used for data that are still to be answered
        with_answers = bool(measurement) or not is_whole(store)
        found = measuring.measured(
            run, devices, Path(store), measurement, share_gpu, out, with_answers
        )
    except measuring.MeasuringFailed as failed:
        return end(failed.code, "", this_line())
    price = run.capture.price
    if is_whole(store):
        told = found.training_alone(sides[1] if sides else devices.ids, price)
    else:
        told = found.both_ways(devices.ids, sides, price)
    best = told.ways[0]
    stores: dict[str, object] = {"train.stores": (run.store.path,)}
    lines = [
        f"{following.line(context, command, stores)} --gpus {listed(devices, ids)}"
        for command, ids in ((capture, best.capture_ids), (train, best.train_ids))
        if ids
    ]
    if not best.capture_ids:
        lines = [training_on(run.store.path, lines[0])]
    if as_json:
        click.echo(foretold.json_text(told, lines))
        return 0
    for text in foretold.lines(told, run.train.epochs, price, parse_size(run.capture.quota)):
        click.echo(text)
    for text in foretold.command_lines(best, lines, store):
        click.echo(text)
    return end(0, lines[0], this_line())


@dflash.command(reads=("store.path", *TRAINING))
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
    "(drafter.num_layers = 3): each is trained into OUT/name on one device, one after another.",
)
@click.option(
    "--per-gpu",
    type=click.IntRange(min=1),
    metavar="N",
    help="With --sweep: so many variants at a time on each device.  [default: 1]",
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
    per_gpu: int | None,
) -> int:
    """Train a drafter from one store or several; follows a store that is still being captured."""
    from dflash_pipeline.store.following import measuring as measuring_line
    from dflash_pipeline.train import glance

    if per_gpu and not sweep:
        raise UsageError("--per-gpu shares a device out among the variants of a --sweep: name one")
    run, stores = training.prepared(context, resume)
    out = run.train.out
    training.check_directory(out, resume, bool(sweep))
    variants = []
    if sweep:
        variants = read_variants(sweep, config_of(context), sets_of(context), given(context))
    if resume:
        fleet.check_done(variants)
    glance.check_runs([one.run for one in variants] or [run])

    def measured(trained: str) -> Callable[[], str]:
        return lambda: measuring_line(context, dflash.commands, run, trained, stores)

    if sweep:
        devices = devices_of(gpus, share_gpu)
        best, signal = fleet.train_variants(variants, out, devices, share_gpu, resume, per_gpu or 1)
        code = 128 + signal if signal else 0
        return end(code, measured(best), following.resuming(out))
    if torchrun.is_rank():
        return training.run_rank(run, gpus, share_gpu, resume)
    code = training.train(run, stores, devices_of(gpus, share_gpu), share_gpu, resume)
    return end(code, measured(out), following.resuming(out))


@dflash.command(
    "eval",
    reads=(
        *("target", "data.max_len", "data.overlong", "data.max_bad_share"),
        *("store.path", "store.hidden_mode", "eval"),
    ),
)
@option("--drafter", "eval.drafter", more="With --check a hub name (owner/name) as well.")
@options(("--target", "target.id"), ("--prompts", "eval.prompts"))
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
    f"decoding of {evaluation.CHECK_PROMPTS} prompts (--limit: of so many), held against published "
    "figures. Needs --target, --drafter and --prompts.",
)
@options(*TEMPLATE)
@option("--gpus-per-target", "target.num_gpus")
@placed
@configured
@click.pass_context
def evaluate(
    context: click.Context, gpus: str, share_gpu: bool, compare: tuple[str, str] | None, check: bool
) -> int:
    """Measure acceptance by decoding with the target, or by replaying a store without it."""
    run = resolve(context)
    if check and (compare or run.eval.endpoint):
        raise UsageError(
            "--check tries the whole path here, with one drafter: leave --compare and --endpoint "
            "(eval.endpoint) out"
        )
    evaluation.check_heeded(context, run, compare, check)
    _look_at_evaluation(run, compare or (run.eval.drafter,))
    if compare:
        return evaluation.compare(run, compare, gpus, share_gpu)
    if run.eval.endpoint:
        return evaluation.ask_server(run)
    drafter = need(run.eval.drafter, "--drafter CHECKPOINT", "eval.drafter")
    if check:
        return evaluation.check_path(run, gpus, share_gpu)
    code = evaluation.measure(run, gpus, share_gpu)
    arguments = (drafter, "--out", following.free_name("drafter"))
    exporting = following.line(context, export, {"store.path": None}, arguments)
    return end(code, exporting, this_line())


def decode_and_score(run: Run, place: Place, extra: dict[str, object]) -> None:
    """The process of `eval`: the one place where the target's side meets the drafter's."""
    from dflash_pipeline.capture import decoder
    from dflash_pipeline.train import evaluate

    evaluate.main(run, place, extra, open_target=decoder.open_target)


@dflash.command(reads=("store.path", "target.id"))
@argument("checkpoint", "CHECKPOINT", field_docs()["eval.drafter"].text)
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
def export(context: click.Context, checkpoint: str, out: str, layout: str) -> int:
    """Write a run's drafter (best, else last), a step, or another checkpoint for a server."""
    run = resolve(context)
    from dflash_pipeline.train import glance

    inputs.check_checkpoint(checkpoint, "")
    glance.check_is_drafter(checkpoint)
    inputs.check_new_directory(out, "--out")
    if layout == "speculators":
        # it carries the target's embedding and head
        if not run.store.path:
            raise UsageError(
                "--layout speculators carries the target's embedding and head, which a store "
                "holds: name one of this target with --store DIR"
            )
        inputs.check_store(run.store.path)
    else:
        why = "the zlab layout holds nothing of the target: leave it out, or --layout speculators"
        refuse_unheeded(context, ("--store",), why)
    extra = {"checkpoint": checkpoint, "out": out, "layout": layout, "store": run.store.path}
    with scratch_logs("export") as logs:
        # its last lines are the serving commands, which only that process can write
        return run_stage(
            "dflash_pipeline.train.export:main", run, ONE_CPU, "export", logs, extra, True
        )


@dflash.command()
@STORE_ARGUMENT
@click.option("--sample", default="", metavar="KEY|NUMBER", help="Show this sample whole.")
@click.option(
    "--follow",
    is_flag=True,
    help="A line after each change, until the store is sealed; waits for one that a capture plans.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON alone.")
def inspect(path: str, sample: str, follow: bool, as_json: bool) -> int:
    """Describe a store; never fails on its data."""
    if follow and sample:
        raise UsageError("--sample shows a sample, --follow the whole store: one at a time")
    if follow:
        # stdout is JSON alone
        await_store(root_of(path), "inspect", True, lambda text: click.echo(text, err=as_json))
    inputs.check_store(path)
    entry, extra = "dflash_pipeline.store.watch:main", dict[str, object](path=path, json=as_json)
    if not follow:
        entry, extra = "dflash_pipeline.store.describe:main", extra | {"sample": sample}
    code = look(entry, "inspect", extra)

    def following_line() -> str:
        from dflash_pipeline.store import following as after

        return after.finishing(capture, path) or f"dflash verify {shlex.quote(path)}"

    return code if as_json else end(code, following_line)


@dflash.command()
@STORE_ARGUMENT
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
@option("--gpus-per-target", "target.num_gpus")
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
    """Check a store; exit code 1 and a line for each fault where it is not whole.

    One that a capture is writing is checked as far as it has come; one that lacks shards while no
    capture is at work is not whole. After --repair the capture that redoes them is the next line.
    """
    inputs.check_store(path)
    extra: dict[str, object] = {"path": path, "json": as_json}
    entry, run, devices = "dflash_pipeline.store.check:main", Run(), ONE_CPU

    def following_line() -> str:
        from dflash_pipeline.store import following as after

        if repair:
            return after.after_repair(capture, path, deep)
        if deep or sample is not None:
            return after.after_check(path)
        return f"dflash verify --deep {shlex.quote(path)}"

    if sample is not None:
        if deep or repair:
            raise UsageError("--sample computes, --deep and --repair check files: one at a time")
        run = resolve(context)
        if run.target.id:
            inputs.check_target(run.target.id)
        entry, extra = "dflash_pipeline.capture.recheck:main", extra | {"sample": sample}
        devices = one_device(gpus, share_gpu, run.target.num_gpus)
    else:
        why = "nothing is computed without --sample N: give it as well, or leave this out"
        refuse_unheeded(context, ("--target", *PLACED), why)
        extra |= {"deep": deep}
    if repair:
        entry = "dflash_pipeline.store.repair:main"
    code = look(entry, "verify", extra, run, devices, share_gpu)
    if code == 0 and not repair:
        from dflash_pipeline.store import following as after

        if again := after.finishing(capture, path):
            # what is there is sound, but `verify && train` must not take it for all
            raise ValueError(
                f"{path} lacks shards or its seal, and no capture is at work; to go on: {again}"
            )
    return code if as_json else end(code, following_line)


@dflash.command()
@argument("out", "OUT", "The directory of the store that is made; must be new.")
@argument(
    "stores",
    "STORE STORE...",
    "Directories of sealed stores, two or more; a sample that stands in two of them is refused.",
    nargs=-1,
    required=True,
)
@click.option("--fast", is_flag=True, help="Check the stores without reading every row of them.")
def merge(out: str, stores: tuple[str, ...], fast: bool) -> int:
    """Make one store OUT of sealed ones of the same identity; they stay as they are.

    Nothing is decoded: shards become hard links where that is possible, else copies.
    """
    from dflash_pipeline.store.following import training_line

    for path in stores:
        inputs.check_store(path)
    if len({Path(path).resolve() for path in stores}) != len(stores):
        raise UsageError(f"{', '.join(stores)}: a store is named twice")
    if len(stores) < 2:
        raise UsageError(f"{stores[0]} alone: name two stores at least that become {out}")
    inputs.check_new_directory(out, "OUT")
    extra = {"out": out, "stores": list(stores), "deep": not fast}
    with scratch_logs("merge") as logs:
        code = launch("dflash_pipeline.store.merge:main", Run(), ONE_CPU, "merge", logs, extra)
    return end(code, lambda: training_line(out, stores[0]), this_line())


@dflash.command("status")
@argument(
    "directory",
    "DIRECTORY",
    "A run directory, the OUT of a sweep, a store, a file that generate writes, or a directory of "
    "logs.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON alone.")
@click.option(
    "--drop",
    default="",
    metavar="RUN",
    help="Of a store captured with --quota: wait for this training run no longer.",
)
def show_status(directory: str, as_json: bool, drop: str) -> int:
    """Say what the processes of a run, sweep, store or answer file do, or how they ended."""
    if drop and as_json:
        raise UsageError("--drop says in a line what it has done: leave --json out")
    # of a store over several mounts its own directory
    directory = str(root_of(directory))
    if drop:
        inputs.check_store(directory)
        extra = {"path": directory, "drop": drop, "json": False}
        code = look("dflash_pipeline.store.drop:main", "status", extra)
        return end(code, f"dflash status {shlex.quote(directory)}")
    found = overview.found_in(directory)
    if as_json:
        click.echo(overview.json_text(found))
        return 0
    consumers, is_open, followers = list[str](), False, overview.Followers()
    if (Path(directory) / "zarr.json").is_file():
        # a store is its own to read, with numpy
        from dflash_pipeline.store import glance

        consumers, is_open = glance.lines_of_consumers(directory), glance.is_open(directory)
        followers = glance.followers(directory)
    told = overview.lines(found)
    # a capture that waits for them says so itself
    told += [text for text in consumers if not any(text in line for line in told)]
    click.echo("\n".join(told))
    click.echo(overview.remedy(directory, found, is_open, followers))
    return 0


@dflash.command("config")
@config_argument
@sets("Repeatable.")
@click.pass_context
def show_config(context: click.Context) -> int:
    """Print the resolved configuration as TOML, every value named."""
    run = resolve(context)
    click.echo(to_toml(run), nl=False)
    told: dict[str, object] = {} if run.target.id else {"target.id": "MODEL"}
    if run.data.files:
        if not run.store.path:
            told["store.path"] = following.free_name("hs")
        coming = following.line(context, capture, told) + " --plan"
    else:
        told["data.files"] = ("PROMPTS.jsonl",)
        if not run.generate.out:
            told["generate.out"] = following.free_name("answers", ".jsonl")
        coming = following.line(context, generate, told)
    click.echo(f"next: {coming}", err=True)
    return 0


@dflash.command()
@click.option(
    "--target",
    type=click.Choice(PACKAGED),
    default=PACKAGED[0],
    show_default=True,
    help="toy comes with the package; smollm2 is a real language model of 135 M parameters.",
)
@click.option("--out", default="demo", show_default=True, metavar="DIR", help="Where it is kept.")
@placed
def demo(target: str, out: str, gpus: str, share_gpu: bool) -> int:
    """Do all of it on a small target: answers, store, drafter, acceptance, export."""
    inputs.check_run_directory(out)
    # each of its commands takes them; this process only runs those
    devices_of(gpus, share_gpu)
    extra = {"target": target, "out": out, "gpus": gpus, "share_gpu": share_gpu}
    run = load(target, (), {})
    entry = "dflash_pipeline.capture.demo:main"
    code = launch(entry, run, ONE_CPU, "demo", f"{out}/logs", extra, sees_gpus=True)
    return end(code, f"dflash inspect {shlex.quote(out)}/store", this_line())


def _look_at_evaluation(run: Run, drafters: Sequence[str]) -> None:
    """UsageError or ValueError where prompts are unusable, or drafters know conversations that are
    rendered in another way than by this line."""
    from dflash_pipeline.capture import arguments
    from dflash_pipeline.capture import glance as data
    from dflash_pipeline.train import glance

    if run.eval.prompts:
        data.check_rows(run.eval.prompts, 0, run.data.max_bad_share, click.echo)
    for drafter in drafters:
        glance.check_drafter(run, drafter, arguments.template_arguments_text(run.target))
    glance.check_pair(run, drafters)


def _fail(text: str, code: int) -> NoReturn:
    sys.stderr.write(f"error: {text}\n")
    sys.exit(code)


if __name__ == "__main__":
    main()
