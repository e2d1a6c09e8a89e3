"""The loop answers each prompt as transformers answers it alone, whichever rows leave when."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config, PreTrainedModel

from dflash_pipeline.capture.decode_attention import grouped
from dflash_pipeline.capture.decode_loop import NO_NUMBER, decode
from dflash_pipeline.capture.draw import Draw
from dflash_pipeline.capture.roomy_cache import roomy
from dflash_pipeline.configs.schema import GenerateConfig
from tiny_targets import EVERY_FAMILY

LENGTHS = (3, 12, 7, 1, 12, 5, 9, 2)
ROOMS = (40, 40, 3, 17, 40, 1, 25, 40)


def prompts_of(lengths: Sequence[int]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, 250, (length,), generator=generator).tolist() for length in lengths]


def alone(model: PreTrainedModel, prompt: list[int], room: int, ends: set[int]) -> list[int]:
    """What transformers' own loop says."""
    with torch.inference_mode():
        found_T = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=room,
            do_sample=False,
            eos_token_id=sorted(ends) or None,
            pad_token_id=0,
        )[0]
    return found_T[len(prompt) :].tolist()


def rows_seen(model: Any) -> list[tuple[int, int]]:
    """Will hold the rows and positions of each forward pass."""
    seen: list[tuple[int, int]] = []

    def note(_module: object, _inputs: object, arguments: dict[str, Any]) -> None:
        seen.append(tuple(arguments["input_ids"].shape))

    model.register_forward_pre_hook(note, with_kwargs=True)
    return seen


def looped(
    model: Any,
    prompts: Sequence[Sequence[int]],
    rooms: Sequence[int],
    ends: set[int],
    look_every: int,
    tell: Callable[[int], None] = lambda _count: None,
    **sampling: Any,
) -> list[list[int]]:
    choice = Draw(GenerateConfig(**sampling), list(range(len(prompts))))
    with torch.inference_mode(), grouped(model), roomy(model):
        return decode(model, prompts, rooms, ends, choice, "cpu", look_every, tell)


@pytest.mark.parametrize("family", EVERY_FAMILY)
def test_answers_are_those_of_each_prompt_alone(
    family: str, make_model: Callable[..., PreTrainedModel]
) -> None:
    """In windows that slide, states of linear attention and experts too, as rows leave."""
    changes = {"num_hidden_layers": 3} if family.startswith("qwen3_5") else {"num_hidden_layers": 2}
    if family.startswith("qwen3_5"):
        changes["layer_types"] = ["linear_attention", "linear_attention", "full_attention"]
    elif family.startswith(("gemma3", "gpt_oss")):
        changes["layer_types"] = ["sliding_attention", "full_attention"]
    model = make_model(family, **changes)
    prompts = prompts_of(LENGTHS)
    free = [alone(model, *one, set()) for one in zip(prompts, ROOMS, strict=True)]
    # tokens that the answers have, so that some end early, and not all at once
    ends = {free[0][4], free[4][9], free[6][2]}
    wanted = [alone(model, *one, ends) for one in zip(prompts, ROOMS, strict=True)]
    assert len(set(map(len, wanted))) > 3
    seen = rows_seen(model)
    for look_every in (1, 5):
        seen.clear()
        assert looped(model, prompts, ROOMS, ends, look_every) == wanted
        rows = [count for count, _ in seen]
        assert rows == sorted(rows, reverse=True)
        assert len(set(rows)) > (2 if look_every == 1 else 1)
        assert 0 <= len(rows) - max(map(len, wanted)) < look_every


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3", "qwen3_5"])
def test_prompts_of_one_length_need_no_mask(
    family: str, make_model: Callable[..., PreTrainedModel]
) -> None:
    model = make_model(family)
    prompts = prompts_of((6, 6, 6))
    wanted = [alone(model, prompt, 12, set()) for prompt in prompts]
    masks: list[object] = []

    def note(_module: object, _inputs: object, arguments: dict[str, Any]) -> None:
        masks.append(arguments["attention_mask"])

    model.register_forward_pre_hook(note, with_kwargs=True)
    assert looped(model, prompts, (12, 12, 12), set(), 4) == wanted
    assert masks[1:] == [None] * 11


def test_a_draw_does_not_depend_on_who_left(make_model: Callable[..., PreTrainedModel]) -> None:
    model = make_model("qwen3", num_hidden_layers=2)
    prompts = prompts_of(LENGTHS)
    sampling = {"temperature": 1.0, "top_k": 50}
    free = looped(model, prompts, ROOMS, set(), 64, **sampling)
    ends = {free[0][3], free[1][8], free[6][2]}
    found = looped(model, prompts, ROOMS, ends, 2, **sampling)
    for answer, whole in zip(found, free, strict=True):
        stop = next((n for n, token in enumerate(whole) if token in ends), len(whole) - 1)
        assert answer == whole[: stop + 1]
    assert len(set(map(len, found))) > 4


def test_it_tells_how_many_tokens_there_are_at_each_look(
    make_model: Callable[..., PreTrainedModel],
) -> None:
    model = make_model("llama", num_hidden_layers=1)
    told: list[int] = []
    looped(model, prompts_of((4, 5)), (3, 10), set(), 4, told.append)
    assert told == [3 + 4, 3 + 8, 3 + 10]


class Found(dict[str, Any]):
    """What a model gives back."""

    logits: torch.Tensor


class Scripted(torch.nn.Module):
    """Says the same to every row, the next of its lines at each step; it knows no positions."""

    def __init__(self, script_KV: Sequence[Sequence[float]], cache: object) -> None:
        super().__init__()
        self.script_KV, self.cache = torch.tensor(script_KV), cache
        self.num_rows: list[int] = []

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None,
        use_cache: bool,
        return_dict: bool,
        past_key_values: object = None,
    ) -> Found:
        assert use_cache
        assert return_dict
        assert past_key_values is (self.cache if self.num_rows else None)
        found = Found(past_key_values=self.cache)
        found.logits = self.script_KV[len(self.num_rows)].expand(*input_ids.shape, -1)
        self.num_rows.append(len(input_ids))
        return found


def one_hot(*tokens: int) -> list[list[float]]:
    """Logits of 5 tokens for each step."""
    return torch.eye(5)[list(tokens)].tolist()


NANS = [float("nan")] * 5


@pytest.mark.parametrize("look_every", [1, 2, 64])
def test_where_a_token_was_no_number_all_answers_end(look_every: int) -> None:
    script = [*one_hot(1, 2), NANS, *one_hot(3, 3, 3, 3)]
    model = Scripted(script, object())
    found = looped(model, [[1], [1, 1]], [6, 6], {4}, look_every)
    assert found == [[1, 2, NO_NUMBER]] * 2
    assert len(model.num_rows) == {1: 3, 2: 4, 64: 6}[look_every]


def test_what_is_chosen_behind_an_end_is_not_heeded() -> None:
    model = Scripted([*one_hot(1, 4), NANS, NANS], object())
    assert looped(model, [[1], [1]], [4, 1], {4}, 64) == [[1, 4], [1]]
    assert model.num_rows == [2] * 4


def test_the_last_token_is_not_put_to_the_model() -> None:
    model = Scripted(one_hot(1, 2, 3), object())
    assert looped(model, [[1]], [3], {4}, 16) == [[1, 2, 3]]
    assert len(model.num_rows) == 3


class Noting:
    """A cache that notes which rows it is to keep."""

    def __init__(self) -> None:
        self.kept: list[list[int]] = []

    def reorder_cache(self, index_B: torch.Tensor) -> None:
        self.kept.append(index_B.tolist())


class Inheriting(Noting):
    """It may hold what the class above knows nothing of."""


def test_rows_leave_once_an_eighth_of_them_has_ended() -> None:
    cache = Noting()
    model = Scripted(one_hot(*[1] * 9), cache)
    looped(model, [[1]] * 10, [1, 9, 2, 9, 9, 5, 9, 9, 9, 9], set(), 1)
    assert cache.kept == [[1, 3, 4, 5, 6, 7, 8, 9], [0, 1, 2, 4, 5, 6, 7]]
    assert model.num_rows == [10, 10, 8, 8, 8, 7, 7, 7, 7]


def test_rows_stay_in_a_cache_that_does_not_say_how_they_leave() -> None:
    model = Scripted(one_hot(*[1] * 9), Inheriting())
    found = looped(model, [[1], [1]], [1, 9], set(), 1)
    assert found == [[1], [1] * 9]
    assert model.num_rows == [2] * 9


@pytest.mark.parametrize("family", ["mamba", "falcon_mamba", "mamba2", "minimax"])
def test_states_that_are_no_layers_keys_are_answered_as_by_transformers(family: str) -> None:
    """MiniMax's in a batch of one length: with padding transformers' own loop errs as well."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 272, "hidden_size": 32, "num_hidden_layers": 2, "eos_token_id": 258}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    others: dict[str, dict[str, Any]] = {
        "mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 1},
        "minimax": {**heads, "num_local_experts": 2, "intermediate_size": 48, "block_size": 16},
    }
    settings = sizes | {"initializer_range": 0.3} | others.get(family, {})
    if family == "minimax":
        settings["layer_types"] = ["linear_attention", "full_attention"]
    config = AutoConfig.for_model(family, **settings)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    if "cache_params" in inspect.signature(model.forward).parameters:
        pytest.skip("this transformers has them in an argument of their own")
    lengths = (5, 5, 5, 5) if family == "minimax" else (3, 12, 7, 1)
    prompts, rooms = prompts_of(lengths), (20, 20, 3, 12)
    wanted = [alone(model, *one, set()) for one in zip(prompts, rooms, strict=True)]
    for look_every in (1, 5):
        assert looped(model, prompts, rooms, set(), look_every) == wanted


@pytest.mark.parametrize("look_every", [1, 16])
def test_an_ended_row_stays_within_the_targets_positions(look_every: int) -> None:
    """It stays in the batch for a while, at positions that a learned table does not have."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=272, n_embd=32, n_layer=2, n_head=4, n_positions=24)
    model: Any = AutoModelForCausalLM.from_config(config).eval()
    prompts, rooms = prompts_of([23] + [3] * 15), [1] + [20] * 15
    wanted = [alone(model, *one, set()) for one in zip(prompts, rooms, strict=True)]
    assert looped(model, prompts, rooms, set(), look_every) == wanted


def test_a_model_without_a_cache_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="Scripted gives no cache"):
        looped(Scripted(one_hot(1, 1), None), [[1]], [2], set(), 1)


class Watched:
    """Chooses, and lets nothing wait for the GPU between the second step and the last."""

    def __init__(self, num_rows: int, last_step: int) -> None:
        self._draw = Draw(GenerateConfig(), range(num_rows))
        self._last_step = last_step

    def choose(self, logits_BV: torch.Tensor, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        found = self._draw.choose(logits_BV, step)
        if step == 1:
            torch.cuda.set_sync_debug_mode("error")
        if step == self._last_step:
            torch.cuda.set_sync_debug_mode("default")
        return found

    def keep(self, index_B: torch.Tensor) -> None:
        self._draw.keep(index_B)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "gemma3"])
def test_no_step_waits_for_the_gpu(family: str, make_model: Callable[..., PreTrainedModel]) -> None:
    model: Any = make_model(family).cuda()
    prompts, rooms = prompts_of(LENGTHS), [12] * len(LENGTHS)
    try:
        with torch.inference_mode(), grouped(model), roomy(model):
            choice = Watched(len(prompts), 11)
            decode(model, prompts, rooms, set(), choice, "cuda", 64, lambda _count: None)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "gemma3", "gpt_oss", "qwen3_5"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_on_a_gpu_in_fp32_the_answers_are_the_cpus(
    temperature: float, family: str, make_model: Callable[..., PreTrainedModel]
) -> None:
    model: Any = make_model(family)
    prompts = prompts_of(LENGTHS)
    sampling = {"temperature": temperature}
    free = looped(model, prompts, ROOMS, set(), 1, **sampling)
    ends = {free[0][4], free[4][9], free[6][2]}
    wanted = looped(model, prompts, ROOMS, ends, 1, **sampling)
    choice = Draw(GenerateConfig(temperature=temperature), range(len(prompts)))
    model.cuda()
    with torch.inference_mode(), grouped(model), roomy(model):
        found = decode(model, prompts, ROOMS, ends, choice, "cuda", 4, lambda _count: None)
    assert found == wanted
