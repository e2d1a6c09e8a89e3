"""The run directory."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_pipeline.configs.errors import UsageError
from dflash_pipeline.train import checkpoint
from dflash_pipeline.train.checkpoint import Progress
from dflash_pipeline.train.drafter import Drafter
from dflash_pipeline.train.loading import read_checkpoint
from dflash_pipeline.train.order import Position
from dflash_pipeline.train.shape import DrafterShape
from dflash_pipeline.train.takeover import take_over
from limits import small_files


def _save(out: Path, shape: DrafterShape, step: int) -> Path:
    drafter = Drafter(shape)
    drafter.initialise(step)
    state = {f"master.{name}": tensor.detach() for name, tensor in drafter.named_parameters()}
    state["rng"] = torch.get_rng_state()
    return checkpoint.save(out, shape, state, _progress(step), {"template_args": "{}"})


def _progress(step: int) -> Progress:
    return replace(
        checkpoint.at_the_beginning(9),
        step=step,
        position=Position(1, 0, 4),
        schedule_step=step + 1,
        best_tau=2.5,
        best_step=step,
    )


def test_a_checkpoint_is_servable_and_holds_the_state(tmp_path: Path, shape: DrafterShape) -> None:
    path = _save(tmp_path, shape, 7)
    assert path.name == "step-00000007"
    assert read_checkpoint(path).shape.layer_ids == (1, 3, 5)
    assert read_checkpoint(path).trained_on == {"template_args": "{}"}
    assert read_checkpoint(tmp_path).path.resolve() == path
    torch.rand(5)
    progress, state = checkpoint.load(path, torch.device("cpu"))
    assert progress == _progress(7)
    drafter = Drafter(shape)
    drafter.initialise(7)
    assert torch.equal(state["master.norm.weight"], drafter.norm.weight)


def test_old_checkpoints_go_but_the_best_stays(tmp_path: Path, shape: DrafterShape) -> None:
    for step in (1, 2, 3, 4, 5):
        path = _save(tmp_path, shape, step)
        if step == 2:
            checkpoint.point(tmp_path, "best", path)
        checkpoint.prune(tmp_path, 2)
    steps = sorted(path.name[-1] for path in tmp_path.glob("step-*"))
    assert steps == ["2", "4", "5"]
    assert (tmp_path / "last").readlink() == Path("step-00000005")
    assert checkpoint.newest(tmp_path) == tmp_path / "step-00000005"


def test_half_a_checkpoint_is_never_taken_for_a_whole_one(
    tmp_path: Path, shape: DrafterShape, monkeypatch: pytest.MonkeyPatch
) -> None:
    _save(tmp_path, shape, 1)
    before = checkpoint.write_tensors

    def dies(*_arguments: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(checkpoint, "write_tensors", dies)
    with pytest.raises(OSError, match="No space"):
        _save(tmp_path, shape, 2)
    assert checkpoint.newest(tmp_path) == tmp_path / "step-00000001"
    assert (tmp_path / "last").readlink() == Path("step-00000001")
    # what was written of it keeps no space on a disk that is full
    assert not list(tmp_path.glob(".*"))
    monkeypatch.setattr(checkpoint, "write_tensors", before)
    _save(tmp_path, shape, 2)
    assert checkpoint.newest(tmp_path) == tmp_path / "step-00000002"
    # the same step once more, as after a resume from step 1
    _save(tmp_path, shape, 2)
    assert sorted(path.name for path in tmp_path.glob(".step-*")) == []


def test_another_plan_leaves_the_share_of_the_schedule_that_is_done() -> None:
    progress = replace(checkpoint.at_the_beginning(1000), step=500, schedule_step=500)
    assert checkpoint.replanned(progress, 1000) == progress
    fewer = checkpoint.replanned(progress, 250)
    assert (fewer.step, fewer.schedule_step, fewer.num_steps) == (500, 125, 250)
    # on four times the ranks for a while, then on two of them
    later = replace(fewer, step=560, schedule_step=185)
    assert checkpoint.replanned(later, 500).schedule_step == 370


def test_a_full_disk_names_the_checkpoint_and_says_how_to_go_on(
    tmp_path: Path, shape: DrafterShape
) -> None:
    told = r"checkpoint .*step-00000001 \(File too large; .* free .*--resume"
    with small_files(5000), pytest.raises(ValueError, match=told):
        _save(tmp_path, shape, 1)
    assert not list(tmp_path.iterdir())


def test_lines_of_steps_that_come_again_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 5}\n{"step": 10}\n{"step": 15}\n{"ste')
    checkpoint.trim_metrics(path, 10)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [5, 10]


def test_lines_that_a_crash_left_unreadable_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 5}\n\xff\xfe\x00\n7\n[]\n{"step": null}\n{"step": 10}\n\xc3')
    checkpoint.trim_metrics(path, 10)
    assert path.read_bytes() == b'{"step": 5}\n{"step": 10}\n'


def _told(path: Path, **changes: object) -> None:
    """A whole state.json with other values; None: without the key."""
    entry = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in entry.items() if value is not None}))


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:100])


def _without_generator(path: Path) -> None:
    tensors = load_file(path)
    del tensors["rng"]
    save_file(tensors, path)


def _not_finite(path: Path) -> None:
    tensors = load_file(path)
    tensors["master.norm.weight"][0] = float("inf")
    save_file(tensors, path)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("state.safetensors", _cut),
        ("state.safetensors", _without_generator),
        ("state.safetensors", _not_finite),
        ("state.safetensors", Path.unlink),
        ("state.json", lambda path: path.write_bytes(path.read_bytes()[:-9])),
        ("state.json", lambda path: _told(path, position=7)),
        ("state.json", lambda path: path.write_text("[]")),
        ("state.json", lambda path: path.write_bytes(b"\xff")),
        ("state.json", Path.unlink),
    ],
)
def test_a_damaged_state_is_named_and_the_checkpoint_before_serves(
    name: str, change: Callable[[Path], object], tmp_path: Path, shape: DrafterShape
) -> None:
    _save(tmp_path, shape, 1)
    path = _save(tmp_path, shape, 2)
    change(path / "state" / name)
    with pytest.raises(ValueError, match=r"step-00000002/state is damaged .*: remove .*-00000002"):
        checkpoint.load(path, torch.device("cpu"))
    shutil.rmtree(path)
    found = checkpoint.newest(tmp_path)
    assert found is not None
    assert checkpoint.load(found, torch.device("cpu"))[0] == _progress(1)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"format": 2}, "has format 2, this version reads 1"),
        ({"format": 2, "num_stale": None}, "has format 2, this version reads 1"),
        # as checkpoints were before they named a format
        (
            {"format": None, "schedule_step": None, "num_steps": None},
            "lacks schedule_step, lacks num_steps",
        ),
        ({"num_stale": None, "patience_left": 3}, "lacks num_stale, holds patience_left"),
        ({"position": {"epoch": 1, "batch": 4}}, "lacks position.segment"),
    ],
)
def test_a_state_of_another_version_is_no_damage_and_its_weights_serve(
    changes: dict[str, object], told: str, tmp_path: Path, shape: DrafterShape
) -> None:
    path = _save(tmp_path, shape, 2)
    _told(path / "state" / "state.json", **changes)
    words = rf"another version .*\(state.json {told}\): .*run.json .*--init-from .*-00000002$"
    with pytest.raises(UsageError, match=words):
        checkpoint.load(path, torch.device("cpu"))
    drafter = Drafter(shape)
    take_over(drafter, str(path))
    expected = Drafter(shape)
    expected.initialise(2)
    assert torch.equal(drafter.norm.weight, expected.norm.weight)


def test_a_state_that_names_no_format_but_holds_all_is_read(
    tmp_path: Path, shape: DrafterShape
) -> None:
    path = _save(tmp_path, shape, 2)
    assert json.loads((path / "state" / "state.json").read_text())["format"] == 1
    _told(path / "state" / "state.json", format=None)
    assert checkpoint.load(path, torch.device("cpu"))[0] == _progress(2)
