"""Whether a training run may use the directory that its line names."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash_pipeline.configs.errors import UsageError
from dflash_pipeline.configs.training import check_directory


@pytest.mark.parametrize(
    ("made", "resume", "is_sweep", "message"),
    [
        ((), False, False, ""),
        (("logs/",), False, False, ""),
        (("logs/", "run.json"), False, False, "is not empty: go on with it by --resume"),
        (("run.json",), True, False, ""),
        ((), True, False, "--resume: there is no run directory"),
        (("first/",), True, False, "holds no run.json: there is no run to resume"),
        (("first/",), True, True, ""),
        (("run.json",), True, True, "is a run, no sweep: leave --sweep out"),
    ],
)
def test_a_directory_is_free_or_holds_what_goes_on(
    made: tuple[str, ...], resume: bool, is_sweep: bool, message: str, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    for name in made:
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).mkdir() if name.endswith("/") else (out / name).touch()
    if not message:
        check_directory(str(out), resume, is_sweep)
        return
    with pytest.raises(UsageError, match=message):
        check_directory(str(out), resume, is_sweep)
