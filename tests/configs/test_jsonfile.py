"""Whatever a file holds instead of a JSON object is one kind of error."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash_pipeline.configs.jsonfile import read_object


def test_an_object_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('{"name": "übung", "n": [1]}', encoding="utf-8")
    assert read_object(path) == {"name": "übung", "n": [1]}


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe\x00", b"[" * 100_000, b"[]", b"null"])
def test_anything_else_is_a_value_error_that_names_the_file(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"^a\.json (is not JSON: |holds no JSON object$)"):
        read_object(path)


def test_a_file_that_is_not_there_stays_an_error_of_the_system(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_object(tmp_path / "a.json")
