"""Conversations -> token ids and masks, once, into a temporary file; only columns stay in memory.

The plan needs all lengths before it can say where a sample goes, and tokenising twice would cost
more than writing five bytes a token aside.
"""

from __future__ import annotations

import multiprocessing
import tempfile
from array import array
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import chain, islice
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from dflash_pipeline.capture.model import resolve
from dflash_pipeline.capture.samples import Conversation, Dropped, place
from dflash_pipeline.capture.template import RenderError, render, render_text
from dflash_pipeline.configs.disk import writing
from dflash_pipeline.configs.schema import DataConfig, TargetConfig
from dflash_pipeline.store.table import (
    HELD_OUT,
    TRAIN,
    hash64,
    teacher_positions,
    valid_anchors,
)

Tokens = tuple[np.ndarray, np.ndarray]

# below this many conversations one process is done before others have loaded their tokenizer
_NUM_ALONE = 4096
_CHUNK = 128
_MOST_PROCESSES = 16


class Spool:
    """Samples in reading order: columns in memory, tokens in a file without a name."""

    def __init__(self, directory: Path | None, last_rows: str) -> None:
        """`directory` holds the temporary file; None: tokens are counted, not kept."""
        self._file = tempfile.TemporaryFile(dir=directory) if directory else None  # noqa: SIM115
        # it has no name
        self._place = f"{directory}/(a temporary file of tokens)"
        self._last_rows = last_rows
        self._begin, self._end = array("q"), 0
        self.keys: list[str] = []
        self.domains: list[str] = []
        self._domain_ids: dict[str, int] = {}
        self.num_supervised = 0
        self.columns = {
            name: array("Q" if name == "token_hash" else "q")
            for name in (
                "source",
                "source_row",
                "domain",
                "split",
                "num_tokens",
                "num_teacher",
                "num_anchors",
                "token_hash",
            )
        }

    def __enter__(self) -> Spool:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def __len__(self) -> int:
        return len(self.keys)

    def add(self, conversation: Conversation, tokens: Tokens, heldout: float) -> None:
        """Append one sample."""
        ids_T, mask_T = tokens
        domain = self._domain_ids.setdefault(conversation.domain, len(self.domains))
        if domain == len(self.domains):
            self.domains.append(conversation.domain)
        self.keys.append(conversation.key)
        self.num_supervised += int(mask_T.sum())
        values = {
            "source": conversation.source,
            "source_row": conversation.row,
            "domain": domain,
            "split": HELD_OUT if is_held_out(conversation.first_prompt, heldout) else TRAIN,
            "num_tokens": len(ids_T),
            "num_teacher": len(teacher_positions(mask_T, self._last_rows)),
            "num_anchors": len(valid_anchors(mask_T)),
            "token_hash": hash64(ids_T.astype("<u4").tobytes()),
        }
        for name, value in values.items():
            self.columns[name].append(value)
        if self._file is not None:
            self._begin.append(self._end)
            data = ids_T.astype("<u4").tobytes() + mask_T.tobytes()
            with writing(self._place):
                self._file.write(data)
            self._end += len(data)

    def column(self, name: str) -> np.ndarray:
        """One column in reading order."""
        return np.array(self.columns[name])

    def tokens(self, i: int) -> Tokens:
        """(ids_T uint32, mask_T uint8) of the i-th sample read."""
        if self._file is None:
            raise ValueError("this spool only counted; it kept no tokens")
        num_tokens = self.columns["num_tokens"][i]
        # what is still buffered is written by the first seek
        with writing(self._place):
            self._file.seek(self._begin[i])
        data = self._file.read(5 * num_tokens)
        ids_T = np.frombuffer(data, "<u4", num_tokens)
        return ids_T, np.frombuffer(data, np.uint8, num_tokens, offset=4 * num_tokens)


def is_held_out(first_prompt: str, heldout: float) -> bool:
    """Whether the samples of a prompt are kept from training; the same everywhere and always."""
    return hash64(first_prompt.encode()) < heldout * 2**64


def fill(
    spool: Spool,
    conversations: Iterable[Conversation],
    tokenizer: PreTrainedTokenizerBase,
    target: TargetConfig,
    vocab_size: int,
    data: DataConfig,
    num_processes: int,
    dropped: Dropped,
) -> None:
    """Render all conversations into the spool; those without a sample are counted in `dropped`."""
    for conversation, found in _rendered_all(conversations, tokenizer, target, num_processes):
        where = place(data.files[conversation.source], conversation.row)
        if isinstance(found, str):
            dropped.add(found, where)
            continue
        ids_T, mask_T = found
        if len(ids_T) and int(ids_T.max()) >= vocab_size:
            dropped.add("a token id outside the target's vocabulary", where)
        elif len(ids_T) > data.max_len and data.overlong == "drop":
            dropped.add("longer than data.max_len", where, is_bad=False)
        elif len(valid_anchors(mask_T)) == 0:
            dropped.add("no supervised pair", where)
        elif len(valid_anchors(mask_T[: data.max_len])) == 0:
            dropped.add("no answer within data.max_len", where, is_bad=False)
        else:
            cut = ids_T[: data.max_len], mask_T[: data.max_len]
            spool.add(conversation, cut, data.heldout)


def rendered(
    conversation: Conversation, tokenizer: PreTrainedTokenizerBase, target: TargetConfig
) -> Tokens:
    """(ids_T uint32, mask_T uint8) of any kind of conversation. Raises RenderError."""
    if conversation.token_ids:
        ids_T = np.array(conversation.token_ids, dtype=np.uint32)
        mask_T = np.zeros(len(ids_T), dtype=np.uint8)
        for begin, end in conversation.loss_spans:
            mask_T[begin:end] = 1
        return ids_T, mask_T
    if not conversation.messages:
        return render_text(tokenizer, conversation.text)
    num_turns = len(conversation.messages)
    # a question without an answer teaches nothing
    while num_turns and conversation.messages[num_turns - 1]["role"] != "assistant":
        num_turns -= 1
    return render(tokenizer, conversation.messages[:num_turns], target)


def _rendered_all(
    conversations: Iterable[Conversation],
    tokenizer: PreTrainedTokenizerBase,
    target: TargetConfig,
    num_processes: int,
) -> Iterator[tuple[Conversation, Tokens | str]]:
    """Each conversation with its tokens or the reason why it has none, in order."""
    source = iter(conversations)
    for conversation in islice(source, _NUM_ALONE):
        yield conversation, _tokens_or_reason(conversation, tokenizer, target)
    first = next(source, None)
    if first is None:
        return
    source = chain([first], source)
    if num_processes < 2:
        for conversation in source:
            yield conversation, _tokens_or_reason(conversation, tokenizer, target)
        return
    num_processes = min(num_processes, _MOST_PROCESSES)
    pending: deque[tuple[list[Conversation], Future[list[Tokens | str]]]] = deque()
    with ProcessPoolExecutor(
        num_processes, multiprocessing.get_context("spawn"), _load, (target,)
    ) as pool:
        while True:
            part = list(islice(source, _CHUNK))
            if part:
                pending.append((part, pool.submit(_render_part, part)))
            if not pending:
                return
            if not part or len(pending) > 2 * num_processes:
                done, future = pending.popleft()
                try:
                    found = future.result()
                except BrokenProcessPool as error:
                    raise ValueError(
                        f"one of {num_processes} processes that tokenise the data was killed, as "
                        "the kernel does when memory runs out: free some, or set OMP_NUM_THREADS "
                        "to use fewer processes, and run the same command again"
                    ) from error
                yield from zip(done, found, strict=True)


def _tokens_or_reason(
    conversation: Conversation, tokenizer: PreTrainedTokenizerBase, target: TargetConfig
) -> Tokens | str:
    try:
        return rendered(conversation, tokenizer, target)
    except RenderError as error:
        return str(error)


class _Worker:
    """What a rendering process holds between its parts."""

    target: TargetConfig
    tokenizer: PreTrainedTokenizerBase


def _load(target: TargetConfig) -> None:
    _Worker.target = target
    _Worker.tokenizer = resolve(target).tokenizer()


def _render_part(part: list[Conversation]) -> list[Tokens | str]:
    return [_tokens_or_reason(one, _Worker.tokenizer, _Worker.target) for one in part]
