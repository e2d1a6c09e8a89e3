"""The target behind the draft and verify loop: cut back and read on, it is the capture's target."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from dflash_pipeline.capture import decoder
from dflash_pipeline.capture.answerer import NO_ROOM, TOO_LONG
from dflash_pipeline.capture.decoder import Decoder, open_target
from dflash_pipeline.capture.target import Target
from dflash_pipeline.configs.errors import UsageError
from dflash_pipeline.configs.schema import DataConfig, EvalConfig, Run, TargetConfig
from places import cpu_place

SMALL: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "eos_token_id": None,
    "pad_token_id": 0,
}
LAYER_IDS = (0, 2)
SLIDING = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"] * 2}


def model(family: str) -> PreTrainedModel:
    torch.manual_seed(0)
    if family == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(**SMALL))
    if family == "gemma3":
        return Gemma3ForCausalLM(Gemma3TextConfig(**SMALL, **SLIDING))
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    config = GptOssConfig(**SMALL, **SLIDING, num_local_experts=4, rope_parameters=rope)
    return GptOssForCausalLM(config)


def expected(target_model: PreTrainedModel, ids_T: torch.Tensor) -> tuple[Any, Any]:
    """Logits and features of a text read at once, as capture reads it."""
    whole = Target(target_model, LAYER_IDS)
    hidden_KBTH, last_BTH = whole.forward(ids_T[None])
    feature_TKH = torch.stack([hidden_BTH[0] for hidden_BTH in hidden_KBTH], dim=1)
    return whole.head_logits(last_BTH)[0], feature_TKH


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "gpt_oss"])
@pytest.mark.parametrize("lengths", [(16,), (16, 16), (3, 16, 9)])
def test_rejected_tokens_leave_no_trace(family: str, lengths: tuple[int, ...]) -> None:
    target_model = model(family)
    # windows of 6 are long past when the cache is cut back
    texts = [torch.randint(1, 256, (length + 14,)) for length in lengths]
    read = Decoder(Target(target_model, ()), LAYER_IDS)
    logits_BV, features = read.prefill([text[:n] for text, n in zip(texts, lengths, strict=True)])
    logits, parts = [[row] for row in logits_BV[:, None]], [[feature] for feature in features]
    going, ends = list(range(len(texts))), list(lengths)
    # of each text another number of tokens is right, the rest of a block is not
    for num_right in ((2, 5, 1), (4, 3, 4), (5, 1, 2)):
        block_BS = torch.full((len(going), 5), 9)
        for row, text in enumerate(going):
            block_BS[row, : num_right[row]] = texts[text][ends[text] : ends[text] + num_right[row]]
        logits_BSV, feature_BSKH = read.verify(block_BS)
        for row, text in enumerate(going):
            logits[text].append(logits_BSV[row, : num_right[row]])
            parts[text].append(feature_BSKH[row, : num_right[row]])
            ends[text] += num_right[row]
        # the first text leaves the batch half way, the others change places
        rows = list(range(len(going)))
        if len(going) == 3:
            rows = [2, 1]
        going = [going[row] for row in rows]
        read.crop(rows, [ends[text] for text in going])
    for text, length in enumerate(lengths):
        logits_TV, feature_TKH = expected(target_model, texts[text][: ends[text]])
        close = {"rtol": 1e-4, "atol": 1e-4}
        torch.testing.assert_close(torch.cat(parts[text]), feature_TKH, **close)
        torch.testing.assert_close(torch.cat(logits[text]), logits_TV[length - 1 :], **close)
        assert feature_TKH.shape == (ends[text], 2, 32)


def test_a_second_prompt_starts_from_nothing() -> None:
    read = Decoder(Target(model("qwen3"), ()), (1,))
    ids_T = torch.arange(5, 15)
    once_BV, _ = read.prefill([ids_T])
    read.verify(torch.tensor([[3, 4]]))
    again_BV, _ = read.prefill([ids_T])
    assert torch.equal(once_BV, again_BV)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_logits_that_are_no_numbers_end_a_decoding(value: float) -> None:
    """Token 0 would be chosen of them, again and again, and every output be identical to plain."""
    target = Target(model("qwen3"), ())
    read = Decoder(target, (1,))
    ids_BS = torch.tensor([[5, 6, 7]])
    read.prefill([ids_BS[0]])
    with torch.no_grad():
        target.head.weight[9] = value
    for step in (lambda: read.verify(ids_BS), lambda: read.prefill([ids_BS[0]])):
        with pytest.raises(ValueError, match=r"logits are NaN or Inf: .* target\.dtype"):
            step()


def test_a_running_state_is_refused_with_the_way_out() -> None:
    target = Target(model("qwen3"), ())
    target.model.config.layer_types = ["linear_attention", "full_attention"] * 2
    with pytest.raises(UsageError, match=r"linear_attention.*Replay.*--store.*--endpoint"):
        Decoder(target, (1,))


class Tokenizer:
    """Words are token ids; the template of `prompt_ids` is replaced with it."""

    pad_token_id = 0


def test_prompts_are_read_up_to_the_last_user_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [
        {"id": "a", "domain": "math", "messages": [_turn("user", "5 6"), _turn("assistant", "7")]},
        {"id": "b", "domain": "math", "messages": [_turn("user", "8")]},
        {"id": "c", "domain": "code", "messages": [_turn("user", "9 4")]},
        {"id": "d", "domain": "code", "messages": [_turn("assistant", "9 4")]},
        {"id": "e", "domain": "chat", "messages": [_turn("user", "1 2 3 4")]},
        {"id": "f", "domain": "long", "messages": [_turn("user", "1 2 3 4 5")]},
    ]
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    target_model = model("qwen3")
    files = SimpleNamespace(
        name="tiny",
        num_layers=4,
        check_weights=lambda: None,
        tokenizer=Tokenizer,
        raw_config={"eos_token_id": 2, "pad_token_id": 0},
        text_config={"max_position_embeddings": 5},
    )
    monkeypatch.setattr(decoder, "resolve", lambda _config: files)
    monkeypatch.setattr(
        decoder.Target, "load", lambda _files, ids, _device, _dtype: Target(target_model, ids)
    )
    monkeypatch.setattr(decoder.template, "prompt_ids", _words)
    monkeypatch.setattr(decoder, "end_ids", lambda _files, _config: frozenset({2, 3, 4}))
    run = Run(
        target=TargetConfig(id="tiny"),
        data=DataConfig(max_bad_share=0.2),
        eval=EvalConfig(prompts=(str(file),), limit=1),
    )
    place = cpu_place("", "")
    opened = open_target(run, place, (1,))
    assert [(prompt.key, prompt.domain, prompt.ids) for prompt in opened.prompts] == [
        ("a", "math", (5, 6)),
        ("c", "code", (9, 4)),
        ("e", "chat", (1, 2, 3, 4)),
    ]
    assert opened.eos_ids == {2, 3, 4}
    assert opened.reserved_ids == {0, 2, 3, 4}
    assert opened.dropped == (
        "1 x no user turn to answer (prompts.jsonl:4)",
        f"1 x {TOO_LONG} (prompts.jsonl:6)",
    )
    assert (opened.dtype, opened.num_layers) == (torch.float32, 4)
    with pytest.raises(UsageError, match=r"reads layers \[4\], target tiny has 4"):
        open_target(run, place, (1, 4))
    shorter = replace(run, data=replace(run.data, max_len=2))
    assert [prompt.key for prompt in open_target(shorter, place, (1,)).prompts] == ["b"]
    assert [prompt.max_new_tokens for prompt in opened.prompts] == [3, 3, 1]
    whole = replace(
        run,
        data=replace(run.data, overlong="drop"),
        eval=replace(run.eval, max_new_tokens=3),
    )
    opened = open_target(whole, place, (1,))
    assert [prompt.key for prompt in opened.prompts] == ["a", "c"]
    assert f"1 x {NO_ROOM} (prompts.jsonl:5)" in opened.dropped
    stricter = replace(run, data=replace(run.data, max_bad_share=0.1))
    with pytest.raises(ValueError, match="1 of 6 rows are unusable"):
        open_target(stricter, place, (1,))


def _turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _words(_tokenizer: object, messages: list[dict[str, str]], _config: object) -> list[int]:
    return [int(word) for message in messages for word in message["content"].split()]


def test_a_twin_decodes_as_the_target_will(
    make_target_dir: Callable[..., Path], tmp_path: Path
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"messages": [_turn("user", "Which way?")]}) + "\n")
    directory = make_target_dir("qwen3")
    run = Run(target=TargetConfig(id=str(directory)), eval=EvalConfig(prompts=(str(file),)))
    place = cpu_place("", "")
    opened = open_target(run, place, (0, 2))
    small, whole = opened.load_twin(print), opened.load()
    assert small is not None
    ids_T = torch.tensor(opened.prompts[0].ids)
    for one in (small, whole):
        (logits_V,), (feature_TKH,) = one.target.prefill([ids_T])
        vocab_size, hidden_size = one.embed_VH.shape
        assert vocab_size == len(logits_V) == opened.vocab_size
        assert feature_TKH.shape == (len(ids_T), len(one.layer_ids), hidden_size)
    assert (whole.layer_ids, whole.embed_VH.shape[1]) == ((0, 2), opened.hidden_size)
