"""What is not there, or cannot be written, is refused before anything heavy loads."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from dflash_pipeline.configs import inputs
from dflash_pipeline.configs.errors import UsageError


@pytest.fixture(autouse=True)
def _in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", ["toy", "smollm2", "Qwen/Qwen3-8B", "plain-name"])
def test_a_name_that_may_be_a_hubs_is_left_to_the_stage(name: str) -> None:
    inputs.check_target(name)


def test_a_targets_files_must_be_there() -> None:
    Path("model").mkdir()
    for name in ("./model", str(Path("model").absolute())):
        with pytest.raises(UsageError, match=r"holds no config\.json"):
            inputs.check_target(name)
    Path("model/config.json").touch()
    inputs.check_target("./model")
    for name in ("./no", "/no/such", "~/no/such/model", "a/b/c", "../no"):
        with pytest.raises(UsageError, match="there is no such directory; expected one with"):
            inputs.check_target(name)
    with pytest.raises(UsageError, match="no such file"):
        inputs.check_target("no.gguf")


def test_a_store_may_be_new_empty_or_a_store() -> None:
    inputs.check_store_place("new/below/new")
    Path("empty").mkdir()
    inputs.check_store_place("empty")
    Path("store").mkdir()
    Path("store/zarr.json").touch()
    inputs.check_store_place("store")
    Path("foreign").mkdir()
    Path("foreign/file").touch()
    with pytest.raises(UsageError, match="not empty and holds no store"):
        inputs.check_store_place("foreign")
    Path("link").symlink_to("nowhere")
    with pytest.raises(UsageError, match=r"is a symbolic link: name the directory .*/nowhere$"):
        inputs.check_store_place("link")


@pytest.mark.parametrize(
    "check",
    [
        inputs.check_store_place,
        lambda path: inputs.check_out_file(path, "--out"),
        lambda path: inputs.check_new_directory(path, "--out"),
    ],
)
def test_a_folder_that_takes_no_entries_is_named(
    check: Callable[[str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("file").touch()
    with pytest.raises(UsageError, match="file is not a directory; choose another place"):
        check("file/x/y")
    # it grants what it then refuses
    with pytest.raises(
        UsageError, match=r"nothing can be made in /proc \(.*; choose another place"
    ):
        check("/proc/new")
    # root may write everywhere, so the answer is forged
    monkeypatch.setattr(os, "access", lambda path, _mode: Path(path) != tmp_path)
    with pytest.raises(UsageError, match="cannot be written to; choose another place"):
        check("new/x")


@pytest.mark.parametrize(
    "check",
    [
        inputs.check_store_place,
        inputs.check_further_mount,
        inputs.check_run_directory,
        lambda path: inputs.check_out_file(path, "--out"),
        lambda path: inputs.check_new_directory(path, "--out"),
    ],
)
def test_nothing_is_written_into_a_store(check: Callable[[str], None]) -> None:
    Path("hs/b0").mkdir(parents=True)
    Path("hs/zarr.json").write_text('{"attributes": {"dflash": {}}}')
    Path("elsewhere").symlink_to("hs")
    # a group of somebody else may hold whatever it likes
    Path("zarr.json").write_text('{"attributes": {}}')
    for inside in ("hs/new", "hs/b0/new", "hs/new/below", "elsewhere/new"):
        with pytest.raises(UsageError, match=r"/hs is a store, nothing else goes into it"):
            check(inside)
    check("hs/../beside")
    check("hs.logs/beside")


def test_what_reads_a_store_needs_one_there() -> None:
    with pytest.raises(UsageError, match=r"there is no store hs: name"):
        inputs.check_store("hs")
    Path("hs").mkdir()
    with pytest.raises(UsageError, match=r"hs is an empty directory, expected a directory that"):
        inputs.check_store("hs")
    for name in "dcba":
        Path("hs", name).touch()
    with pytest.raises(
        UsageError, match=r"no store at hs \(no zarr\.json in it, but a, b, c, \.\."
    ):
        inputs.check_store("hs")
    with pytest.raises(UsageError, match=r"no store at hs/a: it is not a directory; expected"):
        inputs.check_store("hs/a")
    Path("hs/zarr.json").touch()
    inputs.check_store("hs,further")


def test_a_list_may_stand_in_a_file() -> None:
    Path("keys.txt").write_text("a\n\n  b b \nc\n", encoding="utf-8")
    assert inputs.listed(("x", "@keys.txt", "c"), "--drop-sample") == ("x", "a", "b b", "c")
    with pytest.raises(UsageError, match="--drop-sample @nowhere: the file cannot be read"):
        inputs.listed(("@nowhere",), "--drop-sample")
