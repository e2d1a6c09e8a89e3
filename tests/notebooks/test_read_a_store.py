"""The notebook runs from top to bottom on a store of each mode, and reads the true values."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from dflash_pipeline.store.reader import open_store

NOTEBOOK = Path(__file__).with_name("read_a_store.ipynb")
GOLDEN = Path(__file__).parents[1] / "golden"
# what the cells left is compared with what the package reads; only the cells run before it
ENDING = """
import sys
assert not {"torch", "transformers"} & set(sys.modules)
np.savez(sys.argv[1], ids=ids, mask=mask, hidden=hidden, last=last, lengths=lengths)
"""


def _cells(kind: str) -> list[str]:
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["metadata"]["kernelspec"]["name"]) == (4, "python3")
    return ["".join(one["source"]) for one in notebook["cells"] if one["cell_type"] == kind]


@pytest.mark.parametrize("mode", ["bf16", "int8", "int4"])
def test_every_cell_runs_and_gives_what_the_package_gives(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = GOLDEN / f"store-v1-{mode}"
    monkeypatch.setenv("STORE", str(path))
    script = "\n".join([*_cells("code"), ENDING])
    command = [sys.executable, "-W", "error", "-c", script, str(tmp_path / "found.npz")]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    store = open_store(path)
    sample = store.sample(0)
    with np.load(tmp_path / "found.npz") as found:
        assert np.array_equal(found["lengths"], store.table.num_tokens)
        assert np.array_equal(found["ids"], sample.ids_T)
        assert np.array_equal(found["mask"], sample.mask_T)
        assert np.array_equal(found["hidden"], sample.hidden_TKH)
        assert np.array_equal(found["last"], sample.last_MH)
    assert f"{len(store.table)} samples, {int(store.table.num_tokens.sum())} tokens" in ended.stdout


def test_it_carries_no_output_and_explains_itself() -> None:
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    code = [one for one in notebook["cells"] if one["cell_type"] == "code"]
    assert all(not one["outputs"] and one["execution_count"] is None for one in code)
    assert len(_cells("markdown")) >= len(code) - 1
