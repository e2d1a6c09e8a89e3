"""One small file a process that says what it is doing; `dflash status` reads it, dead or alive."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

from dflash_pipeline.configs.disk import write_whole
from dflash_pipeline.configs.jsonfile import read_object

# the states of a process that has not ended; then: done, failed, stopped
ACTIVE = ("starting", "running", "waiting")


@dataclass(kw_only=True, slots=True)
class Status:
    """What one process is doing. Times are seconds since 1970."""

    stage: str
    number: int
    """Of no other living process of the stage in the same log directory."""
    pid: int = 0
    host: str = ""
    started_at: float = 0.0
    """When this process began."""
    start_ticks: float = 0.0
    """The kernel's count of that moment; tells a reused process id apart."""
    time: float = 0.0
    """When this was written."""
    device: str = ""
    state: str = "starting"
    text: str = ""
    """The last thing said."""
    done: float = 0.0
    total: float = 0.0
    unit: str = ""
    begin_done: float = 0.0
    """Where `done` stood when this process began to count; the rate leaves it out."""
    begin_time: float = 0.0
    numbers: dict[str, float] = field(default_factory=dict)
    counts: dict[str, float] = field(default_factory=dict)
    """Of a capture's worker: the sums of `configs/counts.py`."""
    error: str = ""

    @property
    def rate(self) -> float:
        """Units a second since counting began; 0 while unknown."""
        elapsed_s = self.time - self.begin_time
        return (self.done - self.begin_done) / elapsed_s if elapsed_s > 0 else 0.0

    @property
    def is_alive(self) -> bool:
        """The process runs on this host. For another host: it wrote within the last minute."""
        if self.state not in ACTIVE:
            return False
        if self.host != socket.gethostname():
            return time.time() - self.time < 60
        return process_start(self.pid) == self.start_ticks


def process_start(pid: int) -> float:
    """The kernel's start count of a process, 0 where it is gone or the system does not tell."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0.0
    fields_after_name = text.rpartition(")")[2].split()
    # a zombie has ended: only its parent has not noticed yet
    return 0.0 if fields_after_name[0] == "Z" else float(fields_after_name[19])


def process_age_s() -> float:
    """Seconds since this process began."""
    ticks = process_start(os.getpid())
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def status_path(log_dir: str, stage: str, number: int) -> Path:
    """The status file of one process."""
    return Path(log_dir) / f"{stage}-{number}.status.json"


def log_path(log_dir: str, stage: str, number: int) -> Path:
    """The log of one process."""
    return Path(log_dir) / f"{stage}-{number}.log"


def new_status(stage: str, number: int, device: str) -> Status:
    """The status of this process before it has done anything."""
    return Status(
        stage=stage,
        number=number,
        pid=os.getpid(),
        host=socket.gethostname(),
        started_at=time.time() - process_age_s(),
        start_ticks=process_start(os.getpid()),
        device=device,
    )


def write_status(log_dir: str, status: Status) -> None:
    """Replace the file, its directory made if need be."""
    status.time = time.time()
    path = status_path(log_dir, status.stage, status.number)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(asdict(status)).encode())


def read_status(path: Path) -> Status | None:
    """One status file; None where it is gone or is not one."""
    try:
        value = read_object(path)
    except (OSError, ValueError):
        return None
    if "stage" not in value or "number" not in value:
        return None
    names = {one.name for one in fields(Status)}
    return Status(**{name: item for name, item in value.items() if name in names})


def end_status(log_dir: str, stage: str, number: int, state: str, error: str) -> None:
    """Write how this process ended; keeps what it had counted. A full disk must not hide why."""
    path = status_path(log_dir, stage, number)
    status = read_status(path)
    if status is None or status.pid != os.getpid():
        status = new_status(stage, number, "")
    status.state, status.error = state, error
    with contextlib.suppress(OSError):
        write_status(log_dir, status)


def places_of(directory: Path) -> list[Path]:
    """Where the statuses of a run, a store, an answer file, or a log directory stand."""
    return [directory, directory / "logs", directory.with_name(directory.name + ".logs")]


def find_statuses(directory: Path) -> list[Status]:
    """Every status of a run: of a run directory, a store, an answer file, or a log directory."""
    found = [
        status
        for place in places_of(directory)
        for path in sorted(place.glob("*.status.json"))
        if (status := read_status(path)) is not None
    ]
    return sorted(found, key=lambda status: (status.stage, status.number))


def find_runs(directory: Path) -> list[tuple[str, Status]]:
    """The statuses of a run, each with ""; of a sweep's variants, each with the variant's name."""
    own = [("", status) for status in find_statuses(directory)]
    if not directory.is_dir():
        return own
    variants = sorted(path for path in directory.iterdir() if (path / "logs").is_dir())
    return own + [(path.name, status) for path in variants for status in find_statuses(path)]
