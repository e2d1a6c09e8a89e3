"""Dialogues to be answered turn by turn, and the line each becomes in the file of answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from dflash_pipeline.capture.samples import Conversation, Dropped, Message, hash64, place, read
from dflash_pipeline.capture.settings import sampling
from dflash_pipeline.capture.template import RenderError, render, spans_of
from dflash_pipeline.configs.schema import DataConfig, GenerateConfig, TargetConfig


@dataclass(slots=True)
class Dialogue:
    """One answer file's line in the making: the user's turns, answered in order."""

    key: str
    domain: str
    messages: list[Message]
    """System turn if any, then the turns so far."""
    questions: list[str]
    """User turns still to come."""
    token_ids: list[int] = field(default_factory=list)
    loss_spans: list[tuple[int, int]] = field(default_factory=list)
    finishes: list[str] = field(default_factory=list)
    """For each answer: `stop` (the target ended it) or `length`."""

    def ask(self) -> list[Message]:
        """Put the next user turn; the conversation that is to be answered."""
        self.messages.append({"role": "user", "content": self.questions.pop(0)})
        return self.messages

    def withdraw(self) -> None:
        """Take back the turn just put, and those after it: it cannot be answered."""
        self.messages.pop()
        self.questions.clear()

    def answer(self, message: Message, finish: str) -> None:
        """Put the target's answer. One cut by the length limit ends the dialogue: what the user
        said next does not follow from half an answer."""
        self.messages.append(message)
        self.finishes.append(finish)
        if finish == "length":
            self.questions.clear()

    def answer_tokens(
        self,
        prompt: Sequence[int],
        answer: Sequence[int],
        tokenizer: PreTrainedTokenizerBase | None,
        config: TargetConfig,
    ) -> None:
        """Put the token ids of the prompt and of the answer just given.

        Earlier answers keep their spans where the prompt holds their very tokens; where the
        template rewrote them, they are what it renders; where that cannot be proven, context.
        """
        kept = self.loss_spans if list(prompt[: len(self.token_ids)]) == self.token_ids else []
        if not kept and self.loss_spans and tokenizer is not None:
            kept = _rendered_spans(self.messages, prompt, tokenizer, config)
        self.token_ids = [*prompt, *answer]
        self.loss_spans = list(kept)
        if answer:
            self.loss_spans.append((len(prompt), len(self.token_ids)))

    def line(self, config: GenerateConfig) -> dict[str, Any]:
        """What stands in the file; read again by `samples`."""
        found: dict[str, Any] = {"id": self.key, "domain": self.domain, "messages": self.messages}
        if self.token_ids:
            found["token_ids"] = self.token_ids
            found["loss_spans"] = self.loss_spans
        found["finish"] = self.finishes
        found["sampling"] = sampling(config)
        return found


def answer_seed(seed: int, key: str, turn: int) -> int:
    """Seed of one sampled answer, below 2^31, from the run's seed, its id (with k) and its turn."""
    return hash64(f"{seed}/{key}/{turn}") >> 33


def dialogues(
    data: DataConfig, num_samples: int, rank: int, world: int, dropped: Dropped
) -> Iterator[Dialogue]:
    """Everything this rank is to answer: prompts by the hash of their id, `num_samples` times each.

    Assistant turns of the data are left out; every user turn will be answered by the target.
    """
    for conversation in read(data.files, data.limit, dropped):
        if not conversation.prompt_messages():
            where = place(data.files[conversation.source], conversation.row)
            dropped.add("no user turn", where)
            continue
        if hash64(conversation.key) % world != rank:
            continue
        for k in range(num_samples):
            key = conversation.key if num_samples == 1 else f"{conversation.key}#{k}"
            yield _dialogue(conversation, key)


def _dialogue(conversation: Conversation, key: str) -> Dialogue:
    turns = conversation.messages
    return Dialogue(
        key=key,
        domain=conversation.domain,
        messages=[dict(turn) for turn in turns[:1] if turn["role"] == "system"],
        questions=[turn["content"] for turn in turns if turn["role"] == "user"],
    )


def _rendered_spans(
    messages: Sequence[Message],
    prompt: Sequence[int],
    tokenizer: PreTrainedTokenizerBase,
    config: TargetConfig,
) -> list[tuple[int, int]]:
    try:
        ids_T, mask_T = render(tokenizer, messages, config)
    except RenderError:
        return []
    if ids_T[: len(prompt)].tolist() != list(prompt):
        return []
    return [(begin, end) for begin, end in spans_of(mask_T) if end <= len(prompt)]
