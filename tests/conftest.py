"""What every test shares; the environment is set before anything heavy is imported."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

# one thread a process: the tests run several processes at once, and sums must not vary
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["TQDM_DISABLE"] = "1"
# configuration of whoever runs the tests is not ours
os.environ.pop("DFLASH_CONFIG", None)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test of a GPU heeds no warning: there torch, by release and card, warns of itself."""
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.filterwarnings("default"))


@pytest.fixture(autouse=True, scope="session")
def _own_temporary_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Commands started by the tests reserve devices here, apart from other runs on the machine."""
    folder: Path = tmp_path_factory.mktemp("tmp")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(folder))
        yield


@pytest.fixture(autouse=True)
def _own_torch_threads() -> None:
    """A test that has torch computes on one thread; one without does not load it for this."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.get_num_threads() != 1:
        torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny() -> ModuleType:
    """The functions of `tiny_store.py`; what needs no store does not load zarr for this."""
    import tiny_store

    return tiny_store


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Matplotlib's figures as they were written, in turn."""
    from matplotlib.figure import Figure

    found, save = list[Any](), Figure.savefig

    def saved(figure: Any, *arguments: Any, **keywords: Any) -> None:
        save(figure, *arguments, **keywords)
        found.append(figure)

    monkeypatch.setattr(Figure, "savefig", saved)
    return found


@pytest.fixture
def ptx_for_hopper(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., str]:
    """`ptx_for_hopper(kernel, kinds, constants, num_warps, fused, aligned)`: a kernel's PTX.

    kinds: Triton's type of each argument that is no constant. fused: may a product and a sum become
    one instruction? aligned: the places of arguments that are multiples of 16. No GPU is needed;
    the test is skipped where Triton has no build.
    """
    triton: Any = pytest.importorskip("triton", reason="triton has no build for this platform")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))

    def compiled(
        kernel: Any,
        kinds: dict[str, str],
        constants: dict[str, Any],
        *,
        num_warps: int,
        fused: bool,
        aligned: Sequence[int] = (),
    ) -> str:
        signature = kinds | dict.fromkeys(constants, "constexpr")
        source = ASTSource(
            kernel,
            {name: signature[name] for name in kernel.arg_names},
            constexprs=constants,
            attrs={(place,): [["tt.divisibility", 16]] for place in aligned},
        )
        options = {"num_warps": num_warps, "enable_fp_fusion": fused}
        hopper = GPUTarget("cuda", 90, 32)
        return str(triton.compile(source, target=hopper, options=options).asm["ptx"])

    return compiled


def _first_changed(**changes: object) -> Callable[[dict[str, Any]], object]:
    """The header with other values for the first tensor."""

    def change(header: dict[str, Any]) -> object:
        name = next(name for name in header if name != "__metadata__")
        return header | {name: header[name] | changes}

    return change


def _second_on_first(header: dict[str, Any]) -> object:
    """Two tensors over the same bytes."""
    one, two = [name for name in header if name != "__metadata__"][:2]
    return header | {two: header[one]}


HOSTILE: dict[str, Callable[[dict[str, Any]], object]] = {
    "ends beyond the file": _first_changed(data_offsets=[0, 1 << 60]),
    "begins before it": _first_changed(data_offsets=[-8, 8]),
    "ends before it begins": _first_changed(data_offsets=[64, 0]),
    "a shape of any size": _first_changed(shape=[1 << 40, 1 << 40]),
    "a negative shape": _first_changed(shape=[-1, 4]),
    "a shape of text": _first_changed(shape="16"),
    "an unknown type": _first_changed(dtype="F4096"),
    "offsets of text": _first_changed(data_offsets=["a", "b"]),
    "no offsets": _first_changed(data_offsets=None),
    "the same bytes twice": _second_on_first,
    "a list": lambda header: list(header),
    "an entry that is none": lambda header: header | {"x": 7},
}


@pytest.fixture
def hostile_files(tmp_path: Path) -> Callable[[Path], dict[str, Path]]:
    """Of a sound safetensors file, copies that claim what is not so, by what they claim."""

    def craft(sound: Path) -> dict[str, Path]:
        content = sound.read_bytes()
        end = 8 + int.from_bytes(content[:8], "little")
        header, body = json.loads(content[8:end]), content[end:]
        headers = {name: json.dumps(change(header)).encode() for name, change in HOSTILE.items()}
        headers["nested without end"] = b"[" * 200_000
        made = {
            name: len(text).to_bytes(8, "little") + text + body for name, text in headers.items()
        }
        made["a header longer than the file"] = (1 << 62).to_bytes(8, "little") + content[8:]
        files = {}
        for number, (name, crafted) in enumerate(made.items()):
            files[name] = tmp_path / f"hostile-{number}.safetensors"
            files[name].write_bytes(crafted)
        return files

    return craft
