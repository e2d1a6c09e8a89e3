"""Fixtures over `tiny_targets.py`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
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


@pytest.fixture(scope="session")
def greedy_tokens() -> Callable[[PreTrainedModel], list[list[int]]]:
    """`greedy_tokens(model)` -> what it answers to a batch of prompts padded on the left."""

    def answered(model: PreTrainedModel) -> list[list[int]]:
        ids_BT = torch.randint(3, 250, (4, 12), generator=torch.Generator().manual_seed(0))
        mask_BT = (torch.arange(12) >= torch.tensor([[0], [9], [4], [11]])).long()
        with torch.inference_mode():
            found_BT = model.generate(
                ids_BT,
                attention_mask=mask_BT,
                max_new_tokens=40,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
        return found_BT[:, 12:].tolist()

    return answered
