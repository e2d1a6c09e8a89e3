"""The target answering a batch of dialogues with transformers.

Sampled tokens take their noise from a hash of (seed, id, turn, step, token): an answer does not
depend on the batch it was in, except through the rounding that padding changes.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

from dflash_pipeline.capture.answers import Dialogue, answer_seed
from dflash_pipeline.capture.decode_attention import grouped
from dflash_pipeline.capture.decode_loop import LOOK_EVERY, NO_NUMBER, decode
from dflash_pipeline.capture.decode_norm import fused_norms
from dflash_pipeline.capture.decode_rope import fused_rope
from dflash_pipeline.capture.draw import Draw
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
        device = torch.device(self._device)
        model = self._model
        with grouped(model), fused_norms(model), fused_rope(model), roomy(model):
            answers = decode(
                model,
                prompts,
                rooms,
                self._ends,
                Draw(self._config, seeds),
                device,
                # a CPU computes nothing meanwhile
                LOOK_EVERY if device.type == "cuda" else 1,
                _Teller(tell),
            )
        for key, answer in zip(keys, answers, strict=True):
            if NO_NUMBER in answer:
                raise ValueError(
                    f"target {self._target.id} gives NaN or Inf for token "
                    f"{answer.index(NO_NUMBER)} of the answer to {key}: its weights are damaged, "
                    f"or overflow target.dtype ({self._model.dtype}); what was answered before is "
                    "kept"
                )
        return answers


class _Teller:
    """Passes on how many tokens there are about once a second."""

    def __init__(self, tell: Callable[[int], None]) -> None:
        self._tell = tell
        self._told_at = time.monotonic()

    def __call__(self, num_tokens: int) -> None:
        if time.monotonic() - self._told_at >= TELL_EVERY_S:
            self._tell(num_tokens)
            self._told_at = time.monotonic()


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
