"""Several drafters from one store by one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dflash_pipeline import cli
from dflash_pipeline.configs.errors import UsageError
from dflash_pipeline.store.reader import Store
from dflash_pipeline.train.loading import read_checkpoint

SWEEP = """
[shallow]
drafter.num_layers = 1

[short]
drafter.block_size = 3
loss.slot_weights = "dpace"

[odd]
train.init_from = "nothing"
"""
BASE = """
[drafter]
num_layers = 2
block_size = 4

[train]
batch_tokens = 256
batch_anchors = 16
anchors_per_sample = 6
max_steps = 4
log_every = 2
validate_samples = 2
"""


def test_each_variant_is_trained_or_named(
    whole_store: Store,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("dflash.toml").write_text(BASE)
    Path("sweep.toml").write_text(SWEEP)
    # there, but torn: seen by the variant's own process alone
    Path("nothing").mkdir()
    Path("nothing/config.json").write_text("[")
    words = ["train", "--store", "hs", "--out", "out", "--gpus", "cpu:2", "--sweep", "sweep.toml"]
    with pytest.raises(ValueError, match="1 of 3 variants failed: odd;"):
        cli.dflash.main(words, standalone_mode=False)
    said = capfd.readouterr()
    assert "nothing is not a drafter that can be read: config.json" in said.err
    assert "shallow  done" in said.out
    shapes = {name: read_checkpoint(tmp_path / "out" / name).shape for name in ("shallow", "short")}
    assert (shapes["shallow"].num_layers, shapes["shallow"].block_size) == (1, 4)
    assert (shapes["short"].num_layers, shapes["short"].block_size) == (2, 3)
    assert cli.dflash.main(["status", "out"], standalone_mode=False) == 0
    told = capfd.readouterr().out
    assert "odd/train-0  failed" in told
    assert "short/train-0  done" in told
    with pytest.raises(UsageError, match=r"out holds no run\.json: .*name the --sweep"):
        cli.dflash.main([*words[:-2], "--resume"], standalone_mode=False)
    named = [word if word != "out" else "out/short" for word in words]
    with pytest.raises(UsageError, match="out/short is a run, no sweep"):
        cli.dflash.main([*named, "--resume"], standalone_mode=False)
    found = json.loads(Path("out/sweep.json").read_text())
    assert [(one["name"], one["steps"]) for one in found] == [
        ("shallow", 4),
        ("short", 4),
        ("odd", None),
    ]
    Path("sweep.toml").write_text(
        SWEEP.replace('train.init_from = "nothing"', "drafter.head_dim = 6")
    )
    assert cli.dflash.main([*words, "--resume"], standalone_mode=False) == 0
    said = capfd.readouterr()
    assert said.out.count("done before") == 2
    assert read_checkpoint(tmp_path / "out" / "odd").shape.head_dim == 6
    assert "next: dflash eval --drafter out/" in said.out


def test_variants_share_one_device_where_the_line_says_so(
    whole_store: Store,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("dflash.toml").write_text(BASE)
    Path("sweep.toml").write_text("[one]\ntrain.seed = 1\n[two]\ntrain.seed = 2")
    words = ["train", "--store", "hs", "--out", "out", "--gpus", "cpu", "--per-gpu", "2"]
    with pytest.raises(UsageError, match=r"--per-gpu shares a device .* --sweep: name one"):
        cli.dflash.main(words, standalone_mode=False)
    assert not Path("out").exists()
    assert cli.dflash.main([*words, "--sweep", "sweep.toml"], standalone_mode=False) == 0
    found = json.loads(Path("out/sweep.json").read_text())
    assert [(one["state"], one["device"]) for one in found] == [("done", "CPU worker 0")] * 2
