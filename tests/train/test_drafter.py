"""The network against its contract, written out by hand, and against Qwen3's own layer."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RotaryEmbedding

from dflash_pipeline.train.drafter import Drafter, Norm
from dflash_pipeline.train.mask import Visibility, grouped_attend
from dflash_pipeline.train.shape import DrafterShape, tensor_shapes


@pytest.fixture(params=["full", "sliding"])
def any_shape(request: pytest.FixtureRequest, shape: DrafterShape) -> DrafterShape:
    if request.param == "full":
        return shape
    kinds = ("sliding_attention", "full_attention")
    return replace(shape, layer_types=kinds, sliding_window=5)


def _drafter(shape: DrafterShape) -> Drafter:
    drafter = Drafter(shape)
    drafter.initialise(0)
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            # norms that differ from 1 and matrices large enough to matter
            parameter.mul_(10 if parameter.dim() > 1 else 1)
            if "norm" in name:
                parameter.copy_(torch.rand(parameter.shape) + 0.5)
    return drafter


def _norm(state: Tensor, weight: Tensor) -> Tensor:
    return state / (state.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def _turned(state_NGD: Tensor, position_N: Tensor) -> Tensor:
    half = state_NGD.shape[-1] // 2
    angle = position_N[:, None, None] * 1e4 ** (-torch.arange(half) / half)
    one, two = state_NGD[..., :half], state_NGD[..., half:]
    parts = one * angle.cos() - two * angle.sin(), two * angle.cos() + one * angle.sin()
    return torch.cat(parts, -1)


def _by_hand(drafter: Drafter, feature_TKH: Tensor, anchor: int, block_SH: Tensor) -> Tensor:
    """One block of one document, as algorithm and contract say it, without any shared code."""
    weights, shape = dict(drafter.named_parameters()), drafter.shape
    joined = torch.cat([weights[f"fc.{k}.weight"] for k in range(3)], dim=1)
    context_TH = _norm(feature_TKH[:anchor].flatten(1) @ joined.T, weights["hidden_norm.weight"])
    position_T = torch.arange(anchor).float()
    position_S = torch.arange(anchor, anchor + len(block_SH)).float()
    for index, kind in enumerate(shape.layer_types):
        own = {
            name.removeprefix(f"layers.{index}.").removesuffix(".weight"): tensor
            for name, tensor in weights.items()
        }
        normed_SH = _norm(block_SH, own["input_layernorm"])
        both = torch.cat((context_TH, normed_SH))
        place = torch.cat((position_T, position_S))
        key = (both @ own["self_attn.k_proj"].T).view(-1, 1, 8)
        key = _turned(_norm(key, own["self_attn.k_norm"]), place).expand(-1, 2, -1)
        value = (both @ own["self_attn.v_proj"].T).view(-1, 1, 8).expand(-1, 2, -1)
        query = (normed_SH @ own["self_attn.q_proj"].T).view(-1, 2, 8)
        query = _turned(_norm(query, own["self_attn.q_norm"]), position_S)
        score = torch.einsum("sed,med->esm", query, key) / 8**0.5
        if kind == "sliding_attention":
            distance = position_S[:, None] - place
            hidden = (distance < 0) | (distance > shape.sliding_window - 1)
            score = score.masked_fill(hidden, -torch.inf)
        mixed = torch.einsum("esm,med->sed", score.softmax(-1), value).flatten(1)
        block_SH = block_SH + mixed @ own["self_attn.o_proj"].T
        normed_SH = _norm(block_SH, own["post_attention_layernorm"])
        gate = F.silu(normed_SH @ own["mlp.gate_proj"].T) * (normed_SH @ own["mlp.up_proj"].T)
        block_SH = block_SH + gate @ own["mlp.down_proj"].T
    return _norm(block_SH, weights["norm.weight"])


def test_names_and_shapes_are_those_of_the_shape(shape: DrafterShape) -> None:
    found = {name: tuple(value.shape) for name, value in Drafter(shape).state_dict().items()}
    assert found == tensor_shapes(shape)


def test_packed_blocks_equal_the_contract_written_out(any_shape: DrafterShape) -> None:
    torch.manual_seed(0)
    drafter = _drafter(any_shape)
    lengths, anchors = (9, 12), ((2, 7), (1, 11))
    feature_NKH = torch.randn(sum(lengths), 3, 8)
    block_QH = torch.randn(16, 8)
    start_A = torch.tensor([0, 0, 9, 9], dtype=torch.int32)
    anchor_A = torch.tensor([2, 7, 10, 20], dtype=torch.int32)
    position_N = torch.cat([torch.arange(length) for length in lengths])
    position_Q = ((anchor_A - start_A)[:, None] + torch.arange(4)).flatten()
    visible = Visibility(anchor_A, start_A, 21, 4, any_shape.sliding_window)
    hidden_QH = drafter(
        drafter.context(feature_NKH),
        position_N,
        block_QH,
        position_Q,
        grouped_attend(visible, any_shape.layer_types),
    )
    block = 0
    for document, feature_TKH in enumerate(feature_NKH.split(lengths)):
        for anchor in anchors[document]:
            rows = slice(4 * block, 4 * block + 4)
            wanted = _by_hand(drafter, feature_TKH, anchor, block_QH[rows])
            torch.testing.assert_close(hidden_QH[rows], wanted, rtol=1e-4, atol=1e-5)
            block += 1


def test_one_block_with_kept_keys_equals_the_contract(any_shape: DrafterShape) -> None:
    torch.manual_seed(1)
    drafter = _drafter(any_shape)
    feature_TKH, block_SH = torch.randn(11, 3, 8), torch.randn(4, 8)
    # the context comes in two parts, as decoding appends it
    parts = [
        drafter.context_keys_values(drafter.context(feature_TKH[part]), torch.arange(11)[part])
        for part in (slice(0, 6), slice(6, 11))
    ]
    # beside it stands a text of four positions, whose room behind them must not be seen
    room = torch.full((2, 11, 1, 8), 50.0)
    keys_values = []
    for first, second in zip(*parts, strict=True):
        key_value = []
        for one, two in zip(first, second, strict=True):
            cache = room.clone()
            cache[0], cache[1, :4] = torch.cat((one, two)), one[:4]
            key_value.append(cache)
        keys_values.append((key_value[0], key_value[1]))
    hidden_BSH = drafter.draft(keys_values, [11, 4], torch.stack((block_SH, block_SH)))
    alone = [(key[:1], value[:1]) for key, value in keys_values]
    alone_BSH = drafter.draft(alone, [11], block_SH[None])
    wanted = _by_hand(drafter, feature_TKH, 11, block_SH)
    shorter = _by_hand(drafter, feature_TKH[:4], 4, block_SH)
    for found, expected in (
        (alone_BSH[0], wanted),
        (hidden_BSH[0], wanted),
        (hidden_BSH[1], shorter),
    ):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    # of several blocks each sees the context before it, and no other block
    contexts = [[11, 4, 4], [0, 3, 2]]
    block_BASH = torch.randn(2, 3, 4, 8)
    found_BASH = drafter.draft_blocks(keys_values, contexts, block_BASH)
    for text, of_text in enumerate(contexts):
        for number, anchor in enumerate(of_text):
            block_SH = block_BASH[text, number]
            expected = _by_hand(drafter, feature_TKH[:anchor], anchor, block_SH)
            torch.testing.assert_close(found_BASH[text, number], expected, rtol=1e-4, atol=1e-5)


def test_a_layer_without_context_is_qwen3s_own(shape: DrafterShape) -> None:
    torch.manual_seed(2)
    shape = replace(shape, layer_types=("full_attention",), num_layers=1)
    drafter = _drafter(shape)
    config = Qwen3Config(
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        vocab_size=97,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        attn_implementation="eager",
    )
    theirs = Qwen3DecoderLayer(config, 0)
    theirs.load_state_dict(drafter.layers[0].state_dict())
    block_SH, position_S = torch.randn(6, 8), torch.arange(3, 9)
    turn = Qwen3RotaryEmbedding(config)(block_SH[None], position_S[None])
    wanted = theirs(
        block_SH[None], position_embeddings=turn, attention_mask=torch.zeros(1, 1, 6, 6)
    )
    wanted = wanted[0] if isinstance(wanted, tuple) else wanted
    # only distances count: the block may as well begin at 0
    nothing = torch.zeros(1, 0, 1, 8)
    (hidden_SH,) = drafter.draft([(nothing, nothing)], [0], block_SH[None])
    wanted_SH = _norm(wanted.view(6, 8), drafter.norm.weight)
    torch.testing.assert_close(hidden_SH, wanted_SH, rtol=1e-4, atol=1e-5)


def test_the_anchors_own_feature_and_later_ones_change_nothing(shape: DrafterShape) -> None:
    drafter = _drafter(shape)
    feature_NKH, block_QH = torch.randn(10, 3, 8), torch.randn(4, 8)
    anchor, start = torch.tensor([5], dtype=torch.int32), torch.tensor([0], dtype=torch.int32)
    visible = Visibility(anchor, start, 10, 4, 0)

    def run() -> Tensor:
        return drafter(
            drafter.context(feature_NKH),
            torch.arange(10),
            block_QH,
            torch.arange(5, 9),
            grouped_attend(visible, shape.layer_types),
        )

    before = run()
    feature_NKH[5:] = 7.0
    assert torch.equal(run(), before)
    feature_NKH[4] = 7.0
    assert not torch.equal(run(), before)


def test_norms_round_once_after_normalising_in_fp32() -> None:
    norm = Norm(64, 1e-6)
    with torch.no_grad():
        norm.weight.copy_(torch.rand(64) + 0.5)
    norm.to(torch.bfloat16)
    state = (torch.randn(5, 64) * 100).bfloat16()
    exact = state.float() / (state.float().square().mean(-1, keepdim=True) + 1e-6).sqrt()
    assert torch.equal(norm(state), norm.weight * exact.bfloat16())


def test_start_weights_depend_on_the_seed_alone(shape: DrafterShape) -> None:
    first, again, other = Drafter(shape), Drafter(shape), Drafter(shape)
    for drafter, seed in ((first, 3), (again, 3), (other, 4)):
        drafter.initialise(seed)
    pairs = zip(first.parameters(), again.parameters(), strict=True)
    assert all(torch.equal(one, two) for one, two in pairs)
    assert not torch.equal(first.fc[0].weight, other.fc[0].weight)
    assert float(first.fc[0].weight.detach().std()) == pytest.approx(0.02, rel=0.3)
    assert torch.equal(first.norm.weight, torch.ones(8))


@pytest.mark.parametrize("seed", [3, -1, -(1 << 63), (1 << 63) - 1])
def test_start_weights_are_the_same_whoever_draws_them(seed: int, shape: DrafterShape) -> None:
    alone, together = Drafter(shape), Drafter(shape)
    before = torch.get_num_threads()
    try:
        for drafter, num_threads in ((alone, 1), (together, 5)):
            torch.set_num_threads(num_threads)
            drafter.initialise(seed)
    finally:
        torch.set_num_threads(before)
    pairs = zip(alone.parameters(), together.parameters(), strict=True)
    assert all(torch.equal(one, two) for one, two in pairs)
    # each matrix has numbers of its own
    matrices = [one.detach().flatten()[:8].tolist() for one in alone.parameters() if one.dim() > 1]
    assert len(set(map(tuple, matrices))) == len(matrices)
    assert all(one.requires_grad for one in alone.parameters())
