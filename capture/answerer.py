"""The target answering a batch of dialogues with transformers.

Sampled tokens take their noise from a hash of (seed, id, turn, step, token): an answer does not
depend on the batch it was in, except through the rounding that padding changes.
Letters: B sequences, T positions, V vocabulary.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import cast

import torch
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from dflash_pipeline.capture.answers import Dialogue, answer_seed
from dflash_pipeline.capture.decode_attention import grouped
from dflash_pipeline.capture.model import TargetFiles
from dflash_pipeline.capture.roomy_cache import roomy
from dflash_pipeline.capture.samples import Message
from dflash_pipeline.capture.target import Target, compute_dtype
from dflash_pipeline.capture.template import RenderError, prompt_ids, stop_ids
from dflash_pipeline.configs.memory import host_told_alike
from dflash_pipeline.configs.place import Place
from dflash_pipeline.configs.schema import DataConfig, GenerateConfig, TargetConfig

TOO_LONG = "prompt not below data.max_len or the target's positions"
NO_ROOM = "no room for a whole answer within data.max_len or the target's positions"
LEFT_OUT = (TOO_LONG, NO_ROOM)
"""Reasons that are no fault of the data."""
TELL_EVERY_S = 1.0
# beyond every step
_NEVER = 1 << 62
_MASK_34, _MASK_37, _MASK_33, _MASK_24 = ((1 << bits) - 1 for bits in (34, 37, 33, 24))


class Answerer:
    """A loaded target that answers; its batches become smaller for good when memory runs out."""

    def __init__(
        self,
        files: TargetFiles,
        target: TargetConfig,
        config: GenerateConfig,
        data: DataConfig,
        place: Place,
        loaded: Target | None = None,
    ) -> None:
        """data: how long a conversation may be, and what becomes of a longer one; loaded: the
        target, where it is there already."""
        self._target, self._config = target, config
        self._tokenizer = files.tokenizer()
        dtype = compute_dtype(target.dtype, place.kind)
        self._model = (loaded or Target.load(files, (), place.device, dtype, target.num_gpus)).model
        self._ends = end_ids(files, target)
        self._device = place.device
        self._num_positions = num_positions(files)
        self._max_len, self._overlong = min(data.max_len, self._num_positions), data.overlong
        self.batch_size = config.batch_size

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a conversation whose last turn is the user's. Raises RenderError."""
        found = prompt_ids(self._tokenizer, messages, self._target)
        self._room(len(found))
        return found

    def _room(self, num_prompt: int) -> int:
        return room(num_prompt, self._max_len, self._config.max_new_tokens, self._overlong)

    def answer(self, batch: Sequence[Dialogue], tell: Callable[[int], None]) -> int:
        """Answer every turn of every dialogue; the number of tokens generated.

        tell: called about once a second with the number so far.
        """
        num_tokens = 0
        while asked := [dialogue for dialogue in batch if dialogue.questions]:
            turn, prompts = [], []
            for dialogue in asked:
                try:
                    prompts.append(self.prompt(dialogue.ask()))
                    turn.append(dialogue)
                except RenderError:
                    dialogue.withdraw()
            answers = self._generate(turn, prompts, partial(_add, tell, num_tokens))
            num_tokens += sum(map(len, answers))
            for dialogue, prompt, answer in zip(turn, prompts, answers, strict=True):
                is_ended = bool(answer) and answer[-1] in self._ends
                text = self._tokenizer.decode(
                    answer[:-1] if is_ended else answer,
                    skip_special_tokens=True,
                    clean_up_tokenization_spaces=False,
                )
                message = {"role": "assistant", "content": str(text)}
                dialogue.answer(message, "stop" if is_ended else "length")
                dialogue.answer_tokens(prompt, answer, self._tokenizer, self._target)
        return num_tokens

    def _generate(
        self,
        turn: Sequence[Dialogue],
        prompts: Sequence[Sequence[int]],
        tell: Callable[[int], None],
    ) -> list[list[int]]:
        """The answers to prompts, each with its end token if it has one."""
        answers: list[list[int]] = []
        while len(answers) < len(turn):
            part = slice(len(answers), len(answers) + self.batch_size)
            seeds = [
                answer_seed(self._config.seed, dialogue.key, len(dialogue.finishes))
                for dialogue in turn[part]
            ]
            try:
                before = sum(map(len, answers))
                keys = [dialogue.key for dialogue in turn[part]]
                tell_all = partial(_add, tell, before)
                with host_told_alike(torch):
                    answers += self._generate_part(keys, prompts[part], seeds, tell_all)
            except torch.OutOfMemoryError as error:
                if len(seeds) == 1:
                    raise ValueError(
                        f"no memory to answer one prompt of {len(prompts[part][0])} tokens: "
                        "lower data.max_len or generate.max_new_tokens"
                    ) from error
                self.batch_size = len(seeds) // 2
                if torch.cuda.is_available():
                    torch.cuda.empty_cache()
        return answers

    @torch.inference_mode()
    def _generate_part(
        self,
        keys: Sequence[str],
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int],
        tell: Callable[[int], None],
    ) -> list[list[int]]:
        rooms = [self._room(len(prompt)) for prompt in prompts]
        longest = max(map(len, prompts))
        pad_id = min(self._ends, default=0)
        # on the left: all answers begin at the same position of the batch
        ids_BT = torch.full((len(prompts), longest), pad_id)
        mask_BT = torch.zeros_like(ids_BT)
        for row, prompt in enumerate(prompts):
            ids_BT[row, longest - len(prompt) :] = torch.tensor(prompt)
            mask_BT[row, longest - len(prompt) :] = 1
        # the model's own defaults (a repetition penalty, say) would change what greedy means
        self._model.generation_config = GenerationConfig(
            max_new_tokens=min(max(rooms), self._num_positions - longest),
            eos_token_id=sorted(self._ends) or None,
            pad_token_id=pad_id,
            do_sample=False,
        )
        finite = _Finite(len(prompts), self._device)
        with grouped(self._model), roomy(self._model):
            found_BT = self._model.generate(
                ids_BT.to(self._device),
                attention_mask=mask_BT.to(self._device),
                logits_processor=LogitsProcessorList([finite, *_processors(self._config, seeds)]),
                stopping_criteria=StoppingCriteriaList([_Teller(longest, self._ends, tell)]),
            )
        found = zip(found_BT[:, longest:].tolist(), rooms, strict=True)
        answers = [_cut(row[:own], self._ends) for row, own in found]
        for key, answer, bad_step in zip(keys, answers, finite.first_bad_B.tolist(), strict=True):
            if bad_step < len(answer):
                raise ValueError(
                    f"target {self._target.id} gives NaN or Inf for token {bad_step} of the answer "
                    f"to {key}: its weights are damaged, or overflow target.dtype "
                    f"({self._model.dtype}); what was answered before is kept"
                )
        return answers


def _add(tell: Callable[[int], None], before: int, count: int) -> None:
    tell(before + count)


def room(num_prompt: int, max_len: int, max_new_tokens: int, overlong: str) -> int:
    """Tokens that an answer to a prompt of `num_prompt` tokens may have, at least 1.

    An answer ends where the conversation reaches `max_len`; with overlong = drop a prompt that
    leaves less than `max_new_tokens` until there is refused. Raises RenderError, with the reason.
    """
    left = max_len - num_prompt
    if left < 1:
        raise RenderError(TOO_LONG)
    if left < max_new_tokens and overlong == "drop":
        raise RenderError(NO_ROOM)
    return min(left, max_new_tokens)


def num_positions(files: TargetFiles) -> int:
    """Positions that the target was made for."""
    return int(files.text_config.get("max_position_embeddings") or 1 << 31)


def end_ids(files: TargetFiles, config: TargetConfig) -> frozenset[int]:
    """Every token that ends an answer: generation config, config, tokenizer and chat template."""
    tokenizer = files.tokenizer()
    found = set(stop_ids(tokenizer, config))
    generation = json.loads(files.files_for_store().get("generation_config.json", b"{}"))
    configs = (generation, files.raw_config, files.text_config)
    for value in (tokenizer.eos_token_id, *(one.get("eos_token_id") for one in configs)):
        found.update(value if isinstance(value, list) else [] if value is None else [value])
    return frozenset(found)


def _cut(answer: list[int], ends: frozenset[int]) -> list[int]:
    """Up to and with the first end token; behind it stands padding."""
    for place, token in enumerate(answer):
        if token in ends:
            return answer[: place + 1]
    return answer


def _processors(config: GenerateConfig, seeds: Sequence[int]) -> LogitsProcessorList:
    processors = LogitsProcessorList()
    if config.temperature > 0:
        processors.append(TemperatureLogitsWarper(config.temperature))
        if config.top_k > 0:
            processors.append(TopKLogitsWarper(config.top_k))
        if config.top_p < 1:
            processors.append(TopPLogitsWarper(config.top_p))
        processors.append(_Noise(seeds))
    return processors


class _Teller(StoppingCriteria):
    """Says now and then how many tokens a batch has; it stops nothing."""

    def __init__(self, begin: int, ends: frozenset[int], tell: Callable[[int], None]) -> None:
        """begin: position of the first new token."""
        self._begin, self._ends, self._tell = begin, sorted(ends), tell
        self._told_at = time.monotonic()

    def __call__(
        self, input_ids: torch.LongTensor, scores: object, **_unused: object
    ) -> torch.BoolTensor:
        # counting waits for the device, which generating does at every step anyway
        if time.monotonic() - self._told_at >= TELL_EVERY_S:
            new_BT = input_ids[:, self._begin :]
            is_end_BT = torch.isin(new_BT, new_BT.new_tensor(self._ends))
            is_padding_BT = is_end_BT.cumsum(1) > is_end_BT.long()
            self._tell(int((~is_padding_BT).sum()))
            self._told_at = time.monotonic()
        go_on_B = torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)
        return cast("torch.BoolTensor", go_on_B)


class _Finite(LogitsProcessor):
    """Notes where logits are no numbers: the largest of NaNs would be token 0, as if chosen."""

    def __init__(self, num_prompts: int, device: torch.device | str) -> None:
        self._step = 0
        self.first_bad_B = torch.full((num_prompts,), _NEVER, device=device)
        """The first new token of each prompt that was chosen so. Read once a batch: asking at each
        step would wait for the device."""

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        # NaN wins a maximum, and a row of nothing but -inf has no other
        is_bad_B = ~scores.amax(-1).isfinite()
        now_B = self.first_bad_B.clamp(max=self._step)
        self.first_bad_B = torch.where(is_bad_B, now_B, self.first_bad_B)
        self._step += 1
        return scores


class _Noise(LogitsProcessor):
    """Gumbel noise on scores: the largest is then a draw from their softmax."""

    def __init__(self, seeds: Sequence[int]) -> None:
        self._seeds = seeds
        self._step = 0

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        noise_BV = gumbel(self._seeds, self._step, scores.shape[-1], scores.device)
        self._step += 1
        return cast("torch.FloatTensor", scores + noise_BV)


def gumbel(seeds: Sequence[int], step: int, vocab_size: int, device: torch.device) -> torch.Tensor:
    """Standard Gumbel noise, fp32 [B, V]: the same for a seed and step in any batch and machine.

    splitmix64 of (seed, step, token) in wrapping int64; 24 bits of it make the uniform number.
    """
    seed_B = torch.tensor(seeds, dtype=torch.int64, device=device)
    token_V = torch.arange(vocab_size, dtype=torch.int64, device=device)
    row_B = _mixed(_mixed(seed_B) + step)
    bits_BV = (_mixed(row_B[:, None] + token_V[None]) >> 40) & _MASK_24
    uniform_BV = (bits_BV.float() + 0.5) / (1 << 24)
    return -torch.log(-torch.log(uniform_BV))


def _mixed(value: torch.Tensor) -> torch.Tensor:
    """The finaliser of splitmix64; shifts of int64 copy the sign, hence the masks."""
    value = value + _signed(0x9E3779B97F4A7C15)
    value = (value ^ ((value >> 30) & _MASK_34)) * _signed(0xBF58476D1CE4E5B9)
    value = (value ^ ((value >> 27) & _MASK_37)) * _signed(0x94D049BB133111EB)
    return value ^ ((value >> 31) & _MASK_33)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value
