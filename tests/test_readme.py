"""What the README says about files, commands, options, presets and benches' figures is so."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import click
import pytest

from dflash_pipeline.cli import dflash
from dflash_pipeline.configs.counts import Counts
from dflash_pipeline.configs.load import all_keys, load, preset_names
from dflash_pipeline.configs.schema import Run
from dflash_pipeline.configs.sweep import read_variants
from dflash_pipeline.store import open_store
from dflash_pipeline.store.paths import SEALED_FILE
from dflash_pipeline.store.snippet import NUMPY_DECODER

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
GOLDEN = ROOT / "tests" / "golden"
FOLDERS = ("capture", "configs", "store", "train")
# options of other programs, which the README shows in their own lines
FOREIGN = ("pip ", "vllm ", "python -m sglang", "python tests/bench/")


def _blocks(language: str) -> list[str]:
    found = re.findall(rf"^ *```{language}\n(.*?)^ *```", TEXT, re.DOTALL | re.MULTILINE)
    # a line that goes on behind a backslash is one
    return [re.sub(r"\\\n *", "", block) for block in found]


def _marked(marker: str) -> str:
    found = re.findall(rf"<!-- {marker} -->\n```bash\n(.*?)\n```", TEXT, re.DOTALL)
    assert len(found) == 1, f"README needs one code block right after <!-- {marker} -->"
    return str(found[0])


def _options(command: click.Command) -> set[str]:
    return {flag for one in command.params for flag in one.opts} | {"--help"}


def _dflash_lines() -> list[list[str]]:
    code = re.findall(r"`([^`\n]+)`", TEXT)
    code += [line.strip() for block in _blocks("bash") for line in block.splitlines()]
    lines = [part for text in code for part in text.split(" && ")]
    return [shlex.split(line) for line in lines if line.startswith("dflash ")]


def test_the_two_commands_stand_after_their_markers() -> None:
    assert _marked("main") == "pip install 'torch==2.13.0' -e . && dflash demo"
    assert _marked("tests") == "pip install 'torch==2.13.0' -e '.[test]' && bash .ci/check"
    assert (ROOT / ".ci" / "check").is_file()


def test_the_check_hands_its_arguments_to_pytest(tmp_path: Path) -> None:
    """It dropped them, and ran every test for ten minutes."""
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "check", tmp_path / ".ci")
    (tmp_path / ".ci" / "types.sh").touch()
    (tmp_path / "python").write_text('#!/bin/sh\nprintf "[%s]" "$@"; echo\n')
    (tmp_path / "python").chmod(0o755)
    line = ["bash", str(tmp_path / ".ci" / "check"), "tests/store", "-k", "a b"]
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    said = subprocess.run(
        line, env={**os.environ, "PATH": path}, capture_output=True, text=True, check=True
    )
    last = said.stdout.splitlines()[-1]
    assert last == "[-m][pytest][-m][not gpu][-q][tests/store][-k][a b]"


def test_the_table_of_commands_is_that_of_the_program() -> None:
    listed = re.findall(r"^\| `dflash ([a-z]+)`", TEXT, re.MULTILINE)
    assert sorted(listed) == sorted(dflash.commands)


def test_every_line_that_calls_dflash_uses_options_that_exist() -> None:
    lines = _dflash_lines()
    assert len(lines) > 15
    for words in lines:
        name, *arguments = words[1:]
        assert name in dflash.commands, words
        given = {word for word in arguments if word.startswith("--")}
        assert given <= _options(dflash.commands[name]), words


def test_every_option_that_is_mentioned_exists_somewhere() -> None:
    known = set().union(*map(_options, dflash.commands.values()))
    code = [line for block in _blocks("bash") for line in block.splitlines()]
    code += re.findall(r"`([^`\n]+)`", TEXT)
    for line in code:
        if not line.startswith(FOREIGN):
            assert set(re.findall(r"(?<!\S)--[a-z-]+", line)) <= known, line


def _shown_words(folder: str) -> set[str]:
    """Names of the numbers that a stage passes to its progress line."""
    return {
        keyword.arg
        for path in (ROOT / folder).glob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func).endswith(("log.progress", "log.part"))
        for keyword in node.keywords
        if keyword.arg
    }


def test_every_word_of_a_progress_line_is_explained_and_no_other() -> None:
    from dflash_pipeline.train import journal, results

    told = TEXT[TEXT.index("The words of progress lines:") :].split("\n\n")[1]
    firsts = [line.split("|")[1] for line in told.splitlines()[2:]]
    listed = [word for first in firsts for word in re.findall(r"`(\w+)`", first)]
    shown = {*Counts().numbers(), *journal._SHOWN, "slot1"}
    shown |= {f"tau_{arm}" for arm in (results.TRAINED, results.UNTRAINED, results.LOOKUP)}
    shown |= _shown_words("capture") | _shown_words("train") | _shown_words("store")
    assert sorted(listed) == sorted(shown)


def test_every_python_file_of_the_package_is_in_the_file_map() -> None:
    files = {
        str(path.relative_to(ROOT))
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*.py")
        if path.read_text(encoding="utf-8").strip()
    }
    listed = re.findall(r"^\| `([a-z_/0-9]+\.py)` \| \S", TEXT, re.MULTILINE)
    assert len(listed) == len(set(listed))
    assert set(listed) == files | {"cli.py"}


def test_every_preset_is_named_and_no_other() -> None:
    paragraph = TEXT[TEXT.index("Presets: ") :].split("\n\n")[0]
    assert sorted(re.findall(r"`([a-z0-9.-]+)`", paragraph)) == preset_names()


def test_every_section_and_setting_that_is_mentioned_exists() -> None:
    sections = re.search(r"with a section each: (.*?)\.\s", TEXT, re.DOTALL)
    assert sections is not None
    assert set(re.findall(r"`(\w+)`", sections[1])) == set(Run.__dataclass_fields__)
    for section, key in re.findall(r"`([a-z]+)\.([a-z_]+)`", TEXT):
        if section in Run.__dataclass_fields__ and key != "py":
            assert f"{section}.{key}" in all_keys()


def test_the_configuration_of_the_two_lines_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    block = _blocks("toml")[0]
    assert tomllib.loads(block)["preset"] in preset_names()
    monkeypatch.chdir(tmp_path)
    Path("dflash.toml").write_text(block, encoding="utf-8")
    run = load("", (), {})
    assert (run.target.id, run.store.path) == ("Qwen/Qwen3-8B", "/nvme/hs")
    assert "dflash capture --gpus 0-4\ndflash train --gpus 5-7 --store /nvme/hs\n" in TEXT


def test_the_variants_of_the_sweep_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    block = _blocks("toml")[1]
    monkeypatch.chdir(tmp_path)
    Path("sweep.toml").write_text(block, encoding="utf-8")
    shallow, block8 = read_variants("sweep.toml", "qwen3-8b", (), {"train.out": "out"})
    assert (shallow.name, shallow.run.drafter.num_layers) == ("shallow", 3)
    assert (block8.run.drafter.block_size, block8.run.loss.gamma) == (8, 4.0)


def _bench(name: str) -> Any:
    return json.loads((ROOT / "tests/bench" / f"{name}.json").read_text(encoding="utf-8"))


def _rows(head: str) -> dict[str, list[str]]:
    """Cells of the table whose first line begins so, by the first of their row."""
    lines = re.match(r"(?:\|.*\n)+", TEXT[TEXT.index(f"| {head}") :])[0].splitlines()[2:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {first: rest for first, *rest in cells}


def _three(number: float) -> str:
    """To three digits."""
    return f"{float(f'{number:.3g}'):,.0f}"


def test_the_tables_of_the_training_step_are_what_was_measured() -> None:
    found = {one["name"]: one for one in _bench("step")["figures"]}
    steps = {
        "CE": "step 8B CE",
        "KL + CE": "step 8B KL+CE",
        "CE, `train.compile = false`": "step 8B eager CE",
        "CE, drafter of Qwen3-4B": "step 4B CE",
        "KL + CE, drafter of Qwen3-4B": "step 4B KL+CE",
    }
    losses = {
        "loss alone, KL + CE, 7,665 rows x 151,936": "loss KL+CE V 151936 H 4096 chunk 1280",
        "loss alone, KL + CE, 7,665 rows x 248,320, width 5,120": (
            "loss KL+CE V 248320 H 5120 chunk 1920"
        ),
    }
    rows = {}
    for label, name in (steps | losses).items():
        one = found[name]
        is_step = label in steps
        rows[label] = [
            f"{one['ms']:.1f}",
            f"{one['ms_per_1000_rows']:.2f}" if is_step else "",
            f"{one['times_floor']:.2f} ({100 / one['times_floor']:.0f} %)",
            _three(one["tokens_per_s"]) if is_step else "",
            f"{one['samples_per_s']:.2f}" if is_step else "",
            f"{one['peak_gib']:.1f}",
        ]
    both = found["step with optimizer, a batch of two"]
    label = "KL + CE, and half an optimizer step: one for two batches, 16,384 rows"
    per_1000 = f"{both['ms'] / 8.192:.2f}"
    rows[label] = [f"{both['ms']:.1f}", per_1000, "", "", "", f"{both['peak_gib']:.1f}"]
    assert _rows("step | ms |") == rows
    assert (both["objective"], both["recompiled"], both["waits"]) == ("KL+CE", 0, "none")
    assert f"made it {both['times_bare']:.3f} times as long" in TEXT
    kinds = ("products", "attention", "loss", "rest")
    assert _rows("step | products") == {
        label: [f"{found[f'profile {steps[label]}'][f'{kind}_ms']:.1f}" for kind in kinds]
        for label in ("CE", "KL + CE")
    }
    ce = found["step 8B CE"]
    flat = " ".join(TEXT.split())
    assert f"for this shape, {185 / ce['ms']:.2f} and {266 / ce['ms']:.2f} times as long" in flat
    chunks = [found[f"loss KL+CE V 151936 H 4096 chunk {rows}"] for rows in (1280, 1920, 2560)]
    times, sizes = ([one[key] for one in chunks] for key in ("ms", "peak_gib"))
    shown = "took {:.1f}, {:.1f} and {:.1f} ms and {:.1f}, {:.1f} and {:.1f} GiB (the loss alone"
    assert shown.format(*times, *sizes) in flat
    a_row = 107 / (512 * 7 / 1000)
    shown = f"{a_row:.1f} ms per 1,000, {a_row / ce['ms_per_1000_rows']:.2f} times as long"
    assert shown in flat
    theirs = _bench("peers")["ways"]["dynamo off"]["figures"]["forward and backward"]["ms"]
    assert f"{theirs:.0f} ms (31.9 per 1,000 rows" in flat
    assert f"{theirs / ce['ms']:.2f} times as long as the CE step above" in flat


def test_the_tables_of_the_capture_are_what_was_measured() -> None:
    parts = {name: part["figures"] for name, part in _bench("capture")["parts"].items()}
    ways = ("int4 to memory", "int4 to memory, compiled", "int4 to disk", "bf16 to disk")
    shown = _rows("shape | bare prefill")
    for shape, label in (("8b", "Qwen3-8B"), ("0.6b", "Qwen3-0.6B")):
        found = parts[shape]
        row = [
            f"{_three(one['tok_s'])}, {one['of_floor']:.2f}"
            for one in (found["bare"], found["bare, compiled"])
        ]
        for way in ways:
            if way not in found:
                row.append("")
                continue
            least = min(found[way]["tok_s"], found[way]["loop_tok_s"])
            bare = found["bare, compiled" if "compiled" in way else "bare"]["tok_s"]
            row.append(f"{_three(least)}, {least / bare:.2f}")
        assert shown[label] == row
    assert _rows("layers | 64 x 512") == {
        way: [
            f"{_three(one['tok_s'])}, {one['of_floor']:.2f}"
            for name, one in parts["rows"].items()
            if name.endswith(f", {way}")
        ]
        for way in ("eager", "compiled")
    }


def test_the_numpy_decoder_is_the_one_that_is_tested() -> None:
    assert NUMPY_DECODER.format(path="/nvme/hs", sample=0) in _blocks("python")


def _decode_golden(mode: str) -> Any:
    """hidden_TKH by the README's lines, of a store with rows of this mode."""
    code = next(block for block in _blocks("python") if "import json, numpy" in block)
    names: dict[str, Any] = {}
    exec(code.replace("/nvme/hs", str(GOLDEN / f"store-v1-{mode}"), 1), names)
    return names["hidden_TKH"]


def test_the_numpy_decoder_reads_bf16_rows_and_refuses_others() -> None:
    """It once took the bytes of int8 and int4 for bf16, and gave numbers without a word."""
    wanted = open_store(GOLDEN / "store-v1-bf16").sample(0).hidden_TKH
    assert (_decode_golden("bf16") == wanted).all()
    for mode in ("int8", "int4"):
        with pytest.raises(AssertionError, match=f"holds {mode} rows: dflash inspect prints their"):
            _decode_golden(mode)


def test_the_listed_paths_of_a_store_are_there_when_it_says_so(
    tiny: ModuleType, tmp_path: Path
) -> None:
    told = dict(re.findall(r"^DIR/(\S+?),? +(\S.*)$", TEXT, re.MULTILINE))
    growing = tiny.build(tiny.make_plan(6), tmp_path / "hs").path
    at_the_end = [path for path, about in told.items() if "once every shard" in about]
    assert at_the_end == [SEALED_FILE]
    of_some = {"calibration/": "int8 and int4", "consumers": "under --quota"}
    for path, about in told.items():
        if path in of_some:
            assert about.startswith(of_some[path])
            continue
        assert (GOLDEN / "store-v1-bf16" / path).exists(), path
        assert (growing / path).exists() is (path not in at_the_end), path


def test_the_first_screen_holds_what_a_newcomer_needs() -> None:
    first = "\n".join(TEXT.splitlines()[:70])
    for needed in ("<!-- main -->", "<!-- tests -->", "<!-- measured -->", "dflash.toml"):
        assert needed in first


def test_prose_keeps_within_a_hundred_columns() -> None:
    prose = re.sub(r"^ *```.*?^ *```$", "", TEXT, flags=re.DOTALL | re.MULTILINE)
    lines = [line for line in prose.splitlines() if not line.startswith("|")]
    assert len(lines) > 100
    assert [line for line in lines if len(line) > 100] == []


def test_no_line_is_unfinished() -> None:
    assert not re.search(r"\b(TODO|TBD|FIXME|FILEMAP|MEASURED|DECODER)\b", TEXT)
