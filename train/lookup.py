"""Prompt lookup: the free baseline. What followed the same tokens before is proposed again."""

from __future__ import annotations

from collections.abc import Sequence


class PromptLookup:
    """Proposes the continuation of the longest suffix, up to `ngram` tokens, that was seen before.

    Of several places the latest wins; a copy that reaches the end of the text goes on over itself,
    so a loop of any length is followed for a whole block: the strongest form of the baseline.
    """

    def __init__(self, num_drafts: int, ngram: int) -> None:
        """`num_drafts`: tokens proposed at a time, as many as the drafter beside it proposes."""
        self._num_drafts = num_drafts
        self._ngram = ngram
        self._ids: list[int] = []
        # tokens -> the place after their latest occurrence that is followed by a token
        self._after: dict[tuple[int, ...], int] = {}

    def add(self, ids: Sequence[int]) -> None:
        """Append tokens of the text."""
        for token in ids:
            end = len(self._ids)
            for size in range(1, min(self._ngram, end) + 1):
                self._after[tuple(self._ids[end - size :])] = end
            self._ids.append(token)

    def drafts(self, anchor_id: int) -> list[int]:
        """Tokens to follow the text and `anchor_id`, which is not added; empty: nothing matched."""
        text = [*self._ids, anchor_id]
        # the text's own suffix without its last token is indexed only now that a token follows it
        after = dict[tuple[int, ...], int]()
        end = len(self._ids)
        for size in range(1, min(self._ngram, end) + 1):
            after[tuple(text[end - size : end])] = end
        for size in range(min(self._ngram, len(text)), 0, -1):
            suffix = tuple(text[-size:])
            place = after.get(suffix, self._after.get(suffix))
            if place is not None:
                for offset in range(self._num_drafts):
                    text.append(text[place + offset])
                return text[-self._num_drafts :]
        return []
