"""The study's pure parts: what is paired, what an interval is, what becomes a default."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dflash_pipeline.configs.load import load
from dflash_pipeline.configs.schema import Run
from dflash_pipeline.configs.status import end_status
from dflash_pipeline.configs.sweep import read_variants
from dflash_pipeline.train import loss, teacher
from studies import arm as arm_process
from studies import cost, preparing, result
from studies.arms import (
    FOLLOWED,
    LOSSES,
    MODES,
    WEIGHTS,
    Arm,
    StoreFacts,
    fingerprint,
    following_arm,
    is_of_bf16_logits,
    later_arms,
    needed_stores,
    objective_arms,
)
from studies.paired import (
    Difference,
    Score,
    Unpaired,
    best_arm,
    interval,
    paired,
    relative,
    smallest_mode,
    t_quantile,
)
from studies.running import Deadline, Job, OutOfTime, run_jobs
from studies.sizes import SIZES, TEMPERATURE, answer_jobs, config_text, is_sampled, prompt_of
from studies.stages import STAGES, Study, named_stages

SEEDS = (0, 1, 2)


def _score(arm: str, seed: int, counts: Mapping[str, tuple[int, int]], data: str = "d") -> Score:
    return Score(
        arm=arm,
        seed=seed,
        data=data,
        kept={key: kept for key, (kept, _) in counts.items()},
        cycles={key: cycles for key, (_, cycles) in counts.items()},
        domain=dict.fromkeys(counts, "math"),
    )


ONE = {"a": (10, 5), "a#0": (8, 4), "b": (9, 3)}


def test_pairs_are_seed_by_seed_whatever_the_order() -> None:
    arm = [_score("x", seed, ONE) for seed in (2, 0)]
    base = [_score("y", seed, ONE) for seed in (0, 2)]
    assert [(one.seed, two.seed) for one, two in paired(arm, base)] == [(0, 0), (2, 2)]


@pytest.mark.parametrize(
    ("base", "message"),
    [
        ([], r"x has seeds \[0\], an arm without scores has \[\]"),
        ([_score("y", 1, ONE)], r"x has seeds \[0\], y has \[1\]"),
        ([_score("y", 0, ONE), _score("y", 0, ONE)], r"y has \[0, 0\]"),
        ([_score("y", 0, {"a": (1, 1), "c": (1, 1)})], "3 answers are scored in one alone, a#0"),
        ([_score("y", 0, ONE, "other")], "trained on different data .d and other."),
    ],
)
def test_arms_that_are_no_pairs_are_refused(base: list[Score], message: str) -> None:
    with pytest.raises(Unpaired, match=message):
        relative([_score("x", 0, ONE)], base, list(ONE))


def test_the_same_drafter_differs_by_nothing() -> None:
    scores = [_score("x", seed, ONE) for seed in SEEDS]
    found = relative(scores, scores, list(ONE))
    assert (found.mean, found.low, found.high) == (0.0, 0.0, 0.0)


def test_a_difference_is_of_pooled_tau_and_of_each_seed() -> None:
    half = {"a": (10, 10), "a#0": (8, 8), "b": (9, 6)}
    arm = [_score("x", 0, ONE), _score("x", 1, half)]
    base = [_score("y", 0, half), _score("y", 1, half)]
    found = relative(arm, base, list(ONE))
    assert found.by_seed == pytest.approx((27 / 12 / (27 / 24) - 1, 0.0))
    assert found.mean == pytest.approx(0.5)
    assert found.num_prompts == 2
    assert found.low < 0 < found.mean < found.high


def test_answers_of_one_prompt_are_one_draw() -> None:
    random = np.random.default_rng(0)
    base, arm = dict[str, tuple[int, int]](), dict[str, tuple[int, int]]()
    for number in range(40):
        base[f"p{number}"], arm[f"p{number}"] = (40, 20), (40, int(random.integers(15, 25)))
    copies = 6
    base_copied = {f"{key}#{k}": value for key, value in base.items() for k in range(copies)}
    arm_copied = {f"{key}#{k}": value for key, value in arm.items() for k in range(copies)}
    single = relative([_score("x", 0, arm)], [_score("y", 0, base)], list(base))
    copied = relative(
        [_score("x", 0, arm_copied)], [_score("y", 0, base_copied)], list(base_copied)
    )
    # the same answer six times tells no more than once
    assert (copied.low, copied.high) == pytest.approx((single.low, single.high), abs=1e-12)
    assert single.is_of_prompts_alone


def test_an_interval_holds_the_truth_as_often_as_it_says() -> None:
    """Simulated: no true difference, three seeds that differ more than the 60 prompts do."""
    random, inside = np.random.default_rng(4), 0
    rounds = 300
    keys = [f"p{number}" for number in range(60)]
    for _ in range(rounds):
        scores: dict[str, list[Score]] = {"x": [], "y": []}
        for name, own in scores.items():
            for seed in SEEDS:
                shift = random.normal(0, 0.03)
                cycles = np.round(50 * np.exp(random.normal(shift, 0.1, len(keys)))).astype(int)
                counts = {key: (100, int(c)) for key, c in zip(keys, cycles, strict=True)}
                own.append(_score(name, seed, counts))
        found = relative(scores["x"], scores["y"], keys)
        inside += found.low <= 0 <= found.high
    # 0.95 less two standard errors of so many rounds
    assert inside / rounds >= 0.925


def test_few_seeds_cost_what_they_must() -> None:
    spread = np.array([-0.01, 0.0, 0.01])
    low, high = interval(0.0, spread, 0.0, 100)
    assert high == pytest.approx(4.3027 * 0.01 / np.sqrt(3), rel=1e-4)
    assert low == -high
    low, high = interval(0.0, spread[:1], 0.01**2, 100_000)
    assert high == pytest.approx(1.96 * 0.01, rel=1e-3)


@pytest.mark.parametrize(
    ("freedom", "value"),
    [(1, 12.7062), (2, 4.30265), (5, 2.57058), (6, 2.44691), (10, 2.22814), (1e6, 1.95997)],
)
def test_quantiles_of_t_are_those_of_the_tables(freedom: float, value: float) -> None:
    assert t_quantile(0.975, freedom) == pytest.approx(value, rel=2e-5)


def test_the_best_is_the_largest_and_equals_are_by_name() -> None:
    assert best_arm({"kl": 2.0, "ce": 2.0, "a": 1.0}) == "ce"
    with pytest.raises(ValueError, match="no arm was scored"):
        best_arm({})


def _loss(low: float, high: float, one_seed: bool = False) -> Difference:
    return Difference((low + high) / 2, low, high, (), 10, one_seed)


def test_a_smaller_mode_must_lose_less_than_its_bound() -> None:
    sizes = {"bf16": 7.0, "int8": 3.5, "int4": 2.0}
    good, wide = _loss(-0.0149, 0.01), _loss(-0.0151, 0.02)
    assert smallest_mode(sizes, {"int8": good, "int4": good}, "bf16") == "int4"
    assert smallest_mode(sizes, {"int8": good, "int4": wide}, "bf16") == "int8"
    assert smallest_mode(sizes, {"int8": wide, "int4": wide}, "bf16") == "bf16"
    # a gain is no loss, and one seed decides nothing
    assert smallest_mode(sizes, {"int8": _loss(0.01, 0.03)}, "bf16") == "int8"
    assert smallest_mode(sizes, {"int4": _loss(0.0, 0.0, True)}, "bf16") == "bf16"


def test_every_objective_is_there_and_is_paired_with_the_default() -> None:
    arms = objective_arms(SEEDS)
    assert len(arms) == len(LOSSES) * len(WEIGHTS) == 6
    assert [arm.name for arm in arms if not arm.against] == [FOLLOWED]
    assert {arm.against for arm in arms} == {"", FOLLOWED}
    assert following_arm(SEEDS).settings == arms[0].settings
    assert following_arm(SEEDS).against == FOLLOWED


@pytest.mark.parametrize("best", [arm.name for arm in objective_arms(SEEDS)])
def test_what_is_asked_of_the_best_changes_one_thing(best: str) -> None:
    (base,) = (arm for arm in objective_arms(SEEDS) if arm.name == best)
    arms = {arm.name: arm for arm in later_arms(best, SEEDS)}
    assert {arm.against for arm in arms.values()} == {best}
    assert arms["cap"].settings.keys() - base.settings.keys() == {"loss.cap_lambda"}
    assert arms["bf16-logits"].settings == base.settings
    assert [name for name, arm in arms.items() if arm.has_bf16_logits] == ["bf16-logits"]
    runs = [arm.run_name(seed) for arm in arms.values() for seed in arm.seeds]
    assert sum(map(is_of_bf16_logits, runs)) == len(SEEDS)
    # in the order of what matters most: time may be up
    questions = [arm.question for arm in arms.values()]
    assert list(dict.fromkeys(questions)) == ["modes", "cap", "logits", "shape"]
    # without KL nothing reads `last`: how it is stored changes nothing
    modes = [name for name, arm in arms.items() if arm.question == "modes"]
    wanted = (
        ["int8", "int4"]
        if best.startswith("ce-") and "kl" not in best
        else ["int8", "int4", "int4-last"]
    )
    assert modes == wanted == [arm.store for arm in arms.values() if arm.question == "modes"]
    assert [len(arm.seeds) for arm in arms.values() if arm.question == "shape"] == [1, 1, 1]
    assert needed_stores([base, *arms.values()]) == ["bf16", *modes]
    assert set(modes) < set(MODES)


@pytest.mark.parametrize("name", list(SIZES))
def test_every_arm_is_a_variant_that_the_product_takes(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    size = SIZES[name]
    Path("dflash.toml").write_text(config_text(size))
    base = load("", (), {})
    for key, value in size.settings.items():
        section, _, field = key.partition(".")
        assert getattr(getattr(base, section), field) == value
    study = Study(tmp_path, name, SEEDS, "cpu", 2, Deadline(1))
    arms = [*objective_arms(SEEDS), following_arm(SEEDS), *later_arms("ce-kl-dpace", SEEDS)]
    runs = [study.variant(arm, seed) for arm in arms for seed in arm.seeds]
    assert len({one.name for one in runs}) == len(runs) == 7 * 3 + 5 * 3 + 3
    for arm in arms:
        run = study.variant(arm, 2).run
        assert (run.train.seed, run.train.stores) == (2, (f"stores/{arm.store}",))
        # the line that is told trains the same
        words = arm.command(2).split(" (")[0].split()
        sets = [words[place + 1] for place, word in enumerate(words) if word == "--set"]
        options = {"train.out": run.train.out, "train.stores": run.train.stores}
        assert load("", sets, options) == run


def test_a_variant_of_an_arm_is_refused_like_any_other(tmp_path: Path) -> None:
    (tmp_path / "sweep.toml").write_text("[ce-gamma-s0]\nloss.sharpness = 1")
    with pytest.raises(ValueError, match=r"unknown key loss\.sharpness"):
        read_variants(str(tmp_path / "sweep.toml"), "toy", (), {"train.out": "arms"})


def test_answers_are_greedy_and_sampled_of_each_prompt_and_held_out_ones_stay_apart() -> None:
    jobs = {job.name: job for job in answer_jobs(SIZES["full"])}
    for split in ("train", "eval"):
        own = [job for name, job in jobs.items() if name.startswith(split)]
        for samples in (
            0,
            SIZES["full"].samples if split == "train" else SIZES["full"].eval_samples,
        ):
            files = [file for job in own if job.samples == samples for file in job.files]
            assert sorted(files) == [f"{split}_{domain}" for domain in ("chat", "code", "math")]
        assert not any(file.partition("_")[0] != split for job in own for file in job.files)
    # a single sampled answer has the id of the greedy one, and no store takes both
    assert min(min(size.samples, size.eval_samples) for size in SIZES.values()) >= 2
    assert len(jobs) == len(answer_jobs(SIZES["full"]))
    words = jobs["eval-sampled-code"].words()
    assert words[words.index("--temperature") + 1] == str(TEMPERATURE)
    assert "--temperature" not in jobs["eval-greedy"].words()
    assert (prompt_of("gsm8k-1#3"), prompt_of("gsm8k-1")) == ("gsm8k-1", "gsm8k-1")
    assert (is_sampled("gsm8k-1#3"), is_sampled("gsm8k-1")) == (True, False)


def test_stores_of_other_answers_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    study = Study(tmp_path, "tiny", SEEDS, "cpu", 2, Deadline(1))
    arms = [*objective_arms(SEEDS), *later_arms(FOLLOWED, SEEDS)]
    monkeypatch.setattr(Study, "facts", lambda _self, name: _Facts("d" if name != "int4" else "e"))
    with pytest.raises(ValueError, match="captured from different answers"):
        study.check_data(arms)
    monkeypatch.setattr(Study, "facts", lambda _self, name: _Facts("d"))
    study.check_data(arms)


class _Facts:
    def __init__(self, data: str) -> None:
        self.data = data


class _FakeStore:
    """What a fingerprint is made of."""

    def __init__(self, order: list[int], **changed: Any) -> None:
        columns = {
            "sample_id": np.array([5, 9, 7], np.uint64),
            "token_hash": np.array([1, 2, 3], np.uint64),
            "num_tokens": np.array([10, 11, 12]),
            "split": np.array([0, 0, 1]),
            "readable_N": np.array([True, True, True]),
        }
        columns |= {name: np.array(value, columns[name].dtype) for name, value in changed.items()}
        for name, column in columns.items():
            setattr(self, name, column[order])
        self.table = self


def test_a_fingerprint_is_of_the_samples_and_not_of_their_order() -> None:
    one = fingerprint(_FakeStore([0, 1, 2]))
    assert fingerprint(_FakeStore([2, 0, 1])) == one
    for changed in (
        {"token_hash": [1, 2, 4]},
        {"split": [1, 0, 1]},
        {"sample_id": [5, 9, 8]},
        {"readable_N": [True, False, True]},
    ):
        assert fingerprint(_FakeStore([0, 1, 2], **changed)) != one


def test_a_run_that_followed_nothing_is_no_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arm = following_arm((0,))
    run = tmp_path / "arms" / arm.run_name(0)
    run.mkdir(parents=True)
    (run / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0, "tau_tf": 1.5, "time": 9.0}\n')
    scores = {"following": [_score("following", 0, ONE)], FOLLOWED: [_score(FOLLOWED, 0, ONE)]}
    study = Study(tmp_path, "tiny", (0,), "cpu", 2, Deadline(1))
    told = result._arm(study, arm, scores)
    assert told["segments_of_first_epoch"] == [0]
    assert "followed nothing" in told["difference"]["none"]
    (run / "order").write_text("{}\n{}\n")
    told = result._arm(study, arm, scores)
    assert told["difference"]["all"]["mean"] == 0.0


def test_differences_are_over_the_seeds_that_both_have_and_say_why_there_are_none() -> None:
    arm = [_score("x", seed, ONE) for seed in (0, 1)]
    found = result.differences(arm, [_score("y", 1, ONE)])
    assert found["all"]["by_seed"] == (0.0,)
    assert set(found) == {"all", "greedy", "sampled", "math"}
    assert "has seeds []" in result.differences(arm, [])["none"]


def test_bf16_logits_are_the_product_rounded_and_only_where_they_are_asked_for() -> None:
    torch.manual_seed(0)
    hidden_NH, weight_VH = torch.randn(5, 16), torch.randn(9, 16)
    exact = loss.raw_logits(hidden_NH, weight_VH)
    rounded = arm_process.bf16_logits(hidden_NH, weight_VH)
    assert torch.equal(rounded, exact.bfloat16().float())
    assert not torch.equal(rounded, exact)
    assert loss.raw_logits is arm_process._raw_logits


def test_the_arm_of_bf16_logits_gives_the_loss_its_own_product_and_takes_it_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = []
    monkeypatch.setattr(
        arm_process.worker,
        "main",
        lambda *_: seen.extend((loss.raw_logits, teacher.raw_logits)) or 1 / 0,
    )
    for name in ("bf16-logits-s1", "cap-s1"):
        run = replace(Run(), train=replace(Run().train, out=f"arms/{name}"))
        with pytest.raises(ZeroDivisionError):
            arm_process.main(run, None, {})
    assert seen == [arm_process.bf16_logits] * 2 + [arm_process._raw_logits] * 2
    assert loss.raw_logits is teacher.raw_logits is arm_process._raw_logits


def test_jobs_that_are_done_are_not_run_again_and_time_ends_the_rest(tmp_path: Path) -> None:
    code = "import sys; open(sys.argv[1], 'a').write('x')"
    jobs = [Job(name, ("-c", code, name), {}) for name in ("one", "two")]
    assert run_jobs(jobs, 1, tmp_path, Deadline(2)) == []
    assert run_jobs(jobs, 2, tmp_path, Deadline(2)) == []
    assert (tmp_path / "one").read_text() == (tmp_path / "two").read_text() == "x"
    late = Job("late", ("-c", code, "late"), {})
    assert run_jobs([*jobs, late], 2, tmp_path, Deadline(0)) == ["late"]
    assert not (tmp_path / "late").exists()
    with pytest.raises(OutOfTime, match="training"):
        Deadline(0).check("training")


def test_a_job_that_fails_is_told_with_the_end_of_its_log(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="bad ended with 3:\nno such thing"):
        run_jobs(
            [Job("bad", ("-c", "print('no such thing'); raise SystemExit(3)"), {})],
            1,
            tmp_path,
            Deadline(2),
        )


def test_a_study_goes_on_only_with_what_it_is_of(tmp_path: Path) -> None:
    study = Study(tmp_path / "s", "tiny", SEEDS, "cpu", 2, Deadline(1))
    study.prepare(None)
    study.prepare(None)
    with pytest.raises(ValueError, match="other seeds: go on with the same ones"):
        replace(study, seeds=(0,)).prepare(None)
    with pytest.raises(ValueError, match="writes its own prompts"):
        study.prepare(tmp_path)
    with pytest.raises(ValueError, match="size full needs --prompts"):
        replace(study, folder=tmp_path / "t", size_name="full").prepare(None)
    with pytest.raises(ValueError, match="other memory: go on with the same ones"):
        replace(study, memory=tmp_path / "memory").prepare(None)


def test_a_rehearsal_takes_the_first_rows_of_each_file_whatever_they_hold(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts"
    prompts.mkdir()
    # a separator that a text would be split at
    rows = [f'{{"id": {number}, "text": "a\u2028b"}}\n' for number in range(20)]
    for name in cost.PROMPTS:
        (prompts / f"{name}.jsonl").write_text("".join(rows), encoding="utf-8")
    study = Study(tmp_path / "s", "rehearsal", SEEDS, "cpu", 2, Deadline(1))
    study.prepare(prompts)
    kept = {
        name: (tmp_path / "s" / "prompts" / f"{name}.jsonl").read_text(encoding="utf-8")
        for name in cost.PROMPTS
    }
    assert kept["train_math"] == "".join(rows[:5])
    assert kept["eval_chat"] == "".join(rows[:2])


def test_a_study_that_will_not_fit_is_refused_before_it_begins(tmp_path: Path) -> None:
    memory = tmp_path / "memory"
    preparing.check_room(cost.Bytes(1, 1), tmp_path, memory)
    with pytest.raises(ValueError, match=f"^{memory} has .* free, the study takes"):
        preparing.check_room(cost.Bytes(1, 1e18), tmp_path, memory)
    with pytest.raises(ValueError, match=f"^{tmp_path} has .* free"):
        preparing.check_room(cost.Bytes(1e18, 0), tmp_path, None)


def _trained(study: Study, arms: list[Arm]) -> None:
    """Let the runs of these arms look as if they were trained."""
    for arm in arms:
        for seed in arm.seeds:
            run = study.folder / "arms" / arm.run_name(seed)
            (run / "step-00000010" / "state").mkdir(parents=True)
            (run / "step-00000010" / "model.safetensors").touch()
            end_status(str(run / "logs"), "train", 0, "done", "")


def test_what_no_later_stage_reads_is_removed_and_its_facts_stay(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    memory = tmp_path / "memory"
    study = Study(tmp_path / "s", "tiny", SEEDS, "cpu", 3, Deadline(1), memory)
    study.folder.mkdir()
    monkeypatch.chdir(study.folder)
    (study.folder / "facts").mkdir()
    (study.folder / "done").mkdir()
    for name in MODES:
        facts = StoreFacts("d", 1, 1, 10, 5, 2.0)
        (study.folder / "facts" / f"{name}.json").write_text(json.dumps(asdict(facts)))
        (study.folder / "done" / f"capture-{name}").touch()
        for folder in (study.folder / "stores" / name, memory / name):
            folder.mkdir(parents=True)
    losses = objective_arms(SEEDS)
    _trained(study, losses)
    study.clear()
    # before the decision every store may be asked for
    assert all(study.is_captured(name) for name in MODES)
    assert not list(study.folder.glob("arms/*/*/state"))
    assert len(list(study.folder.glob("arms/*/*/model.safetensors"))) == len(losses) * len(SEEDS)

    (study.folder / "decision.json").write_text('{"objective": "ce-kl-dpace"}')
    later = {arm.name: arm for arm in later_arms("ce-kl-dpace", SEEDS)}
    _trained(study, [later["int8"], replace(later["int4"], seeds=SEEDS[:2])])
    study.clear()
    assert [name for name in MODES if study.is_captured(name)] == ["bf16", "int4", "int4-last"]
    assert sorted(path.name for path in memory.iterdir()) == ["bf16", "int4", "int4-last"]
    assert not (study.folder / "stores" / "int8").exists()
    assert study.is_known("int8")
    assert study.facts("int8").bytes_per_token == 2.0

    # without KL nothing reads `last`: a mode that is not asked for goes
    (study.folder / "decision.json").write_text('{"objective": "ce-gamma"}')
    study.clear()
    assert not study.is_captured("int4-last")


def test_a_capture_waits_no_longer_for_followers_that_cannot_begin(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    study = Study(tmp_path, "tiny", SEEDS, "cpu", 3, Deadline(60))
    monkeypatch.chdir(tmp_path)

    def train(_study: Study, _arms: list[Arm]) -> None:
        raise ValueError("no such GPU")

    monkeypatch.setattr(Study, "_plan", lambda _study, _job: None)
    monkeypatch.setattr(Study, "_train", train)
    with pytest.raises(ValueError, match="no such GPU"):
        study._followed(study._capture_job("bf16"), following_arm(SEEDS))
    # nothing was captured on the way out
    assert not (tmp_path / "logs").exists()


def test_half_of_every_store_lies_in_the_memory_that_is_given(tmp_path: Path) -> None:
    study = Study(tmp_path, "tiny", SEEDS, "cpu", 3, Deadline(1), Path("/memory"))
    for name in (*MODES, "eval"):
        words = study._capture_job(name).arguments
        assert words[words.index("--store") + 1] == f"stores/{name},/memory/{name}"
    words = replace(study, memory=None)._capture_job("bf16").arguments
    assert words[words.index("--store") + 1] == "stores/bf16"


def test_a_line_names_stages_in_its_order() -> None:
    assert named_stages("all") == STAGES
    assert named_stages("data,store") == ("data", "store")
    with pytest.raises(argparse.ArgumentTypeError, match="no stage stroe: expected estimate, all"):
        named_stages("data,stroe")


def test_the_estimate_is_of_the_size_it_is_given() -> None:
    one, two = (cost.costs(SIZES["full"], 3, num_gpus) for num_gpus in (1, 2))
    assert [part.name.partition(":")[0] for part in one] == list(STAGES[:-1])
    assert all(a.seconds > b.seconds for a, b in zip(one, two, strict=True))
    half = replace(SIZES["full"], settings={**SIZES["full"].settings, "train.epochs": 1})
    assert cost.costs(half, 3, 1)[2].seconds < one[2].seconds
    assert cost.num_runs(3) == 39


def test_the_full_size_is_what_is_asked_for_and_fits_one_gpu_machine() -> None:
    full = SIZES["full"]
    measured = cost._measured()["generate"]
    generated = cost.num_answers(full, "train") * measured["tokens"] / measured["answers"]
    assert generated >= 3e6
    assert cost.num_answers(full, "eval") >= 2000
    # of the half hour that a machine may be held: the rest is for its start and for the unforeseen
    assert sum(part.seconds for part in cost.costs(full, 3, 1)) < 18 * 60
    most = cost.most_bytes(full, 3, has_memory=True)
    assert max(most.disk, most.memory) < 45e9
    alone = cost.most_bytes(full, 3, has_memory=False)
    assert alone.memory == 0
    assert alone.disk == pytest.approx(most.disk + most.memory)
    assert cost.most_bytes(SIZES["tiny"], 3, has_memory=True) == cost.Bytes(0, 0)
