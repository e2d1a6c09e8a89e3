"""What proposes: a drafter with keys and values of its own, or prompt lookup; a batch at a time.

Shape letters: B prompts, X keys that a cache has room for, N tokens, S slots of a block,
K captured layers, H hidden, G key/value heads, D width of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from dflash_pipeline.store import rows
from dflash_pipeline.store.quantise import Calibration
from dflash_pipeline.train.drafter import Drafter, KeyValue
from dflash_pipeline.train.head import TargetHead
from dflash_pipeline.train.lookup import PromptLookup
from dflash_pipeline.train.sampling import Draws, Proposal, Sampling

# positions by which the room for keys and values grows at least
_ROOM = 256


class Drafting(Protocol):
    """Something that proposes what follows; it is told each token that was settled."""

    def begin(self, num_prompts: int) -> None:
        """New texts."""
        ...

    def extend(self, ids: Sequence[Sequence[int]], features: Sequence[Tensor]) -> None:
        """Of each prompt, tokens that the target has read for good and their feature_NKH."""
        ...

    def propose(
        self, anchors: Sequence[int], sampling: Sampling, draws: Sequence[Draws]
    ) -> list[Proposal]:
        """Of each prompt, tokens that may follow its text and anchor; fewer or none are allowed."""
        ...

    def keep(self, prompts: Sequence[int]) -> None:
        """Go on with these of the prompts, in this order."""
        ...


class ModelDrafting:
    """A drafter that keeps its context's keys and values from one block to the next."""

    def __init__(
        self,
        drafter: Drafter,
        head: TargetHead,
        rounding: Callable[[Tensor], Tensor] | None,
    ) -> None:
        """`rounding`: what the store would do to a feature; None: features stay as they are."""
        self._drafter = drafter
        self._head = head
        self._rounding = rounding
        # of each layer [B, X, G, D]; prompt b fills the first _num_context[b] positions
        self._keys_values: list[KeyValue] = []
        self._num_context: list[int] = []

    def begin(self, num_prompts: int) -> None:
        self._keys_values, self._num_context = [], [0] * num_prompts

    @torch.no_grad()
    def extend(self, ids: Sequence[Sequence[int]], features: Sequence[Tensor]) -> None:
        feature_NKH = torch.cat(list(features))
        if self._rounding is not None:
            feature_NKH = self._rounding(feature_NKH)
        weight = self._drafter.norm.weight
        feature_NKH = feature_NKH.to(weight.device, weight.dtype)
        begins, counts = self._num_context, list(map(len, ids))
        spans = [range(begin, begin + count) for begin, count in zip(begins, counts, strict=True)]
        position_N = torch.tensor([place for span in spans for place in span], device=weight.device)
        prompt_N = torch.tensor(
            [prompt for prompt, span in enumerate(spans) for _ in span], device=weight.device
        )
        new = self._drafter.context_keys_values(self._drafter.context(feature_NKH), position_N)
        self._num_context = [span.stop for span in spans]
        self._make_room(new)
        for kept, fresh in zip(self._keys_values, new, strict=True):
            for cache_BXGD, state_NGD in zip(kept, fresh, strict=True):
                cache_BXGD[prompt_N, position_N] = state_NGD

    @torch.no_grad()
    def propose(
        self, anchors: Sequence[int], sampling: Sampling, draws: Sequence[Draws]
    ) -> list[Proposal]:
        shape, weight = self._drafter.shape, self._drafter.norm.weight
        ids_BS = torch.full(
            (len(anchors), shape.block_size), shape.mask_token_id, device=weight.device
        )
        ids_BS[:, 0] = torch.tensor(anchors, device=weight.device)
        longest = max(self._num_context)
        hidden_BSH = self._drafter.draft(
            [(key[:, :longest], value[:, :longest]) for key, value in self._keys_values],
            self._num_context,
            self._head.embed(ids_BS).to(weight.dtype),
        )
        num_prompts, num_drafts = len(anchors), shape.block_size - 1
        logits_NV = self._head.logits(hidden_BSH[:, 1:].flatten(0, 1))
        return sampling.propose(logits_NV.unflatten(0, (num_prompts, num_drafts)), draws)

    def keep(self, prompts: Sequence[int]) -> None:
        if list(prompts) == list(range(len(self._num_context))):
            return
        self._num_context = [self._num_context[prompt] for prompt in prompts]
        chosen = torch.tensor(prompts, device=self._drafter.norm.weight.device)
        self._keys_values = [(key[chosen], value[chosen]) for key, value in self._keys_values]

    def _make_room(self, like: Sequence[KeyValue]) -> None:
        """Caches as long as the longest context, grown rarely; `like` has one state a token."""
        needed = max(self._num_context)
        room = self._keys_values[0][0].shape[1] if self._keys_values else 0
        if needed <= room:
            return
        size = (len(self._num_context), max(needed + _ROOM, 2 * room))
        grown = []
        for layer, states in enumerate(like):
            key_value = [state.new_zeros(*size, *state.shape[1:]) for state in states]
            if room:
                for new, old in zip(key_value, self._keys_values[layer], strict=True):
                    new[:, :room] = old
            grown.append((key_value[0], key_value[1]))
        self._keys_values = grown


class LookupDrafting:
    """Prompt lookup in the same loop; it needs no features."""

    def __init__(self, num_drafts: int, ngram: int) -> None:
        """As `PromptLookup`'s."""
        self._num_drafts, self._ngram = num_drafts, ngram
        self._lookups: list[PromptLookup] = []

    def begin(self, num_prompts: int) -> None:
        self._lookups = [PromptLookup(self._num_drafts, self._ngram) for _ in range(num_prompts)]

    def extend(self, ids: Sequence[Sequence[int]], features: Sequence[Tensor]) -> None:
        for lookup, own in zip(self._lookups, ids, strict=True):
            lookup.add(own)

    def propose(
        self, anchors: Sequence[int], sampling: Sampling, draws: Sequence[Draws]
    ) -> list[Proposal]:
        pairs = zip(self._lookups, anchors, strict=True)
        return [Proposal(lookup.drafts(anchor), None) for lookup, anchor in pairs]

    def keep(self, prompts: Sequence[int]) -> None:
        self._lookups = [self._lookups[prompt] for prompt in prompts]


def as_stored(feature_NKH: Tensor, mode: str, calibrations: Sequence[Calibration]) -> Tensor:
    """Live features after a trip through the store's rows: what the drafter was trained on.

    `calibrations`: one for each of the K layers; none for bf16.
    """
    plain = np.ascontiguousarray(feature_NKH.to("cpu", torch.float32).numpy())
    stored = rows.decode(rows.encode(plain, mode, calibrations), mode, calibrations)
    return torch.from_numpy(np.array(stored).reshape(plain.shape)).to(feature_NKH.device)
