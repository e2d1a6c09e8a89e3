"""The target with a cache that can be cut back: what the draft and verify loop asks for.

Features are read by hooks on the chosen layers, logits through the target's own head, exactly as in
capture. A target whose state cannot be cut back (linear attention) is refused: use replay there.

Letters: T positions of a prompt, S tokens read on, K captured layers, H hidden, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from dflash_pipeline.capture import samples, template, twin
from dflash_pipeline.capture.answerer import LEFT_OUT, end_ids, num_positions, room
from dflash_pipeline.capture.model import TargetFiles, resolve
from dflash_pipeline.capture.samples import Dropped
from dflash_pipeline.capture.target import Target, compute_dtype
from dflash_pipeline.configs.errors import UsageError
from dflash_pipeline.configs.place import Place
from dflash_pipeline.configs.schema import Run

# a state that is a sum over all tokens cannot forget the last ones
_CUTTABLE = {"full_attention", "sliding_attention", "chunked_attention"}


class Decoder:
    """Prefill, verify and crop over one growing cache."""

    def __init__(self, target: Target, layer_ids: Sequence[int]) -> None:
        """`target` may hook other layers or none. UsageError if its state cannot be cut back."""
        check_cuttable(target)
        self._target = target
        self._layer_ids = tuple(layer_ids)
        self._hidden_1TH: dict[int, Tensor] = {}
        self._cache = DynamicCache()
        # transformers 5 renamed the argument on the way
        accepted = inspect.signature(target.backbone.forward).parameters
        self._cache_argument = "cache" if "cache" in accepted else "past_key_values"
        for layer_id in self._layer_ids:
            target.layers[layer_id].register_forward_hook(self._keeping(layer_id))

    @torch.inference_mode()
    def prefill(self, ids_T: Tensor) -> tuple[Tensor, Tensor]:
        """Forget everything, read a prompt -> fp32 logits_V after its last token, feature_TKH."""
        # made without a config, so that sliding layers keep all keys (their mask still slides):
        # a cache that drops old keys could not be cut back
        self._cache = DynamicCache()
        last_TH, feature_TKH = self._read(ids_T)
        return self._target.head_logits(last_TH[-1]), feature_TKH

    @torch.inference_mode()
    def verify(self, ids_S: Tensor) -> tuple[Tensor, Tensor]:
        """Read on -> fp32 logits_SV after each token, feature_SKH."""
        last_SH, feature_SKH = self._read(ids_S)
        return self._target.head_logits(last_SH), feature_SKH

    def crop(self, num_tokens: int) -> None:
        """Keep the first `num_tokens` tokens of the cache."""
        num_removed = self._cache.get_seq_length() - num_tokens
        # below 0: so many are removed, in every transformers 5; a length is refused by later ones
        if num_removed > 0:
            self._cache.crop(-num_removed)

    def _read(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        output = self._target.backbone(
            input_ids=ids[None].to(self._target.device),
            attention_mask=None,
            use_cache=True,
            **{self._cache_argument: self._cache},
        )
        feature = torch.stack([self._hidden_1TH.pop(layer_id)[0] for layer_id in self._layer_ids])
        return output.last_hidden_state[0], feature.transpose(0, 1)

    def _keeping(self, layer_id: int) -> Any:
        def keep(_module: nn.Module, _inputs: Any, output: Any) -> None:
            self._hidden_1TH[layer_id] = output[0] if isinstance(output, tuple) else output

        return keep


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """What the target is given to answer."""

    key: str
    domain: str
    ids: tuple[int, ...]
    max_new_tokens: int
    """Longest answer that keeps the conversation within `data.max_len`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedTarget:
    """A target that decodes, with the two matrices that a drafter shares with it."""

    target: Decoder
    layer_ids: tuple[int, ...]
    """Those whose outputs are its features."""
    embed_VH: Tensor
    head_VH: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalTarget:
    """All that evaluation needs to know of a target before its weights are loaded."""

    run: Run
    files: TargetFiles
    layer_ids: tuple[int, ...]
    prompts: tuple[Prompt, ...]
    dropped: tuple[str, ...]
    """Rows of the prompt files that became no prompt, a line a reason."""
    eos_ids: frozenset[int]
    """Tokens that end an answer."""
    reserved_ids: frozenset[int]
    """End and padding tokens: none may stand for a masked slot."""
    dtype: torch.dtype
    device: torch.device

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return self.files.num_layers

    @property
    def hidden_size(self) -> int:
        """Width H of the residual stream."""
        return self.files.hidden_size

    @property
    def vocab_size(self) -> int:
        """Rows V of the embedding."""
        return self.files.vocab_size

    @property
    def rendering(self) -> dict[str, str]:
        """How prompts are made, in the words of a store's identity."""
        return {
            "tokenizer_hash": self.files.tokenizer_hash(),
            "template_hash": self.files.template_hash(),
            "template_args": template.template_arguments_text(self.run.target),
        }

    def load(self) -> LoadedTarget:
        """The target itself, on its device."""
        return _loaded(self.files, self.layer_ids, self.device, self.dtype)

    def load_twin(self, say: Callable[[str], None]) -> LoadedTarget | None:
        """A tiny random one on the CPU, for a rehearsal; None, and a line said, if none is made."""
        with twin.made(self.run, self.files, say) as small:
            if small is None:
                return None
            return _loaded(small.files, small.layer_ids, torch.device("cpu"), torch.float32)


def open_target(run: Run, place: Place, layer_ids: Sequence[int]) -> EvalTarget:
    """Read the prompts of `run.eval.prompts`; the target will be loaded with `layer_ids` hooked."""
    files = resolve(run.target)
    if too_high := [layer_id for layer_id in layer_ids if layer_id >= files.num_layers]:
        raise UsageError(
            f"the drafter reads layers {too_high}, target {files.name} has {files.num_layers}: it "
            "was trained for another target"
        )
    files.check_weights()
    dropped = Dropped()
    prompts = tuple(_limited(_prompts(run, files, dropped), run.eval.limit))
    if not prompts:
        raise UsageError(
            f"no usable prompt in {', '.join(run.eval.prompts)}: {'; '.join(dropped.lines())}"
        )
    # the ends that `generate` knows: an answer must end where a stored one would
    eos_ids = end_ids(files, run.target)
    pad_ids = _ids(files.tokenizer().pad_token_id) | _ids(files.raw_config.get("pad_token_id"))
    return EvalTarget(
        run=run,
        files=files,
        layer_ids=tuple(layer_ids),
        prompts=prompts,
        dropped=tuple(dropped.lines()),
        eos_ids=eos_ids,
        reserved_ids=eos_ids | pad_ids,
        dtype=compute_dtype(run.target.dtype, place.kind),
        device=torch.device(place.device),
    )


def _loaded(
    files: TargetFiles, layer_ids: Sequence[int], device: torch.device, dtype: torch.dtype
) -> LoadedTarget:
    target = Target.load(files, (), device, dtype)
    return LoadedTarget(
        target=Decoder(target, layer_ids),
        layer_ids=tuple(layer_ids),
        embed_VH=_weight(target.model.get_input_embeddings()),
        head_VH=_weight(target.head),
    )


def check_cuttable(target: Target) -> None:
    """Raise UsageError for a target whose state cannot be cut back to an earlier token."""
    config = target.model.config.get_text_config(decoder=True)
    strange = set(getattr(config, "layer_types", None) or ()) - _CUTTABLE
    if strange or getattr(target.model, "_is_stateful", False):
        raise UsageError(
            f"{type(target.model).__name__} keeps a running state "
            f"({', '.join(sorted(strange)) or 'recurrent layers'}) that cannot be cut back after a "
            "rejected draft: leave out --prompts to replay the held-out samples of a store"
        )


def _prompts(run: Run, files: TargetFiles, dropped: Dropped) -> Iterator[Prompt]:
    """Raises ValueError after the last row when too many were unusable."""
    max_len = min(run.data.max_len, num_positions(files))
    for conversation in samples.read(run.eval.prompts, 0, dropped):
        where = samples.place(run.eval.prompts[conversation.source], conversation.row)
        messages = conversation.prompt_messages()
        if not messages:
            dropped.add("no user turn to answer", where)
            continue
        try:
            ids = template.prompt_ids(files.tokenizer(), messages, run.target)
            num_new = room(len(ids), max_len, run.eval.max_new_tokens, run.data.overlong)
        except template.RenderError as error:
            dropped.add(str(error), where, is_bad=str(error) not in LEFT_OUT)
            continue
        yield Prompt(
            key=conversation.key,
            domain=conversation.domain,
            ids=tuple(ids),
            max_new_tokens=num_new,
        )
    dropped.check(run.data.max_bad_share)


def _limited(prompts: Iterator[Prompt], limit: int) -> Iterator[Prompt]:
    """The first `limit` prompts of each domain; 0: all."""
    taken: dict[str, int] = {}
    for prompt in prompts:
        taken[prompt.domain] = taken.get(prompt.domain, 0) + 1
        if not limit or taken[prompt.domain] <= limit:
            yield prompt


def _weight(module: nn.Module) -> Tensor:
    weight = module.weight
    assert isinstance(weight, Tensor)
    return weight.detach()


def _ids(value: object) -> frozenset[int]:
    values = value if isinstance(value, list) else [value]
    return frozenset(token_id for token_id in values if isinstance(token_id, int))
