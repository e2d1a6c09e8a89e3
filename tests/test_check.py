"""`dflash eval --check` on the toy target, with a drafter of our own as the one of others."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

from dflash_pipeline.capture import toytext
from dflash_pipeline.capture.model import resolve
from dflash_pipeline.configs import evaluation
from dflash_pipeline.configs.load import load
from dflash_pipeline.configs.schema import EvalConfig, Run, TargetConfig
from dflash_pipeline.train import trust
from dflash_pipeline.train.drafter import Drafter
from dflash_pipeline.train.export import write_zlab
from places import cpu_place
from shapes import small_shape


def drafter(path: Path) -> None:
    """Fresh weights; it reads two of the toy's layers."""
    files = resolve(TargetConfig(id="toy"))
    shape = small_shape(
        hidden_size=files.hidden_size,
        intermediate_size=48,
        num_layers=1,
        head_dim=16,
        vocab_size=files.vocab_size,
        mask_token_id=files.mask_token_id(TargetConfig(id="toy")),
        layer_ids=(0, 2),
        num_target_layers=files.num_layers,
        init_std=0.1,
    )
    made = Drafter(shape)
    made.initialise(0)
    write_zlab(path, shape, dict(made.named_parameters()))


def test_the_stages_of_a_check_agree_with_one_another(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    drafter(tmp_path / "public")
    rows = [one for domain in toytext.DOMAINS for one in toytext.rows(domain, "eval", 2, 1)]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(one) + "\n" for one in rows))
    place = cpu_place(tmp_path / "logs", "check")
    run = Run(
        target=TargetConfig(id="toy"),
        eval=EvalConfig(
            drafter=str(tmp_path / "public"), prompts=(str(prompts),), limit=5, max_new_tokens=12
        ),
    )
    described = tmp_path / "drafter.json"
    trust.describe(run, place, {"out": str(described)})
    found = json.loads(described.read_text())
    extra = {"kind": "cpu", "num_workers": 1, "only_count": False}
    for entry, changed in evaluation.trial(run, str(tmp_path), found):
        module, function = entry.split(":")
        getattr(importlib.import_module(module), function)(changed, place, extra)
    results = {name: str(tmp_path / f"{name}.json") for name in ("replayed", "decoded")}
    trust.judge(run, place, {**results, "block_size": found["block_size"]})
    output = capsys.readouterr().out
    assert "reads layers 0, 2" in output
    assert "gate: logits: error" in output
    assert "replayed 5 held-out samples" in output
    assert "the same cycles on 5 of 5 prompts" in output
    assert output.endswith("check passed\n")


def test_what_a_configuration_says_of_another_store_is_not_that_of_a_check() -> None:
    """A quota would have its capture wait for a training run, a donor's layers may be others."""
    sets = ["capture.quota=1MB", "capture.num_consumers=2", "capture.calibration_from=other"]
    run = load("toy", sets, {})
    told = {"path": "public", "layer_ids": [0, 2], "mask_token_id": 5}
    for entry, changed in evaluation.trial(run, "trial", told):
        found = changed.capture
        assert (found.quota, found.num_consumers, found.calibration_from) == ("", 1, ""), entry
