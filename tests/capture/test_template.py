"""Supervised is what the target itself would have generated, in every kind of template."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dflash_pipeline.capture.arguments import template_arguments_text
from dflash_pipeline.capture.template import (
    RenderError,
    prompt_ids,
    render,
    render_text,
    spans_of,
    stop_ids,
)
from dflash_pipeline.configs.schema import TargetConfig

SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|begin_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<|start|>",
    "<|message|>",
    "<|channel|>",
    "<|end|>",
    "<|return|>",
)
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "{{ '<|begin_of_text|>' }}{% for m in messages %}"
    "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' }}"
    "{{ m.content | trim + '<|eot_id|>' }}"
    "{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
QWEN3 = """
{%- set ns = namespace(last=messages | length - 1, open=true) -%}
{%- for m in messages[::-1] -%}
{%- if ns.open and m.role == 'user' -%}
{%- set ns.open = false -%}{%- set ns.last = messages | length - 1 - loop.index0 -%}
{%- endif -%}
{%- endfor -%}
{%- for m in messages -%}
{%- if m.role != 'assistant' -%}
{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
{%- else -%}
{%- set ns.content = m.content -%}{%- set ns.thought = '' -%}
{%- if m.reasoning_content is string -%}
{%- set ns.thought = m.reasoning_content -%}
{%- elif '</think>' in m.content -%}
{%- set ns.thought = m.content.split('</think>')[0].split('<think>')[-1] -%}
{%- set ns.content = m.content.split('</think>')[-1].lstrip('\n') -%}
{%- endif -%}
{{ '<|im_start|>assistant\n' }}
{%- if loop.index0 > ns.last and (loop.last or ns.thought) -%}
{{ '<think>\n' + ns.thought.strip('\n') + '\n</think>\n\n' }}
{%- endif -%}
{{ ns.content.lstrip('\n') + '<|im_end|>\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|im_start|>assistant\n' }}
{%- if enable_thinking is defined and enable_thinking is false -%}
{{ '<think>\n\n</think>\n\n' }}
{%- endif -%}
{%- endif -%}
"""
HARMONY = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<|start|>assistant"
    "{% if m.reasoning_content and loop.last %}<|channel|>analysis<|message|>"
    "{{ m.reasoning_content }}<|end|><|start|>assistant{% endif %}"
    "<|channel|>final<|message|>{{ m.content }}"
    "{% if loop.last %}<|return|>{% else %}<|end|>{% endif %}"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
TAGGED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}TAIL{% endgeneration %}REST"
    "{% else %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PLAIN = TargetConfig()


@pytest.fixture
def make() -> Callable[..., PreTrainedTokenizerFast]:
    """`make(template, merges)` -> a byte-level tokenizer with that template."""

    def made(template: str, merges: Sequence[tuple[str, str]] = ()) -> PreTrainedTokenizerFast:
        pieces = sorted(pre_tokenizers.ByteLevel.alphabet()) + [a + b for a, b in merges]
        vocabulary = {piece: index for index, piece in enumerate(pieces)}
        tokenizer = Tokenizer(models.BPE(vocabulary, list(merges)))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
        wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
        wrapped.chat_template = template
        return wrapped

    return made


def talk(*contents: str) -> list[dict[str, str]]:
    roles = ("user", "assistant") * len(contents)
    return [{"role": role, "content": text} for role, text in zip(roles, contents, strict=False)]


def supervised(
    tokenizer: PreTrainedTokenizerFast,
    messages: list[dict[str, str]],
    config: TargetConfig = PLAIN,
) -> list[str]:
    ids_T, mask_T = render(tokenizer, messages, config)
    assert len(ids_T) == len(mask_T)
    return [tokenizer.decode(ids_T[begin:end]) for begin, end in spans_of(mask_T)]


CONVERSATION = talk("What?", "That, and more.", "Why?\nTell.", "Because <b>\n  it is.")


@pytest.mark.parametrize(
    ("template", "end"), [(CHATML, "<|im_end|>"), (LLAMA3, "<|eot_id|>"), (QWEN3, "<|im_end|>")]
)
def test_every_answer_is_supervised_with_its_end_token_and_nothing_else_is(
    make: Callable[..., PreTrainedTokenizerFast], template: str, end: str
) -> None:
    thought = "<think>\n\n</think>\n\n" if template == QWEN3 else ""
    assert supervised(make(template), CONVERSATION) == [
        f"That, and more.{end}",
        f"{thought}Because <b>\n  it is.{end}",
    ]


def test_the_ids_are_those_of_the_whole_rendered_conversation(
    make: Callable[..., PreTrainedTokenizerFast],
) -> None:
    tokenizer = make(LLAMA3)
    whole = tokenizer.apply_chat_template(CONVERSATION, tokenize=True, return_dict=True)
    ids_T, mask_T = render(tokenizer, CONVERSATION, PLAIN)
    assert ids_T.tolist() == whole["input_ids"]
    (first, _), (second, _) = spans_of(mask_T)
    assert ids_T[:first].tolist() == prompt_ids(tokenizer, CONVERSATION[:1], PLAIN)
    assert ids_T[:second].tolist() == prompt_ids(tokenizer, CONVERSATION[:3], PLAIN)


def test_reasoning_that_the_template_drops_from_history_is_not_supervised_there(
    make: Callable[..., PreTrainedTokenizerFast],
) -> None:
    messages = talk("a", "<think>\nfirst\n</think>\n\nA", "b", "<think>\nsecond\n</think>\n\nB")
    for thinking in ("default", "on"):
        config = TargetConfig(thinking=thinking)
        assert supervised(make(QWEN3), messages, config) == [
            "A<|im_end|>",
            "<think>\nsecond\n</think>\n\nB<|im_end|>",
        ]


def test_reasoning_in_a_field_of_its_own_is_supervised(
    make: Callable[..., PreTrainedTokenizerFast],
) -> None:
    messages = talk("a", "A", "b", "B")
    messages[3]["reasoning_content"] = "thought"
    assert supervised(make(QWEN3), messages)[1] == "<think>\nthought\n</think>\n\nB<|im_end|>"
    assert supervised(make(HARMONY), messages) == [
        "<|channel|>final<|message|>A<|end|>",
        "<|channel|>analysis<|message|>thought<|end|><|start|>assistant"
        "<|channel|>final<|message|>B<|return|>",
    ]


def test_with_thinking_off_the_empty_reasoning_is_part_of_the_prompt(
    make: Callable[..., PreTrainedTokenizerFast],
) -> None:
    config = TargetConfig(thinking="off")
    messages = talk("a", "<table>", "b", "<think")
    # the earlier turn lacks the empty reasoning that its prompt would have had
    assert supervised(make(QWEN3), messages, config) == ["<table><|im_end|>", "<think<|im_end|>"]
    prompt = prompt_ids(make(QWEN3), messages[:1], config)
    assert make(QWEN3).decode(prompt).endswith("assistant\n<think>\n\n</think>\n\n")


@pytest.mark.parametrize(
    ("tail", "rest"), [("", "<|im_end|>\n"), ("<|im_end|>", "\n"), ("<|im_end|>\n", "")]
)
def test_generation_tags_are_made_to_end_with_the_end_token(
    make: Callable[..., PreTrainedTokenizerFast], tail: str, rest: str
) -> None:
    template = TAGGED.replace("TAIL", tail).replace("REST", rest)
    assert supervised(make(template), CONVERSATION) == [
        "That, and more.<|im_end|>",
        "Because <b>\n  it is.<|im_end|>",
    ]


def test_an_answer_that_would_share_a_token_with_its_prompt_is_cut_from_it(
    make: Callable[..., PreTrainedTokenizerFast],
) -> None:
    tokenizer = make(CHATML, [("Ċ", "Ġ")])
    messages = talk("a\n b", " yes", "c", "no")
    assert supervised(tokenizer, messages) == [" yes<|im_end|>", "no<|im_end|>"]
    ids_T, mask_T = render(tokenizer, messages, PLAIN)
    begin = spans_of(mask_T)[0][0]
    assert ids_T[:begin].tolist() == prompt_ids(tokenizer, messages[:1], PLAIN)
    # elsewhere the merge stays
    assert tokenizer.convert_tokens_to_ids("ĊĠ") in ids_T[:begin].tolist()


@pytest.mark.parametrize(
    ("template", "messages", "reason"),
    [
        (CHATML, talk("a"), "no assistant turn"),
        (CHATML, talk("a", "b<|im_end|>c"), "text holds the token that ends a turn"),
        (CHATML, talk("a", "b")[::-1], "an answer without a question before it"),
        ("", talk("a", "b"), "the target has no chat template"),
        (
            CHATML.replace("{{ m.content }}", "{{ m.content | upper }}"),
            talk("a", "b"),
            "does not render each turn once",
        ),
        (
            CHATML.replace("<|im_end|>", ""),
            talk("a", "b"),
            "ends an answer with no token of its own",
        ),
        (
            CHATML.replace("m.content }}", "m.content | replace('zz', 'c') }}"),
            talk("a", "azza"),
            "an answer does not stand unchanged",
        ),
        (
            "{% if messages | length > 5 %}{{ raise_exception('too many') }}{% endif %}" + CHATML,
            talk("a", "b", "c", "d", "e", "f"),
            "the chat template refuses: too many",
        ),
        (
            CHATML.replace("{{ m.role }}", "{{ messages | length }}{{ m.role }}"),
            talk("a", "b"),
            "rewrites a user turn",
        ),
    ],
)
def test_what_cannot_be_proven_is_refused_with_its_reason(
    make: Callable[..., PreTrainedTokenizerFast],
    template: str,
    messages: list[dict[str, str]],
    reason: str,
) -> None:
    with pytest.raises(RenderError, match=reason):
        render(make(template), messages, PLAIN)


def test_plain_text_is_supervised_but_for_its_first_token(
    make: Callable[..., PreTrainedTokenizerFast],
) -> None:
    ids_T, mask_T = render_text(make(CHATML), "abc")
    assert (len(ids_T), mask_T.tolist()) == (3, [0, 1, 1])


def test_an_answer_stops_at_the_token_of_the_last_turn(
    make: Callable[..., PreTrainedTokenizerFast],
) -> None:
    tokenizer = make(HARMONY)
    assert stop_ids(tokenizer, PLAIN) == {tokenizer.convert_tokens_to_ids("<|return|>")}
    assert stop_ids(make(""), PLAIN) == frozenset()


def test_arguments_and_system_prompt_are_the_same_text_in_any_order() -> None:
    first = TargetConfig(template_args=("b=1", "a=low"), thinking="off", system_prompt="Be brief.")
    other = TargetConfig(template_args=("a=low", "b=1"), thinking="off", system_prompt="Be brief.")
    assert template_arguments_text(first) == template_arguments_text(other)
    assert template_arguments_text(first) == (
        '{"arguments":{"a":"low","b":1,"enable_thinking":false},"system_prompt":"Be brief."}'
    )


def test_a_system_prompt_is_put_before_conversations_without_one(
    make: Callable[..., PreTrainedTokenizerFast],
) -> None:
    config = TargetConfig(system_prompt="Be brief.")
    tokenizer = make(CHATML)
    whole = tokenizer.decode(render(tokenizer, CONVERSATION, config)[0])
    assert whole.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n")
    own = [{"role": "system", "content": "Own."}, *CONVERSATION]
    assert "Be brief" not in tokenizer.decode(render(tokenizer, own, config)[0])
