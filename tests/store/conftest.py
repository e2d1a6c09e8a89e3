"""Fixtures over `tiny_store.py`."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from dflash_pipeline.store.access import ALIGNMENT
from dflash_pipeline.store.reader import open_store


@pytest.fixture(scope="session")
def plan(tiny: ModuleType) -> Any:
    """24 samples."""
    return tiny.make_plan(24)


@pytest.fixture(scope="session")
def originals(tiny: ModuleType, plan: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A planned store and a whole, sealed one, made once; tests get copies."""
    folder = tmp_path_factory.mktemp("originals")
    tiny.build(plan, folder / "empty")
    store = tiny.build(plan, folder / "whole")
    tiny.capture(plan, store)
    store.seal()
    return folder


def _copy(source: Path, target: Path) -> Any:
    shutil.copytree(source, target, symlinks=True)
    return open_store(target)


@pytest.fixture
def empty_store(originals: Path, tmp_path: Path) -> Any:
    """A planned store at tmp_path / hs with nothing captured yet."""
    return _copy(originals / "empty", tmp_path / "hs")


@pytest.fixture
def store(originals: Path, tmp_path: Path) -> Any:
    """A whole, sealed store at tmp_path / hs."""
    return _copy(originals / "whole", tmp_path / "hs")


@pytest.fixture
def small_store(tmp_path: Path) -> Any:
    """A copy of the golden store: five samples, four shards."""
    return _copy(Path(__file__).parent.parent / "golden" / "store-v1-bf16", tmp_path / "small")


@pytest.fixture
def fork_worker() -> Iterator[Callable[[Path, int], Callable[[float], int]]]:
    """Starts `chaos_worker.py` for a store; what it gives starts a process, by its pause."""
    with contextlib.ExitStack() as ends:

        def host(path: Path, num_samples: int) -> Callable[[float], int]:
            script = Path(__file__).with_name("chaos_worker.py")
            command = [sys.executable, str(script), str(path), str(num_samples)]
            pipe = subprocess.PIPE
            process = ends.enter_context(
                subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
            )

            def start(pause_s: float) -> int:
                assert process.stdin is not None
                assert process.stdout is not None
                process.stdin.write(f"{pause_s}\n")
                process.stdin.flush()
                return int(process.stdout.readline())

            return start

        yield host


@pytest.fixture
def flip() -> Callable[[Path, int], None]:
    """Inverts one byte of a file."""

    def invert(file: Path, place: int) -> None:
        content = bytearray(file.read_bytes())
        content[place] ^= 0xFF
        file.write_bytes(content)

    return invert


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Random bytes that end at no whole block, at tmp_path / rows."""
    path = tmp_path / "rows"
    path.write_bytes(
        np.random.default_rng(0).integers(0, 256, 9 * ALIGNMENT + 1234, np.uint8).tobytes()
    )
    return path


@pytest.fixture
def no_direct(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A file system that refuses O_DIRECT at open; the attempts."""
    attempts: list[int] = []
    real = os.open

    def open_buffered(path: Any, flags: int, *rest: Any, **named: Any) -> int:
        if flags & os.O_DIRECT:
            attempts.append(flags)
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), str(path))
        return real(path, flags, *rest, **named)

    monkeypatch.setattr(os, "open", open_buffered)
    return attempts
