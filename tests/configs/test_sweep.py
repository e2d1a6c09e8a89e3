"""Variants of a training run: read, run beside one another, summed up, gone on with."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from dflash_pipeline.configs import fleet
from dflash_pipeline.configs.errors import UsageError
from dflash_pipeline.configs.fleet import check_done, run_variants, table
from dflash_pipeline.configs.gpus import Devices
from dflash_pipeline.configs.sweep import Variant, read_variants

# trains for nothing, writes what a run leaves, and behaves as its learning rate says
STAND_IN = """
import json, time
from pathlib import Path
from dflash_pipeline.configs.load import to_dict
from dflash_pipeline.store.runlog import RunLog

def main(run, place, extra):
    out = Path(run.train.out)
    log = RunLog(place)
    log.say(f"threads {place.threads}")
    if run.optim.lr > 0.5 and not extra["resume"]:
        (out / "run.json").write_text(json.dumps({"run": to_dict(run)}))
        raise ValueError("the learning rate is absurd")
    (out / "run.json").write_text(json.dumps({"run": to_dict(run)}))
    for step, tau in ((1, 1.5), (2, 1.0 + run.drafter.num_layers)):
        log.metrics({"step": step, "loss": 3.0 / step}, out / "metrics.jsonl")
        log.metrics({"step": step, "tau": tau}, out / "metrics.jsonl")
    while run.train.max_steps == 99:
        time.sleep(0.01)
    while run.train.max_steps == 98 and not all(
        (out.parent / name / "metrics.jsonl").exists() for name in ("v0", "v1")
    ):
        time.sleep(0.01)
"""
ENTRY = "sweep_stand_in:main"
ONE_CPU = Devices("cpu", (0,))


@pytest.fixture
def variants_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Write a sweep file and read its variants into tmp_path / out."""
    (tmp_path / "sweep_stand_in.py").write_text(STAND_IN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)

    def read(text: str, *sets: str, **options: object) -> list[Variant]:
        (tmp_path / "sweep.toml").write_text(text)
        given = {key.replace("__", "."): value for key, value in options.items()}
        return read_variants("sweep.toml", "", sets, given | {"train.out": str(tmp_path / "out")})

    return read


def test_a_variant_is_the_line_with_its_changes_in_a_folder_of_its_own(variants_of) -> None:
    small, wide = variants_of(
        "[small]\ndrafter.num_layers = 3\n[wide]\ndrafter.block_size = 8\n[wide.loss]\ngamma = 4",
        "optim.lr=0.25",
        train__epochs=2,
    )
    assert (small.name, small.run.drafter.num_layers, small.run.drafter.block_size) == (
        "small",
        3,
        16,
    )
    assert (wide.run.drafter.num_layers, wide.run.loss.gamma) == (5, 4.0)
    assert {one.run.optim.lr for one in (small, wide)} == {0.25}
    assert {one.run.train.epochs for one in (small, wide)} == {2}
    assert [Path(one.run.train.out).name for one in (small, wide)] == ["small", "wide"]
    assert Path(small.run.train.out).parent.name == "out"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no variant"),
        ("small = 3", r"variant small must be a table"),
        ("[a]\ndrafter.num_layer = 3", r"variant a: unknown key .*did you mean drafter.num_layers"),
        ("[a]\ndrafter.num_layers = 0", r"variant a: drafter\.num_layers must be at least 1"),
        ("[a]\nstore.path = 'x'", r"variant a sets store: a variant changes drafter, loss"),
        ("[a]\ntrain.epochs = 3", r"variant a sets train\.epochs, and so does the line"),
        ("[a]\noptim.lr = 0.1", r"variant a sets optim\.lr, and so does the line"),
        ("[a]\ntrain.out = 'x'", r"variant a sets train\.out, and so does the line"),
        ("['../a']\nloss.ce = 2", r"variant \.\./a: the name becomes a folder"),
        ("[step-1]\nloss.ce = 2", r"variant step-1: .* has a meaning there"),
        ("['sweep.json']\nloss.ce = 2", r"variant sweep\.json: .* has a meaning there"),
        ("[best]\nloss.ce = 2", r"variant best: .* has a meaning there"),
        ("[a", "is not TOML"),
    ],
)
def test_a_file_that_cannot_be_meant_is_refused_by_variant_and_key(
    text: str, message: str, variants_of
) -> None:
    with pytest.raises(UsageError, match=r"sweep\.toml.*" + message):
        variants_of(text, "optim.lr=0.25", train__epochs=2)


THREE = """
[first]
drafter.num_layers = 2
[absurd]
optim.lr = 9.0
[third]
drafter.num_layers = 3
"""


def test_one_that_fails_does_not_stop_the_others_and_is_gone_on_with_alone(
    variants_of, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    variants, out = variants_of(THREE), tmp_path / "out"
    out.mkdir()
    devices = Devices("cpu", (0, 1))
    outcomes, number = run_variants(ENTRY, variants, devices, out, resume=False)
    assert number == 0
    assert [(one.name, one.state) for one in outcomes] == [
        ("first", "done"),
        ("absurd", "failed"),
        ("third", "done"),
    ]
    first, absurd, third = outcomes
    assert (first.steps, first.loss, first.best_tau, first.best_step) == (2, 1.5, 3.0, 2)
    assert (third.best_tau, absurd.steps) == (4.0, None)
    assert absurd.error == "the learning rate is absurd"
    said = capfd.readouterr()
    # two at a time share the cores
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    assert f"[third] threads {threads}" in said.out
    assert "error: the learning rate is absurd" in said.err
    assert [one["state"] for one in json.loads((out / "sweep.json").read_text())] == [
        "done",
        "failed",
        "done",
    ]
    assert table(outcomes)[3].startswith("third    done    CPU worker ")
    check_done(variants)
    outcomes, _ = run_variants(ENTRY, variants, devices, out, resume=True)
    assert [one.state for one in outcomes] == ["done before", "done", "done before"]
    # what is done is not silently taken for what is asked for now
    with pytest.raises(UsageError, match=r"variant third was .*drafter\.num_layers: 3, now 4"):
        check_done(variants_of(THREE.replace("num_layers = 3", "num_layers = 4")))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"train__epochs": 9}, r"train\.epochs: 6, now 9"),
        ({"train__max_steps": 7}, r"train\.max_steps: 0, now 7"),
        ({"train__init_from": "other"}, r"train\.init_from: '', now 'other'"),
        ({"train__stores": ("other",)}, r"train\.stores: \['hs'\], now \['other'\]"),
        ({"feed__io": "read", "train__log_every": 3, "train__timeout_s": 5.0}, ""),
    ],
)
def test_what_decides_the_result_of_a_done_variant_must_be_as_it_was(
    options: dict[str, object], message: str, variants_of, tmp_path: Path
) -> None:
    text, given = "[only]\nloss.ce = 2.0", {"train__stores": ("hs",)}
    (tmp_path / "out").mkdir()
    run_variants(ENTRY, variants_of(text, **given), ONE_CPU, tmp_path / "out", resume=False)
    now = variants_of(text, **(given | options))
    if not message:
        check_done(now)
        return
    with pytest.raises(UsageError, match=message):
        check_done(now)


@pytest.mark.parametrize("content", [None, b"", b'{"run": {"drafter"', b"[]", b"\xff"])
def test_a_done_variant_whose_record_is_gone_is_named(
    content: bytes | None, variants_of, tmp_path: Path
) -> None:
    variants = variants_of("[only]\nloss.ce = 2.0")
    (tmp_path / "out").mkdir()
    run_variants(ENTRY, variants, ONE_CPU, tmp_path / "out", resume=False)
    record = tmp_path / "out" / "only" / "run.json"
    record.unlink()
    if content is not None:
        record.write_bytes(content)
    with pytest.raises(UsageError, match=r"variant only is done, but .*remove .*out/only"):
        check_done(variants)


def test_lines_that_a_crash_left_unreadable_are_passed_over(variants_of, tmp_path: Path) -> None:
    variants = variants_of("[only]\nloss.ce = 2.0")
    (tmp_path / "out").mkdir()
    run_variants(ENTRY, variants, ONE_CPU, tmp_path / "out", resume=False)
    with (tmp_path / "out" / "only" / "metrics.jsonl").open("ab") as file:
        file.write(b'\xff\x00\n7\n{"tau": 9.0}\n{"st')
    (outcome,), _ = run_variants(ENTRY, variants, ONE_CPU, tmp_path / "out", resume=True)
    assert (outcome.state, outcome.steps) == ("done before", 2)


def test_a_signal_stops_those_that_run_and_begins_no_other(variants_of, tmp_path: Path) -> None:
    text = "\n".join(f"[v{number}]\ntrain.max_steps = 99" for number in range(3))
    variants, out = variants_of(text), tmp_path / "out"
    out.mkdir()

    def signals() -> None:
        while sum((out / f"v{number}" / "metrics.jsonl").exists() for number in range(3)) < 2:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=signals)
    thread.start()
    outcomes, number = run_variants(ENTRY, variants, Devices("cpu", (0, 1)), out, resume=False)
    thread.join()
    assert number == signal.SIGTERM
    assert [one.state for one in outcomes] == ["stopped", "stopped", "not begun"]
    assert not (out / "v2").exists()


def test_several_share_a_device_and_the_rest_wait_for_their_turn(
    variants_of, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    # each of the first two waits for the other: on a device of its own turn neither would end
    text = "\n".join(
        f"[v{number}]\ntrain.max_steps = {98 if number < 2 else 0}" for number in range(3)
    )
    variants, out = variants_of(text), tmp_path / "out"
    out.mkdir()
    outcomes, number = run_variants(ENTRY, variants, ONE_CPU, out, resume=False, per_device=2)
    assert number == 0
    assert [(one.state, one.device) for one in outcomes] == [("done", "CPU worker 0")] * 3
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    assert f"[v1] threads {threads}" in capfd.readouterr().out


def test_the_table_has_a_dash_for_what_was_never_told(variants_of) -> None:
    (variant,) = variants_of("[only]\nloss.ce = 2.0")
    lines = table([fleet._outcome(variant, "not begun", "", 0.0, "")])
    assert lines[0] == "variant  state      device  time     steps  loss  best tau  at step"
    assert lines[1].split() == ["only", "not", "begun", "0:00:00", "-", "-", "-", "-"]
