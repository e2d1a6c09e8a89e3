"""The group `target/` of a store: all that training needs of the target.

Letters: V vocabulary, H hidden size.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from dflash_pipeline.store import flatfiles, paths
from dflash_pipeline.store.metadata import Root
from dflash_pipeline.store.spec import StoreSpec


class TargetGroup:
    """Embedding, head and files; each method raises ValueError for what is damaged."""

    def __init__(self, path: Path, root: Root, spec: StoreSpec) -> None:
        self._path, self._root, self._spec = path, root, spec

    def embed(self) -> NDArray[np.uint16]:
        """The target's embedding as raw bf16 bits, a read-only view uint16 [V, H]."""
        return self._matrix(paths.EMBED_FILE)

    @property
    def is_tied(self) -> bool:
        """Whether the target's head is its embedding."""
        return self._root.num_head_rows == 0

    def head(self) -> NDArray[np.uint16]:
        """The target's head as raw bf16 bits, a read-only view uint16 [V, H]."""
        return self.embed() if self.is_tied else self._matrix(paths.HEAD_FILE)

    def _matrix(self, name: str) -> NDArray[np.uint16]:
        shape = (self._spec.vocab_size, self._spec.hidden_size)
        return flatfiles.map_flat(self._path, name, "<u2", shape)

    def files(self) -> dict[str, bytes]:
        """The target's configuration, tokenizer and template files, by name."""
        return {name: self._file(name) for name in self._root.file_bytes}

    def _file(self, name: str) -> bytes:
        size = cast("int", self._root.file_bytes[name])
        if size == 0:
            return b""
        return flatfiles.read_flat(self._path, paths.target_file(name), "|u1", (size,)).tobytes()

    def config(self) -> dict[str, Any]:
        """The target's config.json."""
        try:
            found = json.loads(self._file("config.json"))
        except (KeyError, ValueError):
            raise ValueError(f"{self._path} holds no readable config.json of its target") from None
        return cast("dict[str, Any]", found)
