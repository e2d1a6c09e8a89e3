"""The stages of the study over one folder: each does what is missing of it, until its time is up.

FOLDER/settings.json   what the study is of; another size, seeds or prompts are refused
FOLDER/prompts/        the prompts, copied (or written, for the toy)
FOLDER/answers/        one file a `dflash generate`
FOLDER/stores/         bf16, eval, and the other modes; each second shard of all of them lies in the
                       folder of --memory, where one is given
FOLDER/facts/          what a result must say of a store, which may be gone by then
FOLDER/arms/           a run each, as a sweep; FOLDER/scores/ a file each
FOLDER/decision.json   the best objective, once all of them are scored whose runs can be trained
FOLDER/decodes/        what `dflash eval` found of the best run, a file each way of choosing tokens

Where $OUT is set, the answers and that run's checkpoint go there as well, as `parcels` of it.
What no later stage reads is removed: a mode's store once all of its runs are trained, and of a
trained run the state that it would have gone on from.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from dflash_pipeline.configs import fleet, gpus
from dflash_pipeline.configs.disk import write_whole
from dflash_pipeline.configs.gpus import Devices, device_name
from dflash_pipeline.configs.load import load
from dflash_pipeline.configs.status import read_status, status_path
from dflash_pipeline.configs.sweep import Variant
from dflash_pipeline.store.reader import open_store
from studies import arm as arm_process
from studies import carried, cost, decoding, preparing
from studies.arms import (
    BASE_STORE,
    EVAL_STORE,
    FOLLOWED,
    FOLLOWING,
    MODES,
    Arm,
    StoreFacts,
    fingerprint,
    following_arm,
    later_arms,
    long_arms,
    needed_stores,
    objective_arms,
    rate_arms,
)
from studies.paired import Score, best_arm
from studies.running import Deadline, Job, OutOfTime, Started, environment, run_jobs
from studies.scoring import LOOKUP, UNTRAINED, read_answers, score_path
from studies.sizes import SIZES, Size, answer_jobs

STAGES = ("data", "store", "arms", "score", "arms", "score", "report")
DECODE = "decode"
"""The stage that is done only where it is named."""
_POLL_S = 0.2
# processes on a device at a time, of the stages whose every process leaves it idle for a while
_ANSWERERS, _CAPTURES = 4, 3
_SCORERS_PER_CORE = 1.5
# how often a call begins a run that fails, from its last checkpoint on
_TRIES = 2


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
    memory: Path | None = None
    """A folder on another file system, for half of every store; None: all are in `folder`."""
    names: tuple[str, ...] = ()
    """The arms that are wanted, of those that there are; empty: all but the long ones and those of
    the learning rate."""
    objective: str = ""
    """What the later arms are asked of; empty: the best one, once all are scored."""
    rate: float = 0.0
    """Learning rate of the long arms; 0: the preset's."""
    answers: Path | None = None
    """A folder of answers that a study sent from another machine; None: they are generated."""
    failures: list[str] = field(default_factory=list)
    """Runs that this call could not train, stores that it could not capture, and why."""

    @property
    def devices(self) -> Devices:
        return gpus.parse(self.gpus)

    @property
    def num_places(self) -> int:
        """Processes that train at a time."""
        return len(self.devices.ids) * self.per_gpu

    @property
    def num_scorers(self) -> int:
        """Processes that replay at a time: on a GPU each waits for its own launches, and cores are
        what there is too little of."""
        if self.devices.kind != "cuda":
            return self.num_places
        return max(self.num_places, int(_SCORERS_PER_CORE * len(os.sched_getaffinity(0))))

    @property
    def _device_words(self) -> list[str]:
        return ["--gpus", self.gpus, "--share-gpu"] if self.gpus else ["--share-gpu"]

    @property
    def long_arms(self) -> list[Arm]:
        return long_arms(self.seeds, self.rate)

    @property
    def size(self) -> Size:
        return SIZES[self.size_name]

    def prepare(self, prompts: Path | None) -> None:
        """Copy the prompts and write the configuration, or find that this study's are there; take
        the answers that another machine sent, where they are given and none are there.

        ValueError where the folder, the prompts or the answers are of another study.
        """
        parcel, done = None, self.folder / "done"
        if self.answers is not None and not carried.has_answers(self.size, done):
            parcel = carried.Parcel(self.answers, self.folder, self.size_name)
            # the toy writes its own
            if prompts is None and self.size.preset != "toy":
                prompts = parcel.prompts
        try:
            preparing.prepare(self.folder, self.size_name, self.seeds, prompts, self.memory)
            if parcel is not None:
                parcel.take(done)
                print(f"answers of {self.answers} taken: none are generated", flush=True)
        finally:
            if parcel is not None:
                parcel.remove()

    def data(self) -> None:
        """Every answer, several commands at a time; then they are sent, unless they came so."""
        jobs = [
            Job.dflash(job.name, [*job.words(), *self._device_words])
            for job in answer_jobs(self.size)
        ]
        (self.folder / "answers").mkdir(exist_ok=True)
        # each waits for its launches: several keep a device busy
        self._run(jobs, min(self.num_places, _ANSWERERS * len(self.devices.ids)))
        if self.answers is None:
            self._send(lambda out: carried.send_answers(self.folder, self.size_name, out))

    def _send(self, pack: Callable[[Path], list[Path]]) -> None:
        """Into $OUT, where that is set; what cannot be sent is told at the end."""
        if "OUT" not in os.environ:
            return
        try:
            for path in pack(Path(os.environ["OUT"])):
                print(f"  sent {path.name}, {path.stat().st_size:,} bytes", flush=True)
        except (ValueError, OSError) as error:
            self.failures.append(f"not sent: {error}")

    def store(self) -> None:
        """Every store; the arm that follows trains while that of bf16 is captured.

        That capture is stopped as soon as its plan is there, and goes on once every follower is at
        work: however fast it is, they have something to follow. The other stores are captured
        meanwhile, as all of this leaves a device idle for most of the time.
        """
        (self.folder / "stores").mkdir(exist_ok=True)
        job = self._capture_job(BASE_STORE)
        modes = [name for name in MODES if name != BASE_STORE and self._is_wanted(name)]
        others = [self._capture_job(name) for name in (*modes[:1], EVAL_STORE, *modes[1:])]
        for following in self._following:
            self._captured_and_followed(job, others, following)
        self._run([job, *others], self._captures_at_once(0))
        for name in (BASE_STORE, EVAL_STORE, *modes):
            self.facts(name)

    def _captured_and_followed(self, job: Job, others: Sequence[Job], following: Arm) -> None:
        if self.num_places < len(self.seeds):
            raise ValueError(
                f"{len(self.seeds)} runs follow one capture at the same time, {self.num_places} "
                "fit: raise --per-gpu"
            )
        with ThreadPoolExecutor(1) as pool:
            beside = pool.submit(
                run_jobs, others, self._captures_at_once(1), self.folder, self.deadline
            )
            try:
                self._followed(job, following)
            except BaseException:
                self.deadline.end_now()
                raise
            beside.result()

    def _captures_at_once(self, num_beside: int) -> int:
        """How many captures, with so many more beside them."""
        return max(1, min(self.num_places, _CAPTURES * len(self.devices.ids)) - num_beside)

    def _followed(self, job: Job, following: Arm) -> None:
        """Train the followers of a capture, and do it; nothing is left to do where both are done
        or where a run cannot follow any more."""
        is_captured = self.is_captured(BASE_STORE)
        if not is_captured:
            self._plan(job)
        begun = [seed for seed in self.seeds if self._has_begun(following.run_name(seed))]
        if is_captured and len(begun) < len(self.seeds):
            return
        with ThreadPoolExecutor(1) as pool:
            capturing = pool.submit(self._capture_when_followed, job, following)
            try:
                self._train([following])
            except OutOfTime:
                # a capture that failed has ended the time, and says why
                capturing.result()
                raise
            except BaseException:
                # the pool waits for it, and it for followers
                self.deadline.end_now()
                raise
            capturing.result()

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
        try:
            run_jobs([job], 1, self.folder, self.deadline)
        except BaseException:
            # the followers wait for it
            self.deadline.end_now()
            raise

    def _state(self, run: str) -> str:
        status = read_status(status_path(f"arms/{run}/logs", "train", 0))
        # a run that was only just started says `running` before it has looked at the store
        if status is None or (status.state == "running" and not self._has_begun(run)):
            return ""
        return status.state

    def _capture_job(self, name: str) -> Job:
        split = "eval" if name == EVAL_STORE else "train"
        mode = MODES.get(name, MODES[BASE_STORE])
        words = ["capture", "--store", ",".join(self._mounts(name)), *self._device_words]
        words += ["--hidden-mode", mode.hidden, "--last-mode", mode.last]
        for job in answer_jobs(self.size):
            if job.name.startswith(split):
                words += ["--data", f"answers/{job.name}.jsonl"]
        # every answer of the one is held out; of the other a few, which training validates with
        words += ["--set", f"data.heldout={1.0 if name == EVAL_STORE else 0.02}"]
        if name not in (BASE_STORE, EVAL_STORE):
            # how much a mode loses is the question: calibration's verdict is recorded, not obeyed
            words += ["--force"]
        return Job.dflash(f"capture-{name}", words)

    def arms(self) -> None:
        """Train what is known to be wanted now, in the order of what matters most."""
        self.clear()
        wanted = self.wanted()
        # a run that is to be trained again may want one that was removed
        missing = [name for name in needed_stores(wanted) if self._is_wanted(name)]
        try:
            self._run([self._capture_job(name) for name in missing], self._captures_at_once(0))
        except RuntimeError as error:
            self.failures.append(str(error))
            wanted = [arm for arm in wanted if self.is_known(arm.store)]
        self.check_data(wanted)
        self._train(wanted)
        self.clear()

    def clear(self) -> None:
        """Remove what no later stage reads, of this call or of one that names no arms."""
        whole = replace(self, names=())
        for name in MODES:
            if name == BASE_STORE or self._is_wanted(name) or whole._is_wanted(name):
                continue
            if self.is_captured(name):
                self.facts(name)
                self._mark(name).unlink()
            for folder in self._mounts(name):
                shutil.rmtree(self.folder / folder, ignore_errors=True)
        for arm in self.all_wanted():
            for run in map(arm.run_name, arm.seeds):
                if self.is_trained(run):
                    for state in (self.folder / "arms" / run).glob("step-*/state"):
                        shutil.rmtree(state)

    def _is_wanted(self, store: str) -> bool:
        """Whether a run may still be trained on it: before the decision, on every one."""
        if not self.names and not self.decision():
            return True
        return any(
            not self.is_trained(arm.run_name(seed))
            for arm in self.wanted()
            if arm.store == store
            for seed in arm.seeds
        )

    def _folder_of(self, store: str) -> Path:
        return self.folder / "stores" / store

    def _mounts(self, store: str) -> list[str]:
        """Where a store's shards lie, as `--store` takes them: its own folder, then the memory."""
        further = [str(self.memory / store)] if self.memory else []
        return [f"stores/{store}", *further]

    def _mark(self, store: str) -> Path:
        return self.folder / "done" / f"capture-{store}"

    @property
    def has_scores(self) -> bool:
        """Whether there is anything to report."""
        return any((self.folder / "scores").glob("*.json"))

    def _facts_path(self, store: str) -> Path:
        return self.folder / "facts" / f"{store}.json"

    def is_captured(self, store: str) -> bool:
        """Whether it is there, and whole."""
        return self._mark(store).exists()

    @property
    def can_go_on(self) -> bool:
        """Whether a later stage has something to work with when one has failed."""
        return self.is_captured(BASE_STORE) and self.is_captured(EVAL_STORE)

    def is_known(self, store: str) -> bool:
        """Whether it was captured whole; it may have been removed since."""
        return self.is_captured(store) or self._facts_path(store).exists()

    def wanted(self) -> list[Arm]:
        """The objectives, and once one of them is chosen, what is asked of it."""
        arms = objective_arms(self.seeds)
        chosen = self.decision()
        arms += later_arms(chosen, self.seeds) if chosen else []
        if not self.names:
            return arms
        arms += [*self.long_arms, *rate_arms(self.seeds)]
        known = {arm.name: arm for arm in arms}
        # each once: two runs of one name would write into one folder
        names = [name for name in dict.fromkeys(self.names) if name != FOLLOWING]
        if unknown := [name for name in names if name not in known]:
            later = "" if chosen else "; others are known once an objective is chosen or given"
            raise ValueError(
                f"no arm {', '.join(unknown)}: expected some of {FOLLOWING}, {', '.join(known)}"
                f"{later}"
            )
        return [known[name] for name in names]

    def all_wanted(self) -> list[Arm]:
        """Those, and the arm that is trained while its store is captured."""
        return [*self._following, *self.wanted()]

    @property
    def _following(self) -> list[Arm]:
        is_wanted = not self.names or FOLLOWING in self.names
        return [following_arm(self.seeds)] if is_wanted else []

    def decision(self) -> str:
        """The best objective, or the one that is given; empty while it is not known."""
        if self.objective:
            return self.objective
        path = self.folder / "decision.json"
        return str(json.loads(path.read_text())["objective"]) if path.exists() else ""

    def check_data(self, arms: Sequence[Arm]) -> None:
        """ValueError unless all stores of these arms hold the same samples."""
        found = {name: self.facts(name).data for name in needed_stores(arms)}
        if len(set(found.values())) > 1:
            raise ValueError(
                f"the stores {found} were captured from different answers: arms on them are no "
                "pairs; remove the odd one, its capture's mark in done/ and its file in facts/"
            )

    def facts(self, name: str) -> StoreFacts:
        """Of a store that is whole, kept from the first time on."""
        path = self._facts_path(name)
        if path.exists():
            return StoreFacts(**json.loads(path.read_text(encoding="utf-8")))
        store = open_store(self._folder_of(name))
        table = store.table
        found = StoreFacts(
            data=fingerprint(store),
            num_samples=len(table),
            num_distinct=len(set(np.asarray(table.token_hash).tolist())),
            num_tokens=int(table.num_tokens.sum()),
            num_supervised=int(table.num_teacher.sum()),
            bytes_per_token=store.all_rows_bytes / max(int(table.num_tokens.sum()), 1),
            guard=dict(store.calibration.report) if store.spec.hidden_mode != "bf16" else None,
        )
        path.parent.mkdir(exist_ok=True)
        write_whole(path, (json.dumps(asdict(found), indent=1) + "\n").encode())
        return found

    def variant(self, arm: Arm, seed: int) -> Variant:
        """One run as the product's sweep takes it."""
        name = arm.run_name(seed)
        options: dict[str, object] = {"train.out": f"arms/{name}"}
        run = load("dflash.toml", (), options, (f"arm {arm.name}", arm.table(seed)))
        return Variant(name, run)

    def _train(self, arms: Sequence[Arm]) -> None:
        """All runs of these arms, in their order, as many at a time as there are places; those that
        fail once more, as others may have taken their memory, and then they are noted."""
        variants = [self.variant(arm, seed) for arm in arms for seed in arm.seeds]
        fleet.check_done(variants)
        devices, out = self.devices, self.folder / "arms"
        failed: list[str] = []
        for _ in range(_TRIES):
            names = [one.name for one in variants if not self.is_trained(one.name)]
            if not names:
                return
            self.deadline.check(f"training of {', '.join(names)}")
            gpus.check(devices, share=True)
            out.mkdir(exist_ok=True)
            with self.deadline.interrupts():
                outcomes, signal = fleet.run_variants(
                    arm_process.TRAIN, variants, devices, out, resume=True, per_device=self.per_gpu
                )
            failed = [f"{one.name}: {one.error}" for one in outcomes if one.state == "failed"]
            if signal:
                self.failures.extend(failed)
                left = [one.name for one in outcomes if not one.state.startswith("done")]
                raise OutOfTime(f"training of {', '.join(left)}")
        self.failures.extend(failed)

    def is_trained(self, name: str) -> bool:
        """Whether a run is done; its status says so."""
        return self._state(name) == "done"

    def score(self) -> None:
        """Replay every run that is trained; the decision, once every objective is scored whose
        runs could be trained."""
        runs = [LOOKUP, UNTRAINED]
        runs += [arm.run_name(seed) for arm in self.all_wanted() for seed in arm.seeds]
        objectives = objective_arms(self.seeds)
        names = [arm.run_name(seed) for arm in objectives for seed in arm.seeds]
        # the untrained drafter has the shape of a trained one
        ready = {LOOKUP} | ({UNTRAINED} if any(map(self.is_trained, names)) else set())
        known = [run for run in runs if run in ready or self.is_trained(run)]
        todo = [run for run in known if not score_path(self.folder, run).exists()]
        if todo:
            self.deadline.check(f"scores of {', '.join(todo)}")
        (self.folder / "scores").mkdir(exist_ok=True)
        shares = defaultdict[int, list[str]](list)
        for number, run in enumerate(todo):
            shares[number % self.num_scorers].append(run)
        jobs = self._score_jobs([shares[place] for place in sorted(shares)])
        for job in jobs:
            # a name of an earlier share says nothing of this one
            (self.folder / "done" / job.name).unlink(missing_ok=True)
        run_jobs(jobs, self.num_scorers, self.folder, self.deadline)
        left = [run for run in todo if not score_path(self.folder, run).exists()]
        if left:
            raise OutOfTime(f"scores of {', '.join(left)}")
        self._decide(objectives)

    def _decide(self, objectives: Sequence[Arm]) -> None:
        """The best objective, of those whose every seed is scored; an arm with a run that failed
        is left out, one with a run that is to be trained yet is waited for."""
        states = {
            arm.name: {self._state(arm.run_name(seed)) for seed in arm.seeds} for arm in objectives
        }
        if self.decision() or not set().union(*states.values()) <= {"done", "failed"}:
            return
        taus = {
            arm.name: _mean_tau(self.scores(arm))
            for arm in objectives
            if states[arm.name] == {"done"}
        }
        if not taus:
            return
        without = [name for name in states if name not in taus]
        decided = {"objective": best_arm(taus), "taus": taus, "without": without}
        (self.folder / "decision.json").write_text(json.dumps(decided, indent=1) + "\n")

    def _score_jobs(self, shares: Sequence[Sequence[str]]) -> list[Job]:
        """A process for the runs of each share."""
        devices = self.devices
        device, visible = "cpu", [""]
        if devices.kind == "cuda":
            # the driver takes its time to tell, and many processes are to begin
            device, visible = "cuda:0", [device_name(number) for number in devices.ids]
        return [
            Job(
                f"score-{place}",
                ("-m", "studies.scoring", str(self.folder), device, *runs),
                {"CUDA_VISIBLE_DEVICES": visible[place % len(visible)]},
            )
            for place, runs in enumerate(shares)
        ]

    def scores(self, arm: Arm) -> list[Score]:
        """Of all seeds of an arm that are scored."""
        data = self.facts(arm.store).data
        return [
            read_score(self.folder, arm.run_name(seed), arm.name, seed, data)
            for seed in arm.seeds
            if score_path(self.folder, arm.run_name(seed)).exists()
        ]

    def decode(self) -> None:
        """Send the best drafter, and decode with it each way that there is time for."""
        run = self.best_run()
        if not run:
            raise ValueError("no arm is scored, none can be decoded: name score before decode")
        self._send(lambda out: carried.send_drafter(self.folder / "arms" / run, out))
        (self.folder / "decodes").mkdir(exist_ok=True)
        devices = self.devices
        # it takes one
        device = str(devices.ids[0]) if devices.kind == "cuda" else "cpu"
        for way in decoding.left(self.folder, run):
            name = decoding.job_name(run, way)
            needed_s = cost.decoding_of(self.size, way).seconds if self.size.is_estimated else 0.0
            self.deadline.check_fits(name, needed_s)
            words = [*decoding.words(self.size, run, way), "--gpus", device, "--share-gpu"]
            self._run([Job.dflash(name, words)], 1)

    def best_run(self) -> str:
        """Of the long arms that are scored, or where none is of all, the best one's first seed;
        empty where none is scored."""
        taus, first = dict[str, float](), dict[str, str]()
        for arm in self.all_wanted():
            if self.is_known(arm.store) and (scores := self.scores(arm)):
                taus[arm.name] = _mean_tau(scores)
                first[arm.name] = arm.run_name(scores[0].seed)
        if not taus:
            return ""
        long = {arm.name for arm in self.long_arms} & taus.keys()
        return first[best_arm({name: taus[name] for name in long or taus})]

    def foretold(self, stages: Sequence[str]) -> list[cost.Cost]:
        """What each of `stages` has left to do, as far as its arms are known; empty for a size
        that is not estimated."""
        if not self.size.is_estimated:
            return []
        num_gpus, found = len(self.devices.ids), list[cost.Cost]()
        # what will be asked of the best objective is as much of any
        asked = not self.names and not self.decision()
        rounds = [self.wanted(), later_arms(FOLLOWED, self.seeds) if asked else []]
        runs = [LOOKUP, UNTRAINED, *_run_names(self.all_wanted())]
        scores = [runs, _run_names(rounds[1])]
        for stage in stages:
            if stage == "arms" and rounds:
                left = [self._untrained(arm) for arm in rounds.pop(0)]
                found.append(cost.training(stage, self.size, left, num_gpus))
            elif stage == "score" and scores:
                todo = [run for run in scores.pop(0) if not score_path(self.folder, run).exists()]
                found.append(cost.scoring(self.size, len(todo), num_gpus))
            elif stage == DECODE:
                ways = decoding.left(self.folder, self.best_run())
                found += [cost.decoding_of(self.size, way) for way in ways]
        return found

    def _untrained(self, arm: Arm) -> Arm:
        """The arm, of the seeds that are not trained yet."""
        seeds = [seed for seed in arm.seeds if not self.is_trained(arm.run_name(seed))]
        return replace(arm, seeds=tuple(seeds))

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


def _run_names(arms: Sequence[Arm]) -> list[str]:
    return [arm.run_name(seed) for arm in arms for seed in arm.seeds]


def _mean_tau(scores: Sequence[Score]) -> float:
    return sum(score.tau(list(score.kept)) for score in scores) / len(scores)


def named_stages(text: str) -> tuple[str, ...]:
    """The stages that a line names, in its order. ArgumentTypeError for a word that is none."""
    if text == "all":
        return STAGES
    named, known = tuple(text.split(",")), list(dict.fromkeys((*STAGES[:-1], DECODE, STAGES[-1])))
    if named != ("estimate",) and (unknown := [name for name in named if name not in known]):
        raise argparse.ArgumentTypeError(
            f"no stage {', '.join(unknown)}: expected estimate, all, or some of "
            f"{', '.join(known)} with commas between them"
        )
    return named


def make_importable(per_gpu: int) -> None:
    """Processes that the product launches find the study's modules, and share the cores where they
    compile: each would start a compiler for every core."""
    os.environ.update(environment())
    cores = len(os.sched_getaffinity(0))
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(max(2, cores // per_gpu)))
