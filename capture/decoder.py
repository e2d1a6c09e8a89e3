"""The target with a cache that can be cut back: what the draft and verify loop asks for.

Features are read by hooks on the chosen layers, logits through the target's own head, exactly as in
capture. A target whose state cannot be cut back (linear attention) is refused: use replay there.

Letters: B prompts, T positions, S tokens read on, K captured layers, H hidden, G key/value heads,
D width of a head, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import DynamicCache

from dflash_pipeline.capture import samples, template, twin
from dflash_pipeline.capture.answerer import LEFT_OUT, end_ids, num_positions, room
from dflash_pipeline.capture.arguments import template_arguments_text
from dflash_pipeline.capture.model import TargetFiles, resolve
from dflash_pipeline.capture.samples import Dropped
from dflash_pipeline.capture.spread import spread_devices
from dflash_pipeline.capture.target import Target, compute_dtype
from dflash_pipeline.configs.errors import UsageError
from dflash_pipeline.configs.place import Place
from dflash_pipeline.configs.schema import Run

# a state that is a sum over all tokens cannot forget the last ones
_CUTTABLE = {"full_attention", "sliding_attention", "chunked_attention"}


class Decoder:
    """Prefill, verify and crop over one growing cache of a batch.

    All texts end at the cache's last column, so that distances between columns are distances
    between positions, which sliding layers count; what stands before a shorter one is masked.
    """

    def __init__(self, target: Target, layer_ids: Sequence[int]) -> None:
        """`target` may hook other layers or none. UsageError if its state cannot be cut back."""
        check_cuttable(target)
        self._target = target
        self._layer_ids = tuple(layer_ids)
        self._hidden_BTH: dict[int, Tensor] = {}
        self._cache = DynamicCache()
        # tokens of each text in the cache
        self._lengths: list[int] = []
        # transformers 5 renamed the argument on the way
        accepted = inspect.signature(target.backbone.forward).parameters
        self._cache_argument = "cache" if "cache" in accepted else "past_key_values"
        for layer_id in self._layer_ids:
            target.layers[layer_id].register_forward_hook(self._keeping(layer_id))

    @torch.inference_mode()
    def prefill(self, prompts: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Forget everything, read prompts -> fp32 logits_BV after each, a feature_TKH of each."""
        # made without a config, so that sliding layers keep all keys (their mask still slides):
        # a cache that drops old keys could not be cut back
        self._cache = DynamicCache()
        lengths = list(map(len, prompts))
        longest = max(lengths)
        ids_BT = torch.stack(
            [functional.pad(ids_T, (longest - len(ids_T), 0)) for ids_T in prompts]
        )
        last_BTH, feature_BTKH = self._read(ids_BT, lengths)
        features = [
            feature_TKH[longest - length :]
            for feature_TKH, length in zip(feature_BTKH, lengths, strict=True)
        ]
        return self._logits(last_BTH[:, -1]), features

    @torch.inference_mode()
    def verify(self, ids_BS: Tensor) -> tuple[Tensor, Tensor]:
        """Read on -> fp32 logits_BSV after each token, feature_BSKH."""
        num_slots = ids_BS.shape[1]
        last_BSH, feature_BSKH = self._read(ids_BS, [have + num_slots for have in self._lengths])
        return self._logits(last_BSH), feature_BSKH

    def _logits(self, last: Tensor) -> Tensor:
        """fp32 logits of states; ValueError for NaN or Inf, of which token 0 would be chosen."""
        logits = self._target.head_logits(last)
        # NaN wins a maximum
        if not bool(logits.amax(-1).isfinite().all()):
            raise ValueError(
                "the target's logits are NaN or Inf: its weights are damaged, or overflow "
                f"target.dtype ({self._target.dtype})"
            )
        return logits

    def crop(self, prompts: Sequence[int], num_tokens: Sequence[int]) -> None:
        """Go on with these of the prompts, of each with so many first tokens of its text."""
        width, wanted = self._cache.get_seq_length(), max(num_tokens)
        # of each text: column of the cache that becomes column 0; below 0 there is nothing
        first = [
            width - self._lengths[prompt] + kept - wanted
            for prompt, kept in zip(prompts, num_tokens, strict=True)
        ]
        is_whole = list(prompts) == list(range(len(self._lengths)))
        self._lengths = list(num_tokens)
        if is_whole and set(first) == {0}:
            # below 0: so many are removed, in every transformers 5; later ones refuse a length
            if width > wanted:
                self._cache.crop(wanted - width)
            return
        device = self._target.device
        prompt_B = torch.tensor(prompts, device=device)
        column_BT = torch.tensor(first, device=device)[:, None] + torch.arange(
            wanted, device=device
        )
        column_BT = column_BT.clamp(min=0)
        # of several kinds, which transformers annotates as one that has neither
        layers: Any = self._cache.layers
        for layer in layers:
            # a layer that shares another's keys has none of its own
            if layer.is_initialized:
                # of a target that is spread, on another GPU
                place = prompt_B.to(layer.keys.device), column_BT.to(layer.keys.device)
                layer.keys = _moved(layer.keys, *place)
                layer.values = _moved(layer.values, *place)

    def _read(self, ids_BT: Tensor, lengths: list[int]) -> tuple[Tensor, Tensor]:
        """`lengths`: tokens of each text with these."""
        device, num_new = self._target.device, ids_BT.shape[1]
        width = self._cache.get_seq_length() + num_new
        mask: dict[str, Tensor | None] = {"attention_mask": None}
        if set(lengths) != {width}:
            column_T = torch.arange(width, device=device)
            length_B1 = torch.tensor(lengths, device=device)[:, None]
            position_BT = (column_T - width + length_B1).clamp(min=0)
            mask = {
                "attention_mask": (column_T >= width - length_B1).long(),
                "position_ids": position_BT[:, width - num_new :],
            }
        output = self._target.backbone(
            input_ids=ids_BT.to(device),
            use_cache=True,
            **mask,
            **{self._cache_argument: self._cache},
        )
        self._lengths = lengths
        hidden = [self._hidden_BTH.pop(layer_id) for layer_id in self._layer_ids]
        return output.last_hidden_state.to(device), torch.stack(hidden, dim=2)

    def _keeping(self, layer_id: int) -> Any:
        def keep(_module: nn.Module, _inputs: Any, output: Any) -> None:
            hidden_BTH = output[0] if isinstance(output, tuple) else output
            self._hidden_BTH[layer_id] = hidden_BTH.to(self._target.device)

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
            "template_args": template_arguments_text(self.run.target),
        }

    def load(self) -> LoadedTarget:
        """The target itself, on its device."""
        num_gpus = self.run.target.num_gpus
        return _loaded(self.files, self.layer_ids, self.device, self.dtype, num_gpus)

    def load_twin(self, say: Callable[[str], None]) -> LoadedTarget | None:
        """A tiny random one on the CPU, for a rehearsal; None, and a line said, if none is made."""
        with twin.made(self.run, self.files, say) as small:
            if small is None:
                return None
            cpu = torch.device("cpu")
            return _loaded(small.files, small.layer_ids, cpu, torch.float32, 1)


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
        device=spread_devices(place.device, run.target.num_gpus)[-1],
    )


def _loaded(
    files: TargetFiles,
    layer_ids: Sequence[int],
    device: torch.device,
    dtype: torch.dtype,
    num_gpus: int,
) -> LoadedTarget:
    target = Target.load(files, (), device, dtype, num_gpus)
    return LoadedTarget(
        target=Decoder(target, layer_ids),
        layer_ids=tuple(layer_ids),
        # of a target that is spread, on another GPU than its head
        embed_VH=_weight(target.model.get_input_embeddings()).to(target.device),
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
            "rejected draft, so it is not decoded here. Replay the held-out samples of a store "
            "(--store DIR without --prompts), or measure a server that runs both (--endpoint URL)"
        )


def _moved(cache_BGTD: Tensor, prompt_B: Tensor, column_BT: Tensor) -> Tensor:
    """Other prompts and columns of a cache, which has [prompts, G, columns, D]."""
    chosen_BGTD = cache_BGTD[prompt_B]
    index_BGTD = column_BT[:, None, :, None].expand(
        -1, chosen_BGTD.shape[1], -1, chosen_BGTD.shape[3]
    )
    return chosen_BGTD.gather(2, index_BGTD)


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
