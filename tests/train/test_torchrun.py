"""torchrun instead of the launcher: jobs that know nothing of one another, on one growing store."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dflash_pipeline.configs.schema import Run
from dflash_pipeline.store.reader import Store
from dflash_pipeline.train.loading import read_checkpoint
from dflash_pipeline.train.order import shard_number

LIMIT_S = 120.0


def _job(run: Run, out: Path, num_layers: int, num_ranks: int) -> subprocess.Popen[bytes]:
    """A rendezvous of its own, on a port that is free."""
    config, train = out.with_suffix(".toml"), run.train
    config.write_text(
        f"[drafter]\nnum_layers = {num_layers}\nblock_size = {run.drafter.block_size}\n[train]\n"
        f"anchors_per_sample = {train.anchors_per_sample}\nbatch_anchors = {train.batch_anchors}\n"
        f"batch_tokens = {train.batch_tokens}\nlog_every = 1\nvalidate_samples = 4\nepochs = 2\n"
    )
    line = ["-m", "dflash_pipeline.cli", "train", "--gpus", "cpu", "--config", str(config)]
    line += ["--store", train.stores[0], "--out", str(out)]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    output = out.with_suffix(".txt").open("wb")
    with output:
        return subprocess.Popen(
            [sys.executable, *torchrun, *line], stdout=output, stderr=subprocess.STDOUT
        )


def _wait_for(found: Callable[[], bool], jobs: dict[Path, subprocess.Popen[bytes]]) -> None:
    end = time.monotonic() + LIMIT_S
    while not found():
        said = "\n".join(out.with_suffix(".txt").read_text() for out in jobs)
        assert all(job.poll() in (None, 0) for job in jobs.values()), said
        assert time.monotonic() < end, said
        time.sleep(0.1)


def test_two_jobs_train_two_drafters_from_one_store_while_it_is_captured(
    tiny: Any,
    train_plan: Any,
    growing_store: Store,
    train_run: Callable[..., Run],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # a host's own name need not lead anywhere
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    tiny.capture(train_plan, growing_store, most=5)
    outs = {tmp_path / "alone": (1, 1), tmp_path / "both": (2, 2)}
    jobs = {out: _job(train_run(), out, *how) for out, how in outs.items()}
    try:
        _wait_for(lambda: all((out / "order").exists() for out in jobs), jobs)
        tiny.capture(train_plan, growing_store)
        growing_store.seal()
        _wait_for(lambda: all(job.poll() == 0 for job in jobs.values()), jobs)
    finally:
        for job in jobs.values():
            job.terminate()
            job.wait()
    shards = sorted(shard_number(one) for one in growing_store.layout.shard_ids())
    for out, (num_layers, num_ranks) in outs.items():
        lines = [json.loads(line) for line in (out / "order").read_text().splitlines()]
        assert len(lines) > 1
        assert sorted(shard for line in lines for _, shard in line["shards"]) == shards
        assert read_checkpoint(out).shape.num_layers == num_layers
        log = (out / "logs" / "train-0.log").read_text()
        assert "the store is still being captured: following it" in log
        assert "trained" in log.splitlines()[-1]
        assert len(list((out / "logs").glob("train-*.log"))) == num_ranks
        # one voice for all ranks
        said = out.with_suffix(".txt").read_text()
        assert said.count("following it") == 1
        assert "[1]" not in said
