"""The commands answer before anything heavy loads."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers", "triton", "zarr", "numcodecs", "safetensors", "numpy")


def _loaded_after(code: str) -> list[str]:
    answer = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys\nprint('loaded', *sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    )
    loaded = answer.stdout.splitlines()[-1].split()[1:]
    return [name for name in HEAVY if name in loaded]


@pytest.mark.parametrize("line", [["--help"], ["train", "--help"], ["config"]])
def test_a_command_that_only_talks_loads_nothing_heavy(line: list[str]) -> None:
    code = (
        "from dflash_pipeline.cli import main\n"
        f"try:\n    main({line!r})\nexcept SystemExit as end:\n    assert not end.code"
    )
    assert _loaded_after(code) == []


def test_reading_a_store_loads_no_torch() -> None:
    loaded = _loaded_after("import dflash_pipeline.store")
    assert "torch" not in loaded
    assert "transformers" not in loaded
