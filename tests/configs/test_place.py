"""What follows from a process's place."""

from __future__ import annotations

import os

import pytest

from dflash_pipeline.configs.place import POISON_VARIABLE, dtype_name, is_poisoned, let_memory_grow


def test_a_type_left_to_the_device_is_bf16_on_cuda_alone() -> None:
    assert (dtype_name("auto", "cuda"), dtype_name("auto", "cpu")) == ("bf16", "fp32")
    assert (dtype_name("fp32", "cuda"), dtype_name("bf16", "cpu")) == ("fp32", "bf16")


def test_buffers_are_poisoned_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(POISON_VARIABLE, raising=False)
    assert not is_poisoned()
    monkeypatch.setenv(POISON_VARIABLE, "1")
    assert is_poisoned()


@pytest.mark.parametrize(
    ("version", "name"),
    [("2.9.1", "PYTORCH_CUDA_ALLOC_CONF"), ("2.13.0+cu130", "PYTORCH_ALLOC_CONF")],
)
def test_the_allocator_is_told_in_the_words_of_its_version(
    version: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", {})
    let_memory_grow(version)
    assert os.environ == {name: "expandable_segments:True"}
    os.environ[name] = "mine"
    let_memory_grow(version)
    assert os.environ == {name: "mine"}
