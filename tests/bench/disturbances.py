"""What `stages.py` does to running stages: ranks that stand still, processes that are killed."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from jobs import Job, pids, sealed, train_figures, wait_until
from stagebench import PART_LIMIT_S, Stages

STILL_S = 5.0
HUNG_TIMEOUT_S = 20.0


def stood_still(stages: Stages, for_good: bool) -> dict[str, Any]:
    """The last rank gets no processor: for some seconds the others wait; for good, it is named."""
    out = "run-hung" if for_good else "run-slow"
    words = ["--epochs", "50", "--max-steps", str(stages.sizes.steps)]
    if for_good:
        words += ["--set", f"train.timeout_s={HUNG_TIMEOUT_S}"]
    job = stages.train(stages.store(), out, stages.every(), *words)
    rank = len(stages.all.ids) - 1
    _await_steps(stages, job, out)
    (victim,) = pids(stages.folder / out / "logs", "train", rank)
    os.kill(victim, signal.SIGSTOP)
    if not for_good:
        time.sleep(STILL_S)
        os.kill(victim, signal.SIGCONT)
        return {"wall_s": stages.run(job)}
    begin = time.perf_counter()
    stages.run(job, code=1)
    named_s = time.perf_counter() - begin
    text = job.text()
    stages.expect(f"rank {rank}" in text, f"hung: rank {rank} is not named: {job.last_line()}")
    return {"named_after_s": named_s, "said": job.last_line()}


def rank_killed(stages: Stages) -> dict[str, Any]:
    """-9 to one rank ends the run with a line that names it; `--resume` ends it well."""
    out, steps = "run-killed", ("--epochs", "50", "--max-steps", str(stages.sizes.steps))
    job = stages.train(stages.store(), out, stages.every(), *steps)
    _await_steps(stages, job, out, checkpoint=True)
    rank = len(stages.all.ids) - 1
    (victim,) = pids(stages.folder / out / "logs", "train", rank)
    os.kill(victim, signal.SIGKILL)
    ended_s = stages.run(job, code=1)
    said = job.last_line()
    stages.expect("SIGKILL" in job.text(), f"kill-rank: not said to be killed: {said}")
    stages.run(stages.train(stages.store(), out, stages.every(), *steps, "--resume"))
    steps_done = train_figures(stages.folder / out)["steps"]
    stages.expect(steps_done == stages.sizes.steps, f"kill-rank: ended at step {steps_done}")
    return {"ended_s": ended_s, "said": said, "steps": steps_done}


def worker_killed(stages: Stages) -> dict[str, Any]:
    """-9 to one capture worker; the line again makes the store whole."""
    job = stages.capture("hs-killed", stages.every())
    store = stages.folder / "hs-killed"
    wait_until(lambda: any(store.glob("b*/commit/c/*/*")) or job.has_ended, PART_LIMIT_S)
    victims = pids(store.with_name("hs-killed.logs"), "capture", len(stages.all.ids) - 1)
    for victim in victims:
        os.kill(victim, signal.SIGKILL)
    code = job.wait(PART_LIMIT_S)
    said = job.last_line()
    stages.run(stages.capture("hs-killed", stages.every()))
    stages.expect(sealed(store), "kill-worker: the store is not sealed")
    stages.run(Job(stages.folder, "verify", "--deep", "hs-killed"))
    return {"code": code, "ended_s": job.seconds, "said": said, "killed": len(victims)}


def stages_killed(stages: Stages) -> dict[str, Any]:
    """-9 to both commands and all of their processes; both lines again."""
    store, out = "hs-both", "run-both"
    jobs = [
        stages.capture(store, stages.capturing),
        stages.train(store, out, stages.training, "--set", "train.save_every=2"),
    ]
    logs = stages.folder / out / "logs"
    wait_until(lambda: any((stages.folder / out).glob("step-*/state")), PART_LIMIT_S)
    victims = pids(stages.folder / "hs-both.logs", "capture", None) + pids(logs, "train", None)
    for job in jobs:
        job.kill()
    for victim in victims:
        if Path(f"/proc/{victim}").exists():
            os.kill(victim, signal.SIGKILL)
    capture = stages.capture(store, stages.capturing)
    train = stages.train(store, out, stages.training, "--set", "train.save_every=2", "--resume")
    found = {"capture_wall_s": stages.run(capture), "train_wall_s": stages.run(train)}
    stages.run(Job(stages.folder, "verify", "--deep", store))
    return found | {"killed": len(victims) + len(jobs)}


def _await_steps(stages: Stages, job: Job, out: str, checkpoint: bool = False) -> None:
    """Until the run has logged steps, or saved some of them."""
    path = stages.folder / out

    def is_there() -> bool:
        if job.has_ended:
            return True
        return any(path.glob("step-*/state")) if checkpoint else (path / "metrics.jsonl").exists()

    stages.expect(wait_until(is_there, PART_LIMIT_S), f"{job.line}: no step in time")
    stages.expect(not job.has_ended, f"{job.line}: over too early: {job.last_line()}")
