"""Conversations from the rows of data files, whatever shape they have.

A row that cannot be used never ends the run by itself: it is counted under its reason, the first
few with their place, and `Dropped.check` fails the run when the share of such rows is too large.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dflash_pipeline.capture import sources
from dflash_pipeline.configs import inputs
from dflash_pipeline.store import table

Message = dict[str, str]

NUM_EXAMPLES = 5
_ROLES = {
    "system": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
}
_TOOL_ROLES = {"tool", "function", "observation", "function_call", "tool_call", "ipython"}
_PROMPTS = ("prompt", "instruction", "question", "query", "problem")
_RESPONSES = ("response", "completion", "output", "answer", "solution")


class UnusableError(ValueError):
    """Why one row cannot be used; the text is the reason it is counted under."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """One row of the data. Its content is `token_ids` if there are any, else `text`, else
    `messages`."""

    key: str
    source: int
    """Index of its file."""
    row: int
    """Line of the file or row of the table, from 1."""
    domain: str
    messages: tuple[Message, ...]
    """Turns of role system, user, assistant; some carry `reasoning_content`."""
    text: str
    """A document without turns."""
    token_ids: tuple[int, ...]
    """The whole conversation as `generate` saw it; wins over tokenising `messages` again."""
    loss_spans: tuple[tuple[int, int], ...]
    """Supervised [begin, end) ranges of `token_ids`."""

    @property
    def first_prompt(self) -> str:
        """What the held-out split is decided by: the first user turn, else the document."""
        for message in self.messages:
            if message["role"] == "user":
                return message["content"].strip()
        return self.text.strip()

    def prompt_messages(self) -> list[Message]:
        """The turns up to and with the last user turn; empty if there is none."""
        for end in range(len(self.messages), 0, -1):
            if self.messages[end - 1]["role"] == "user":
                return list(self.messages[:end])
        return []


@dataclass(slots=True)
class Dropped:
    """Rows read, and those not used: how many for each reason, and where the first ones stand."""

    num_rows: int = 0
    num_bad: int = 0
    """Of those not used, the ones that count against `data.max_bad_share`."""
    counts: dict[str, int] = field(default_factory=dict)
    examples: dict[str, list[str]] = field(default_factory=dict)

    def add(self, reason: str, where: str, *, is_bad: bool = True) -> None:
        """Count one row under its reason; `where` is `file:line`."""
        self.num_bad += is_bad
        self.counts[reason] = self.counts.get(reason, 0) + 1
        places = self.examples.setdefault(reason, [])
        if len(places) < NUM_EXAMPLES:
            places.append(where)

    def lines(self) -> list[str]:
        """One line a reason, the most frequent first: count, reason, first places."""
        ordered = sorted(self.counts.items(), key=lambda item: (-item[1], item[0]))
        return [
            f"{count} x {reason} ({', '.join(self.examples[reason])}"
            f"{', ...' if count > len(self.examples[reason]) else ''})"
            for reason, count in ordered
        ]

    @property
    def enough_share(self) -> float:
        """The smallest share in hundredths that allows what was dropped."""
        return math.ceil(100 * self.num_bad / self.num_rows) / 100

    def check(self, max_bad_share: float, further: str = "") -> None:
        """Raise ValueError when more than `max_bad_share` of the rows were not usable.

        further: what may come on top of them, where not all is known yet.
        """
        if self.num_bad > max_bad_share * self.num_rows:
            raise ValueError(
                f"{self.num_bad} of {self.num_rows} rows are unusable, data.max_bad_share allows "
                f"{max_bad_share:g}: {'; '.join(self.lines())}. Mend these rows, or leave them out "
                f"with --set data.max_bad_share={self.enough_share:g}"
                f"{further if self.num_bad < self.num_rows else ''}"
            )


def read(files: Sequence[str], limit: int, dropped: Dropped) -> Iterator[Conversation]:
    """Usable conversations of all files in order; the rest is counted in `dropped`.

    `limit` is the number of rows read at most over all files, 0: all. Memory holds one row and
    eight bytes for each key seen.
    """
    inputs.check_data(files)
    names = sources.stems(files)
    seen: set[int] = set()
    for source, (file, name) in enumerate(zip(files, names, strict=True)):
        for row in sources.rows(file):
            if limit and dropped.num_rows >= limit:
                return
            dropped.num_rows += 1
            where = place(file, row.number)
            if row.values is None:
                dropped.add(row.fault, where)
                continue
            try:
                conversation = _conversation(row.values, source, row.number, name)
            except UnusableError as error:
                dropped.add(str(error), where)
                continue
            key_hash = hash64(conversation.key)
            if key_hash in seen:
                dropped.add("id seen before", where)
                continue
            seen.add(key_hash)
            yield conversation


def place(file: str, row: int) -> str:
    """`file:line`, the file by its name alone."""
    return f"{file if file.startswith('hf:') else Path(file).name}:{row}"


def hash64(text: str) -> int:
    """64-bit hash of a text, the same on every machine."""
    return table.hash64(text.encode())


def _conversation(values: Mapping[str, Any], source: int, number: int, name: str) -> Conversation:
    domain = values.get("domain")
    token_ids, loss_spans = _tokens(values)
    # an answer of `generate` may be empty: its end token alone
    messages, text = _content(values, may_be_empty=bool(token_ids))
    return Conversation(
        key=_key(values, f"{name}/{number}"),
        source=source,
        row=number,
        domain=_encodable(domain) if isinstance(domain, str) and domain else name,
        messages=messages,
        text=text,
        token_ids=token_ids,
        loss_spans=loss_spans,
    )


def _key(values: Mapping[str, Any], fallback: str) -> str:
    identifier = values.get("id")
    if isinstance(identifier, int) and not isinstance(identifier, bool):
        return str(identifier)
    if isinstance(identifier, str) and identifier:
        return _encodable(identifier)
    return fallback


def _content(values: Mapping[str, Any], *, may_be_empty: bool) -> tuple[tuple[Message, ...], str]:
    for name in ("messages", "conversations", "conversation"):
        if isinstance(values.get(name), list):
            return _with_system(values, _turns(values[name], may_be_empty=may_be_empty)), ""
    for name in _PROMPTS:
        if values.get(name) is not None:
            return _with_system(values, _pair(values, name)), ""
    if "text" in values:
        return (), _filled(values["text"], "text")
    for name in ("messages", "conversations", "conversation"):
        if name in values:
            raise UnusableError(f"{name} is no list of turns")
    raise UnusableError("no messages, prompt or text")


def _pair(values: Mapping[str, Any], prompt_name: str) -> tuple[Message, ...]:
    prompt = values[prompt_name]
    if isinstance(prompt, list):
        turns = _turns(prompt, may_be_empty=False)
    else:
        content = _filled(prompt, prompt_name)
        # the second field of alpaca's rows; empty for most of them
        more = values.get("input") if prompt_name == "instruction" else None
        if isinstance(more, str) and more.strip():
            content = f"{content}\n\n{_encodable(more)}"
        turns = ({"role": "user", "content": content},)
    for name in _RESPONSES:
        response = values.get(name)
        if isinstance(response, list):
            return (*turns, *_turns(response, may_be_empty=False))
        if response is not None:
            return (*turns, {"role": "assistant", "content": _filled(response, name)})
    return turns


def _turns(raw_turns: Sequence[Any], *, may_be_empty: bool) -> tuple[Message, ...]:
    if not raw_turns:
        raise UnusableError("no turns")
    return tuple(_turn(raw_turn, may_be_empty=may_be_empty) for raw_turn in raw_turns)


def _turn(raw_turn: object, *, may_be_empty: bool) -> Message:
    if not isinstance(raw_turn, Mapping):
        raise UnusableError("a turn is no object")
    raw_role = raw_turn.get("role", raw_turn.get("from"))
    if not isinstance(raw_role, str):
        raise UnusableError("unknown role")
    if raw_role in _TOOL_ROLES or raw_turn.get("tool_calls"):
        raise UnusableError("tool turn")
    role = _ROLES.get(raw_role)
    if role is None:
        raise UnusableError("unknown role")
    content = raw_turn.get("content", raw_turn.get("value"))
    is_empty_answer = may_be_empty and role == "assistant" and content == ""
    turn = {"role": role, "content": "" if is_empty_answer else _filled(content, "content")}
    reasoning = raw_turn.get("reasoning_content")
    if isinstance(reasoning, str) and reasoning.strip():
        turn["reasoning_content"] = _encodable(reasoning)
    return turn


def _with_system(values: Mapping[str, Any], turns: tuple[Message, ...]) -> tuple[Message, ...]:
    system = values.get("system")
    if isinstance(system, str) and system.strip() and turns[0]["role"] != "system":
        return ({"role": "system", "content": _encodable(system)}, *turns)
    return turns


def _filled(content: object, name: str) -> str:
    if content is None:
        raise UnusableError(f"{name} is null")
    if isinstance(content, list):
        raise UnusableError(f"{name} is a list of parts")
    if not isinstance(content, str):
        raise UnusableError(f"{name} is no text")
    if not content.strip():
        raise UnusableError(f"{name} is empty")
    return _encodable(content)


def _encodable(text: str) -> str:
    # JSON may spell half of a surrogate pair; no tokenizer takes it
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UnusableError("lone surrogate") from error
    return text


def _tokens(values: Mapping[str, Any]) -> tuple[tuple[int, ...], tuple[tuple[int, int], ...]]:
    token_ids, spans = values.get("token_ids"), values.get("loss_spans")
    if token_ids is None:
        return (), ()
    fault = "token_ids and loss_spans do not fit"
    if not isinstance(token_ids, list) or not isinstance(spans, list) or not token_ids:
        raise UnusableError(fault)
    if not all(type(token) is int and 0 <= token < 1 << 32 for token in token_ids):
        raise UnusableError(fault)
    end_before = 0
    for span in spans:
        if not (
            isinstance(span, list)
            and len(span) == 2
            and all(type(bound) is int for bound in span)
            and end_before <= span[0] < span[1] <= len(token_ids)
        ):
            raise UnusableError(fault)
        end_before = span[1]
    return tuple(token_ids), tuple((begin, end) for begin, end in spans)
