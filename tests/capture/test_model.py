"""A target is described from its small files, its embedding read bit for bit."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AddedToken, AutoTokenizer

from dflash_pipeline.capture.model import TargetFiles, embedding_and_head, resolve
from dflash_pipeline.configs.errors import UsageError
from dflash_pipeline.configs.schema import TargetConfig


def _files(directory: Path) -> TargetFiles:
    return resolve(TargetConfig(id=str(directory)))


@pytest.fixture
def copy(target_dir: Path, tmp_path: Path) -> Path:
    """A copy of the tiny Qwen3 that a test may damage."""
    return Path(shutil.copytree(target_dir, tmp_path / "target"))


def _edit(path: Path, **values: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def _bits(weight: torch.Tensor) -> np.ndarray:
    bits: np.ndarray = weight.bfloat16().view(torch.uint16).numpy()
    return bits


def test_a_target_is_described_without_its_weights(copy: Path) -> None:
    (copy / "model.safetensors").unlink()
    files = _files(copy)
    assert (files.num_layers, files.hidden_size, files.vocab_size) == (6, 32, 272)
    assert (files.is_tied, files.quantisation) == (False, "")
    assert files.layer_ids(TargetConfig(num_capture_layers=2)) == (1, 3)
    assert files.layer_ids(TargetConfig(layer_ids=(4, 0))) == (4, 0)
    with pytest.raises(UsageError, match=r"target\.layer_ids=0,1,2,3,4$"):
        files.layer_ids(TargetConfig(num_capture_layers=5))
    with pytest.raises(UsageError, match=r"=0,1,2,3, or use --config toy, which names them$"):
        resolve(TargetConfig(id="toy")).layer_ids(TargetConfig(id="toy"))
    assert set(files.files_for_store()) == {
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
    }


def test_the_mask_token_is_the_first_row_beyond_the_tokenizer(target_dir: Path) -> None:
    files = _files(target_dir)
    assert files.mask_token_id(TargetConfig()) == 259
    assert files.mask_token_id(TargetConfig(mask_token_id=7)) == 7


@pytest.mark.parametrize(
    ("mask_token_id", "message"),
    [
        (272, "mask token 272 .* is outside the embedding of target .*, which has 272 rows"),
        (258, "mask token 258 .* is also the eos token"),
        (256, "mask token 256 .* is also the pad token"),
    ],
)
def test_an_impossible_mask_token_is_refused(
    target_dir: Path, mask_token_id: int, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        _files(target_dir).mask_token_id(TargetConfig(mask_token_id=mask_token_id))


def test_an_end_token_named_only_by_the_generation_config_is_no_mask_token(copy: Path) -> None:
    _edit(copy / "generation_config.json", eos_token_id=[258, 97])
    with pytest.raises(UsageError, match=r"mask token 97 .* is also the eos token"):
        _files(copy).mask_token_id(TargetConfig(mask_token_id=97))


def test_a_full_vocabulary_asks_for_a_mask_token(make_target_dir: Callable[..., Path]) -> None:
    files = _files(make_target_dir("qwen3", vocab_size=259))
    with pytest.raises(
        UsageError, match=r"name a token that never occurs with target\.mask_token_id"
    ):
        files.mask_token_id(TargetConfig())


@pytest.mark.parametrize(
    ("vocab_size", "message"),
    [
        (200, r"tokenizer has ids up to 258 \('.*'\), its embedding 200 rows"),
        # of the end token alone
        (258, r"tokenizer has ids up to 258 \('.*'\), its embedding 258 rows"),
    ],
)
def test_a_tokenizer_of_a_larger_vocabulary_is_refused(
    vocab_size: int, message: str, copy: Path
) -> None:
    _edit(copy / "config.json", vocab_size=vocab_size)
    with pytest.raises(UsageError, match=message):
        _files(copy).tokenizer()


def test_a_marker_that_no_chat_has_may_lie_beyond_the_vocabulary(copy: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(copy)
    tokenizer.add_tokens([AddedToken(f"<image{i}>", special=True) for i in range(20)])
    tokenizer.save_pretrained(copy)
    assert max(_files(copy).tokenizer().get_vocab().values()) == 278
    tokenizer.add_tokens(["a word"])
    tokenizer.save_pretrained(copy)
    with pytest.raises(UsageError, match=r"ids up to 279 \('a word'\), its embedding 272 rows"):
        _files(copy).tokenizer()


def test_embedding_and_head_are_the_models_in_bf16(target_dir: Path) -> None:
    weights = load_file(target_dir / "model.safetensors")
    embed_VH, head_VH = embedding_and_head(_files(target_dir))
    np.testing.assert_array_equal(embed_VH, _bits(weights["model.embed_tokens.weight"]))
    assert head_VH is not None
    np.testing.assert_array_equal(head_VH, _bits(weights["lm_head.weight"]))


def test_a_tied_target_has_no_head(make_target_dir: Callable[..., Path]) -> None:
    embed_VH, head_VH = embedding_and_head(_files(make_target_dir("llama")))
    assert embed_VH.shape == (272, 32)
    assert head_VH is None


def test_nested_names_in_several_files_are_found(copy: Path) -> None:
    weights = load_file(copy / "model.safetensors")
    (copy / "model.safetensors").unlink()
    parts = (
        {
            "model.language_model.embed_tokens.weight": weights[
                "model.embed_tokens.weight"
            ].bfloat16()
        },
        {"lm_head.weight": weights["lm_head.weight"], "visual.proj.weight": torch.ones(272, 32)},
    )
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    for name, part in zip(names, parts, strict=True):
        save_file(part, copy / name)
    weight_map = {key: name for name, part in zip(names, parts, strict=True) for key in part}
    index = {"metadata": {}, "weight_map": weight_map}
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    embed_VH, head_VH = embedding_and_head(_files(copy))
    np.testing.assert_array_equal(embed_VH, _bits(weights["model.embed_tokens.weight"]))
    assert head_VH is not None
    np.testing.assert_array_equal(head_VH, _bits(weights["lm_head.weight"]))
    (copy / names[1]).unlink()
    with pytest.raises(UsageError, match=r"model-00002-of-00002\.safetensors is missing"):
        embedding_and_head(_files(copy))


def test_the_weight_hash_changes_with_one_bit(copy: Path) -> None:
    before = _files(copy).weight_hash()
    assert before == _files(copy).weight_hash()
    data = bytearray((copy / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (copy / "model.safetensors").write_bytes(data)
    assert _files(copy).weight_hash() != before


def test_tokenizer_and_template_have_hashes_of_their_own(copy: Path) -> None:
    def hashes() -> tuple[str, str]:
        files = _files(copy)
        return files.tokenizer_hash(), files.template_hash()

    tokenizer_hash, template_hash = hashes()
    template = copy / "chat_template.jinja"
    template.write_text(template.read_text() + "{# new #}")
    assert hashes()[0] == tokenizer_hash
    assert hashes()[1] != template_hash
    tokenizer = copy / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text() + " ")
    assert hashes()[0] != tokenizer_hash


def test_a_pickled_checkpoint_is_refused_by_name(copy: Path) -> None:
    (copy / "model.safetensors").rename(copy / "pytorch_model.bin")
    with pytest.raises(UsageError, match=r"pytorch_model\.bin is a pickle and is not read"):
        _files(copy).weight_hash()


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.unlink(), r"no \.safetensors file in .*: save the model as"),
        (_cut, r"model\.safetensors is damaged or no safetensors file"),
        (lambda path: path.write_bytes(b""), r"model\.safetensors is damaged or no safetensors"),
        (lambda path: path.write_bytes(b"\xff" * 99), r"model\.safetensors is damaged or no"),
    ],
)
def test_weights_that_are_not_whole_are_refused_by_their_headers(
    copy: Path, damage: Callable[[Path], object], message: str
) -> None:
    files = _files(copy)
    files.check_weights()
    damage(copy / "model.safetensors")
    with pytest.raises(UsageError, match=message) as caught:
        _files(copy).check_weights()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("told", "further", "message"),
    [
        (4, 0, r"holds model\.layers\.5, but its config\.json tells of 4 layers"),
        (4, 1, r"holds model\.layers\.5, but its config\.json tells of 4 layers"),
        (8, 0, r"lacks model\.layers\.6, but its config\.json tells of 8 layers"),
        (4, 2, ""),
        (6, 0, ""),
        (6, 1, ""),
    ],
)
def test_a_checkpoint_of_another_number_of_layers_is_refused_by_its_headers(
    copy: Path, told: int, further: int, message: str
) -> None:
    """Else the first few would be loaded, and captured, as if they were the model."""
    _edit(
        copy / "config.json",
        num_hidden_layers=told,
        layer_types=["full_attention"] * told,
        num_nextn_predict_layers=further,
    )
    if not message:
        _files(copy).check_weights()
        return
    with pytest.raises(UsageError, match=message):
        _files(copy).check_weights()


def test_weights_that_claim_what_is_not_so_are_refused_by_their_headers(
    copy: Path, hostile_files: Callable[[Path], dict[str, Path]]
) -> None:
    weights = copy / "model.safetensors"
    for claim, file in hostile_files(weights).items():
        shutil.copyfile(file, weights)
        with pytest.raises(UsageError, match=r"model\.safetensors is damaged or no") as caught:
            _files(copy).check_weights()
        assert "\n" not in str(caught.value), claim


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({}, "names no weights: expected a weight_map"),
        ({"weight_map": []}, "names no weights"),
        ({"weight_map": {"a": "../a.safetensors"}}, "expected files of its own directory"),
        ({"weight_map": {"a": "/a.safetensors"}}, "expected files of its own directory"),
        ({"weight_map": {"a": ".."}}, "is missing"),
        ({"weight_map": {"a": "b.safetensors"}}, r"b\.safetensors is missing"),
    ],
)
def test_an_index_names_files_of_its_own_directory_that_are_there(
    copy: Path, index: object, message: str
) -> None:
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UsageError, match=message):
        _files(copy).weight_paths()


def test_a_target_without_a_tokenizer_is_refused(copy: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (copy / name).unlink()
    with pytest.raises(UsageError, match=r"no tokenizer in .*expected tokenizer\.json"):
        _files(copy).tokenizer()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model_type": "nonesuch"}, "of a model of type 'nonesuch'"),
        ({"model_type": "vit"}, "model type 'vit' is no causal language model"),
        ({"model_type": None}, "cannot read config.json"),
        ({"num_hidden_layers": "six"}, "field 'num_hidden_layers': .*expected int, got str"),
        ({"num_hidden_layers": 32}, "must be equal to the number of `layer_types`"),
        ({"num_hidden_layers": -3}, "must be equal to the number of `layer_types`"),
        ({"hidden_size": None}, "field 'hidden_size'"),
        ({"quantization_config": "x"}, "cannot read config.json"),
    ],
)
def test_a_configuration_that_cannot_be_used_is_refused_in_one_line(
    copy: Path, values: dict[str, object], message: str
) -> None:
    _edit(copy / "config.json", **values)
    with pytest.raises(UsageError, match=message) as caught:
        _files(copy)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "no target: give --target"),
        ("/no/such/place", "not a directory of a model"),
        ("./nothing.gguf", "no such file"),
        ("nobody/nothing-at-all", "the hub does not give it"),
    ],
)
def test_a_name_that_is_nothing_is_refused_in_one_line(name: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        resolve(TargetConfig(id=name))
    assert "\n" not in str(caught.value)


def test_a_directory_without_a_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"holds no config\.json"):
        _files(tmp_path)
