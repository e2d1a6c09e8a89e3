"""Several ranks of one run: uneven data, and a rank that is slow, hangs, fails or is killed."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from dflash_pipeline.configs.gpus import Devices
from dflash_pipeline.configs.launch import launch
from dflash_pipeline.configs.place import Place
from dflash_pipeline.configs.schema import Run
from dflash_pipeline.store.reader import Store
from dflash_pipeline.store.table import TRAIN
from dflash_pipeline.train.facts import Facts
from dflash_pipeline.train.group import Group
from places import cpu_place

Ranks = Callable[..., int]


@pytest.fixture
def ranks(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole_store: Store
) -> Ranks:
    """`ranks(run, world, resume=False, ...)`: the exit code of `rank_tasks.train` on so many
    ranks; what else is given is what the ranks do."""
    folder = Path(__file__).parent
    monkeypatch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    (tmp_path / "record").mkdir()

    def go(run: Run, world: int, **does: Any) -> int:
        extra = {"resume": False, "record": str(tmp_path / "record")} | does
        devices = Devices(kind="cpu", ids=tuple(range(world)))
        logs = str(Path(run.train.out) / "logs")
        return launch("rank_tasks:train", run, devices, "train", logs, extra)

    return go


def _drawn(record: Path) -> dict[int, list[int]]:
    """Samples of each epoch, of all ranks; a step that was done again counts as it was last."""
    epochs: dict[int, list[int]] = {}
    for file in record.iterdir():
        for line in file.read_text().splitlines():
            epoch, samples = json.loads(line)
            epochs.setdefault(epoch, []).extend(samples)
    return {epoch: sorted(samples) for epoch, samples in epochs.items()}


def _masters(out: Path) -> dict[str, torch.Tensor]:
    state = load_file(out / "last" / "state" / "state.safetensors")
    return {name: tensor for name, tensor in state.items() if name.startswith("master")}


def test_uneven_ranks_meet_each_sample_once_an_epoch(
    whole_store: Store, train_run: Callable[..., Run], ranks: Ranks, tmp_path: Path
) -> None:
    """In an epoch's last step some ranks have fewer batches, or none."""
    world = 3
    assert ranks(train_run(epochs=2, accumulate=2, batch_anchors=7), world) == 0
    table = whole_store.table
    num_samples = int(((table.split == TRAIN) & (table.num_anchors > 0)).sum())
    drawn = _drawn(tmp_path / "record")
    assert drawn == {epoch: list(range(num_samples)) for epoch in (0, 1)}
    counts = {len(file.read_text().splitlines()) for file in (tmp_path / "record").iterdir()}
    assert len(counts) == 1
    last = [
        json.loads((tmp_path / "record" / str(rank)).read_text().splitlines()[-1])[1]
        for rank in range(world)
    ]
    assert len({len(samples) for samples in last}) > 1


def test_a_rank_without_an_anchor_takes_part_with_nothing(
    train_run: Callable[..., Run], ranks: Ranks, tmp_path: Path
) -> None:
    one = train_run(epochs=1, accumulate=4, dtype="fp32")
    two = replace(one, train=replace(one.train, accumulate=2, out=str(tmp_path / "two")))
    assert ranks(one, 1, empties=True) == 0
    assert ranks(two, 2, empties=True) == 0
    wanted, found = _masters(tmp_path / "out"), _masters(tmp_path / "two")
    for name, master in wanted.items():
        torch.testing.assert_close(found[name], master, rtol=1e-3, atol=1e-5)
    assert np.isfinite([float(master.sum()) for master in found.values()]).all()


def test_a_slow_rank_is_waited_for_and_named_and_nothing_else(
    train_run: Callable[..., Run], ranks: Ranks, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = train_run(max_steps=6, timeout_s=8.0)
    assert ranks(run, 2, rank=1, at_step="is slow") == 0
    said = capfd.readouterr()
    assert said.err == ""
    log = (tmp_path / "out" / "logs" / "train-0.log").read_text()
    (line,) = re.findall(r"rank 0 has waited .*", log)
    assert re.fullmatch(
        r"rank 0 has waited [12] s for rank 1 \(last seen at step [0-3], \d s ago\)", line
    )
    assert line in said.out
    assert "hangs" not in (tmp_path / "out" / "logs" / "train-1.log").read_text()


def test_rank_0_of_a_finished_run_waits_for_a_rank_that_is_late(
    train_run: Callable[..., Run], ranks: Ranks, capfd: pytest.CaptureFixture[str]
) -> None:
    """It had ended, and what it keeps for all with it, before the other had asked: no step, and so
    no sum, kept them together."""
    run = train_run(epochs=1)
    assert ranks(run, 1) == 0
    assert ranks(run, 3, resume=True, rank=2, late_s=3.0) == 0
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("what", "world", "victim"), [("is killed", 2, 0), ("is killed", 3, 1), ("fails", 2, 1)]
)
def test_the_others_of_a_rank_that_ended_name_it_and_resume_goes_on(
    what: str,
    world: int,
    victim: int,
    train_run: Callable[..., Run],
    ranks: Ranks,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    run = train_run(epochs=2, save_every=2, batch_anchors=16 * (4 - world))
    assert ranks(run, world, rank=victim, at_step=what) == 1
    (line,) = capfd.readouterr().err.splitlines()
    reasons = {"is killed": "the process was ended by SIGKILL", "fails": "a reason of its own"}
    assert line.startswith(f"error: {reasons[what]}")
    assert f"(rank {victim}, log: " in line
    named = {0: "rank 0, which holds the key-value store of all,"}.get(victim, f"rank {victim} (")
    logs = tmp_path / "out" / "logs"
    for rank in set(range(world)) - {victim}:
        last = (logs / f"train-{rank}.log").read_text().splitlines()[-1]
        assert last.startswith(f"ValueError: rank {rank} at step 3 lost its connection: {named}")
        assert "has ended, see its log; run the same line with --resume" in last
    if victim == 0:
        assert ranks(run, world, resume=True) == 0
        assert (tmp_path / "out" / "last").is_symlink()


def test_a_rank_that_hangs_is_named_and_ends_the_run(
    train_run: Callable[..., Run],
    ranks: Ranks,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    # a launcher that is done with the failed one does not wait for the others' own patience
    monkeypatch.setattr("dflash_pipeline.configs.launch.GRACE_S", 1.0)
    assert ranks(train_run(timeout_s=6.0), 2, rank=1, at_step="hangs") == 1
    said = capfd.readouterr().err
    assert re.search(r"rank 1 hangs: for \d+ s it has been in stage .* after step 3 \(the", said)
    assert "(the others: no single rank is behind)" in said
    stacks = (tmp_path / "out" / "logs" / "train-1.log").read_text()
    assert re.search(r'rank_tasks.py", line \d+ in learns', stacks)
    assert "most recent call first" in stacks


class _Texts(Facts):
    """A key-value store that ends when it is told to."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}
        self.is_gone = False

    def set(self, key: str, text: str) -> None:
        self._need()
        self.texts[key] = text

    def find(self, key: str) -> str | None:
        self._need()
        return self.texts.get(key)

    def _need(self) -> None:
        if self.is_gone:
            raise RuntimeError("Broken pipe")

    def answers(self) -> bool:
        return not self.is_gone


def test_who_hears_of_rank_0_s_end_last_still_names_the_rank_that_ended_first() -> None:
    group = Group(cpu_place(".", "train"), 8.0)
    group.rank, group.world = 2, 3
    group._facts = texts = _Texts()
    group.tell_beat()
    texts.is_gone = True
    assert "lost its connection: rank 0, which holds" in group.lost()
    texts.is_gone = False
    texts.set("ended", "rank 1 (last seen at step 3, 2 s ago)")
    group.tell_beat()
    texts.is_gone = True
    assert "lost its connection: rank 1 (last seen at step 3" in group.lost()


def test_a_rank_between_two_sums_learns_of_rank_0_s_end_by_what_it_needs_of_it() -> None:
    group = Group(cpu_place(".", "train"), 8.0)
    group.rank, group.world = 1, 2
    group._facts = texts = _Texts()
    texts.is_gone = True
    # a sign of life that nobody hears ends nothing
    group.beat(3)
    message = "rank 1 at step 3 lost its connection: rank 0, which holds the key-value store"
    with pytest.raises(ValueError, match=message):
        group.told("segment/0")
    with pytest.raises(ValueError, match=message):
        group.tell("stop asked", "")


def test_rank_0_leaves_last_and_names_who_does_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dflash_pipeline.train.group._STOPPED_S", 0.2)
    group = Group(cpu_place(".", "train"), 0.5)
    group.rank, group.world = 0, 2
    group._facts = texts = _Texts()
    with pytest.raises(
        ValueError, match=r"waited up to 0\.5 s for the other ranks: rank 1 \(never"
    ):
        group.leave(lambda: False)
    # who wants it to stop is not kept
    group.leave(lambda: True)
    texts.set("left/1", "")
    group.leave(lambda: False)
    # another rank waits for nobody
    group.rank, texts.texts = 1, {}
    group.leave(lambda: False)
    assert texts.texts == {"left/1": ""}
