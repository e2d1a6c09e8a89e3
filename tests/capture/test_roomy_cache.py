"""A cache with room holds what a concatenated one does, without moving it at each token."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from random import Random
from typing import Any

import pytest
import torch
from transformers import Cache, DynamicCache, PreTrainedModel, StaticCache
from transformers.cache_utils import DynamicLayer, StaticLayer

from dflash_pipeline.capture.roomy_cache import ROOM, RoomyLayer, roomy

Tokens = Callable[[PreTrainedModel], list[list[int]]]


def test_a_layer_holds_what_the_growing_one_does() -> None:
    layer, plain = RoomyLayer(), DynamicLayer()
    generator = torch.Generator().manual_seed(0)
    places = []
    for length in (7, *[1] * 80, 3, 0, ROOM + 1, 1):
        new = [torch.randn((2, 3, length, 4), generator=generator) for _ in range(2)]
        for found, wanted in zip(layer.update(*new), plain.update(*new), strict=True):
            assert torch.equal(found, wanted)
        assert layer.get_seq_length() == plain.get_seq_length()
        places.append(layer.keys.data_ptr())
    # moved when full, and not before
    assert len(set(places[:81])) == 3
    assert len(set(places[: ROOM + 1])) == 1


@pytest.mark.parametrize("seed", range(20))
def test_whatever_is_done_to_a_layer_it_stays_what_the_growing_one_is(seed: int) -> None:
    """What transformers' own methods do to keys and values; what was given out stays as it was."""
    layer, plain, random = RoomyLayer(), DynamicLayer(), Random(seed)
    generator = torch.Generator().manual_seed(seed)
    given: list[tuple[torch.Tensor, torch.Tensor]] = []
    for _ in range(60):
        num_rows = len(plain.keys) if plain.get_seq_length() else 3
        order = torch.randint(num_rows, (num_rows,), generator=generator)
        calls: list[tuple[str, Any]] = [
            ("crop", -random.randrange(1, 3)),
            ("reorder_cache", order),
            ("batch_select_indices", order[: max(1, num_rows - 1)]),
            ("batch_repeat_interleave", 2 if num_rows < 4 else 1),
        ]
        if plain.get_seq_length() > 3 and random.random() < 0.3:
            name, argument = random.choice(calls)
            for one in (layer, plain):
                getattr(one, name)(argument)
            num_rows = len(plain.keys)
        elif random.random() < 0.1:
            # goes on as a copy; the original must not write into it
            old, layer = layer, deepcopy(layer)
            if plain.get_seq_length():
                old.update(*(torch.zeros(num_rows, 2, 1, width) for width in (4, 0)))
        length = random.choice([1, 1, 1, 2, ROOM + 1])
        # values of no channels: of a layer that needs none
        new = [torch.randn((num_rows, 2, length, width), generator=generator) for width in (4, 0)]
        found, wanted = layer.update(*new), plain.update(*new)
        assert all(map(torch.equal, found, wanted))
        assert layer.get_seq_length() == plain.get_seq_length()
        given += [(one, one.clone()) for one in found]
        assert all(torch.equal(one, before) for one, before in given)


def test_rows_that_are_left_keep_their_room() -> None:
    """Fewer rows than there were, as many times as one likes; and the others' memory is free."""
    layer, plain = RoomyLayer(), DynamicLayer()
    generator = torch.Generator().manual_seed(0)
    for index in ([0, 2, 3, 4], [1, 3], [0]):
        num_rows = len(layer.keys) if layer.is_initialized else 5
        new = [torch.randn((num_rows, 3, 7, 4), generator=generator) for _ in range(2)]
        for one in (layer, plain):
            one.update(*new)
            one.reorder_cache(torch.tensor(index))
        assert torch.equal(layer.keys, plain.keys)
        assert torch.equal(layer.values, plain.values)
        place = layer.keys.data_ptr()
        token = torch.randn((len(index), 3, 1, 4), generator=generator)
        for found, wanted in zip(
            layer.update(token, -token), plain.update(token, -token), strict=True
        ):
            assert torch.equal(found, wanted)
        # nothing was copied a second time
        assert layer.keys.data_ptr() == place


def test_a_layer_that_was_cut_from_outside_goes_on_with_what_is_left() -> None:
    layer = RoomyLayer()
    first = torch.arange(24.0).reshape(1, 1, 6, 4)
    layer.update(first, -first)
    before = layer.keys
    layer.keys, layer.values = layer.keys[:, :, :2], layer.values[:, :, :2]
    new = torch.full((1, 1, 1, 4), 9.0)
    key, value = layer.update(new, new)
    assert torch.equal(key, torch.cat([first[:, :, :2], new], dim=2))
    assert torch.equal(value, torch.cat([-first[:, :, :2], new], dim=2))
    assert torch.equal(before, first)


@pytest.mark.parametrize(
    ("family", "kinds"),
    [
        ("llama", {"RoomyLayer"}),
        ("gemma3", {"RoomyLayer", "DynamicSlidingWindowLayer"}),
        ("gpt_oss", {"RoomyLayer", "DynamicSlidingWindowLayer"}),
        # a state of its own, of another class in each transformers
        ("qwen3_5", None),
    ],
)
def test_padded_batches_are_answered_as_before(
    family: str,
    kinds: set[str] | None,
    make_model: Callable[..., PreTrainedModel],
    greedy_tokens: Tokens,
) -> None:
    model = make_model(family)
    wanted = greedy_tokens(model)
    seen: set[str] = set()

    def look(_module: object, _inputs: object, arguments: dict[str, Any]) -> None:
        for cache in arguments.values():
            if isinstance(cache, Cache):
                seen.update(type(layer).__name__ for layer in cache.layers)

    handle = model.get_decoder().register_forward_pre_hook(look, with_kwargs=True)
    with roomy(model):
        assert greedy_tokens(model) == wanted
    assert kinds is None or seen == kinds
    seen.clear()
    assert greedy_tokens(model) == wanted
    assert "RoomyLayer" not in seen
    handle.remove()


class Called(torch.nn.Module):
    """Gives back the kinds of layers that it was called with."""

    def forward(self, cache: DynamicCache) -> list[type]:
        return list(map(type, cache.layers))


def test_layers_of_a_dynamic_cache_become_roomy_also_when_in_use(
    make_model: Callable[..., PreTrainedModel],
) -> None:
    config = make_model("llama", num_hidden_layers=2).config
    used, fixed = DynamicCache(config=config), StaticCache(config=config, max_cache_len=4)
    first, new = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 1, 8)
    used.update(first, -first, 0)
    called = Called()
    with roomy(called):
        assert called(cache=used) == [RoomyLayer] * 2
        assert called(cache=fixed) == [StaticLayer] * 2
    key, value = used.update(new, -new, 0)
    assert torch.equal(key, torch.cat([first, new], dim=2))
    assert torch.equal(value, -key)
    with pytest.raises(TypeError), roomy(called):
        called(1, 2)
    assert called(cache=DynamicCache(config=config)) == [DynamicLayer] * 2
