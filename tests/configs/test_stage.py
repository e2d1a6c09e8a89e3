"""Logs of commands that only read, and the device of those that take one."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash_pipeline.configs.errors import UsageError
from dflash_pipeline.configs.stage import logs_near, one_device, scratch_logs
from dflash_pipeline.configs.status import new_status, write_status


@pytest.mark.parametrize(
    ("state", "is_kept"),
    # one that is still running here was killed: its line names the log as well
    [("done", False), ("stopped", False), ("failed", True), ("running", True)],
)
def test_logs_stay_where_a_line_names_them_and_until_the_next_time(
    state: str, is_kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with scratch_logs("look") as logs:
        status = new_status("look", 0, "cpu")
        status.state = state
        write_status(logs, status)
    assert Path(logs).exists() is is_kept
    with scratch_logs("look"):
        assert not Path(logs).exists()
    assert list(tmp_path.iterdir()) == []


def test_the_logs_of_an_evaluation_stand_with_those_of_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "elsewhere"))
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run/logs").mkdir(parents=True)
    (tmp_path / "run/step-00000001").mkdir()
    for name in ("run", "run/step-00000001"):
        with logs_near(tmp_path / name) as logs:
            assert logs == str(tmp_path / "run/logs")
    with logs_near(tmp_path / "elsewhere") as logs:
        assert Path(logs).parent == tmp_path / "elsewhere"


def test_a_command_that_takes_one_device_refuses_several() -> None:
    assert one_device("cpu", share=False).ids == (0,)
    with pytest.raises(UsageError, match="--gpus cpu:2: this command runs on one device"):
        one_device("cpu:2", share=False)
    # or another number than a target is spread over
    assert one_device("cpu:2", share=False, per_target=2).ids == (0, 1)
    for text, told in (("cpu:3", "--gpus cpu:3"), ("cpu", "--gpus cpu"), ("", "CPU worker 0")):
        with pytest.raises(UsageError, match=f"^{told}: this command runs on the 2 of one target"):
            one_device(text, share=False, per_target=2)
