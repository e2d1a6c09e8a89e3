"""Attention over a grouped cache gives what transformers' gives, or leaves it to transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from dflash_pipeline.capture import decode_attention
from dflash_pipeline.capture.answerer import Answerer
from dflash_pipeline.capture.answers import Dialogue
from dflash_pipeline.capture.decode_attention import grouped, grouped_attention, token_mask
from dflash_pipeline.capture.model import resolve
from dflash_pipeline.capture.target import Target
from dflash_pipeline.configs.schema import DataConfig, GenerateConfig, TargetConfig
from places import cpu_place

Tokens = Callable[[PreTrainedModel], list[list[int]]]
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, dict[str, torch.Tensor | None]]
SCALING = 0.2
MASKS = ("none", "padded", "window", "one for all", "additive")


def inputs(
    num_heads: int, num_groups: int, dtype: torch.dtype, device: str = "cpu", length: int = 37
) -> Inputs:
    """query_BH1D, key_BGTD, value_BGTD and masks by name."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((5, num_heads, 1, 16), *((5, num_groups, length, 16),) * 2)
    query, key, value = (torch.randn(shape, generator=generator) for shape in shapes)
    padding_B = torch.tensor([0, 3, length // 2, length - 1, 1])
    place_T = torch.arange(length)
    padded = (place_T >= padding_B[:, None])[:, None, None].to(device)
    window = padded & (place_T >= length - 8).to(device)
    additive = torch.zeros(padded.shape, dtype=dtype, device=device)
    masks = {
        "none": None,
        "padded": padded,
        "window": window,
        "one for all": window[:1],
        "additive": additive.masked_fill(~padded, torch.finfo(dtype).min),
    }
    return *(one.to(device, dtype) for one in (query, key, value)), masks


def expanded(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    """SDPA after each head was given keys and values of its own, as [B, 1, H, D]."""
    times = query.shape[1] // key.shape[1]
    key, value = (one.repeat_interleave(times, dim=1) for one in (key, value))
    found = functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=SCALING
    )
    return found.transpose(1, 2)


def largest_error(found: torch.Tensor, truth: torch.Tensor) -> float:
    return float((found.double() - truth).abs().max())


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("num_heads", "num_groups"), [(9, 3), (4, 2), (6, 1)])
def test_it_is_sdpa_over_expanded_keys_within_rounding(
    num_heads: int, num_groups: int, mask: str
) -> None:
    query, key, value, masks = inputs(num_heads, num_groups, torch.float32)
    found = grouped_attention(query, key, value, masks[mask], SCALING)
    torch.testing.assert_close(found, expanded(query, key, value, masks[mask]))
    if mask != "none":
        # what is behind the mask would show
        assert largest_error(grouped_attention(query, key, value, None, SCALING), found) > 0.1


def test_a_query_head_reads_its_own_keys() -> None:
    query, _, _, _ = inputs(4, 2, torch.float32)
    value_BGTD = torch.tensor([1.0, 2.0])[None, :, None, None].expand(5, 2, 3, 16)
    found = grouped_attention(query, torch.zeros(5, 2, 3, 16), value_BGTD, None, None)
    assert found[0, 0, :, 0].tolist() == [1.0, 1.0, 2.0, 2.0]


def check_bf16(device: str, length: int) -> None:
    """Its error to fp64 against SDPA's own."""
    query, key, value, masks = inputs(9, 3, torch.bfloat16, device, length)
    for mask in masks.values():
        exact = None if mask is None else mask if mask.dtype == torch.bool else mask.double()
        truth = expanded(query.double(), key.double(), value.double(), exact)
        budget = largest_error(expanded(query, key, value, mask), truth)
        error = largest_error(grouped_attention(query, key, value, mask, SCALING), truth)
        assert error <= 2 * budget


def test_in_bf16_it_errs_no_more_than_sdpa() -> None:
    check_bf16("cpu", 37)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("length", [37, 400, 401])
def test_on_a_gpu_in_bf16_it_errs_no_more_than_sdpa(length: int) -> None:
    check_bf16("cuda", length)


Call = Callable[..., str]


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch) -> Call:
    """`call(query, key, value, mask, **settings)` -> which of the two functions was asked."""
    functions: Any = ALL_ATTENTION_FUNCTIONS
    monkeypatch.setitem(functions, "sdpa", lambda *_inputs, **_settings: ("plain", None))
    monkeypatch.setattr(decode_attention, "grouped_attention", lambda *_inputs: "grouped")
    own, other = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)

    def asked(*tensors: torch.Tensor | None, is_own: bool = True, **settings: Any) -> str:
        with grouped(own):
            found = functions["sdpa"](own if is_own else other, *tensors, **settings)
        assert functions["sdpa"](own, *tensors, **settings)[0] == "plain"
        return str(found[0])

    return asked


def test_what_it_does_not_know_goes_to_the_plain_function(call: Call) -> None:
    query, key, value, masks = inputs(4, 2, torch.float32)
    mask = masks["padded"]
    assert mask is not None
    tensors = (query, key, value, mask)
    idle = {"dropout": 0.0, "sliding_window": 8, "position_ids": mask, "softcap": None}
    assert call(*tensors, scaling=SCALING, output_router_logits=False, **idle) == "grouped"
    assert call(query, key, value, None) == "grouped"
    for settings in (
        {"s_aux": torch.zeros(4)},
        {"softcap": 30.0},
        {"dropout": 0.1},
        {"position_bias": torch.zeros(1, 4, 1, 37)},
        {"output_attentions": True},
        {"is_own": False},
    ):
        assert call(*tensors, **settings) == "plain", settings
    two = query.expand(-1, -1, 2, -1)
    for others in (
        (two, key, value, mask),
        (query, query, query, None),
        (query[:, :3], key, value, mask),
        (query, key, value[..., :8], mask),
        (query, key, value, mask.expand(-1, 4, -1, -1)),
        (query, key, value, mask[..., :-1]),
        (query, key, value, mask[:, 0, 0]),
    ):
        assert call(*others) == "plain"


@pytest.mark.parametrize(
    ("family", "changes", "is_grouped"),
    [
        ("llama", {}, True),
        ("qwen3", {}, True),
        ("mistral", {}, True),
        ("gemma3", {}, True),
        ("qwen3_5", {}, True),
        ("llama", {"num_key_value_heads": 4}, False),
        # its sinks are eager attention's
        ("gpt_oss", {}, False),
    ],
)
def test_padded_batches_are_answered_as_before(
    family: str,
    changes: dict[str, Any],
    is_grouped: bool,
    make_model: Callable[..., PreTrainedModel],
    greedy_tokens: Tokens,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = make_model(family, **changes)
    wanted = greedy_tokens(model)
    calls = []
    original = grouped_attention

    def counted(*tensors: Any) -> torch.Tensor:
        calls.append(tensors)
        return original(*tensors)

    monkeypatch.setattr(decode_attention, "grouped_attention", counted)
    with grouped(model):
        assert greedy_tokens(model) == wanted
    assert bool(calls) == is_grouped
    if family != "gpt_oss":
        model.set_attn_implementation("eager")
        assert greedy_tokens(model) == wanted


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length", [1, 37, 40])
def test_the_mask_of_one_token_is_added_to_scores_and_begins_rows_aligned(
    length: int, dtype: torch.dtype
) -> None:
    padding_BT = torch.arange(length) >= torch.tensor([[0], [length // 2], [length - 1]])
    asked: list[dict[str, Any]] = []

    def plain(**settings: Any) -> torch.Tensor:
        asked.append(settings)
        return padding_BT[:, None, None]

    settings = {"attention_mask": padding_BT, "dtype": dtype, "allow_is_causal_skip": True}
    for num_new in ({"q_length": 1}, {"cache_position": torch.tensor([4])}):
        mask = token_mask(plain, **settings, **num_new)
        assert mask is not None
        assert mask.dtype == dtype
        assert torch.equal(mask == 0, padding_BT[:, None, None])
        assert torch.equal(mask == -torch.inf, ~padding_BT[:, None, None])
        assert mask.stride(0) % 16 == 0
        assert not asked[-1]["allow_is_causal_skip"]


def test_other_masks_are_those_of_transformers() -> None:
    made = torch.ones(1, 1, 2, 2, dtype=torch.bool)
    for settings in (
        {"q_length": 2, "attention_mask": torch.ones(1, 2), "dtype": torch.float32},
        {"q_length": 1, "attention_mask": None, "dtype": torch.float32},
        {"q_length": 1, "attention_mask": torch.ones(1, 2)},
        {"attention_mask": torch.ones(1, 2), "dtype": torch.float32},
    ):
        assert token_mask(lambda **_settings: made, **settings) is made


def test_the_plain_functions_are_back_after_an_error() -> None:
    functions: Any = ALL_ATTENTION_FUNCTIONS
    masks: Any = ALL_MASK_ATTENTION_FUNCTIONS
    plain, plain_mask = functions["sdpa"], masks["sdpa"]

    def fail(error: BaseException) -> None:
        with grouped(torch.nn.Linear(1, 1)):
            assert functions["sdpa"] is not plain
            assert masks["sdpa"] is not plain_mask
            raise error

    for error in (torch.OutOfMemoryError(), KeyboardInterrupt()):
        with pytest.raises(type(error)):
            fail(error)
        assert functions["sdpa"] is plain
        assert masks["sdpa"] is plain_mask


def test_a_target_that_has_answered_is_captured_as_before(
    make_target_dir: Callable[..., Path], tmp_path: Path
) -> None:
    config = TargetConfig(id=str(make_target_dir("qwen3", num_hidden_layers=2)))
    files, place = resolve(config), cpu_place(tmp_path / "logs", "generate")
    target = Target.load(files, (0, 1), "cpu", torch.float32)
    # of one token too, as `grouped` would take
    batches = [torch.arange(3, 3 + 2 * length).reshape(2, length) for length in (1, 9)]
    before = [target.forward(ids_BT) for ids_BT in batches]
    answerer = Answerer(
        files, config, GenerateConfig(max_new_tokens=4), DataConfig(max_len=512), place, target
    )
    assert answerer.answer([Dialogue("a", "d", [], ["One?"])], print) > 0
    assert not target.model._forward_pre_hooks
    for ids_BT, (hidden_KBTH, last_BTH) in zip(batches, before, strict=True):
        again_KBTH, again_BTH = target.forward(ids_BT)
        assert torch.equal(again_BTH, last_BTH)
        assert all(map(torch.equal, again_KBTH, hidden_KBTH))
