"""Ranks that train together."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from dflash_pipeline.configs.place import Place
from dflash_pipeline.train.facts import within
from dflash_pipeline.train.group import Group

# joins, does a step, and is stuck in something else for longer than anyone waits
STUCK = """
import sys, time
from dflash_pipeline.configs.place import Place
from dflash_pipeline.train.group import Group
place = Place(rank=1, world=2, device="cpu", kind="cpu", log_dir="", stage="train",
              number=1, rendezvous=sys.argv[1], threads=1)
print("ready", flush=True)
Group(place, 60.0).beat(41)
time.sleep(60)
"""
TIMEOUT_S = 4.0


def test_one_rank_needs_nobody(place: Place) -> None:
    group = Group(place, 5.0)
    tensor = torch.ones(3)
    group.add_up(tensor)
    assert tensor.tolist() == [1, 1, 1]
    assert group.agree("key", "text") == "text"
    assert group.told("key") is None
    group.close()


def test_a_hung_rank_is_named_in_time(place: Place, tmp_path: Path) -> None:
    rendezvous = f"file://{tmp_path}/meet"
    command = [sys.executable, "-c", STUCK, rendezvous]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as other:
        try:
            assert other.stdout is not None
            other.stdout.readline()
            group = Group(replace(place, world=2, rendezvous=rendezvous), TIMEOUT_S)
            group.beat(42)
            with pytest.raises(ValueError, match=r"rank 1 \(last seen at step 41.*timeout_s"):
                group.add_up(torch.ones(1))
            group.close()
        finally:
            other.kill()


# rank 0 holds the key-value store; it joins, hears that the other one has, and is stopped
STOPPED = STUCK.replace("rank=1", "rank=0").replace(
    "Group(place, 60.0).beat(41)\ntime.sleep(60)",
    """group = Group(place, 60.0)
group.beat(41)
while group.told("joined") is None:
    time.sleep(0.01)
import os, signal; os.kill(os.getpid(), signal.SIGSTOP)""",
)
# it is stopped before it joins, once the other one has found the store
STOPPED_AT_START = STUCK.replace("rank=1", "rank=0").replace(
    "Group(place, 60.0).beat(41)\ntime.sleep(60)",
    """from dflash_pipeline.train.group import _served
store = _served(place, 60.0)
import os, signal; os.kill(os.getpid(), signal.SIGSTOP)""",
)


@contextlib.contextmanager
def _rank_0(code: str) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """Its process, and the rendezvous at which it is."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        rendezvous = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
    with subprocess.Popen(
        [sys.executable, "-c", code, rendezvous], stdout=subprocess.PIPE
    ) as other:
        try:
            assert other.stdout is not None
            other.stdout.readline()
            yield other, rendezvous
        finally:
            other.kill()


def test_a_store_that_stands_still_holds_up_nobody(place: Place) -> None:
    """Its client would wait without end: for a beat of the other ranks, and to tell its own."""
    with _rank_0(STOPPED) as (other, rendezvous):
        group = Group(replace(place, rank=1, world=2, rendezvous=rendezvous), TIMEOUT_S)
        group.tell("joined", "")
        os.waitpid(other.pid, os.WUNTRACED)
        began = time.monotonic()
        message = "rank 0, which holds the key-value store of all, answers no longer"
        with pytest.raises(ValueError, match=message):
            group.add_up(torch.ones(1))
        with pytest.raises(ValueError, match="waited 4 s for rank 0 to decide 'it'"):
            group.agree("it", "")
        assert group.behind().startswith("rank 0")
        assert time.monotonic() - began < 4 * TIMEOUT_S
        group.close()


def test_a_store_that_stands_still_at_the_start_holds_up_nobody(place: Place) -> None:
    with _rank_0(STOPPED_AT_START) as (_, rendezvous):
        began = time.monotonic()
        with pytest.raises(ValueError, match=r"^rank 1 .*key-value store of all"):
            Group(replace(place, rank=1, world=2, rendezvous=rendezvous), 1.0)
        assert time.monotonic() - began < 30


def test_ranks_that_do_not_come_to_the_start_are_told_of(place: Place) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    start = replace(place, world=2, rendezvous=f"tcp://127.0.0.1:{port}")
    with pytest.raises(ValueError, match=r"^rank 0 waited 1 s for all 2 ranks to start: see"):
        Group(start, 1.0)
    # by now nobody listens there
    message = rf"^rank 1 could not reach the key-value store of all ranks at 127\.0\.0\.1:{port}"
    with pytest.raises(ValueError, match=message):
        Group(replace(start, rank=1), 1.0)


@pytest.mark.gpu
def test_sums_on_a_gpu_go_on_in_a_group_that_another_thread_joined() -> None:
    device = torch.device("cuda", 0)
    store = dist.HashStore()
    within(
        60.0,
        lambda: dist.init_process_group(
            "nccl", store=store, rank=0, world_size=1, device_id=device
        ),
        "join",
    )
    try:
        tensor = torch.full((1000,), 2.0, device=device)
        dist.all_reduce(tensor)
        assert tensor.sum().item() == 2000
    finally:
        dist.destroy_process_group()


def test_what_takes_too_long_is_left_behind_and_errors_come_through() -> None:
    assert within(5.0, lambda: 3, "quick") == 3
    with pytest.raises(ZeroDivisionError):
        within(5.0, lambda: 1 / 0, "wrong")
    over = threading.Event()
    with pytest.raises(TimeoutError, match=r"^no answer within 0\.05 s$"):
        within(0.05, over.wait, "endless")
    over.set()


def test_a_start_that_gets_no_answer_at_all_is_told_as_that(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    over = threading.Event()
    monkeypatch.setattr(dist, "TCPStore", lambda *_: over.wait())
    monkeypatch.setattr("dflash_pipeline.train.group._START_MARGIN_S", 0.05)
    other = replace(place, rank=1, world=2, rendezvous="tcp://127.0.0.1:1")
    with pytest.raises(
        ValueError, match=r"127\.0\.0\.1:1 within 0\.1 s: .*\(no answer within 0\.15 s"
    ):
        Group(other, 0.1)
    over.set()
