"""What every test shares; the environment is set before anything heavy is imported."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# one thread a process: the tests run several processes at once, and sums must not vary
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["TQDM_DISABLE"] = "1"
# configuration of whoever runs the tests is not ours
os.environ.pop("DFLASH_CONFIG", None)


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
