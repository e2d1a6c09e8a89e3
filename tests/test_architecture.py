"""Rules a reader relies on: who imports whom, what is packaged, what is documented."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from dataclasses import fields
from pathlib import Path

import pytest

from dflash_pipeline.configs.docs import field_docs
from dflash_pipeline.configs.load import load, preset_names
from dflash_pipeline.configs.schema import Run

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("configs", "store", "capture", "train")
ALLOWED = {
    "configs": {"configs"},
    # only what a stage is told: the run, its place, and the error for people
    "store": {"configs", "store"},
    "capture": {"configs", "store", "capture"},
    "train": {"configs", "store", "train"},
}
SECTIONS = {type(getattr(Run(), one.name)).__name__: one.name for one in fields(Run)}
"""Class -> section of the schema."""
HEAVY = {"torch", "transformers", "triton", "safetensors"}


def _modules(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def _imports(path: Path) -> list[str]:
    found: list[str] = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            module = node.module or ""
            found.append(module)
            # `from dflash_pipeline import train` names a folder as well
            found += [f"{module}.{alias.name}" for alias in node.names]
    return found


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_imports_only_what_it_may(folder: str) -> None:
    for path in _modules(folder):
        for name in _imports(path):
            parts = name.split(".")
            if parts[0] == "dflash_pipeline" and len(parts) > 1:
                assert parts[1] in ALLOWED[folder], f"{path.relative_to(ROOT)} imports {name}"


def test_store_knows_neither_torch_nor_transformers() -> None:
    for path in _modules("store"):
        heavy = {name.split(".")[0] for name in _imports(path)} & HEAVY
        assert not heavy, f"{path.relative_to(ROOT)} imports {heavy}"


def test_configs_needs_the_standard_library_and_click_alone() -> None:
    light = {"dflash_pipeline", "click", *sys.stdlib_module_names}
    for path in _modules("configs"):
        for name in _imports(path):
            assert name.split(".")[0] in light, f"{path}: {name}"


def test_root_holds_what_the_layout_names() -> None:
    assert [path.name for path in ROOT.glob("*.py")] == ["cli.py"]


def test_nothing_reads_a_pickle() -> None:
    for folder in FOLDERS:
        for path in _modules(folder):
            assert not {"pickle", "torch.load", "joblib", "dill"} & set(_imports(path)), path
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Attribute) and node.attr == "load":
                    assert ast.unparse(node.value) not in ("torch", "pickle"), path


def test_packages_listed_are_the_folders_on_disk() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    on_disk = {"dflash_pipeline"}
    for path in ROOT.rglob("__init__.py"):
        parts = path.relative_to(ROOT).parts[:-1]
        if parts[0] in FOLDERS:
            on_disk.add(".".join(("dflash_pipeline", *parts)))
    assert set(project["tool"]["setuptools"]["packages"]) == on_disk


def test_what_the_tests_install_holds_every_optional_part_but_the_heavy_one() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    # datasets brings pandas and an HTTP stack; its door is tested with a stand-in
    optional = set(extras) - {"test", "datasets"}
    assert f"dflash-pipeline[{','.join(sorted(optional))}]" in extras["test"]


def test_root_has_no_init_file() -> None:
    # with one, pytest would put the parent folder on the path and mypy would misname the tree
    assert not (ROOT / "__init__.py").exists()


def test_every_field_of_the_schema_is_documented() -> None:
    for key, doc in field_docs().items():
        assert doc.text.endswith("."), f"{key} has no sentence under it"


def _annotated(annotation: ast.expr | None) -> str:
    """The section whose class an annotation names, alone or as `LossConfig | None`."""
    nodes = ast.walk(annotation) if annotation is not None else ()
    found = {SECTIONS.get(node.id, "") for node in nodes if isinstance(node, ast.Name)} - {""}
    return found.pop() if len(found) == 1 else ""


class _Reads(ast.NodeVisitor):
    """The `section.field` that a module reads: off `run.section`, off a parameter that is annotated
    with the section's class, or off a name or an attribute that one of these was assigned to."""

    def __init__(self) -> None:
        self.found: set[str] = set()
        self._names: dict[str, str] = {}

    def _section(self, node: ast.expr) -> str:
        if isinstance(node, ast.Attribute) and node.attr in SECTIONS.values():
            return node.attr
        return self._names.get(ast.unparse(node), "")

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        before = dict(self._names)
        for one in ast.walk(node):
            # what its first method stores others read
            if isinstance(one, ast.FunctionDef) and one.name == "__init__":
                self.visit(one)
            elif isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name):
                self._names[f"self.{one.target.id}"] = _annotated(one.annotation)
        self.generic_visit(node)
        self._names = before

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        before = dict(self._names)
        for one in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs):
            self._names[one.arg] = _annotated(one.annotation)
        self.generic_visit(node)
        kept = {key: value for key, value in self._names.items() if key.startswith("self.")}
        self._names = before | kept

    def visit_Assign(self, node: ast.Assign) -> None:
        self.generic_visit(node)
        for target in node.targets:
            pairs = [(target, node.value)]
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = list(zip(target.elts, node.value.elts, strict=False))
            for name, value in pairs:
                self._names[ast.unparse(name)] = self._section(value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self.generic_visit(node)
        self._names[ast.unparse(node.target)] = _annotated(node.annotation)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if section := self._section(node.value):
            self.found.add(f"{section}.{node.attr}")
        self.generic_visit(node)


def _reads(text: str) -> set[str]:
    reads = _Reads()
    reads.visit(ast.parse(text))
    return reads.found


def test_a_read_is_of_the_section_that_it_is_read_off() -> None:
    text = """
class Clip:
    limits: LossConfig | None
    def __init__(self, config: OptimConfig, run: Run):
        self._config, self.seed = config, run.data.seed
    def __call__(self, model, feed: FeedConfig):
        train = self.run.train
        eval: EvalConfig = self.chosen
        return self._config.clip, model.compile, feed.depth, train.seed, self.limits.ce, eval.top_k
def other(config: dict, feed):
    return config.lr, feed.io, train.compile, run.eval
"""
    expected = {"optim.clip", "data.seed", "feed.depth", "train.seed", "loss.ce", "eval.top_k"}
    assert _reads(text) == expected


def test_every_field_of_the_schema_is_read_somewhere() -> None:
    paths = [path for folder in FOLDERS for path in _modules(folder)]
    # its checks alone change nothing
    paths.remove(ROOT / "configs" / "schema.py")
    read = set[str]()
    for path in [*paths, ROOT / "cli.py"]:
        read |= _reads(path.read_text(encoding="utf-8"))
    unread = [key for key in field_docs() if key not in read]
    assert not unread, f"set by users and read by nobody: {unread}"


def test_a_setting_that_a_text_proposes_can_be_set() -> None:
    texts = [(ROOT / "README.md").read_text(encoding="utf-8")]
    for path in [ROOT / "cli.py", *(one for folder in FOLDERS for one in _modules(folder))]:
        nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        texts += [str(node.value) for node in nodes if isinstance(node, ast.Constant)]
    found = [re.findall(r"\b([a-z]+\.[a-z_0-9]+) ?= ?(\"?[\w.+-]+\"?)", text) for text in texts]
    fields = field_docs()
    together = [
        [f"{key}={value}".rstrip(".") for key, value in one if key in fields] for one in found
    ]
    assert sum(map(len, together)) > 15
    for settings in together:
        load("tiny", settings, {})


@pytest.mark.parametrize("name", preset_names())
def test_a_preset_loads_and_states_its_thinking_mode(name: str) -> None:
    load(name, [], {})
    assert "thinking" in tomllib.loads((ROOT / "configs" / f"{name}.toml").read_text())["target"]


@pytest.mark.parametrize("name", preset_names())
def test_a_preset_repeats_a_default_only_where_it_says_why(name: str) -> None:
    section = ""
    for line in (ROOT / "configs" / f"{name}.toml").read_text().splitlines():
        if line.startswith("["):
            section = line.strip("[]")
        elif "=" in line and "#" not in line and not line.startswith("thinking"):
            ((key, value),) = tomllib.loads(line).items()
            assert value != field_docs()[f"{section}.{key}"].default, f"{section}.{key}"


def test_presets_follow_the_papers_gamma_for_their_block() -> None:
    # arXiv 2602.06036, A.1: 7, 5, 4 for blocks of 16, 10, 8
    expected = {16: 7.0, 10: 5.0, 8: 4.0}
    for name in preset_names():
        run = load(name, [], {})
        block_size = run.drafter.block_size
        if block_size in expected:
            assert run.loss.gamma == expected[block_size], name


def _writes_namelessly(tree: ast.Module) -> list[int]:
    """Lines of writes of Python's own whose error would not name the file (`configs/disk.py`)."""
    named: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.With) and any(
            isinstance(item.context_expr, ast.Call)
            and getattr(item.context_expr.func, "id", "") == "writing"
            for item in node.items
        ):
            named |= set(ast.walk(node))
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or node in named:
            continue
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        modes = [one.value for one in node.args if isinstance(one, ast.Constant)]
        opens = name == "open" and any(
            isinstance(mode, str) and re.fullmatch("[wa]b?", mode) for mode in modes
        )
        if opens or name in {"write_text", "write_bytes", "savefig", "savez", "write_all"}:
            found.append(node.lineno)
    return found


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_write_that_fails_names_its_file(folder: str) -> None:
    """The system does not: on a full disk nobody would know which."""
    planted = "with writing(path):\n    path.write_text('')\npath.write_text('')\nopen(path, 'w')"
    assert _writes_namelessly(ast.parse(planted)) == [3, 4]
    # a log that is handed to a process, a lock, and where nothing is kept: none of them is written;
    # `durable.py` tries a file system, and what `shard.py` writes is named by `writer.py`
    spared = {"numbers.py", "torchrun.py", "gpus.py", "child.py", "durable.py", "shard.py"}
    for path in _modules(folder):
        lines = _writes_namelessly(ast.parse(path.read_text(encoding="utf-8")))
        assert not lines or path.name in spared, f"{path.relative_to(ROOT)}: lines {lines}"


@pytest.mark.parametrize("folder", [*FOLDERS, "tests"])
def test_nothing_silences_the_type_checker(folder: str) -> None:
    silence = re.compile("#.*type: *ignore")
    assert silence.search(f"x = 1  # type{':'} ignore[assignment]")
    for path in _modules(folder):
        lines = path.read_text(encoding="utf-8").splitlines()
        found = [number for number, line in enumerate(lines, start=1) if silence.search(line)]
        assert not found, f"{path.relative_to(ROOT)}: lines {found}"


def test_a_slot_is_a_place_in_a_block_and_memory_that_is_lent_is_a_buffer() -> None:
    """By what the shape suffixes of the modules that lend memory leave: `slot_R` is a place."""
    planted = ast.parse("def free_slot(self) -> Slot: ...\nslot = self.free_slot()\nslot_R = 1")
    assert _slots(planted) == ["Slot", "free_slot", "slot"]
    for name in ("train/ring.py", "train/feed.py", "capture/offload.py", "store/writer.py"):
        assert _slots(ast.parse((ROOT / name).read_text(encoding="utf-8"))) == [], name


def _slots(tree: ast.Module) -> list[str]:
    """Names that call something itself a slot."""
    found = set()
    for node in ast.walk(tree):
        for field in ("id", "attr", "arg", "name"):
            name = getattr(node, field, None)
            if isinstance(name, str) and re.fullmatch(r"(.*_)?slot", name, re.IGNORECASE):
                found.add(name)
    return sorted(found)
