"""The target's files: found by name and described without loading a model.

Weights are only ever read from safetensors; a pickled checkpoint (.bin, .pt) is refused.
"""

from __future__ import annotations

import hashlib
import json
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from huggingface_hub.errors import StrictDataclassError
from numpy.typing import NDArray
from transformers import AutoConfig, AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from dflash_pipeline.capture import gguf, weightfiles, weights
from dflash_pipeline.capture.weightfiles import json_object
from dflash_pipeline.configs.errors import UsageError, first_line
from dflash_pipeline.configs.layers import check_layer_ids, layer_ids
from dflash_pipeline.configs.schema import PACKAGED, TargetConfig

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
)
STORED_FILES = (
    "config.json",
    "generation_config.json",
    *TOKENIZER_FILES,
    "chat_template.jinja",
    "chat_template.json",
)


# what transformers raises for a configuration that it does not know or that contradicts itself
_CONFIG_ERRORS = (ValueError, KeyError, TypeError, AttributeError, StrictDataclassError)


class TargetFiles:
    """A target's directory and what its files say; weights stay on disk."""

    def __init__(self, directory: Path, name: str, *, trust_remote_code: bool) -> None:
        """`name` is what the user wrote; errors repeat it."""
        self.directory = directory
        self.name = name
        self.trust_remote_code = trust_remote_code
        config_path = directory / "config.json"
        if not config_path.is_file():
            raise UsageError(f"target {name}: {directory} holds no config.json")
        self.raw_config: dict[str, Any] = json_object(config_path)
        self.config = _config(directory, name, trust_remote_code)

    @cached_property
    def text_config(self) -> dict[str, Any]:
        """The language model's part of the configuration, defaults filled in."""
        values: dict[str, Any] = self.config.get_text_config(decoder=True).to_dict()
        return values

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return int(self.text_config["num_hidden_layers"])

    @property
    def hidden_size(self) -> int:
        """Width H of the residual stream."""
        return int(self.text_config["hidden_size"])

    @property
    def vocab_size(self) -> int:
        """Rows V of the embedding, padding rows included."""
        return int(self.text_config["vocab_size"])

    @property
    def is_tied(self) -> bool:
        """Whether the head is the embedding."""
        return bool(self.config.tie_word_embeddings)

    @property
    def quantisation(self) -> str:
        """The checkpoint's own weight quantisation; empty for a plain one."""
        settings = self.raw_config.get("quantization_config")
        return str(settings.get("quant_method", "unknown")) if settings else ""

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The target's tokenizer, loaded once. UsageError where it is missing, cannot be used, or
        is of another vocabulary."""
        return self._tokenizer

    @cached_property
    def _tokenizer(self) -> PreTrainedTokenizerBase:
        if not any((self.directory / name).is_file() for name in TOKENIZER_FILES):
            # transformers would make an empty one up
            raise UsageError(
                f"target {self.name}: no tokenizer in {self.directory}: expected tokenizer.json or "
                "the files of a slow one"
            )
        try:
            tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
                self.directory, trust_remote_code=self.trust_remote_code
            )
        except (OSError, ValueError, KeyError, ImportError) as error:
            raise UsageError(
                f"target {self.name}: no usable tokenizer in {self.directory}: {first_line(error)}"
            ) from error
        self._check_ids(tokenizer)
        return tokenizer

    def _check_ids(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """UsageError where text has tokens without a row of the embedding."""
        # a marker that no chat has may lie beyond: Gemma 3 1B has one for images, which it lacks
        used = f"{tokenizer.chat_template}{tokenizer.bos_token}{tokenizer.eos_token}"
        added = tokenizer.added_tokens_decoder.items()
        markers = {i for i, one in added if one.special and one.content not in used}
        beyond = {
            token_id: token
            for token, token_id in tokenizer.get_vocab().items()
            if token_id >= self.vocab_size and token_id not in markers
        }
        if beyond:
            token_id = max(beyond)
            raise UsageError(
                f"target {self.name}: its tokenizer has ids up to {token_id} "
                f"({beyond[token_id]!r}), its embedding {self.vocab_size} rows (vocab_size in "
                "config.json), so they are not of one model: name a directory that holds both as "
                "they were published"
            )

    def weight_hash(self) -> str:
        """sha256 over name and sha256 of each safetensors file, in name order; read once."""
        return self._weight_hash

    @cached_property
    def _weight_hash(self) -> str:
        return weightfiles.digest(self.weight_paths())

    def tokenizer_hash(self) -> str:
        """sha256 over the tokenizer's files; the chat template has its own hash."""
        total = hashlib.sha256()
        for name in TOKENIZER_FILES:
            path = self.directory / name
            if not path.is_file():
                continue
            data = path.read_bytes()
            if name == "tokenizer_config.json":
                settings = json_object(path)
                settings.pop("chat_template", None)
                data = json.dumps(settings, sort_keys=True).encode()
            total.update(f"{name} {hashlib.sha256(data).hexdigest()}\n".encode())
        return total.hexdigest()

    def template_hash(self) -> str:
        """sha256 of the chat template, `none` where the tokenizer has none."""
        template = self.tokenizer().chat_template
        if not template:
            return "none"
        return hashlib.sha256(json.dumps(template, sort_keys=True).encode()).hexdigest()

    def layer_ids(self, config: TargetConfig) -> tuple[int, ...]:
        """Layers to capture: those the configuration names, else spread by the DFlash rule."""
        if config.layer_ids:
            check_layer_ids(config.layer_ids, self.num_layers)
            return config.layer_ids
        try:
            return tuple(layer_ids(self.num_layers, config.num_capture_layers))
        except UsageError as error:
            if self.name not in PACKAGED:
                raise
            raise UsageError(f"{error}, or use --config {self.name}, which names them") from error

    def mask_token_id(self, config: TargetConfig) -> int:
        """The embedding row of a masked slot: named, the mask token, or the first unused row.

        Raises ValueError for a row that does not exist or that is also pad or eos: those have a
        meaning of their own, and servers strip them.
        """
        tokenizer = self.tokenizer()
        ends = self._end_ids()
        if config.mask_token_id >= 0:
            found, origin = config.mask_token_id, "target.mask_token_id"
        elif isinstance(tokenizer.mask_token_id, int):
            found, origin = tokenizer.mask_token_id, "the tokenizer's mask token"
        else:
            found = max(tokenizer.get_vocab().values()) + 1
            origin = "the first row beyond the tokenizer's ids"
            if found >= self.vocab_size:
                raise UsageError(
                    f"target {self.name}: all {self.vocab_size} embedding rows are tokens and none "
                    "is a mask token; name a token that never occurs with target.mask_token_id"
                )
        if found >= self.vocab_size:
            raise UsageError(
                f"mask token {found} ({origin}) is outside the embedding of target {self.name}, "
                f"which has {self.vocab_size} rows; set target.mask_token_id"
            )
        if found in ends:
            raise UsageError(
                f"mask token {found} ({origin}) is also the {ends[found]} token of target "
                f"{self.name}; set target.mask_token_id to another row"
            )
        return found

    def files_for_store(self) -> dict[str, bytes]:
        """Small files that describe the target, by name: configuration, tokenizer, template."""
        paths = {name: self.directory / name for name in STORED_FILES}
        return {name: path.read_bytes() for name, path in paths.items() if path.is_file()}

    def weight_paths(self) -> tuple[Path, ...]:
        """The safetensors files, fetched from the hub if need be, in name order."""
        return self._weight_paths

    @cached_property
    def _weight_paths(self) -> tuple[Path, ...]:
        return weightfiles.found(self.name, self.directory)

    def check_weights(self) -> None:
        """Raise UsageError for weights that are missing, cut short, or of another number of layers
        than the configuration's; only headers are read.

        What the hub has not given yet is not fetched for it.
        """
        is_fetched = any(self.directory.glob("*.safetensors"))
        if is_fetched or not weightfiles.is_snapshot(self.directory):
            further = self.text_config.get("num_nextn_predict_layers") or 0
            weights.check(self.name, self.weight_paths(), self.num_layers, int(further))

    def _end_ids(self) -> dict[int, str]:
        """Ids that mean pad or eos anywhere in the target's files -> which of the two."""
        tokenizer = self.tokenizer()
        generation_path = self.directory / "generation_config.json"
        generation = json_object(generation_path) if generation_path.is_file() else {}
        ends: dict[int, str] = {}
        for kind in ("pad", "eos"):
            key = f"{kind}_token_id"
            for value in (
                getattr(tokenizer, key),
                self.raw_config.get(key),
                self.text_config.get(key),
                generation.get(key),
            ):
                for token_id in value if isinstance(value, list) else [value]:
                    if token_id is not None:
                        ends.setdefault(int(token_id), kind)
        return ends


def resolve(config: TargetConfig) -> TargetFiles:
    """The files of the target that `config` names; nothing but small files is read.

    Raises UsageError for a name that is nothing we know, an unknown model type, and a hub name
    that cannot be fetched.
    """
    name = config.id
    if not name:
        raise UsageError("no target: give --target (a directory, a hub name, toy or smollm2)")
    if name == "toy":
        directory = Path(str(resources.files("dflash_pipeline.capture") / "toy"))
    elif name == "smollm2":
        directory = gguf.smollm2_directory()
    elif name.endswith(".gguf"):
        directory = gguf.converted(Path(name).expanduser())
    elif Path(name).expanduser().is_dir():
        directory = Path(name).expanduser()
    elif Path(name).exists() or name.startswith(("/", ".", "~")) or name.count("/") > 1:
        raise UsageError(f"target {name}: not a directory of a model, nor a .gguf file")
    else:
        directory = weightfiles.snapshot(name, config.revision or None, with_weights=False)
    return TargetFiles(directory, name, trust_remote_code=config.trust_remote_code)


def embedding_and_head(
    files: TargetFiles,
) -> tuple[NDArray[np.uint16], NDArray[np.uint16] | None]:
    """Embedding and head as raw bf16 bits, see `weights.embedding_and_head`."""
    shape = (files.vocab_size, files.hidden_size)
    return weights.embedding_and_head(files.name, files.weight_paths(), shape, files.is_tied)


def _config(directory: Path, name: str, trust_remote_code: bool) -> PretrainedConfig:
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(
            directory, trust_remote_code=trust_remote_code
        )
    except (*_CONFIG_ERRORS, OSError, ImportError) as error:
        model_type = json_object(directory / "config.json").get("model_type", "")
        raise UsageError(
            f"target {name}: this transformers cannot read config.json of a model of type "
            f"{model_type!r}: {first_line(error)}"
        ) from error
    is_remote = trust_remote_code and hasattr(config, "auto_map")
    if not is_remote and config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise UsageError(
            f"target {name}: model type {config.model_type!r} is no causal language model"
        )
    return config
