"""The stages of the study over one folder: each does what is missing of it, until its time is up.

FOLDER/settings.json   what the study is of; another size, seeds or prompts are refused
FOLDER/prompts/        the prompts, copied (or written, for the toy)
FOLDER/answers/        one file a `dflash generate`
FOLDER/stores/         bf16, eval, and the modes that the second round needs
FOLDER/arms/           a run each, as a sweep; FOLDER/scores/ a file each
FOLDER/decision.json   the best objective, once all of them are scored
"""

from __future__ import annotations

import json
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dflash_pipeline.configs import fleet, gpus
from dflash_pipeline.configs.gpus import Devices, device_name
from dflash_pipeline.configs.load import load
from dflash_pipeline.configs.status import read_status, status_path
from dflash_pipeline.configs.sweep import Variant
from dflash_pipeline.store.reader import open_store
from studies import arm as arm_process
from studies import preparing
from studies.arms import (
    BASE_STORE,
    EVAL_STORE,
    MODES,
    Arm,
    StoreFacts,
    fingerprint,
    following_arm,
    later_arms,
    needed_stores,
    objective_arms,
)
from studies.paired import Score, best_arm
from studies.running import Deadline, Job, OutOfTime, Started, environment, run_jobs
from studies.scoring import LOOKUP, UNTRAINED, read_answers, score_path
from studies.sizes import SIZES, answer_jobs

_POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class Study:
    """What a study is of, and what it may use now."""

    folder: Path
    size_name: str
    seeds: tuple[int, ...]
    gpus: str
    """As `--gpus` of the product."""
    per_gpu: int
    """Processes that share a device."""
    deadline: Deadline

    @property
    def devices(self) -> Devices:
        return gpus.parse(self.gpus)

    @property
    def num_places(self) -> int:
        """Processes at a time."""
        return len(self.devices.ids) * self.per_gpu

    @property
    def _device_words(self) -> list[str]:
        return ["--gpus", self.gpus, "--share-gpu"] if self.gpus else ["--share-gpu"]

    def prepare(self, prompts: Path | None) -> None:
        """Copy the prompts and write the configuration, or find that this study's are there."""
        preparing.prepare(self.folder, self.size_name, self.seeds, prompts)

    def data(self) -> None:
        """Every answer, several commands at a time."""
        jobs = [
            Job.dflash(job.name, [*job.words(), *self._device_words])
            for job in answer_jobs(SIZES[self.size_name])
        ]
        (self.folder / "answers").mkdir(exist_ok=True)
        self._run(jobs, min(self.num_places, 4 * len(self.devices.ids)))

    def store(self) -> None:
        """The two bf16 stores; the arm that follows trains while the first one is captured.

        Its capture is stopped as soon as its plan is there, and goes on once every follower is at
        work: however fast it is, they have something to follow.
        """
        (self.folder / "stores").mkdir(exist_ok=True)
        job, following = self._capture_job(BASE_STORE), following_arm(self.seeds)
        is_captured = (self.folder / "done" / job.name).exists()
        if self.num_places < len(self.seeds):
            raise ValueError(
                f"{len(self.seeds)} runs follow one capture at the same time, {self.num_places} "
                "fit: raise --per-gpu"
            )
        if not is_captured:
            self._plan(job)
        begun = [seed for seed in self.seeds if self._has_begun(following.run_name(seed))]
        if not is_captured or len(begun) == len(self.seeds):
            capturing = threading.Thread(target=self._capture_when_followed, args=(job, following))
            capturing.start()
            try:
                self._train([following])
            finally:
                capturing.join()
        self._run([job, self._capture_job(EVAL_STORE)], 2)

    def _plan(self, job: Job) -> None:
        """Begin a capture, and stop it once its store is there; the same line goes on with it."""
        plan = self.folder / "stores" / BASE_STORE / "zarr.json"
        if plan.exists():
            return
        self.deadline.check(job.name)
        planning = Started(job, self.folder)
        try:
            while not plan.exists() and planning.code is None:
                self.deadline.check(job.name)
                time.sleep(_POLL_S)
        finally:
            planning.stop()
        if not plan.exists():
            planning.check()

    def _has_begun(self, run: str) -> bool:
        return (self.folder / "arms" / run / "run.json").exists()

    def _capture_when_followed(self, job: Job, following: Arm) -> None:
        """Capture to the end, or as far as time goes, once all followers wait for shards."""
        runs = [following.run_name(seed) for seed in following.seeds]
        while self.deadline.left_s > 0:
            states = [self._state(run) for run in runs]
            # one that failed is told of by the training itself
            if "failed" in states or all(
                state in ("waiting", "running", "done") for state in states
            ):
                break
            time.sleep(_POLL_S)
        run_jobs([job], 1, self.folder, self.deadline)

    def _state(self, run: str) -> str:
        status = read_status(status_path(f"arms/{run}/logs", "train", 0))
        # a run that was only just started says `running` before it has looked at the store
        if status is None or (status.state == "running" and not self._has_begun(run)):
            return ""
        return status.state

    def _capture_job(self, name: str) -> Job:
        split = "eval" if name == EVAL_STORE else "train"
        mode = MODES.get(name, MODES[BASE_STORE])
        words = ["capture", "--store", f"stores/{name}", *self._device_words]
        words += ["--hidden-mode", mode.hidden, "--last-mode", mode.last]
        for job in answer_jobs(SIZES[self.size_name]):
            if job.name.startswith(split):
                words += ["--data", f"answers/{job.name}.jsonl"]
        # every answer of the one is held out; of the other a few, which training validates with
        words += ["--set", f"data.heldout={1.0 if name == EVAL_STORE else 0.02}"]
        if name not in (BASE_STORE, EVAL_STORE):
            # how much a mode loses is the question: calibration's verdict is recorded, not obeyed
            words += ["--force"]
        return Job.dflash(f"capture-{name}", words)

    def arms(self) -> None:
        """Train what is known to be wanted now, and first capture the stores that it needs."""
        wanted = self.wanted()
        missing = [name for name in needed_stores(wanted) if name != BASE_STORE]
        self._run([self._capture_job(name) for name in missing], len(MODES))
        self.check_data(wanted)
        self._train(wanted)

    def wanted(self) -> list[Arm]:
        """The objectives, and once one of them is chosen, what is asked of it."""
        arms = objective_arms(self.seeds)
        chosen = self.decision()
        return [*arms, *later_arms(chosen, self.seeds)] if chosen else arms

    def decision(self) -> str:
        """The best objective; empty while it is not known."""
        path = self.folder / "decision.json"
        return str(json.loads(path.read_text())["objective"]) if path.exists() else ""

    def check_data(self, arms: Sequence[Arm]) -> None:
        """ValueError unless all stores of these arms hold the same samples."""
        found = {name: self.facts(name).data for name in needed_stores(arms)}
        if len(set(found.values())) > 1:
            raise ValueError(
                f"the stores {found} were captured from different answers: arms on them are no "
                "pairs; remove the odd one and its capture's mark in done/"
            )

    def facts(self, name: str) -> StoreFacts:
        """Of a store that is whole."""
        store = open_store(self.folder / "stores" / name)
        table = store.table
        return StoreFacts(
            data=fingerprint(store),
            num_samples=len(table),
            num_distinct=len(set(np.asarray(table.token_hash).tolist())),
            num_tokens=int(table.num_tokens.sum()),
            num_supervised=int(table.num_teacher.sum()),
            bytes_per_token=store.all_rows_bytes / max(int(table.num_tokens.sum()), 1),
            guard=dict(store.calibration.report) if store.spec.hidden_mode != "bf16" else None,
        )

    def variant(self, arm: Arm, seed: int) -> Variant:
        """One run as the product's sweep takes it."""
        name = arm.run_name(seed)
        options: dict[str, object] = {"train.out": f"arms/{name}"}
        run = load("dflash.toml", (), options, (f"arm {arm.name}", arm.table(seed)))
        return Variant(name, run)

    def _train(self, arms: Sequence[Arm]) -> None:
        """All runs of these arms; the bf16 logits after the others, they have another entry."""
        for entry, rounded in (
            (arm_process.TRAIN, False),
            (arm_process.TRAIN_BF16_LOGITS, True),
        ):
            variants = [
                self.variant(arm, seed)
                for arm in arms
                if arm.has_bf16_logits == rounded
                for seed in arm.seeds
            ]
            if variants:
                self._train_variants(entry, variants)

    def _train_variants(self, entry: str, variants: Sequence[Variant]) -> None:
        fleet.check_done(variants)
        names = [one.name for one in variants if not self.is_trained(one.name)]
        if not names:
            return
        self.deadline.check(f"training of {', '.join(names)}")
        devices, out = self.devices, self.folder / "arms"
        gpus.check(devices, share=True)
        out.mkdir(exist_ok=True)
        with self.deadline.interrupts():
            outcomes, signal = fleet.run_variants(
                entry, variants, devices, out, resume=True, per_device=self.per_gpu
            )
        failed = [f"{one.name}: {one.error}" for one in outcomes if one.state == "failed"]
        if failed:
            raise RuntimeError("; ".join(failed))
        if signal:
            left = [one.name for one in outcomes if not one.state.startswith("done")]
            raise OutOfTime(f"training of {', '.join(left)}")

    def is_trained(self, name: str) -> bool:
        """Whether a run is done; its status says so."""
        return self._state(name) == "done"

    def score(self) -> None:
        """Replay every run that is trained; the decision, once every objective is scored."""
        wanted = [following_arm(self.seeds), *self.wanted()]
        runs = [LOOKUP, UNTRAINED]
        runs += [arm.run_name(seed) for arm in wanted for seed in arm.seeds]
        known = [run for run in runs if run in (LOOKUP, UNTRAINED) or self.is_trained(run)]
        todo = [run for run in known if not score_path(self.folder, run).exists()]
        if todo:
            self.deadline.check(f"scores of {', '.join(todo)}")
        (self.folder / "scores").mkdir(exist_ok=True)
        shares = defaultdict[int, list[str]](list)
        for number, run in enumerate(todo):
            shares[number % self.num_places].append(run)
        jobs = [self._score_job(place, shares[place]) for place in sorted(shares)]
        for job in jobs:
            # a name of an earlier share says nothing of this one
            (self.folder / "done" / job.name).unlink(missing_ok=True)
        run_jobs(jobs, self.num_places, self.folder, self.deadline)
        left = [run for run in todo if not score_path(self.folder, run).exists()]
        if left:
            raise OutOfTime(f"scores of {', '.join(left)}")
        objectives = objective_arms(self.seeds)
        names = {arm.run_name(seed) for arm in objectives for seed in arm.seeds}
        if names <= set(known) and not self.decision():
            taus = {arm.name: _mean_tau(self.scores(arm)) for arm in objectives}
            decided = {"objective": best_arm(taus), "taus": taus}
            (self.folder / "decision.json").write_text(json.dumps(decided, indent=1) + "\n")

    def _score_job(self, place: int, runs: Sequence[str]) -> Job:
        devices = self.devices
        number = devices.ids[place % len(devices.ids)]
        device = "cuda:0" if devices.kind == "cuda" else "cpu"
        visible = device_name(number) if devices.kind == "cuda" else ""
        seconds = f"{max(self.deadline.left_s, 0):.0f}"
        return Job(
            f"score-{place}",
            ("-m", "studies.scoring", str(self.folder), device, seconds, *runs),
            {"CUDA_VISIBLE_DEVICES": visible},
        )

    def scores(self, arm: Arm) -> list[Score]:
        """Of all seeds of an arm that are scored."""
        data = self.facts(arm.store).data
        return [
            read_score(self.folder, arm.run_name(seed), arm.name, seed, data)
            for seed in arm.seeds
            if score_path(self.folder, arm.run_name(seed)).exists()
        ]

    def _run(self, jobs: Sequence[Job], at_once: int) -> None:
        left = run_jobs(jobs, at_once, self.folder, self.deadline)
        if left:
            raise OutOfTime(", ".join(left))


def read_score(folder: Path, run: str, arm: str, seed: int, data: str) -> Score:
    """The counts of one run."""
    answers: dict[str, Any] = read_answers(folder, run)["answers"]
    return Score(
        arm=arm,
        seed=seed,
        data=data,
        kept={key: one["kept"] for key, one in answers.items()},
        cycles={key: one["cycles"] for key, one in answers.items()},
        domain={key: one["domain"] for key, one in answers.items()},
    )


def _mean_tau(scores: Sequence[Score]) -> float:
    return sum(score.tau(list(score.kept)) for score in scores) / len(scores)


def make_importable() -> None:
    """Processes that the product launches find the study's modules."""
    import os

    os.environ.update(environment())
