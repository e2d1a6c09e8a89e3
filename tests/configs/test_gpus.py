"""`--gpus`: what it means, what is there, what is free."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from dflash_pipeline.configs.errors import UsageError
from dflash_pipeline.configs.gpus import Devices, check, device_name, parse, reserved


@pytest.fixture
def four_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A `nvidia-smi` that lists four GPUs: 1 computes for process 77, 3 for an unseen one."""
    script = tmp_path / "bin" / "nvidia-smi"
    script.parent.mkdir()
    script.write_text(
        """#!/bin/sh
case "$1" in
--query-gpu=*)
  echo "0, GPU-aa, 4"; echo "1, GPU-bb, 9000"; echo "2, GPU-cc, 500"; echo "3, GPU-dd, 2000";;
--query-compute-apps=*) echo "GPU-bb, 77, python, 8900";;
esac
"""
    )
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{script.parent}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("DFLASH_GPUS_AS_CPU", raising=False)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("DFLASH_GPUS_AS_CPU", raising=False)


@pytest.mark.parametrize(
    ("text", "ids"),
    [("0-4", (0, 1, 2, 3, 4)), ("5-7", (5, 6, 7)), ("0-2,6", (0, 1, 2, 6)), ("3", (3,))],
)
def test_numbers_and_ranges(
    text: str, ids: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DFLASH_GPUS_AS_CPU", raising=False)
    assert parse(text) == Devices("cuda", ids)
    monkeypatch.setenv("DFLASH_GPUS_AS_CPU", "1")
    assert parse(text) == Devices("cpu", ids)


def test_cpu_workers() -> None:
    assert parse("cpu") == Devices("cpu", (0,))
    assert parse("cpu:3") == Devices("cpu", (0, 1, 2))


@pytest.mark.parametrize(
    "text", ["0-", "a", "4-2", "0,0", "cpu:0", "cpu:x", "cpu:99999", "-1", "0-99999", ","]
)
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--gpus"):
        parse(text)


@pytest.mark.usefixtures("four_gpus")
def test_without_numbers_every_visible_gpu_is_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse("") == Devices("cuda", (0, 1, 2, 3))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,0")
    assert parse("") == Devices("cuda", (0, 1))
    for hidden in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert parse("") == Devices("cpu", (0,))


@pytest.mark.usefixtures("four_gpus")
@pytest.mark.parametrize("name", ["7", "MIG-aa", "GPU-xx"])
def test_a_name_that_hides_every_gpu_by_mistake_is_not_taken_for_a_cpu(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", name)
    with pytest.raises(UsageError, match=rf"CUDA_VISIBLE_DEVICES is {name}, .*\(0 to 3, or"):
        parse("")
    assert parse("cpu") == Devices("cpu", (0,))


@pytest.mark.usefixtures("no_gpu")
def test_without_a_driver_a_cpu_process_is_meant() -> None:
    assert parse("") == Devices("cpu", (0,))
    with pytest.raises(UsageError, match="there is no such GPU; visible: none; use --gpus cpu"):
        check(Devices("cuda", (0,)), share=False)


@pytest.mark.usefixtures("four_gpus")
def test_numbers_index_the_visible_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-cc,0")
    assert device_name(0) == "GPU-cc"
    assert device_name(1) == "GPU-aa"
    with pytest.raises(UsageError, match=r"--gpus 2: .*CUDA_VISIBLE_DEVICES.*0 to 1"):
        check(Devices("cuda", (2,)), share=False)


@pytest.mark.usefixtures("four_gpus")
def test_a_gpu_that_is_absent_or_in_use_is_refused() -> None:
    check(Devices("cuda", (0, 2)), share=False)
    with pytest.raises(UsageError, match=r"--gpus 9: there is no such GPU; visible: 0 to 3"):
        check(Devices("cuda", (9,)), share=True)
    with pytest.raises(UsageError, match=r"GPU 1 is in use by process 77 \(python, 8900 MiB\)"):
        check(Devices("cuda", (1,)), share=False)
    with pytest.raises(UsageError, match=r"GPU 3 is in use by a process that is not visible"):
        check(Devices("cuda", (3,)), share=False)
    check(Devices("cuda", (1, 3)), share=True)


def test_two_stages_meet_on_one_gpu_only_when_asked_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DFLASH_GPUS_AS_CPU", "1")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with reserved(parse("0-4"), "capture", share=False):
        with reserved(parse("5-7"), "train", share=False):
            pass
        with (
            pytest.raises(UsageError, match=r"GPU 4 is in use by dflash capture \(process \d+\)"),
            reserved(parse("4-6"), "train", share=False),
        ):
            pass
        with reserved(parse("4"), "train", share=True):
            pass
    with reserved(parse("4"), "train", share=False):
        pass
