"""What the comparison with speculators hands over: the same data, but for one norm's rounding."""

from __future__ import annotations

import importlib
import json
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from dflash_pipeline.capture.model import TargetFiles, resolve
from dflash_pipeline.configs.load import load
from dflash_pipeline.configs.schema import Run, TargetConfig
from dflash_pipeline.store.reader import Sample
from studies.exchange import before_norm, final_norm, write_samples
from studies.theirs import THEIR_VERSION

EPS = 1e-6


def _norm(state_MH: torch.Tensor, weight_H: torch.Tensor) -> torch.Tensor:
    """As speculators applies it."""
    wide = state_MH.float()
    return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS) * weight_H


def test_the_norm_of_what_stands_before_it_is_what_was_stored() -> None:
    torch.manual_seed(0)
    weight_H = torch.rand(96) * 3 + 0.05
    stored_MH = _norm(torch.randn(50, 96) * 40, weight_H)
    found = _norm(before_norm(stored_MH, weight_H), weight_H)
    assert float((found - stored_MH).norm() / stored_MH.norm()) < 2**-8
    # the state after the norm, handed over as it is, would be normed twice
    twice = _norm(stored_MH, weight_H)
    assert float((twice - stored_MH).norm() / stored_MH.norm()) > 0.1


class _Store:
    """Two samples of six and four tokens, three layers."""

    def __init__(self) -> None:
        random = np.random.default_rng(0)
        self.samples = []
        for length, mask in ((6, [0, 0, 1, 1, 0, 1]), (4, [0, 1, 1, 1])):
            rows = torch.from_numpy(random.standard_normal((length, 3, 16), np.float32)).bfloat16()
            last = random.standard_normal((sum(mask[1:]), 16), np.float32)
            self.samples.append(
                Sample(
                    key=f"s{length}",
                    ids_T=np.arange(length, dtype=np.uint32) + 7,
                    mask_T=np.array(mask, np.uint8),
                    hidden_TKH=rows.float().numpy(),
                    last_MH=last,
                )
            )

    def sample(self, index: int) -> Sample:
        return self.samples[index]


def test_a_sample_is_handed_over_row_by_row(tmp_path: Path) -> None:
    store, weight_H = _Store(), torch.rand(16) + 0.5
    size = write_samples(store, [1, 0], weight_H, tmp_path)
    files = sorted((tmp_path / "hidden_states").iterdir())
    assert [file.name for file in files] == ["hs_0.safetensors", "hs_1.safetensors"]
    assert size == sum(file.stat().st_size for file in files)
    lines = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    for file, line, sample in zip(files, lines, reversed(store.samples), strict=True):
        found = load_file(file)
        assert found["token_ids"].tolist() == line["input_ids"] == sample.ids_T.tolist()
        assert line["loss_mask"] == sample.mask_T.tolist()
        assert torch.equal(found["hidden_states"][:, :3].float(), torch.tensor(sample.hidden_TKH))
        # the row before each supervised token, and nothing anywhere else
        states = found["hidden_states"][:, 3]
        places = [at for at in range(len(line["loss_mask"]) - 1) if line["loss_mask"][at + 1]]
        assert states.abs().sum(-1).nonzero().flatten().tolist() == places
        assert torch.equal(states[places], before_norm(torch.tensor(sample.last_MH), weight_H))


def test_the_final_norm_is_the_targets_own() -> None:
    files = resolve(TargetConfig(id="toy"))
    stored = load_file(files.weight_paths()[0])["model.norm.weight"]
    assert torch.equal(final_norm(files), stored.float())


def test_a_target_whose_norm_is_another_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    files = resolve(TargetConfig(id="toy"))
    monkeypatch.setattr(files.config, "model_type", "gemma3_text")
    with pytest.raises(ValueError, match="target of type gemma3_text: its final norm"):
        final_norm(files)
    monkeypatch.setattr(files.config, "model_type", "qwen3")
    monkeypatch.setattr(TargetFiles, "weight_paths", lambda _self: [])
    with pytest.raises(ValueError, match=r"has no tensor model\.norm\.weight"):
        final_norm(files)


@pytest.mark.parametrize(
    ("real_rates", "tries", "is_fair"),
    [([10.0], 1, True), ([20.0, 20.0], 2, True), ([30.0, 9.0, 40.0], 3, False)],
)
def test_equal_seconds_are_reached_or_nothing_is_compared(
    real_rates: list[float], tries: int, is_fair: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "bench"))
    import head_to_head

    left = list(real_rates)
    found = head_to_head.in_time(
        lambda steps: {"steps": steps, "training_s": steps / left.pop(0)}, 10.0, 60.0
    )
    assert found["tries"] == tries
    assert head_to_head.is_in_time(found, 60.0) == is_fair
    assert not left


def test_ours_trains_with_the_defaults_whatever_its_preset_was_tuned_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its weighting of slots was chosen by a study of this very target."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "bench"))
    import head_to_head

    tuned = load("smollm2", (), {})
    sets = [f"{key}={value}" for key, value in head_to_head.untuned().items()]
    run = load("smollm2", sets, {})
    assert (run.optim, run.drafter.init_std) == (Run().optim, Run().drafter.init_std)
    assert run.loss == replace(Run().loss, gamma=tuned.loss.gamma)
    assert run.loss != tuned.loss


def test_a_line_that_was_cut_off_keeps_what_was_trained_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "bench"))
    import head_to_head

    asked, trained = {"seconds": 60.0, "set": ["a=1"]}, []

    def train(seconds: float) -> dict[str, float]:
        trained.append(seconds)
        return {"training_s": seconds}

    def kept(words: dict[str, object], seconds: float) -> dict[str, float]:
        return head_to_head.kept(tmp_path, "ours", words, lambda: train(seconds))

    # beyond its time it is no result, and the next call trains anew
    assert kept(asked, 90.0) == {"training_s": 90.0}
    assert kept(asked, 61.0) == kept(asked, 62.0) == {"training_s": 61.0}
    assert trained == [90.0, 61.0]
    judged = [tmp_path / name for name in ("ours-replayed.json", "both-replayed.json")]
    others = tmp_path / "theirs-replayed.json"
    for path in (*judged, others):
        path.touch()
    assert kept(asked | {"set": []}, 63.0) == {"training_s": 63.0}
    assert not any(path.exists() for path in judged)
    assert others.exists()


def test_a_line_that_is_run_again_judges_what_it_had_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "bench"))
    import head_to_head

    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OUT", raising=False)
    done: list[str] = []

    def trained(name: str) -> dict[str, float]:
        done.append(name)
        return {"training_s": 60.0}

    table = SimpleNamespace(num_tokens=np.full(9, 5))
    modes = {"hidden_mode": "bf16", "last_mode": "bf16", "last_rows": "teacher"}
    store = SimpleNamespace(spec=SimpleNamespace(**modes), table=table)
    fakes = {
        "installed_version": lambda _python: THEIR_VERSION,
        "open_store": lambda _path: store,
        "machine": dict,
        "_chosen": lambda *_: list(range(9)),
        "_prepared": lambda *_: 7,
        "_store_bytes": lambda *_: 8,
        "_ours": lambda *_: trained("ours"),
        "_theirs": lambda *_: trained("theirs"),
        "_judged": lambda *_: {"replayed": done.append("judged")},
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(head_to_head, name, fake)
    config = tmp_path / "dflash.toml"
    config.write_text('preset = "toy"\n')
    words = ["x", "out", "--eval-store", "e", "--target", str(config), "--seconds", "60"]
    words += ["--their-python", sys.executable, "--store"]

    def run_again(store: str) -> list[str]:
        monkeypatch.setattr(sys, "argv", [*words, store])
        done.clear()
        assert head_to_head.main() == 0
        return done

    assert run_again("s") == ["ours", "theirs", "judged"]
    assert run_again("s") == ["judged"]
    # of another store, or by a configuration that was changed, it would be another drafter
    assert run_again("t") == ["ours", "theirs", "judged"]
    config.write_text('preset = "toy"\n[drafter]\nnum_layers = 1\n')
    assert run_again("t") == ["ours", "theirs", "judged"]
    assert run_again("t") == ["judged"]
    found = json.loads((tmp_path / "out" / "head_to_head.json").read_text(encoding="utf-8"))
    assert found["same_seconds"]
    assert (found["samples"], found["tokens"]) == (5, 25)


@pytest.fixture
def their_training(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module that runs in the environment of speculators, without that."""
    for name in ("datasets", "speculators", "speculators.train", "speculators.train.config"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for name in ("cli", "trainer"):
        monkeypatch.setattr(sys.modules["speculators.train"], name, None, raising=False)
    schema = ModuleType("schema")
    monkeypatch.setattr(schema, "TrainConfig", None, raising=False)
    monkeypatch.setitem(sys.modules, "speculators.train.config.schema", schema)
    monkeypatch.delitem(sys.modules, "studies.their_training", raising=False)
    return importlib.import_module("studies.their_training")


class _TheirConfig(NamedTuple):
    max_steps: int
    checkpoint_freq: int


class _TheirTrainer:
    """Its loop, as it is in 0.9.0: what is done in each epoch, whatever max_steps says."""

    def __init__(self, max_steps: int, epoch_steps: list[int]) -> None:
        self.config = _TheirConfig(max_steps, len(epoch_steps))
        self.epoch_steps, self.global_step = epoch_steps, 0
        self.did: list[str] = []

    def train_epoch(self, epoch: int) -> None:
        for _ in range(self.epoch_steps[epoch]):
            self.global_step += 1
            if self.global_step >= self.config.max_steps:
                break
        self.did.append(f"train {epoch}")

    def maybe_save_checkpoint(self, epoch: int, _local_step: int = 0) -> None:
        if epoch == 0 or (epoch + 1) % self.config.checkpoint_freq == 0:
            self.did.append(f"save {epoch}")

    def val_epoch(self, epoch: int) -> dict[str, float]:
        self.did.append(f"validate {epoch}")
        return {"loss_epoch": 1.0}

    def run(self) -> None:
        for epoch in range(len(self.epoch_steps)):
            self.train_epoch(epoch)
            self.maybe_save_checkpoint(epoch)
            self.val_epoch(epoch)


def test_their_training_ends_with_its_steps_and_saves_there(their_training: Any) -> None:
    class Ended(_TheirTrainer):
        pass

    left = _TheirTrainer(7, [3] * 6)
    left.run()
    # what is mended: a step, a checkpoint and a validation that nobody asked for
    assert left.global_step == 10
    their_training.end_with_the_steps(Ended)
    found = Ended(7, [3] * 6)
    found.run()
    assert found.global_step == 7
    assert found.did[:3] == ["train 0", "save 0", "validate 0"]
    assert found.did[3:] == ["train 1", "validate 1", "train 2", "save 2", "validate 2"]


def test_what_is_known_is_written_before_what_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line may be cut off at any moment, and the machine gone by then."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "bench"))
    import head_to_head

    out = tmp_path / "h"
    (out / "theirs" / "0").mkdir(parents=True)
    told: list[list[str]] = []

    # both drafters are judged at the same time, or this waits in vain
    together = threading.Barrier(2, timeout=30)

    def evaluated(folder: Path, words: list[str]) -> float:
        arm = {"all": {"tau": 2.0}, "seconds": 1.0}
        if "--drafter" in words:
            assert "--share-gpu" in words
            together.wait()
        found = {"domains": {}} if "--compare" in words else {"arms": {"trained": arm}}
        (folder / words[-1 if "--compare" in words else words.index("--json") + 1]).write_text(
            json.dumps(found), encoding="utf-8"
        )
        return 1.0

    monkeypatch.setattr(head_to_head, "_dflash", evaluated)
    options = SimpleNamespace(
        eval_store=tmp_path, prompts=[tmp_path / "p"], target="toy", limit=1, gpus="cpu"
    )
    found = head_to_head._judged(options, out, lambda judged: told.append(list(judged)))
    assert told == [["replayed"], ["replayed", "decoded"]]
    assert found["decoded"]["tau"] == {"ours": {"all": 2.0}, "theirs": {"all": 2.0}}
    monkeypatch.setenv("OUT", str(tmp_path))
    head_to_head._write(out, {"ours": 1})
    for folder in (out, tmp_path):
        assert json.loads((folder / "head_to_head.json").read_text(encoding="utf-8")) == {"ours": 1}


def test_samples_are_prepared_once_and_others_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "bench"))
    import head_to_head

    written: list[list[int]] = []

    def write(_store: object, chosen: list[int], _norm: object, data: Path) -> int:
        data.mkdir()
        written.append(chosen)
        return 10 * len(chosen)

    monkeypatch.setattr(head_to_head, "write_samples", write)
    for name in ("final_norm", "resolve"):
        monkeypatch.setattr(head_to_head, name, lambda _of: None)

    class Table(list[str]):
        key = list.__getitem__

    store = SimpleNamespace(path=tmp_path / "s", table=Table(f"k{i}" for i in range(6)))

    def prepared(chosen: list[int]) -> int:
        return head_to_head._prepared(tmp_path / "data", store, chosen, Run(), tmp_path)

    assert prepared([3, 1, 0, 2, 4]) == prepared([3, 1, 0, 2, 4]) == 50
    assert prepared([1, 3, 5, 0, 2, 4]) == 60
    assert written == [[3, 1, 0, 2, 4], [1, 3, 5, 0, 2, 4]]
    # what the two train on, and nothing else
    dropped = (tmp_path / "dropped.txt").read_text(encoding="utf-8").split()
    assert dropped == ["k0", "k2", "k4", "k5"]


def test_a_file_may_stand_for_the_preset_wherever_the_line_was_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "bench"))
    import head_to_head

    monkeypatch.chdir(tmp_path)
    (tmp_path / "dflash.toml").write_text('preset = "toy"\n')
    words = ["x", "out", "--store", "s", "--eval-store", "e", "--their-python", "p", "--target"]
    for target, expected in (("dflash.toml", str(tmp_path / "dflash.toml")), ("toy", "toy")):
        monkeypatch.setattr(sys, "argv", [*words, target])
        assert head_to_head._options().target == expected


def test_the_packed_speculators_is_the_one_that_is_asked_for() -> None:
    packed = (Path(__file__).parent / "bench" / "offline.sh").read_text(encoding="utf-8")
    assert f"speculators=={THEIR_VERSION} " in packed


def test_without_speculators_it_says_so_and_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "bench"))
    import head_to_head

    words = ["x", str(tmp_path / "out"), "--store", "s", "--eval-store", "e", "--target", "toy"]
    for python in (sys.executable, str(tmp_path / "nowhere")):
        monkeypatch.setattr(head_to_head, "installed_version", lambda _python: "")
        monkeypatch.setattr(sys, "argv", [*words, "--their-python", python])
        assert head_to_head.main() == 4
        assert "pip install speculators==0.9.0" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()
