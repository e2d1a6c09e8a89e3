"""Conversations as the target's chat template renders them: token ids and which are supervised.

Supervised are the assistant's tokens of the *whole* rendered conversation, the token that ends a
turn included. Templates rewrite history (Qwen3 drops the reasoning of earlier turns), so a turn is
looked for in the rendered whole and its place is proven: the text before it is what the target is
given at generation time, its tokens are a prefix of the whole's tokens, and the text up to the end
token closes with the turn's own answer. What cannot be proven is refused.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np
from jinja2 import TemplateError
from transformers import BatchEncoding, PreTrainedTokenizerBase

from dflash_pipeline.capture.arguments import template_arguments
from dflash_pipeline.configs.schema import TargetConfig

Message = dict[str, str]
Rendered = tuple[np.ndarray, np.ndarray]

# words that no template treats in a special way and that occur nowhere else in its text
_PROBE = ("qprobewordone", "aprobewordtwo", "qprobewordthree", "aprobewordfour")
_END_OF_REASONING = "</think>"
_GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")


class RenderError(ValueError):
    """One conversation cannot be rendered with proven spans; the text is a short reason."""


@dataclass(frozen=True, slots=True)
class _Scaffold:
    """What the template puts around assistant turns, learnt once from a probe conversation."""

    headers: tuple[str, ...]
    """Texts between a user turn and the answer after it, in history and in the last turn."""
    ends: dict[int, str]
    """Tokens that end an assistant turn -> their text."""
    last_end: int
    """The one that ends the conversation's last turn."""


def prompt_ids(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], config: TargetConfig
) -> list[int]:
    """Token ids that the target is given to answer `messages`. Raises RenderError."""
    return _encode(tokenizer, _text(tokenizer, messages, config, is_prompt=True))


def stop_ids(tokenizer: PreTrainedTokenizerBase, config: TargetConfig) -> frozenset[int]:
    """The token by which the template ends an answer; empty without a provable one."""
    try:
        return frozenset({_scaffold(tokenizer, config).last_end})
    except RenderError:
        return frozenset()


def render_text(tokenizer: PreTrainedTokenizerBase, text: str) -> Rendered:
    """(ids_T uint32, mask_T uint8) of a document: every token but the first is supervised."""
    ids_T = np.array(tokenizer(text, verbose=False)["input_ids"], dtype=np.uint32)
    mask_T = np.ones(len(ids_T), dtype=np.uint8)
    mask_T[:1] = 0
    return ids_T, mask_T


def render(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], config: TargetConfig
) -> Rendered:
    """(ids_T uint32, mask_T uint8) of the whole conversation. Raises RenderError."""
    if not any(message["role"] == "assistant" for message in messages):
        raise RenderError("no assistant turn: let generate answer it")
    scaffold = _scaffold(tokenizer, config)
    for message in messages:
        for content in (message["content"], message.get("reasoning_content", "")):
            if any(end in content for end in scaffold.ends.values()):
                raise RenderError("text holds the token that ends a turn")
    if _GENERATION_TAG.search(_template(tokenizer)):
        ids, spans = _tagged(tokenizer, messages, config, scaffold)
    else:
        ids, spans = _aligned(tokenizer, messages, config, scaffold)
    mask_T = np.zeros(len(ids), dtype=np.uint8)
    for begin, end in spans:
        mask_T[begin:end] = 1
    return np.array(ids, dtype=np.uint32), mask_T


def spans_of(mask_T: np.ndarray) -> list[tuple[int, int]]:
    """[begin, end) of each run of ones."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask_T, [0]])))
    return [(int(begin), int(end)) for begin, end in edges.reshape(-1, 2)]


def _template(tokenizer: PreTrainedTokenizerBase) -> str:
    if not tokenizer.chat_template:
        raise RenderError("the target has no chat template")
    return tokenizer.get_chat_template()


def _text(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    config: TargetConfig,
    *,
    is_prompt: bool,
) -> str:
    _template(tokenizer)
    try:
        text = tokenizer.apply_chat_template(
            _with_system(messages, config),
            tokenize=False,
            add_generation_prompt=is_prompt,
            **template_arguments(config),
        )
    except (TemplateError, TypeError, KeyError, IndexError) as error:
        raise RenderError(f"the chat template refuses: {error}") from error
    assert isinstance(text, str)
    return text


def _with_system(messages: Sequence[Message], config: TargetConfig) -> list[Message]:
    if config.system_prompt and messages and messages[0]["role"] != "system":
        return [{"role": "system", "content": config.system_prompt}, *messages]
    return list(messages)


def _encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    # the template writes the begin token itself
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    assert isinstance(ids, list)
    return ids


@lru_cache(maxsize=8)
def _scaffold(tokenizer: PreTrainedTokenizerBase, config: TargetConfig) -> _Scaffold:
    messages = [
        {"role": role, "content": content}
        for role, content in zip(("user", "assistant") * 2, _PROBE, strict=True)
    ]
    text = _text(tokenizer, messages, config, is_prompt=False)
    if any(text.count(content) != 1 for content in _PROBE):
        raise RenderError("the chat template does not render each turn once")
    headers, ends, last_end = [], {}, -1
    for turn in (1, 3):
        before = _text(tokenizer, messages[:turn], config, is_prompt=False)
        if not text.startswith(before):
            raise RenderError("the chat template rewrites a user turn when it is answered")
        answer_begin = text.index(_PROBE[turn])
        headers.append(text[len(before) : answer_begin])
        after = text[answer_begin + len(_PROBE[turn]) :]
        first_ids = _encode(tokenizer, after)[:1]
        end = _added_token(tokenizer, first_ids)
        if not end or not after.startswith(end):
            raise RenderError("the chat template ends an answer with no token of its own")
        last_end = first_ids[0]
        ends[last_end] = end
    return _Scaffold(tuple(headers), ends, last_end)


def _added_token(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    """The text of an added token, which no merge can split or swallow; empty if it is none."""
    token = tokenizer.added_tokens_decoder.get(ids[0]) if ids else None
    return str(token.content) if token is not None else ""


def _aligned(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    config: TargetConfig,
    scaffold: _Scaffold,
) -> tuple[list[int], list[tuple[int, int]]]:
    """Ids and supervised spans of a template without generation tags."""
    text = _text(tokenizer, messages, config, is_prompt=False)
    begins, nums_ends = [], []
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            begins.append(_answer_begin(tokenizer, messages[:index], config, scaffold, text))
            nums_ends.append(_num_ends(text, begins[-1], message, scaffold))
    ids, first_indices = _cut_ids(tokenizer, text, begins)
    spans = [
        (first, _end_index(ids, first, num_ends, scaffold))
        for first, num_ends in zip(first_indices, nums_ends, strict=True)
    ]
    if any(earlier[1] > later[0] for earlier, later in pairwise(spans)):
        raise RenderError("two answers overlap in the rendered conversation")
    return ids, spans


def _cut_ids(
    tokenizer: PreTrainedTokenizerBase, text: str, begins: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Token ids of `text` and the index of the first token of each answer.

    An answer that begins with a blank may share a token with the prompt's last newline. The
    target never sees that token, as its prompt ends there: such a text is tokenised in pieces cut
    at the answers, as at generation time.
    """
    ids = _encode(tokenizer, text)
    prefixes = [_encode(tokenizer, text[:begin]) for begin in begins]
    if all(ids[: len(prefix)] == prefix for prefix in prefixes):
        return ids, [len(prefix) for prefix in prefixes]
    ids, first_indices = [], []
    for begin, end in pairwise([0, *begins, len(text)]):
        if begin:
            first_indices.append(len(ids))
        ids.extend(_encode(tokenizer, text[begin:end]))
    decoded = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    if decoded != text:
        raise RenderError("a token crosses the beginning of an answer")
    return ids, first_indices


def _answer_begin(
    tokenizer: PreTrainedTokenizerBase,
    before: Sequence[Message],
    config: TargetConfig,
    scaffold: _Scaffold,
    text: str,
) -> int:
    """Where in `text` the answer after the turns `before` begins."""
    if not any(message["role"] == "user" for message in before):
        raise RenderError("an answer without a question before it")
    prompt = _text(tokenizer, before, config, is_prompt=True)
    if text.startswith(prompt):
        return len(prompt)
    history = _text(tokenizer, before, config, is_prompt=False)
    if not text.startswith(history) or not prompt.startswith(history):
        raise RenderError("the chat template rewrites the turns before an answer")
    # the prompt opens more than the rendered turn has, as Qwen3's empty reasoning does
    opened = prompt[len(history) :]
    for header in sorted(scaffold.headers, key=len, reverse=True):
        if header and opened.startswith(header) and text.startswith(header, len(history)):
            return len(history) + len(header)
    raise RenderError("the rendered turn does not begin like the prompt for it")


def _num_ends(text: str, begin: int, message: Message, scaffold: _Scaffold) -> int:
    """How many end tokens there are up to the one that closes the answer (harmony ends its
    analysis with one as well)."""
    answer = message["content"].split(_END_OF_REASONING)[-1].strip()
    place = begin
    for num_ends in range(1, len(text)):
        found = [text.find(end, place) for end in scaffold.ends.values()]
        found = [position for position in found if position >= 0]
        if not found:
            break
        if text[begin : min(found)].rstrip().endswith(answer):
            return num_ends
        place = min(found) + 1
    raise RenderError("an answer does not stand unchanged in the rendered conversation")


def _end_index(ids: list[int], begin: int, num_ends: int, scaffold: _Scaffold) -> int:
    """Index after the `num_ends`-th end token from `begin` on."""
    for index in range(begin, len(ids)):
        if ids[index] in scaffold.ends:
            num_ends -= 1
            if num_ends == 0:
                return index + 1
    raise RenderError("an answer has no end token")


def _tagged(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    config: TargetConfig,
    scaffold: _Scaffold,
) -> tuple[list[int], list[tuple[int, int]]]:
    """Ids and supervised spans by the template's own generation tags.

    Some tags leave the end token out and some take in the newline after it: a span is made to
    end with its last end token in either case.
    """
    encoded = tokenizer.apply_chat_template(
        _with_system(messages, config),
        return_dict=True,
        return_assistant_tokens_mask=True,
        **template_arguments(config),
    )
    if not isinstance(encoded, BatchEncoding):
        raise RenderError("the chat template's generation tags give no mask")
    ids = list(encoded["input_ids"])
    runs = spans_of(np.array(encoded["assistant_masks"], dtype=np.uint8))
    num_answers = sum(message["role"] == "assistant" for message in messages)
    if len(runs) != num_answers:
        raise RenderError(f"the chat template tags {len(runs)} of {num_answers} answers")
    spans = []
    for begin, end in runs:
        ends = [i for i in range(begin, min(end + 1, len(ids))) if ids[i] in scaffold.ends]
        if not ends:
            raise RenderError("a tagged answer has no end token")
        spans.append((begin, ends[-1] + 1))
    return ids, spans
