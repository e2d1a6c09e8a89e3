"""The gate passes a true capture of each family and refuses each fault made on purpose."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config

from dflash_pipeline.capture.gate import Tokens, check
from dflash_pipeline.capture.row_errors import noise_bound
from dflash_pipeline.capture.target import Target
from dflash_pipeline.store.calibration import Calibrated, calibrate
from dflash_pipeline.store.rows import decode, encode
from dflash_pipeline.store.spec import FORMAT, StoreSpec
from dflash_pipeline.store.table import teacher_positions
from tiny_targets import EVERY_FAMILY

LAYER_IDS = (0, 2, 4)
LENGTHS = (21, 9)
PLAIN = Calibrated()
Stored = dict[int, tuple[np.ndarray, np.ndarray]]


def _spec(
    last_mode: str = "bf16", last_rows: str = "teacher", hidden_mode: str = "bf16"
) -> StoreSpec:
    return StoreSpec(
        format=FORMAT,
        target_id="tiny",
        target_hash="",
        target_dtype="fp32",
        quantisation="",
        layer_ids=LAYER_IDS,
        num_target_layers=6,
        hidden_size=32,
        vocab_size=272,
        hidden_mode=hidden_mode,
        last_mode=last_mode,
        last_rows=last_rows,
        calibration_hash="",
        tokenizer_hash="",
        template_hash="",
        template_args="{}",
        max_len=64,
        overlong="truncate",
    )


def _repeated(sample: int) -> tuple[np.ndarray, np.ndarray]:
    """The first sample is one token again and again: all of its rows are alike."""
    ids_T, mask_T = _tokens(sample)
    return (np.full_like(ids_T, 7), mask_T) if sample == 0 else (ids_T, mask_T)


def _tokens(sample: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(sample)
    mask_T = (np.arange(LENGTHS[sample]) > 2).astype(np.uint8)
    return random.integers(0, 256, LENGTHS[sample]).astype(np.uint32), mask_T


def _captured(
    target: Target,
    layer_ids: tuple[int, ...] = LAYER_IDS,
    shift: int = 0,
    tokens: Tokens = _tokens,
) -> Stored:
    """What a capture would store: `layer_ids` may be wrong ones, rows may be moved by `shift`."""
    stored = {}
    capturing = Target(target.model, layer_ids)
    for sample in range(len(LENGTHS)):
        ids_T, mask_T = tokens(sample)
        hidden_KBTH, last_BTH = capturing.forward(torch.from_numpy(ids_T.astype(np.int64))[None])
        hidden_TKH = torch.stack(hidden_KBTH)[:, 0].transpose(0, 1).roll(shift, 0)
        last_MH = last_BTH[0].roll(shift, 0)[teacher_positions(mask_T, "teacher")]
        stored[sample] = (
            encode(hidden_TKH.numpy(), "bf16"),
            encode(last_MH.numpy(), "bf16"),
        )
    return stored


def _check(
    target: Target,
    stored: Stored,
    spec: StoreSpec | None = None,
    calibrated: Calibrated = PLAIN,
    tokens: Tokens = _tokens,
    by_other_code: bool = False,
) -> list[str]:
    return check(
        target,
        spec or _spec(),
        calibrated,
        range(len(LENGTHS)),
        tokens,
        stored.__getitem__,
        by_other_code=by_other_code,
    )


def _calibrated(target: Target, mode: str) -> Calibrated:
    states = [
        target.forward(torch.from_numpy(_tokens(s)[0].astype(np.int64))[None]) for s in (0, 1)
    ]
    hidden_NKH = torch.cat([torch.stack(hidden)[:, 0].transpose(0, 1) for hidden, _ in states])
    last_NH = torch.cat([last_BTH[0] for _, last_BTH in states])
    found = calibrate(hidden_NKH.numpy(), last_NH.numpy(), mode, mode)
    return Calibrated.of(found, len(LAYER_IDS), {})


def _quantised(stored: Stored, mode: str, calibrated: Calibrated) -> Stored:
    return {
        sample: (
            encode(decode(hidden, "bf16"), mode, calibrated.hidden),
            encode(decode(last, "bf16"), mode, calibrated.last),
        )
        for sample, (hidden, last) in stored.items()
    }


@pytest.fixture(scope="module")
def target(make_model: Callable[..., PreTrainedModel]) -> Target:
    return Target(make_model("qwen3"), LAYER_IDS)


@pytest.mark.parametrize("family", EVERY_FAMILY)
def test_a_true_capture_passes_and_every_fault_was_seen_to_fail(
    family: str, make_model: Callable[..., PreTrainedModel]
) -> None:
    target = Target(make_model(family), LAYER_IDS)
    lines = _check(target, _captured(target))
    assert [line.split(":")[0] for line in lines] == [
        "layer 0",
        "layer 2",
        "layer 4",
        "last",
        "logits",
    ]
    text = "\n".join(lines)
    for fault in ("embedding", "layer 1", "layer 3", "layer 5", "the next token's row"):
        assert fault in text
    for fault in ("the norm missing", "the norm done twice"):
        assert fault in text
    assert "not applicable" not in text


@pytest.mark.parametrize("mode", ["int8", "int4"])
@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_quantised_rows_pass_and_their_faults_do_not(
    family: str, mode: str, make_model: Callable[..., PreTrainedModel]
) -> None:
    target = Target(make_model(family), LAYER_IDS)
    spec, calibrated = _spec(mode, hidden_mode=mode), _calibrated(target, mode)
    lines = _check(target, _quantised(_captured(target), mode, calibrated), spec, calibrated)
    assert len(lines) == 5
    assert "not applicable" not in "\n".join(lines)
    for wrong, name in (
        (_captured(target, (0, 2, 3)), "layer 4 differs"),
        (_captured(target, shift=1), "layer 2 differs .*last differs .*logits differs"),
    ):
        with pytest.raises(ValueError, match=name):
            _check(target, _quantised(wrong, mode, calibrated), spec, calibrated)
    # rows of another calibration
    swapped = replace(calibrated, hidden=calibrated.hidden[::-1])
    with pytest.raises(ValueError, match=r"layer 0 differs .*layer 4 differs"):
        _check(target, _quantised(_captured(target), mode, swapped), spec, calibrated)


def _nearly_one_norm(make_model: Callable[..., PreTrainedModel]) -> Target:
    """A second norm moves the logits by less than int4 does."""
    model = make_model("qwen3")
    torch.manual_seed(0)
    nn.init.normal_(model.model.norm.weight, 1.0, 0.02)
    return Target(model, LAYER_IDS)


def _other_last(target: Target, stored: Stored, norms: int) -> Stored:
    """`stored` with rows of last that went through so many final norms."""
    changed = {}
    for sample, (hidden, _) in stored.items():
        ids_T, mask_T = _tokens(sample)
        raw: list[torch.Tensor] = []
        hook = target.norm.register_forward_pre_hook(lambda _n, given, to=raw: to.append(given[0]))
        with torch.no_grad():
            target.model(torch.from_numpy(ids_T.astype(np.int64))[None])
            hook.remove()
            last_TH = raw[0][0]
            for _ in range(norms):
                last_TH = target.norm(last_TH)
        rows = last_TH[teacher_positions(mask_T, "teacher")].numpy()
        changed[sample] = hidden, encode(rows, "bf16")
    return changed


@pytest.mark.parametrize("mode", ["bf16", "int8", "int4"])
def test_a_fault_within_the_noise_of_the_mode_does_not_decide(
    mode: str, make_model: Callable[..., PreTrainedModel]
) -> None:
    target = _nearly_one_norm(make_model)
    calibrated = PLAIN if mode == "bf16" else _calibrated(target, mode)
    spec = _spec(mode, hidden_mode=mode)
    true = _captured(target)

    def stored_as(stored: Stored) -> Stored:
        return stored if mode == "bf16" else _quantised(stored, mode, calibrated)

    lines = _check(target, stored_as(true), spec, calibrated)
    assert all("; if it were another (must exceed 0." in line for line in lines)
    told = [part for line in lines for part in line.split("; ") if "not separable" in part]
    assert [part.split(":")[0] for part in told] == ["the norm done twice"] * (mode == "int4")
    assert all(part.endswith(", not separable at int4") for part in told)
    for wrong, text in (
        (_captured(target, (0, 2, 3)), "layer 4 differs"),
        (_captured(target, shift=1), "layer 2 differs .*last differs .*logits differs"),
        (_other_last(target, true, 0), "last differs .*logits differs"),
        (_other_last(target, true, 2), "the norm done twice" if mode == "int4" else "last differs"),
    ):
        with pytest.raises(ValueError, match=text):
            _check(target, stored_as(wrong), spec, calibrated)


@pytest.mark.parametrize("layer_ids", [(1, 2, 4), (0, 1, 4), (0, 2, 3), (0, 2, 5)])
def test_a_layer_off_by_one_is_refused_by_name(target: Target, layer_ids: tuple[int, ...]) -> None:
    (place,) = (k for k in range(3) if layer_ids[k] != LAYER_IDS[k])
    with pytest.raises(ValueError, match=f"layer {LAYER_IDS[place]} differs from the target's own"):
        _check(target, _captured(target, layer_ids))


def test_layers_in_another_order_are_refused(target: Target) -> None:
    with pytest.raises(ValueError, match=r"layer 0 differs .*layer 4 differs"):
        _check(target, _captured(target, (4, 2, 0)))


@pytest.mark.parametrize("shift", [1, -1])
def test_rows_moved_by_one_token_are_refused(target: Target, shift: int) -> None:
    with pytest.raises(ValueError, match=r"layer 2 differs .*last differs .*logits differs"):
        _check(target, _captured(target, shift=shift))


def test_one_wrong_row_among_all_is_refused(target: Target) -> None:
    stored = _captured(target)
    stored[1][0][4, 1] = stored[1][0][5, 1]
    with pytest.raises(ValueError, match="layer 2 differs"):
        _check(target, stored)


@pytest.mark.parametrize("is_doubled", [False, True])
def test_a_last_state_without_or_with_two_norms_is_refused(
    target: Target, is_doubled: bool
) -> None:
    stored = _captured(target)
    for sample in stored:
        ids_T, mask_T = _tokens(sample)
        norm = target.norm
        with torch.no_grad():
            hidden_states = target.model(
                torch.from_numpy(ids_T.astype(np.int64))[None], output_hidden_states=True
            ).hidden_states
            after_TH = hidden_states[-1][0]
            wrong_TH = (
                norm(after_TH)
                if is_doubled
                else target.layers[5](
                    hidden_states[5],
                    position_embeddings=target.backbone.rotary_emb(
                        hidden_states[5], torch.arange(len(ids_T))[None]
                    ),
                )[0]
            )
        rows = wrong_TH[teacher_positions(mask_T, "teacher")].numpy()
        stored[sample] = (stored[sample][0], encode(rows, "bf16"))
    with pytest.raises(ValueError, match=r"last differs .*logits differs"):
        _check(target, stored)


def test_nan_rows_are_refused(target: Target) -> None:
    stored = _captured(target)
    stored[0][0][2, 0] = 0xFF
    with pytest.raises(ValueError, match="layer 0 differs"):
        _check(target, stored)


def test_a_second_norm_of_ones_is_reported_as_no_fault(
    make_model: Callable[..., PreTrainedModel],
) -> None:
    model = make_model("qwen3")
    nn.init.ones_(model.model.norm.weight)
    target = Target(model, LAYER_IDS)
    lines = _check(target, _captured(target))
    assert "the norm done twice: not applicable" in lines[-1]
    assert "the norm missing: not applicable" not in lines[-1]


def test_rows_alike_tell_nothing_and_the_others_decide(target: Target) -> None:
    lines = _check(target, _captured(target, tokens=_repeated), tokens=_repeated)
    assert "not applicable" not in "\n".join(lines)
    with pytest.raises(ValueError, match=r"layer 0 differs .*layer 2 differs .*last differs"):
        _check(target, _captured(target, shift=1, tokens=_repeated), tokens=_repeated)


def test_a_sample_of_one_token_alone_cannot_show_rows_moved_by_one(target: Target) -> None:
    def alike(sample: int) -> tuple[np.ndarray, np.ndarray]:
        ids_T, mask_T = _tokens(sample)
        return np.full_like(ids_T, 7), mask_T

    lines = _check(target, _captured(target, tokens=alike), tokens=alike)
    assert all("the next token's row: not applicable" in line for line in lines[:-1])


def test_a_layer_that_does_nothing_cannot_be_told_from_its_neighbour_and_need_not(
    make_model: Callable[..., PreTrainedModel],
) -> None:
    model = make_model("qwen3")
    nn.init.zeros_(model.model.layers[3].self_attn.o_proj.weight)
    nn.init.zeros_(model.model.layers[3].mlp.down_proj.weight)
    target = Target(model, LAYER_IDS)
    assert "layer 3: not applicable" in _check(target, _captured(target))[1]


def test_without_last_the_layers_alone_are_judged(target: Target) -> None:
    lines = _check(target, _captured(target), _spec(last_mode="none"))
    assert [line.split(":")[0] for line in lines] == ["layer 0", "layer 2", "layer 4"]


def test_bf16_noise_passes_and_its_faults_do_not(
    make_model: Callable[..., PreTrainedModel],
) -> None:
    model = make_model("qwen3", initializer_range=0.15).bfloat16()
    target = Target(model, LAYER_IDS)
    # what a batch of another shape does in bf16: the same sums in another order
    stored = _captured(Target(make_model("qwen3", initializer_range=0.15), LAYER_IDS))
    model.load_state_dict(make_model("qwen3", initializer_range=0.15).bfloat16().state_dict())
    lines = _check(target, stored)
    assert len(lines) == 5
    wrong = _captured(Target(make_model("qwen3", initializer_range=0.15), (0, 2, 3)), (0, 2, 3))
    with pytest.raises(ValueError, match="layer 4 differs"):
        _check(target, wrong)


def _deep_model(num_layers: int) -> PreTrainedModel:
    """Whose layers make more of each rounding than it was."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=272,
        hidden_size=32,
        intermediate_size=96,
        num_hidden_layers=num_layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        initializer_range=0.25,
        tie_word_embeddings=False,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        # of queries and keys: the larger, the harder attention chooses
        if name.endswith("norm.weight"):
            nn.init.uniform_(parameter, 0.5, 2.5 if "self_attn" in name else 1.5)
    return model


def test_noise_is_measured_on_the_target_where_its_layers_make_much_of_a_rounding() -> None:
    model = _deep_model(24).bfloat16()
    layer_ids = (0, 11, 22)
    # other kernels round at other places: here at none at all
    exact = copy.deepcopy(model).float()
    spec = replace(_spec(), layer_ids=layer_ids, num_target_layers=24)
    true = _captured(Target(exact, layer_ids), layer_ids)
    with pytest.raises(ValueError, match="layer 22 differs from the target's own"):
        _check(Target(model, layer_ids), true, spec)
    lines = _check(Target(model, layer_ids), true, spec, by_other_code=True)
    deepest = lines[2]
    error = float(deepest.split("error ")[1].split(",")[0])
    assert deepest.startswith("layer 22")
    assert error > noise_bound(torch.bfloat16, 23)
    for wrong in ((0, 10, 22), (0, 11, 21), (0, 11, 23)):
        stored = _captured(Target(exact, wrong), wrong)
        with pytest.raises(ValueError, match="differs from the target's own"):
            _check(Target(model, layer_ids), stored, spec, by_other_code=True)
