"""What `dflash eval` asks of a target: prompts, and what decodes them (`capture/decoder.py`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from typing import Protocol

import torch
from torch import Tensor

from dflash_pipeline.configs.place import Place
from dflash_pipeline.configs.schema import Run
from dflash_pipeline.train.decode import DecodeTarget


class Prompt(Protocol):
    """What the target is given to answer."""

    @property
    def key(self) -> str: ...
    @property
    def domain(self) -> str: ...
    @property
    def ids(self) -> Sequence[int]: ...
    @property
    def max_new_tokens(self) -> int: ...


class LoadedTarget(Protocol):
    """A target that decodes."""

    @property
    def target(self) -> DecodeTarget: ...
    @property
    def layer_ids(self) -> Sequence[int]: ...
    @property
    def embed_VH(self) -> Tensor: ...
    @property
    def head_VH(self) -> Tensor: ...


class EvalTarget(Protocol):
    """What is known of a target before it is loaded; `capture/decoder.py` has one."""

    @property
    def prompts(self) -> Sequence[Prompt]: ...
    @property
    def dropped(self) -> Sequence[str]: ...
    @property
    def eos_ids(self) -> Set[int]: ...
    @property
    def reserved_ids(self) -> Set[int]: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def rendering(self) -> Mapping[str, str]: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def device(self) -> torch.device: ...
    def load(self) -> LoadedTarget: ...
    def load_twin(self, say: Callable[[str], None]) -> LoadedTarget | None: ...


OpenTarget = Callable[[Run, Place, Sequence[int]], EvalTarget]
"""The target of a run on a device, for a drafter that reads these layers."""
