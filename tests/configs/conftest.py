"""Stages that stand in for the real ones in tests of the launcher."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

STAGES = """
import os, signal, sys, time
from pathlib import Path
from dflash_pipeline.configs.errors import UsageError

def RunLog(place):
    # here, not above: importing the store's package takes as long as all the rest of a child
    from dflash_pipeline.store import runlog
    return runlog.RunLog(place)

def work(run, place, extra):
    log = RunLog(place)
    log.say(f"{place.device} {os.environ['CUDA_VISIBLE_DEVICES']!r} {run.optim.lr} {extra}")
    log.progress(1, 2, "samples")
    log.progress(2, 2, "samples", loss=1.5)
    print("printed by the stage", file=sys.stderr)

def collects(run, place, extra):
    import gc
    enabled, frozen = gc.isenabled(), gc.get_freeze_count()
    RunLog(place).say(f"collects: {enabled}, spares its imports: {frozen > 1000}")

def first_fails(run, place, extra):
    if place.rank == 0:
        while not Path(place.log_dir, "waiting-1").exists():
            time.sleep(0.01)
        raise ValueError("store x holds layers 1,\\nwanted 2")
    wait(run, place, extra)

def wait(run, place, extra):
    log = RunLog(place)
    log.state("waiting")
    log.say(f"pid {os.getpid()}")
    Path(place.log_dir, f"waiting-{place.rank}").touch()
    time.sleep(60)

def counts(run, place, extra):
    from dflash_pipeline.configs.counts import Counts
    log = RunLog(place)
    log.say(f"said by {extra['who']}")
    log.counted(1, 2, "samples", Counts(num_tokens=extra["tokens"], seconds=1.0))
    Path(place.log_dir, f"{extra['who']}-{place.rank}.counted").touch()
    while not Path(place.log_dir, f"{extra['who']}-{place.rank}.go").exists():
        time.sleep(0.01)

def refuse(run, place, extra):
    raise UsageError("no such model")

def prints(run, place, extra):
    for _ in range(100000):
        print("line")

def says(run, place, extra):
    log = RunLog(place)
    for _ in range(100000):
        log.say("line")

class Held:
    def __del__(self):
        os.write(2, b"leaked 1 function\\n")

def tears_down(run, place, extra):
    import atexit
    atexit.register(os.write, 2, b"registered by a library for the end\\n")
    sys.held = Held()

def killed(run, place, extra):
    os.kill(os.getpid(), signal.SIGKILL)

def told_to_stop(run, place, extra):
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)

def disk_full(run, place, extra):
    raise OSError(28, "No space left on device")

def deaf(run, place, extra):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    wait(run, place, extra)

def one_hangs(run, place, extra):
    if place.rank:
        deaf(run, place, extra)

def stops_by_itself(run, place, extra):
    noted = []
    signal.signal(signal.SIGTERM, lambda *_: noted.append(1))
    Path(place.log_dir, f"waiting-{place.rank}").touch()
    while not noted:
        time.sleep(0.01)
    RunLog(place).say("finished the batch")
"""


@pytest.fixture
def stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Name of a module that child processes can import; each function is one way to behave."""
    folder = tmp_path / "modules"
    folder.mkdir()
    (folder / "stand_ins.py").write_text(STAGES)
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
    return "stand_ins"
