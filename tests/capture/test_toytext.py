"""The templated conversations, and the toy target that was trained on them."""

from __future__ import annotations

import ast
import itertools
import re
from importlib import resources
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from dflash_pipeline.capture import toyfit, toytext

TOY = Path(str(resources.files("dflash_pipeline.capture") / "toy"))


def _answered(domain: str, split: toytext.Split, count: int) -> list[toytext.Messages]:
    return list(itertools.islice(toytext.conversations(domain, split, 3), count))


@pytest.mark.parametrize("domain", toytext.DOMAINS)
def test_rows_are_the_same_each_time_and_no_prompt_is_on_both_sides(domain: str) -> None:
    train = toytext.rows(domain, "train", 50, 1)
    evaluation = toytext.rows(domain, "eval", 20, 1)
    assert train == toytext.rows(domain, "train", 50, 1)
    assert train != toytext.rows(domain, "train", 50, 2)
    assert len({row["id"] for row in train + evaluation}) == 70
    prompts = [str(row["messages"][0]["content"]) for row in train + evaluation]
    assert len(set(prompts)) == 70
    assert [toytext.is_heldout(prompt) for prompt in prompts] == [False] * 50 + [True] * 20
    assert all(row["messages"][-1]["role"] == "user" for row in train)


def test_asking_for_more_prompts_than_the_templates_hold_is_refused() -> None:
    with pytest.raises(ValueError, match="ask for fewer"):
        toytext.rows("chat", "eval", 300, 0)


def test_the_sums_are_right() -> None:
    for messages in _answered("math", "train", 200):
        answer = messages[1]["content"]
        equations = re.findall(r"(\d+) ([-+*/]) (\d+) = (\d+)", answer)
        assert equations
        for left, sign, right, result in equations:
            value = {
                "+": int(left) + int(right),
                "-": int(left) - int(right),
                "*": int(left) * int(right),
                "/": int(left) / int(right),
            }[sign]
            assert value == int(result) > 0
        assert answer.endswith(f"The answer is {equations[-1][3]}.")


def test_the_programs_are_python() -> None:
    for messages in _answered("code", "train", 100):
        fenced = re.fullmatch(r"```python\n(.*)\n```\n.*", messages[1]["content"], re.DOTALL)
        assert fenced is not None
        ast.parse(fenced[1])


def test_only_training_chats_have_a_second_turn() -> None:
    lengths = {
        (domain, split): {len(messages) for messages in _answered(domain, split, 100)}
        for domain in toytext.DOMAINS
        for split in ("train", "eval")
    }
    assert lengths.pop(("chat", "train")) == {2, 4}
    assert set(map(tuple, lengths.values())) == {(2,)}


def test_the_training_text_is_what_the_chat_template_writes() -> None:
    tokenizer = AutoTokenizer.from_pretrained(TOY)
    for messages in _answered("chat", "train", 10):
        pieces = "".join(text for text, _ in toyfit.render(messages))
        assert pieces == tokenizer.apply_chat_template(messages, tokenize=False)


def test_digits_stay_single_and_the_mask_token_is_a_token_of_its_own() -> None:
    tokenizer = AutoTokenizer.from_pretrained(TOY)
    assert len(tokenizer) == toyfit.VOCAB_SIZE
    assert len(tokenizer.encode("1234", add_special_tokens=False)) == 4
    assert len({tokenizer.mask_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id}) == 3


def test_the_toy_is_small_enough_to_be_committed() -> None:
    sizes = {path.name: path.stat().st_size for path in TOY.iterdir() if path.is_file()}
    assert set(sizes) == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert sum(sizes.values()) < 1_300_000


@pytest.mark.parametrize("domain", toytext.DOMAINS)
def test_the_toy_answers_held_out_prompts_as_the_templates_do_and_stops(domain: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(TOY)
    model = AutoModelForCausalLM.from_pretrained(TOY, dtype=torch.float32).eval()
    num_right = 0
    for messages in _answered(domain, "eval", 8):
        ids = tokenizer.apply_chat_template(
            messages[:-1], add_generation_prompt=True, return_dict=False
        )
        ids_1T = torch.tensor([ids])
        answer_1T = model.generate(
            ids_1T, attention_mask=torch.ones_like(ids_1T), max_new_tokens=160, do_sample=False
        )
        text = tokenizer.decode(answer_1T[0, len(ids) :].tolist())
        assert text.endswith(toyfit.END)
        num_right += text == messages[-1]["content"] + toyfit.END
    assert num_right >= 6


def test_newton_schulz_brings_every_singular_value_near_one() -> None:
    torch.manual_seed(0)
    for rows, columns in ((48, 96), (96, 48)):
        values = torch.linalg.svdvals(toyfit.orthogonal(torch.randn(rows, columns)))
        assert 0.6 < float(values.min()) <= float(values.max()) < 1.3


def test_the_learning_rate_rises_is_held_and_falls() -> None:
    last = toyfit.NUM_STEPS - 1
    rise = round(toyfit.WARMUP_SHARE * toyfit.NUM_STEPS)
    fall = round((1 - toyfit.DECAY_SHARE) * toyfit.NUM_STEPS)
    shares = [toyfit.schedule(step) for step in (0, rise, fall, last)]
    assert shares[0] < shares[1] == shares[2] == 1.0
    assert shares[3] == pytest.approx(0.02, abs=0.001)
