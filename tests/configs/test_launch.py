"""One process a device: what it is told, what is shown, and how all of them end."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dflash_pipeline.configs import launch as launcher
from dflash_pipeline.configs.counts import closing_lines
from dflash_pipeline.configs.errors import UsageError
from dflash_pipeline.configs.gpus import Devices
from dflash_pipeline.configs.launch import Beside, launch, noted_signals, place_of
from dflash_pipeline.configs.load import load
from dflash_pipeline.configs.schema import Run
from dflash_pipeline.configs.status import Status, find_statuses, log_path, process_start

TWO = Devices("cpu", (0, 1))


def _signal_once_waiting(logs: Path, times: int) -> None:
    def send() -> None:
        while len(list(logs.glob("waiting-*"))) < 2:
            time.sleep(0.01)
        for _ in range(times):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.3)

    threading.Thread(target=send, daemon=True).start()


def test_every_process_gets_the_run_its_place_and_the_extras(
    stages: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = load("", ["optim.lr=0.25"], {})
    assert launch(f"{stages}:work", run, TWO, "train", str(tmp_path / "logs"), {"a": [1]}) == 0
    out = capfd.readouterr().out
    assert "[0] cpu '' 0.25 {'a': [1]}" in out
    assert "[1] cpu '' 0.25 {'a': [1]}" in out
    assert out.count("train: 2 of 2 samples (100 %)") == 1
    assert "loss 1.5" in out
    log = (tmp_path / "logs" / "train-1.log").read_text()
    assert "printed by the stage" in log
    assert [one.state for one in find_statuses(tmp_path)] == ["done", "done"]


def test_the_first_failure_ends_the_rest_and_is_one_line_on_the_terminal(
    stages: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    begin = time.monotonic()
    assert launch(f"{stages}:first_fails", Run(), TWO, "train", str(tmp_path / "logs"), {}) == 1
    assert time.monotonic() - begin < 15
    log = tmp_path / "logs" / "train-0.log"
    error = f"error: store x holds layers 1, wanted 2 (rank 0, log: {log})\n"
    assert capfd.readouterr().err == error
    assert "Traceback (most recent call last)" in log.read_text()
    assert [one.state for one in find_statuses(tmp_path)] == ["failed", "stopped"]


def test_a_usage_error_of_a_stage_is_exit_code_2(
    stages: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    one = Devices("cpu", (0,))
    assert launch(f"{stages}:refuse", Run(), one, "export", str(tmp_path), {}) == 2
    assert capfd.readouterr().err == "error: no such model\n"


def test_a_refusal_leaves_no_trace_and_how_earlier_work_ended_is_told_as_before(
    stages: str, tmp_path: Path
) -> None:
    logs = tmp_path / "run" / "logs"
    assert launch(f"{stages}:refuse", Run(), TWO, "train", str(logs), {}) == 2
    assert not logs.parent.exists()
    assert launch(f"{stages}:work", Run(), TWO, "train", str(logs), {}) == 0
    done = find_statuses(logs)
    assert launch(f"{stages}:refuse", Run(), Devices("cpu", (0,)), "train", str(logs), {}) == 2
    assert find_statuses(logs) == done
    assert [one.state for one in done] == ["done", "done"]
    # a failure is news, of another stage it is none
    assert launch(f"{stages}:disk_full", Run(), Devices("cpu", (0,)), "eval", str(logs), {}) == 1
    assert [one.state for one in find_statuses(logs)] == ["failed", "done", "done"]


def test_a_status_that_another_launch_removes_meanwhile_stops_nobody(
    stages: str, tmp_path: Path
) -> None:
    # as it is between the listing of its directory and its reading
    (tmp_path / "train-7.status.json").symlink_to("gone")
    one = Devices("cpu", (0,))
    assert launch(f"{stages}:work", Run(), one, "train", str(tmp_path), {}) == 0
    assert [one.number for one in find_statuses(tmp_path)] == [0]


def test_a_stage_is_seen_at_work_before_its_process_has_said_so(
    stages: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []

    def started(*arguments: object) -> object:
        seen.append(all(one.is_alive for one in find_statuses(tmp_path)))
        return child(*arguments)

    child = launcher._Child
    monkeypatch.setattr(launcher, "_Child", started)
    assert launch(f"{stages}:work", Run(), TWO, "capture", str(tmp_path), {}) == 0
    assert seen == [True, True]


@pytest.mark.parametrize("words", ["prints", "says"])
def test_output_that_nobody_reads_any_longer_ends_a_command_silently(
    words: str, stages: str, tmp_path: Path
) -> None:
    code = (
        "import sys\n"
        "from dflash_pipeline.configs.gpus import Devices\n"
        "from dflash_pipeline.configs.launch import launch\n"
        "from dflash_pipeline.configs.schema import Run\n"
        f"sys.exit(launch('{stages}:{words}', Run(), Devices('cpu', (0,)), 'inspect', "
        f"{str(tmp_path)!r}, {{}}))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "line\n"
        parent.stdout.close()
        assert parent.stderr is not None
        error = parent.stderr.read()
    if words == "prints":
        assert (parent.returncode, error) == (141, "")
        assert "Traceback" not in (tmp_path / "inspect-0.log").read_text()
    else:
        # the launcher's own writing: what to make of it is the command line's
        assert error.strip().splitlines()[-1].startswith("BrokenPipeError")


def test_the_log_ends_with_what_was_said_last(stages: str, tmp_path: Path) -> None:
    """Libraries bound by nanobind list all they hold where an interpreter tears itself down."""
    one = Devices("cpu", (0,))
    assert launch(f"{stages}:tears_down", Run(), one, "capture", str(tmp_path), {}) == 0
    last = (tmp_path / "capture-0.log").read_text().splitlines()[-1]
    assert last == "registered by a library for the end"


def test_a_process_that_the_kernel_ends_is_explained(
    stages: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert launch(f"{stages}:killed", Run(), TWO, "capture", str(tmp_path), {}) == 1
    assert "ended by SIGKILL, as the kernel does when memory runs out" in capfd.readouterr().err


def test_a_process_that_somebody_else_stopped_is_explained(
    stages: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    one = Devices("cpu", (0,))
    assert launch(f"{stages}:told_to_stop", Run(), one, "capture", str(tmp_path), {}) == 1
    assert "error: the process was told to stop by SIGTERM (log:" in capfd.readouterr().err


def test_a_full_disk_says_what_to_do(
    stages: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    one = Devices("cpu", (0,))
    assert launch(f"{stages}:disk_full", Run(), one, "capture", str(tmp_path), {}) == 1
    assert "No space left on device: free some space where" in capfd.readouterr().err


def test_an_error_is_told_though_the_log_takes_nothing(
    stages: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The disk that is full is the one that the log stands on."""
    log_path(str(tmp_path), "capture", 0).symlink_to("/dev/full")
    one = Devices("cpu", (0,))
    assert launch(f"{stages}:disk_full", Run(), one, "capture", str(tmp_path), {}) == 1
    assert "No space left on device: free some space where" in capfd.readouterr().err
    (status,) = find_statuses(tmp_path)
    assert status.state == "failed"


def test_an_entry_that_does_not_exist_fails_in_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    one = Devices("cpu", (0,))
    assert launch("no_such_module:main", Run(), one, "eval", str(tmp_path), {}) == 1
    error = capfd.readouterr().err
    assert error.startswith("error: ModuleNotFoundError: No module named 'no_such_module'")
    assert error.count("\n") == 1


def test_the_collector_spares_what_a_stage_imported_and_collects_the_rest(
    stages: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    one = Devices("cpu", (0,))
    assert launch(f"{stages}:collects", Run(), one, "eval", str(tmp_path), {}) == 0
    assert "collects: True, spares its imports: True" in capfd.readouterr().out


@pytest.mark.parametrize("behaviour", ["wait", "stops_by_itself"])
def test_ctrl_c_stops_every_process_and_is_exit_code_130(
    behaviour: str, stages: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    _signal_once_waiting(tmp_path, times=1)
    assert launch(f"{stages}:{behaviour}", Run(), TWO, "capture", str(tmp_path), {}) == 130
    captured = capfd.readouterr()
    assert "SIGINT: stopping, up to 30 s" in captured.out
    assert "error" not in captured.err
    if behaviour == "stops_by_itself":
        assert captured.out.count("finished the batch") == 2


def test_of_launches_beside_one_another_one_says_that_they_stop(
    stages: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    logs, one = str(tmp_path), Devices("cpu", (0,))
    # each is the first of its launch: one file stands for both
    (tmp_path / "waiting-1").touch()
    _signal_once_waiting(tmp_path, times=1)
    with noted_signals() as signals, ThreadPoolExecutor(2) as pool:
        beside = Beside(signals, 2, [])
        words = (f"{stages}:wait", Run(), one, "plan", logs, {})
        both = [pool.submit(launch, *words, beside=beside) for _ in range(2)]
        assert [done.result() for done in both] == [130, 130]
    assert capfd.readouterr().out.count("SIGINT: stopping") == 1


def test_a_second_ctrl_c_does_not_wait(stages: str, tmp_path: Path) -> None:
    _signal_once_waiting(tmp_path, times=2)
    begin = time.monotonic()
    assert launch(f"{stages}:deaf", Run(), TWO, "capture", str(tmp_path), {}) == 130
    assert time.monotonic() - begin < 15


def test_a_process_that_does_not_listen_is_killed_after_the_grace(
    stages: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "GRACE_S", 0.3)
    _signal_once_waiting(tmp_path, times=1)
    assert launch(f"{stages}:deaf", Run(), TWO, "capture", str(tmp_path), {}) == 130


def test_a_process_that_hangs_when_all_work_is_done_is_killed_and_named(
    stages: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    begin = time.monotonic()
    assert launch(f"{stages}:one_hangs", Run(), TWO, "capture", str(tmp_path), {}, lag_s=1.0) == 0
    assert 1.0 < time.monotonic() - begin < 30
    said = (
        "capture-1 has not ended 1 s after another had found all work done: it hangs and was killed"
    )
    told = capfd.readouterr()
    assert said in told.out
    assert told.err == ""


def test_children_do_not_outlive_a_killed_parent(stages: str, tmp_path: Path) -> None:
    code = (
        "from dflash_pipeline.configs.launch import launch\n"
        "from dflash_pipeline.configs.gpus import Devices\n"
        "from dflash_pipeline.configs.schema import Run\n"
        f"launch('{stages}:wait', Run(), Devices('cpu', (0,)), 'capture', {str(tmp_path)!r}, {{}})"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        said = re.fullmatch(r"pid (\d+)\n", parent.stdout.readline())
        assert said is not None
        pid = int(said[1])
        assert process_start(pid) > 0
        parent.kill()
    deadline = time.monotonic() + 10
    while process_start(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert process_start(pid) == 0


def test_a_run_with_fewer_processes_forgets_those_of_the_last_one(
    stages: str, tmp_path: Path
) -> None:
    for devices in (Devices("cpu", (0, 1)), Devices("cpu", (0,))):
        assert launch(f"{stages}:work", Run(), devices, "train", str(tmp_path), {}) == 0
    assert [one.number for one in find_statuses(tmp_path)] == [0]


def test_launches_beside_one_another_are_told_apart(stages: str, tmp_path: Path) -> None:
    """As two captures into one store: each log, status and closing line is of one process."""
    one, logs = Devices("cpu", (0,)), str(tmp_path)
    ended: dict[str, list[Status]] = {"first": [], "second": []}
    codes: list[int] = []

    def started(who: str, devices: Devices, tokens: int) -> threading.Thread:
        def work() -> None:
            extra = {"who": who, "tokens": tokens}
            codes.append(
                launch(f"{stages}:counts", Run(), devices, "capture", logs, extra, ended=ended[who])
            )

        thread = threading.Thread(target=work)
        thread.start()
        _await(lambda: len(list(tmp_path.glob(f"{who}-*.counted"))) == len(devices.ids))
        return thread

    def let_go(who: str, rank: int) -> None:
        (tmp_path / f"{who}-{rank}.go").touch()

    def found() -> dict[int, str]:
        return {one.number: one.state for one in find_statuses(tmp_path)}

    first = started("first", TWO, 1000)
    let_go("first", 0)
    _await(lambda: found() == {0: "done", 1: "running"})
    # neither the number of what has ended in a launch that goes on, nor what it has done
    second = started("second", one, 7)
    assert found() == {0: "done", 1: "running", 2: "running"}
    assert launch(f"{stages}:refuse", Run(), one, "capture", logs, {}) == 2
    assert found() == {0: "done", 1: "running", 2: "running"}
    let_go("first", 1)
    let_go("second", 0)
    first.join()
    second.join()
    assert codes == [0, 0]
    lines = closing_lines(ended["first"], price=0.0)
    assert [text.partition(" tokens")[0] for text in lines] == [
        "worker 0: 1,000",
        "worker 1: 1,000",
        "together: 2,000",
    ]
    assert closing_lines(ended["second"], price=0.0)[0].startswith("7 tokens")
    for number, who in enumerate(("first", "first", "second")):
        log = log_path(logs, "capture", number).read_text()
        assert [text for text in ended if f"said by {text}" in log] == [who]
    # both are over: the next one begins anew
    assert launch(f"{stages}:work", Run(), one, "capture", logs, {}) == 0
    assert found() == {0: "done"}


def _await(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_the_devices_of_a_process_follow_each_other() -> None:
    devices = Devices("cuda", (0, 1, 4, 6))
    assert launcher.grouped(devices, 1) == [(0,), (1,), (4,), (6,)]
    assert launcher.grouped(devices, 2) == [(0, 1), (4, 6)]
    with pytest.raises(UsageError, match=r"GPUs 0,1,4,6 are 4, which is no multiple"):
        launcher.grouped(devices, 3)


@pytest.mark.parametrize(("text", "num_threads"), [("3", 3), ("0", 1), ("", None), ("all", None)])
def test_a_process_has_the_threads_that_openmp_is_told_and_never_none(
    text: str, num_threads: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch refuses 0 threads."""
    monkeypatch.setenv("OMP_NUM_THREADS", text)
    place = place_of("cpu", 1, 0, "train", "logs", 0, "env://", 1)
    assert place.threads == (num_threads or len(os.sched_getaffinity(0)))
