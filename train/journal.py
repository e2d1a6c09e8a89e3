"""What the run says at a log line: one transfer from the device, then text, JSON and TensorBoard.

Between log lines nothing here touches the device.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from dflash_pipeline.configs.memory import gib, usage
from dflash_pipeline.configs.schema import Run
from dflash_pipeline.store.reader import Store
from dflash_pipeline.store.rolling import awaited_text
from dflash_pipeline.store.runlog import RunLog
from dflash_pipeline.train.board import Board
from dflash_pipeline.train.clock import Clock
from dflash_pipeline.train.consumption import capture_state
from dflash_pipeline.train.feed import Feed
from dflash_pipeline.train.follow import Draw
from dflash_pipeline.train.group import Group
from dflash_pipeline.train.metrics import Metrics, Summary
from dflash_pipeline.train.optim import Health, Optimizer
from dflash_pipeline.train.order import Catalog
from dflash_pipeline.train.speed import Speed, Stretch

_NAMED_SAMPLES = 8
_LOOK_EVERY_S = 1.0
_IDLE = "no capture runs (its command goes on with it)"
# name on the terminal -> name in the record
_SHOWN = {
    "loss": "loss",
    "tau_tf": "tau_tf",
    "lr": "lr",
    "tok_s": "tokens_per_s",
    "rows_s": "draft_rows_per_s",
    "wait": "wait_share",
    "gib": "memory_gib",
    "host_gib": "host_memory_gib",
}


class Journal:
    """Rank 0 speaks for all; every rank names its own bad samples."""

    def __init__(
        self,
        out: Path,
        log: RunLog,
        group: Group,
        run: Run,
        stores: Sequence[Store],
        samples: Catalog,
        clock: Clock,
    ) -> None:
        self._log, self._group, self._run = log, group, run
        self._stores, self._samples = stores, samples
        self._out, self._clock = out, clock
        self.speed = Speed(group.world)
        self._drawn: list[tuple[int, Draw]] = []
        self._since = time.perf_counter()
        self._board = Board(out / "tensorboard") if group.rank == 0 else None
        self._is_waiting, self._looked_at = False, 0.0
        self._was_idle: bool | None = None
        self._told_of: set[str] = set()

    def close(self) -> None:
        """Finish TensorBoard's file, where there is one."""
        if self._board is not None:
            self._board.close()

    def waiting(self) -> None:
        """The step needs shards that are not committed yet."""
        now = time.monotonic()
        if self._is_waiting and now - self._looked_at < _LOOK_EVERY_S:
            return
        self._looked_at = now
        text = f"waiting for shards: {awaited(self._stores)}"
        if not self._is_waiting:
            self._is_waiting = True
            self._log.state("waiting")
        # short waits are many under a quota: said once, and again when a capture ends or begins
        is_idle = _IDLE in text
        if is_idle != self._was_idle:
            self._was_idle = is_idle
            self._log.say_once(text)
        self._log.waiting(text)

    def note(self, step: int, draw: Draw) -> None:
        """A step was done; its samples are kept until the device tells how it went."""
        if self._is_waiting:
            self._is_waiting = False
            self._log.state("running")
        self._drawn.append((step, draw))

    @property
    def has_steps(self) -> bool:
        """Steps were done since the last line."""
        return bool(self._drawn)

    def line(
        self,
        step: int,
        lr: float,
        metrics: Metrics,
        optimizer: Optimizer,
        feed: Feed,
    ) -> None:
        """Say how the steps since the last line went. ValueError after too many bad steps."""
        self._clock.stage_now = "log line"
        counts = feed.take_counts()
        device = metrics.sums.device
        host_sums = torch.tensor(
            [counts.num_tokens, counts.num_blocks, counts.num_samples, counts.wait_s],
            dtype=torch.float64,
            device=device,
        )
        shared = torch.cat((metrics.sums, host_sums))
        self._group.add_up(shared)
        # the only wait for the device between two log lines
        told = torch.cat((shared, optimizer.vector())).cpu()
        metrics.clear()
        summary = metrics.summary(told[: len(metrics.sums)])
        health = optimizer.health(told[len(shared) :])
        num_tokens, num_blocks, num_samples, wait_s = told[len(metrics.sums) : len(shared)].tolist()
        now = time.perf_counter()
        elapsed_s, self._since = now - self._since, now
        num_rows = num_blocks * (len(summary.accuracy_by_slot) + 1)
        stretch = Stretch(
            num_steps=len(self._drawn),
            elapsed_s=elapsed_s,
            wait_s=wait_s / self._group.world,
            num_samples=num_samples,
            num_rows=num_rows,
            num_tokens=num_tokens,
        )
        self.speed.add(stretch)
        used = usage(torch, device)
        record: dict[str, object] = {
            "step": step,
            "epoch": self._drawn[-1][1].epoch,
            "loss": summary.loss,
            "ce": summary.ce,
            "entropy": summary.entropy,
            "accuracy_by_slot": list(summary.accuracy_by_slot),
            "accepted": summary.accepted,
            "tau_tf": summary.tau,
            "lr": lr,
            "gradient_norm": health.gradient_norm,
            "num_bad_steps": health.num_bad,
            "tokens_per_s": num_tokens / elapsed_s,
            "draft_rows_per_s": num_rows / elapsed_s,
            "samples_per_s": num_samples / elapsed_s,
            "wait_share": round(stretch.wait_s / elapsed_s, 4),
            "memory_gib": gib(used.peak),
            "reserved_memory_gib": gib(used.reserved),
            "host_memory_gib": gib(used.host_peak),
            "time": time.time(),
        }
        # of this rank alone
        stage_s = {"wait": counts.wait_s} | self._clock.take()
        record |= {f"{name}_ms": 1e3 * s / len(self._drawn) for name, s in stage_s.items()}
        if self._run.loss.needs_last:
            record |= {"kl": summary.kl, "overlap": summary.overlap}
        self._tell(step, summary, record)
        self._name_bad_steps(health)
        self._drawn.clear()

    def validated(self, step: int, tau: float, num_cycles: int, is_best: bool) -> None:
        """Tell a replay of held-out samples; rank 0 does."""
        if self._group.rank != 0:
            return
        best = ", the best so far" if is_best else ""
        self._log.say(f"step {step}: replay of held-out samples: tau {tau:.3f}{best}")
        self._log.metrics(
            {"step": step, "tau": tau, "num_cycles": num_cycles}, self._out / "metrics.jsonl"
        )
        if self._board is not None:
            self._board.add({"tau": tau}, step)

    def left_out(self, step: int, why: str) -> None:
        """A held-out sample that no validation can use, said once; any rank may."""
        if why not in self._told_of:
            self._told_of.add(why)
            self._log.say(f"step {step}: left out of the validation: {why}")

    def _tell(self, step: int, summary: Summary, record: dict[str, object]) -> None:
        # JSON has no NaN: a number that is not finite is null, and not shown
        numbers = {
            name: value
            for name, value in record.items()
            if isinstance(value, float) and math.isfinite(value)
        }
        plain = {
            name: None if isinstance(value, float) and name not in numbers else value
            for name, value in record.items()
        }
        shown = {"slot1": summary.accuracy_by_slot[0]}
        shown |= {short: numbers[name] for short, name in _SHOWN.items() if name in numbers}
        self._log.progress(step, self._last_step(step), "steps", **shown)
        if self._group.rank == 0:
            self._log.metrics(plain, self._out / "metrics.jsonl")
        if self._board is not None:
            slots = enumerate(summary.accuracy_by_slot, start=1)
            accuracies = {f"accuracy/slot{slot:02d}": accuracy for slot, accuracy in slots}
            self._board.add(numbers | accuracies, step)

    def _last_step(self, step: int) -> int:
        """Of the run, as far as its order knows by now."""
        last = step + self._drawn[-1][1].num_left
        return min(last, self._run.train.max_steps or last)

    def _name_bad_steps(self, health: Health) -> None:
        last = ""
        for (step, draw), where in zip(self._drawn, health.first_bad, strict=True):
            if where:
                keys = [self._key(place) for batch in draw.batches for place in batch.tolist()]
                more = f" and {len(keys) - _NAMED_SAMPLES} more" * (len(keys) > _NAMED_SAMPLES)
                last = (
                    f"step {step}: NaN or Inf first in {where}, step skipped; samples "
                    f"{', '.join(keys[:_NAMED_SAMPLES])}{more}"
                )
                self._log.say(last)
        if health.longest_streak >= self._run.train.max_bad_steps:
            raise ValueError(
                f"loss or gradient was not finite in {health.longest_streak} steps in a row "
                f"(train.max_bad_steps is {self._run.train.max_bad_steps}); the last on this rank: "
                f"{last or 'none, see the logs of the others'}; check the store with dflash verify "
                "--deep, or lower optim.lr"
            )

    def _key(self, place: int) -> str:
        store = self._stores[int(self._samples.store_C[place])]
        return store.table.key(int(self._samples.sample_C[place]))


def awaited(stores: Sequence[Store]) -> str:
    """How far the captures of unfinished stores are, and whether they run."""
    parts = []
    for store in stores:
        if store.is_sealed:
            continue
        shard_ids = store.layout.shard_ids()
        num_captured = sum(store.is_committed(shard_id) for shard_id in shard_ids)
        doing = capture_state(store.path)
        state = f"its capture is {doing}" if doing else _IDLE
        text = awaited_text(store.path, store.layout) if store.is_rolling else ""
        state += f", {text}" if text else ""
        parts.append(f"{store.path} has {num_captured} of {len(shard_ids)}, {state}")
    return "; ".join(parts) or "the last ones are being sealed"
