"""Ranks that train together."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dflash_pipeline.configs.place import Place
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


# rank 0 holds the key-value store; it joins, does a step, and is stopped as a whole
STOPPED = STUCK.replace("rank=1", "rank=0").replace(
    "time.sleep(60)", "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"
)


def test_a_store_that_stands_still_holds_up_nobody(place: Place) -> None:
    """Its client would wait without end: for a beat of the other ranks, and to tell its own."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        rendezvous = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
    command = [sys.executable, "-c", STOPPED, rendezvous]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as other:
        try:
            assert other.stdout is not None
            other.stdout.readline()
            group = Group(replace(place, rank=1, world=2, rendezvous=rendezvous), TIMEOUT_S)
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
        finally:
            other.kill()


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
