"""`0-4,6`, `cpu`, `cpu:4` -> devices, and whether they are there and free.

Numbers index the GPUs that CUDA_VISIBLE_DEVICES leaves visible. DFLASH_GPUS_AS_CPU=1 lets each
number stand for one CPU worker, so that a machine without GPUs runs the same lines.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dflash_pipeline.configs.errors import UsageError

# an idle GPU holds up to some hundred MiB for its driver; a process that computes holds more
IDLE_MEMORY_MIB = 1024
# each CPU worker is a process of hundreds of MiB: more than this a core is a slip of the hand
MAX_CPU_WORKERS_PER_CORE = 16


@dataclass(frozen=True, slots=True)
class Devices:
    """What a stage runs on; one process each."""

    kind: Literal["cuda", "cpu"]
    ids: tuple[int, ...]
    """Numbers among the visible GPUs; for a CPU, of the workers."""

    def __str__(self) -> str:
        name = "GPU" if self.kind == "cuda" else "CPU worker"
        listed = ",".join(str(one) for one in self.ids)
        return f"{name} {listed}" if len(self.ids) == 1 else f"{name}s {listed}"


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU as `nvidia-smi` lists it."""

    index: int
    uuid: str
    used_mib: int


def gpus_are_cpu() -> bool:
    """Whether tests have GPU numbers stand for CPU processes."""
    return os.environ.get("DFLASH_GPUS_AS_CPU", "") == "1"


def parse(text: str) -> Devices:
    """Read `--gpus`; says nothing about what is there. "" means every visible GPU, else one CPU.

    UsageError for another text, and where "" would mean a CPU by mistake.
    """
    text = text.strip()
    if not text:
        if visible := visible_gpus():
            return Devices("cuda", tuple(range(len(visible))))
        _check_hidden()
        return Devices("cpu", (0,))
    if text == "cpu":
        return Devices("cpu", (0,))
    if match := re.fullmatch(r"cpu:(\d+)", text):
        if int(match[1]) < 1:
            raise UsageError("--gpus cpu:0: at least one worker is needed")
        num_cores = len(os.sched_getaffinity(0))
        most = MAX_CPU_WORKERS_PER_CORE * num_cores
        if int(match[1]) > most:
            raise UsageError(
                f"--gpus {text}: this process may use {num_cores} CPU cores, at most {most} "
                f"workers; one a core is usual: cpu:{num_cores}"
            )
        return Devices("cpu", tuple(range(int(match[1]))))
    ids: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", part)
        if match is None:
            raise UsageError(f"--gpus {text}: write numbers and ranges as 0-4,6, or cpu, or cpu:N")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise UsageError(f"--gpus {text}: the range {part.strip()} runs backwards")
        if last - first >= 1024:
            raise UsageError(f"--gpus {text}: no machine has so many GPUs")
        ids += range(first, last + 1)
    if len(set(ids)) != len(ids):
        raise UsageError(f"--gpus {text} names a GPU twice")
    return Devices("cpu" if gpus_are_cpu() else "cuda", tuple(ids))


def listed(devices: Devices, ids: Sequence[int]) -> str:
    """What `--gpus` must say for some of the devices: `0-4,6`, `cpu` or `cpu:4`."""
    if devices.kind == "cpu" and not gpus_are_cpu():
        return "cpu" if len(ids) == 1 else f"cpu:{len(ids)}"
    parts: list[list[int]] = []
    for number in sorted(ids):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


def visible_gpus() -> list[Gpu]:
    """The GPUs that a number may name, in that order; empty without a driver."""
    listed = _all_gpus()
    names = os.environ.get("CUDA_VISIBLE_DEVICES")
    if names is None:
        return listed
    visible = []
    for name in names.split(","):
        found = [
            gpu
            for gpu in listed
            if name.strip() == str(gpu.index)
            or (name.strip().startswith("GPU-") and gpu.uuid.startswith(name.strip()))
        ]
        # CUDA itself stops at the first name that it cannot resolve
        if len(found) != 1:
            break
        visible.append(found[0])
    return visible


def _check_hidden() -> None:
    """UsageError unless GPUs that are there and not visible are hidden on purpose."""
    names = os.environ.get("CUDA_VISIBLE_DEVICES", "").strip()
    if names and not names.startswith("-") and (there := _all_gpus()):
        raise UsageError(
            f"CUDA_VISIBLE_DEVICES is {names}, which names no whole GPU of this machine (0 to "
            f"{len(there) - 1}, or a uuid that begins with GPU-): set it to some of them, or give "
            "--gpus cpu"
        )


def _all_gpus() -> list[Gpu]:
    return [
        Gpu(int(row[0]), row[1], int(row[2]) if row[2].isdigit() else 0)
        for row in _nvidia_smi("--query-gpu=index,uuid,memory.used")
    ]


def check(devices: Devices, share: bool) -> None:
    """Refuse a GPU that is not there or, unless shared, whose memory another process holds."""
    if devices.kind != "cuda":
        return
    visible = visible_gpus()
    for number in devices.ids:
        if number >= len(visible):
            there = f"0 to {len(visible) - 1}" if visible else "none"
            limit = " (CUDA_VISIBLE_DEVICES)" if "CUDA_VISIBLE_DEVICES" in os.environ else ""
            raise UsageError(
                f"--gpus {number}: there is no such GPU; visible{limit}: {there}"
                + ("" if visible else "; use --gpus cpu")
            )
    if share:
        return
    holders = {
        row[0]: f"process {row[1]} ({row[2]}, {row[3]} MiB)"
        for row in _nvidia_smi("--query-compute-apps=gpu_uuid,pid,process_name,used_memory")
    }
    for number in devices.ids:
        gpu = visible[number]
        holder = holders.get(gpu.uuid, "")
        if not holder and gpu.used_mib > IDLE_MEMORY_MIB:
            # in a container the other side's process is not listed, but its memory is
            holder = f"a process that is not visible from here ({gpu.used_mib} MiB)"
        if holder:
            raise UsageError(
                f"GPU {number} is in use by {holder}: choose another one, or share it on purpose "
                "with --share-gpu"
            )


def device_name(number: int) -> str:
    """What CUDA_VISIBLE_DEVICES must hold so that a process sees this GPU alone."""
    return visible_gpus()[number].uuid


@contextlib.contextmanager
def reserved(devices: Devices, stage: str, share: bool) -> Iterator[None]:
    """Hold the devices' names while a stage runs, so that two stages never meet on one GPU.

    The kernel drops a lock with its process, so a killed stage reserves nothing. Plain CPU
    workers are not reserved. Raises UsageError naming the stage that holds one.
    """
    if devices.kind == "cuda":
        names = [device_name(number) for number in devices.ids]
    elif gpus_are_cpu():
        names = [f"cpu-{number}" for number in devices.ids]
    else:
        names = []
    folder = Path(tempfile.gettempdir()) / f"dflash-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    with contextlib.ExitStack() as stack:
        for number, name in zip(devices.ids, names, strict=False):
            file = stack.enter_context((folder / f"{name}.lock").open("a+"))
            try:
                fcntl.flock(file, (fcntl.LOCK_SH if share else fcntl.LOCK_EX) | fcntl.LOCK_NB)
            except BlockingIOError:
                if share:
                    continue
                file.seek(0)
                raise UsageError(
                    f"GPU {number} is in use by dflash {file.read().strip() or 'of another run'}: "
                    "choose another one, or share it on purpose with --share-gpu"
                ) from None
            file.truncate(0)
            file.write(f"{stage} (process {os.getpid()})")
            file.flush()
        yield


def _nvidia_smi(query: str) -> Sequence[list[str]]:
    """Rows of one query; none where there is no driver."""
    try:
        answer = subprocess.run(
            ["nvidia-smi", query, "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    if answer.returncode != 0:
        return []
    return [
        [cell.strip() for cell in line.split(",")]
        for line in answer.stdout.splitlines()
        if line.count(",") >= 2
    ]
