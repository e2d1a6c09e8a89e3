"""What training keeps of the target: its frozen embedding and head, out of the store.

Shape letters: V vocabulary, H hidden, N rows.
"""

from __future__ import annotations

from typing import Self

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from dflash_pipeline.store.reader import Store
from dflash_pipeline.train.shape import DrafterShape


class TargetHead:
    """Embeds drafted blocks and turns hidden states into logits, as the target itself would.

    The embedding is looked up raw and scaled; logits are scaled, then soft-capped (Gemma).
    """

    def __init__(self, embed_VH: Tensor, head_VH: Tensor | None, shape: DrafterShape) -> None:
        """`head_VH` None: tied, the embedding is the head."""
        expected = (shape.vocab_size, shape.hidden_size)
        for name, matrix in (("embedding", embed_VH), ("head", head_VH)):
            if matrix is not None and tuple(matrix.shape) != expected:
                raise ValueError(
                    f"the target's {name} is {tuple(matrix.shape)}, the drafter expects {expected}"
                )
        self._embed_VH = embed_VH
        self.weight_VH = embed_VH if head_VH is None else head_VH
        self._shape = shape

    @classmethod
    def from_store(
        cls, store: Store, shape: DrafterShape, device: torch.device | str, dtype: torch.dtype
    ) -> Self:
        """What the store keeps of its target, rounded to `dtype`; a tied head is the embedding."""
        embed_VH = _tensor(store.embed(), device, dtype)
        head_VH = None if store.is_tied else _tensor(store.head(), device, dtype)
        return cls(embed_VH, head_VH, shape)

    def embed(self, ids: Tensor) -> Tensor:
        """[..] token ids -> [.., H]."""
        embedded = F.embedding(ids, self._embed_VH)
        scale = self._shape.input_embedding_scale
        return embedded if scale == 1.0 else embedded * scale

    def logits(self, hidden_NH: Tensor) -> Tensor:
        """fp32 logits [N, V] of post-norm hidden states."""
        return finish_logits(raw_logits(hidden_NH, self.weight_VH), self.multiplier, self.soft_cap)

    @property
    def num_bytes(self) -> int:
        """Of the embedding, and of the head where it is another matrix."""
        is_tied = self.weight_VH is self._embed_VH
        return self._embed_VH.nbytes + (0 if is_tied else self.weight_VH.nbytes)

    @property
    def multiplier(self) -> float:
        """What raw logits are multiplied by."""
        return self._shape.output_multiplier

    @property
    def soft_cap(self) -> float:
        """Logits stay within plus and minus this, by tanh; 0: no bound."""
        return self._shape.final_logit_softcapping


def raw_logits(hidden_NH: Tensor, weight_VH: Tensor, out_NV: Tensor | None = None) -> Tensor:
    """hidden W^T with an fp32 result whatever the operands, in `out_NV` where that is given.

    bf16 *logits* cost 14 % of the loss gradient at a vocabulary of 151,936; the same bf16 product
    with an fp32 result costs nothing.
    """
    if hidden_NH.is_cuda and hidden_NH.dtype != torch.float32:
        return torch.mm(hidden_NH, weight_VH.t(), out_dtype=torch.float32, out=out_NV)
    return torch.mm(hidden_NH.float(), weight_VH.float().t(), out=out_NV)


def finish_logits(raw_NV: Tensor, multiplier: float, soft_cap: float) -> Tensor:
    """Output scale, then c tanh(z / c); may write into `raw_NV`."""
    if multiplier != 1.0:
        raw_NV.mul_(multiplier)
    if soft_cap:
        raw_NV.div_(soft_cap).tanh_().mul_(soft_cap)
    return raw_NV


def _tensor(
    bits_VH: npt.NDArray[np.uint16], device: torch.device | str, dtype: torch.dtype
) -> Tensor:
    """bf16 bits -> tensor; copied, since a memory map is read-only."""
    tensor = torch.from_numpy(np.array(bits_VH)).view(torch.bfloat16)
    return tensor.to(device=device, dtype=dtype)
