"""How a server's model of a drafter is held against ours: weights, one block, captured states."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dflash_pipeline.train.shape import SLIDING, DrafterShape
from server_cases import ANCHOR, LAYER_IDS, TARGETS, TEXT_T, Case
from tiny_targets import tiny_model


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a server's model gave for `Case`; the same positions as `ours` computes."""

    far_keys: list[Tensor]
    keys: list[Tensor]
    values: list[Tensor]
    hidden_SH: Tensor
    logits_SV: Tensor


def ours(case: Case) -> Found:
    """The reference: this package's drafter over the same text."""
    drafter = case.drafter
    with torch.no_grad():
        context_NH = drafter.context(case.feature_NKH)
        far = drafter.context_keys_values(context_NH, case.far_N)
        near = drafter.context_keys_values(context_NH, torch.arange(ANCHOR))
        block_1SH = case.head.embed(case.ids_S[None])
        pairs = [(key[None], value[None]) for key, value in near]
        hidden_SH = drafter.draft(pairs, [ANCHOR], block_1SH)[0]
        return Found(
            far_keys=[key for key, _ in far],
            keys=[key for key, _ in near],
            values=[value for _, value in near],
            hidden_SH=hidden_SH,
            logits_SV=case.head.logits(hidden_SH),
        )


def errors(expected: Found, found: Found) -> dict[str, float]:
    """Largest absolute difference of each stage; NaN counts as infinite."""

    def largest(one: Tensor, other: Tensor) -> float:
        assert one.shape == other.shape, (one.shape, other.shape)
        return float((one.float() - other.float()).abs().nan_to_num(nan=torch.inf).max())

    lists = {
        "far_keys": (expected.far_keys, found.far_keys),
        "keys": (expected.keys, found.keys),
        "values": (expected.values, found.values),
        "hidden": ([expected.hidden_SH], [found.hidden_SH]),
        "logits": ([expected.logits_SV], [found.logits_SV]),
    }
    return {
        name: max(largest(a, b) for a, b in zip(one, other, strict=True))
        for name, (one, other) in lists.items()
    }


def attend(
    query_SED: Tensor,
    key_PGD: Tensor,
    value_PGD: Tensor,
    *,
    is_causal: bool,
    window: int | None,
    scale: float,
) -> Tensor:
    """The last S of P positions over all P -> [S, E, D]; `window` counts a query's own position."""
    num_rows, num_keys = len(query_SED), len(key_PGD)
    position_S = torch.arange(num_keys - num_rows, num_keys)[:, None]
    back_SP = position_S - torch.arange(num_keys)
    seen_SP = back_SP >= 0 if is_causal else torch.ones_like(back_SP, dtype=torch.bool)
    if window is not None:
        seen_SP = seen_SP & (back_SP.abs() < window)
    mixed_ESD = F.scaled_dot_product_attention(
        query_SED.transpose(0, 1)[None],
        key_PGD.transpose(0, 1)[None],
        value_PGD.transpose(0, 1)[None],
        attn_mask=seen_SP,
        scale=scale,
        enable_gqa=True,
    )[0]
    return mixed_ESD.transpose(0, 1)


def same(found: Mapping[str, object], expected: Mapping[str, object]) -> None:
    """ValueError names what a server read otherwise than the drafter was trained."""
    wrong = [f"{key} {found[key]!r}, expected {expected[key]!r}" for key in expected]
    wrong = [line for line, key in zip(wrong, expected, strict=True) if found[key] != expected[key]]
    if wrong:
        raise ValueError("read otherwise: " + "; ".join(wrong))


def meaning(shape: DrafterShape) -> dict[str, object]:
    """What every server must read out of config.json, in our conventions."""
    return {
        "layer_ids": list(shape.layer_ids),
        "mask_token_id": shape.mask_token_id,
        "block_size": shape.block_size,
        "causal": [kind == SLIDING for kind in shape.layer_types],
        "windows": [shape.sliding_window if t == SLIDING else None for t in shape.layer_types],
    }


def check_weights(case: Case, parameters: Mapping[str, Tensor], load: Callable[[], object]) -> None:
    """`load` fills parameters of NaN; ValueError unless each then holds what was exported."""
    with torch.no_grad():
        for parameter in parameters.values():
            parameter.fill_(torch.nan)
    load()
    for name, tensor in case.stacked().items():
        held = parameters.get(name)
        if held is None:
            raise ValueError(f"it has no parameter {name}")
        is_padded = name in ("embed_tokens.weight", "lm_head.weight")
        if not torch.equal(held[: len(tensor)] if is_padded else held, tensor):
            raise ValueError(f"{name} holds something else than was exported")


def captured_error(case_states: Sequence[Tensor], family: str) -> float:
    """Largest difference of a server's captured states over `TEXT_T` from transformers' own."""
    tiny, changes = TARGETS[family]
    with torch.no_grad():
        model = tiny_model(tiny, **changes)
        expected = model(TEXT_T[None], output_hidden_states=True).hidden_states
    pairs = zip(LAYER_IDS, case_states, strict=True)
    return max(float((state - expected[index + 1][0]).abs().max()) for index, state in pairs)


def compared(case: Case, block: Callable[[Tensor], Found]) -> dict[str, Any]:
    """The differences of `block`, a server's way from feature_NKH to one block, from ours; control:
    the same where the features come in another order."""
    expected, found = ours(case), block(case.feature_NKH)
    mixed = block(case.feature_NKH.roll(1, dims=1))
    return {"errors": errors(expected, found), "control": errors(expected, mixed)["hidden"]}


def one_process(folder: Path) -> dict[str, Any]:
    """What either server's `init_distributed_environment` is told of a process that is alone."""
    return {
        "world_size": 1,
        "rank": 0,
        "local_rank": 0,
        "distributed_init_method": f"file://{folder}/rendezvous",
        "backend": "gloo",
    }


@contextmanager
def with_forward(kind: Any, forward: Callable[..., Tensor]) -> Iterator[None]:
    """All modules of a server's class attend in this way meanwhile."""
    kernel = kind.forward
    kind.forward = forward
    try:
        yield
    finally:
        kind.forward = kernel
