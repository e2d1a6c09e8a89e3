"""The frozen target: chosen layers' outputs and the post-norm last state of a padded batch.

Letters: B sequences, T positions, K captured layers, H hidden, V vocabulary.
Trap: HF's `hidden_states[-1]` is after the final norm while the others are raw layer outputs, so
layers are read by hooks on the layers themselves and `last` is what the backbone returns.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from dflash_pipeline.capture.model import TargetFiles
from dflash_pipeline.capture.spread import device_map, spread_devices, spread_text
from dflash_pipeline.capture.structure import decoder_of, final_norm_of
from dflash_pipeline.configs.errors import UsageError
from dflash_pipeline.configs.place import dtype_name

# not annotated by transformers
_loader: Any = AutoModelForCausalLM
_logging: Any = transformers_logging

Take = Callable[[int, torch.Tensor], None]


def compute_dtype(name: str, kind: str) -> torch.dtype:
    """`target.dtype` as a type."""
    return {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype_name(name, kind)]


def slow_fallback(files: TargetFiles, kind: str) -> str:
    """What transformers computes slowly here because a package is missing; empty: nothing."""
    kinds = files.text_config.get("layer_types") or []
    num_linear = sum(one == "linear_attention" for one in kinds)
    missing = [
        package
        for module, package in (
            ("fla", "flash-linear-attention"),
            ("causal_conv1d", "causal-conv1d"),
        )
        if importlib.util.find_spec(module) is None
    ]
    if kind != "cuda" or not num_linear or not missing:
        return ""
    return (
        f"slow: {num_linear} of {len(kinds)} layers are linear attention, and without "
        f"{' and '.join(missing)} transformers computes them step by step in plain torch: pip "
        f"install {' '.join(missing)}"
    )


class Target:
    """A causal language model, frozen, whose chosen layers are hooked.

    The model is called without an attention mask: rows are padded on the right, and a causal
    position never sees what stands behind it. Any mask would cost SDPA its fast kernels.
    """

    def __init__(self, model: PreTrainedModel, layer_ids: Sequence[int]) -> None:
        """`model` may be any causal language model built as transformers builds them.

        Raises ValueError when its decoder layers or its head cannot be told by structure.
        """
        self.model: Any = model.train(False).requires_grad_(False)
        self.layer_ids = tuple(layer_ids)
        text_config = model.config.get_text_config(decoder=True)
        self.backbone, self.layers = decoder_of(model, text_config.num_hidden_layers)
        self.norm = final_norm_of(self.backbone)
        head = self.model.get_output_embeddings()
        if not isinstance(head, nn.Linear):
            raise ValueError(f"{type(model).__name__} has no linear head")
        self.head = head
        self.soft_cap = float(getattr(text_config, "final_logit_softcapping", None) or 0.0)
        # Cohere multiplies its logits, Granite divides them
        self.logit_scale = float(getattr(text_config, "logit_scale", None) or 1.0) / float(
            getattr(text_config, "logits_scaling", None) or 1.0
        )
        self.spread = ""
        """What runs where, if it is spread over several GPUs."""
        self.is_compiled = False
        """`run` goes through compiled layers; set back, it goes through the plain ones again."""
        self.versions: set[int] = set()
        """Those of the compiled layers that `run` has gone through since they were cleared."""
        self._take: Take | None = None
        for place, layer_id in enumerate(self.layer_ids):
            self.layers[layer_id].register_forward_hook(self._giving(place))

    @classmethod
    def load(
        cls,
        files: TargetFiles,
        layer_ids: Sequence[int],
        device: torch.device | str,
        dtype: torch.dtype,
        num_gpus: int = 1,
    ) -> Target:
        """The target of `files` on `device`; refuses a checkpoint that lacks a weight.

        num_gpus: it is spread over so many, the first ones that the process sees.
        """
        # fetched first, where the hub has them
        files.weight_paths()
        files.check_weights()
        placed = None
        if num_gpus > 1:
            devices = spread_devices(device, num_gpus)
            placed = device_map(files.config, devices, trust_remote_code=files.trust_remote_code)
        # its bar would stand between our own progress lines
        _logging.disable_progress_bar()
        try:
            model, report = _loader.from_pretrained(
                files.directory,
                dtype=dtype,
                use_safetensors=True,
                trust_remote_code=files.trust_remote_code,
                output_loading_info=True,
                device_map=placed,
                # refused below, with their names
                ignore_mismatched_sizes=True,
            )
        except (ValueError, KeyError, ImportError) as error:
            raise UsageError(f"target {files.name} cannot be loaded: {error}") from error
        for key, found, expected in sorted(report["mismatched_keys"]):
            raise UsageError(
                f"target {files.name}: {key} has shape {list(found)} in the checkpoint, "
                f"{list(expected)} by its config.json: they are not of one model"
            )
        if lacking := sorted(report["missing_keys"]):
            more = f" and {len(lacking) - 1} more weights" if len(lacking) > 1 else ""
            raise UsageError(
                f"target {files.name}: the checkpoint lacks {lacking[0]}{more} of "
                f"{type(model).__name__}: fetch it again"
            )
        if placed is None:
            return cls(model.to(device), layer_ids)
        target = cls(model, layer_ids)
        target.spread = spread_text(placed)
        if target.device.type == "cuda":
            # kernels of our own run where the rows are collected
            torch.cuda.set_device(target.device)
        return target

    @property
    def device(self) -> torch.device:
        """Where the weights are; of a target that is spread, the head's, where states are given."""
        return self.head.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Compute type."""
        return self.head.weight.dtype

    @property
    def weight_bytes(self) -> int:
        """What the weights on `device` hold."""
        parameters = self.model.parameters()
        return sum(p.numel() * p.element_size() for p in parameters if p.device == self.device)

    @property
    def is_running(self) -> bool:
        """`run` is at work, as for every batch of a capture."""
        return self._take is not None

    @torch.inference_mode()
    def forward(self, ids_BT: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
        """hidden_KBTH (a list over K of [B, T, H]) and the post-norm last_BTH.

        Shorter rows are padded on the right with any id; what comes out there means nothing.
        """
        kept: dict[int, torch.Tensor] = {}
        last_BTH = self.run(ids_BT, kept.__setitem__)
        return [kept[place] for place in range(len(self.layer_ids))], last_BTH

    @torch.inference_mode()
    def run(self, ids_BT: torch.Tensor, take: Take) -> torch.Tensor:
        """The post-norm last_BTH; `take` is given each captured layer's place and [B, T, H] as soon
        as they are queued, so that none of them needs to outlive its layer."""
        self._take = take
        try:
            last_BTH: torch.Tensor = self.backbone(
                input_ids=ids_BT, attention_mask=None, use_cache=False
            ).last_hidden_state
        finally:
            self._take = None
        return last_BTH.to(self.device)

    @torch.inference_mode()
    def head_logits(self, last: torch.Tensor) -> torch.Tensor:
        """Logits [..., V] in fp32 of post-norm last states [..., H], as the target makes them."""
        logits: torch.Tensor = self.head(last)
        if self.logit_scale != 1.0:
            logits = logits * self.logit_scale
        if self.soft_cap:
            logits = torch.tanh(logits / self.soft_cap) * self.soft_cap
        return logits.float()

    def _giving(self, place: int) -> Any:
        def give(_module: nn.Module, _inputs: Any, output: Any) -> None:
            if self._take is not None:
                hidden_BTH = output[0] if isinstance(output, tuple) else output
                # of a target that is spread, from another GPU
                self._take(place, hidden_BTH.to(self.device))

        return give
