"""Attention of one new token over a cache of fewer heads, without the cache expanded first.

Where there is a padding mask, transformers (5.17 still, 5.24 no more) copies keys and values to as
many heads as queries have, at each step and in each layer. Here the query heads of a key-value head
become the rows of one product with it, and SDPA's kernels do the rest: scores are fp32, as before.
The padding mask, too, is made once a step as those kernels take it, and without asking the device
whether there is any padding; transformers' own would be converted in each layer.
Letters: B sequences, G key-value heads, R query heads of each, T positions, D head dimension.
Trap: a mask must be one of all heads, or a row of the product would be masked as another head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

Attention = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]

# what models pass on and SDPA does not need: the mask has the window, one query is never causal
_IDLE = frozenset(("position_ids", "cache_position", "use_cache", "sliding_window", "is_causal"))
# by name; not annotated by transformers
_functions: Any = ALL_ATTENTION_FUNCTIONS
_masks: Any = ALL_MASK_ATTENTION_FUNCTIONS
# elements: of a mask whose rows begin elsewhere than at multiples of 8 (in some releases of 16) its
# kernels make a copy
_ALIGNED = 16


@contextmanager
def grouped(model: nn.Module) -> Iterator[None]:
    """Within it the model's `sdpa` attention is this one where it can be; other models, and other
    implementations than `sdpa`, do not see it. In one thread: the functions are the process's."""
    plain: Attention = _functions["sdpa"]
    plain_mask: Callable[..., torch.Tensor | None] = _masks["sdpa"]
    own = frozenset(map(id, model.modules()))

    def attention(
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        **settings: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        is_own = id(module) in own and all(map(_is_idle, settings, settings.values()))
        if is_own and can_group(query, key, value, attention_mask):
            return grouped_attention(query, key, value, attention_mask, scaling), None
        return plain(module, query, key, value, attention_mask, scaling=scaling, **settings)

    # not the model's setting: a name of our own would be unknown to what asks whether it is `sdpa`
    try:
        _functions["sdpa"] = attention
        _masks["sdpa"] = partial(token_mask, plain_mask)
        yield
    finally:
        _functions["sdpa"] = plain
        _masks["sdpa"] = plain_mask


def token_mask(
    plain: Callable[..., torch.Tensor | None], *inputs: Any, **settings: Any
) -> torch.Tensor | None:
    """The mask of transformers' `plain`; that of one new token as what is added to its scores."""
    padding_BT = settings.get("attention_mask")
    # how many are new: as a number, or in older releases as their positions
    num_new = settings.get("q_length")
    if num_new is None and (positions := settings.get("cache_position")) is not None:
        num_new = len(positions)
    if padding_BT is None or num_new != 1 or inputs:
        return plain(*inputs, **settings)
    # whether it could be left out, that is, whether all is seen, the device would have to say
    mask = plain(**settings | {"allow_is_causal_skip": False})
    dtype = settings.get("dtype")
    if mask is None or mask.dtype != torch.bool or dtype is None:
        return mask
    length = mask.shape[-1]
    width = -(-length // _ALIGNED) * _ALIGNED
    added = torch.full((*mask.shape[:-1], width), -torch.inf, dtype=dtype, device=mask.device)
    return added[..., :length].masked_fill_(mask, 0)


def _is_idle(name: str, setting: object) -> bool:
    """Whether it changes nothing here: sinks, a cap, a bias or dropout would, and go elsewhere."""
    return name in _IDLE or setting is None or (isinstance(setting, (int, float)) and not setting)


def can_group(
    query_BHSD: torch.Tensor,
    key_BGTD: torch.Tensor,
    value_BGTD: torch.Tensor,
    mask: torch.Tensor | None,
) -> bool:
    """Whether it is one new token over fewer heads, with no mask or one of all heads."""
    _, num_heads, num_new, size = query_BHSD.shape
    num_groups, length = key_BGTD.shape[1:3]
    return (
        num_new == 1
        and num_groups < num_heads
        and num_heads % num_groups == 0
        and key_BGTD.shape == value_BGTD.shape
        and key_BGTD.shape[3] == size
        and (mask is None or (mask.ndim == 4 and mask.shape[1:] == (1, 1, length)))
    )


def grouped_attention(
    query_BH1D: torch.Tensor,
    key_BGTD: torch.Tensor,
    value_BGTD: torch.Tensor,
    mask_B11T: torch.Tensor | None,
    scaling: float | None,
) -> torch.Tensor:
    """softmax(q k^T scaling + mask) v as [B, 1, H, D]; head h reads key-value head h // R.

    The mask: boolean, true where a position is seen, or what is added to the scores.
    """
    num_rows, num_heads, _, size = query_BH1D.shape
    num_groups = key_BGTD.shape[1]
    query_BGRD = query_BH1D.reshape(num_rows, num_groups, num_heads // num_groups, size)
    found_BGRD = functional.scaled_dot_product_attention(
        query_BGRD, key_BGTD, value_BGTD, attn_mask=mask_B11T, scale=scaling
    )
    return found_BGRD.reshape(num_rows, 1, num_heads, size)
