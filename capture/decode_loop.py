"""Answers token by token: the target's forward over a growing cache, for a batch of prompts.

transformers' `generate` decodes a row on until the last of its batch has ended, and asks the device
at each step whether it has. Here the host looks at what was chosen only every few steps, and rows
that have ended then leave the batch, once they are a good part of it.
Letters: B sequences, T positions, K steps since the last look, V vocabulary.
Trap: between two looks the host runs ahead of the device; nothing in a step may wait for a value.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

import torch
from transformers import DynamicCache

# steps between two looks on a device that computes beside the host; each costs a wait, and what is
# decoded behind an end until the next one is thrown away
LOOK_EVERY = 16
NO_NUMBER = -1
"""In place of a token that was chosen from NaN or Inf; nothing follows it."""
# the rows that are left, of those in the batch, at which the ended ones leave it: to copy the cache
# of the others costs less than a step. Of the rows decoded for the README's study 93 % were
# unfinished ones with it, 88 % with 3 / 4, and 69 % where none left
_KEPT_SHARE = 7 / 8
# transformers renamed the argument on the way
_CACHES = ("cache", "past_key_values")


class Choice(Protocol):
    """What makes tokens of logits, with a state for each row of the batch."""

    def choose(self, logits_BV: torch.Tensor, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Each row's token, int64 [B], and whether it was chosen among numbers, bool [B]."""

    def keep(self, index_B: torch.Tensor) -> None:
        """Only these rows are left."""


def decode(
    model: Any,
    prompts: Sequence[Sequence[int]],
    rooms: Sequence[int],
    ends: Collection[int],
    choice: Choice,
    device: torch.device | str,
    look_every: int,
    tell: Callable[[int], None],
) -> list[list[int]]:
    """The answer to each prompt, with its end token if it has one.

    rooms: tokens that each may have; device: where the model takes ids; tell: called at each look
    with the number of tokens so far. All end with the first that has NO_NUMBER in it.
    """
    answers: list[list[int]] = [[] for _ in prompts]
    batch = _Batch(model, prompts, rooms, min(ends, default=0), device)
    rows = list(range(len(prompts)))
    logits_BV = batch.begin()
    chosen: list[torch.Tensor] = []
    for step in range(max(rooms)):
        token_B, is_number_B = choice.choose(logits_BV, step)
        chosen.append(torch.where(is_number_B, token_B, NO_NUMBER))
        if (step + 1) % look_every == 0 or step + 1 == max(rooms):
            # the only place where the host waits
            found_BK = torch.stack(chosen, 1).tolist()
            chosen.clear()
            live = [
                place
                for place, (row, tokens) in enumerate(zip(rows, found_BK, strict=True))
                if _goes_on(answers[row], tokens, rooms[row], ends)
            ]
            tell(sum(map(len, answers)))
            if not live or any(NO_NUMBER in answers[row][-1:] for row in rows):
                break
            if batch.can_keep and len(live) <= _KEPT_SHARE * len(rows):
                rows = [rows[place] for place in live]
                index_B = torch.tensor(live)
                batch.keep(index_B)
                choice.keep(index_B)
                token_B = token_B[index_B.to(token_B.device)]
        # not after the last: there is nothing to choose any more
        if step + 1 < max(rooms):
            logits_BV = batch.go_on(token_B)
    return answers


def _goes_on(answer: list[int], tokens: Sequence[int], room: int, ends: Collection[int]) -> bool:
    """Add to an answer what belongs to it; whether it goes on after all of `tokens`.

    What a row chose behind its end, or beyond its room, is nobody's.
    """
    is_over = bool(answer) and (len(answer) >= room or answer[-1] in ends)
    for token in tokens:
        if is_over:
            return False
        answer.append(token)
        is_over = token in ends or token == NO_NUMBER or len(answer) >= room
    return not is_over


class _Batch:
    """Rows under way: their cache, which positions are no padding, and where each of them is."""

    def __init__(
        self,
        model: Any,
        prompts: Sequence[Sequence[int]],
        rooms: Sequence[int],
        pad_id: int,
        device: torch.device | str,
    ) -> None:
        self._model, self._device = model, device
        parameters = inspect.signature(model.forward).parameters
        # the logits of all positions of all prompts would be the largest tensor of all
        self._last_only = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}
        self._has_positions = "position_ids" in parameters
        length = max(map(len, prompts))
        # on the left: all answers begin at the same position of the batch
        ids_BT = torch.full((len(prompts), length), pad_id)
        is_text_BT = torch.zeros((len(prompts), length + max(rooms)), dtype=torch.bool)
        for row, prompt in enumerate(prompts):
            ids_BT[row, length - len(prompt) :] = torch.tensor(prompt)
            is_text_BT[row, length - len(prompt) :] = True
        self._has_padding = min(map(len, prompts)) < length
        self._length = length
        self._ids_BT = ids_BT.to(device)
        # of the tokens to come too: none of them is padding
        self._is_text_BT = is_text_BT.to(device)
        self._position_B = torch.tensor([len(prompt) for prompt in prompts]).to(device)
        # a row that has ended stays there: the target may know no position behind its room
        self._last_B = self._position_B + torch.tensor(rooms).to(device) - 1
        self._cache: dict[str, Any] = {}

    def begin(self) -> torch.Tensor:
        """All prompts at once; the logits of their next tokens."""
        mask_BT = self._is_text_BT[:, : self._length]
        position_BT = (mask_BT.long().cumsum(1) - 1).clamp(min=0)
        # of what is generated only the last token goes through the model
        ids_BT, self._ids_BT = self._ids_BT, self._ids_BT[:, :0]
        found = self._forward(ids_BT, mask_BT.long(), position_BT, **self._last_only)
        name = next((name for name in _CACHES if found.get(name) is not None), None)
        if name is None:
            raise ValueError(f"{type(self._model).__name__} gives no cache that goes on")
        self._cache = {name: found[name]}
        layers = getattr(found[name], "layers", ())
        if layers and not any(hasattr(layer, "keys") for layer in layers):
            # states alone have the padding behind them: a mask of all positions is none of one
            self._has_padding = False
        logits_BTV: torch.Tensor = found.logits
        return logits_BTV[:, -1]

    def go_on(self, token_B: torch.Tensor) -> torch.Tensor:
        """One more token of each row; the logits of the next."""
        self._length += 1
        mask_BT = self._is_text_BT[:, : self._length] if self._has_padding else None
        found = self._forward(
            token_B.to(self._device)[:, None], mask_BT, self._position_B[:, None], **self._cache
        )
        self._position_B = torch.minimum(self._position_B + 1, self._last_B)
        logits_BTV: torch.Tensor = found.logits
        return logits_BTV[:, -1]

    @property
    def can_keep(self) -> bool:
        """Whether rows can leave. What a family's own cache holds beside its layers (MiniMax's
        states of linear attention) stays as it is unless that class says otherwise."""
        kinds = [type(cache) for cache in self._cache.values()]
        return all(kind is DynamicCache or "reorder_cache" in vars(kind) for kind in kinds)

    def keep(self, index_B: torch.Tensor) -> None:
        """Only these rows are left."""
        # for a search of several beams every layer can do this, states without positions (of
        # linear attention) among them; nothing asks for as many rows as there were
        index_B = index_B.to(self._device)
        for cache in self._cache.values():
            cache.reorder_cache(index_B)
        self._is_text_BT = self._is_text_BT[index_B]
        self._position_B, self._last_B = self._position_B[index_B], self._last_B[index_B]

    def _forward(
        self,
        ids_BT: torch.Tensor,
        mask_BT: torch.Tensor | None,
        position_BT: torch.Tensor,
        **others: Any,
    ) -> Any:
        if self._has_positions:
            others["position_ids"] = position_BT
        return self._model(
            input_ids=ids_BT, attention_mask=mask_BT, use_cache=True, return_dict=True, **others
        )
