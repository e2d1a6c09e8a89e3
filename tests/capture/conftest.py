"""Fixtures over `tiny_targets.py`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from tiny_targets import save_target, tiny_model, tiny_tokenizer


@pytest.fixture(scope="session")
def make_model() -> Callable[..., PreTrainedModel]:
    """`make_model(family, **configuration)` -> a tiny random model."""
    return tiny_model


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer of every tiny target."""
    return tiny_tokenizer()


@pytest.fixture(scope="session")
def make_target_dir(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[..., Path]:
    """`make_target_dir(family, **configuration)` -> a Hugging Face directory, made once each."""
    made: dict[str, Path] = {}

    def make(family: str, **changes: Any) -> Path:
        key = repr((family, sorted(changes.items())))
        if key not in made:
            directory = tmp_path_factory.mktemp(f"target-{family}")
            save_target(directory, family, **changes)
            made[key] = directory
        return made[key]

    return make


@pytest.fixture(scope="session")
def target_dir(make_target_dir: Callable[..., Path]) -> Path:
    """A tiny Qwen3."""
    return make_target_dir("qwen3")
