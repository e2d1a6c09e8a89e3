"""How large the study is, and the lines of configuration that all of its commands share."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

DOMAINS = ("math", "code", "chat")
TEMPERATURE = 0.7


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """One size of the whole study."""

    preset: str
    """Of the target."""
    num_prompts: tuple[int, int] = (0, 0)
    """Training and held-out prompts of a domain: the first of its file, or as many as the toy
    writes; 0: all of the file."""
    samples: int
    """Sampled answers of a training prompt, beside the greedy one; at least 2, as one alone would
    have the greedy one's id."""
    eval_samples: int
    """The same of a held-out prompt."""
    is_estimated: bool = False
    """Whether `cost.py` knows what it takes."""
    settings: Mapping[str, object] = field(default_factory=dict)
    """`section.key` -> value over the preset."""


FULL = Size(
    preset="smollm2",
    samples=4,
    eval_samples=7,
    is_estimated=True,
    settings={
        "data.max_len": 768,
        "generate.max_new_tokens": 256,
        # of 1,024 the prompts' padding makes the cache a fifth larger
        "generate.batch_size": 512,
        "store.shard_bytes": 1 << 28,
        "capture.token_budget": 49152,
        "drafter.num_layers": 3,
        "drafter.block_size": 8,
        "loss.gamma": 4.0,
        "loss.position_chunk": 3584,
        "train.epochs": 2,
        "train.anchors_per_sample": 24,
        "train.batch_anchors": 1024,
        "train.batch_tokens": 16384,
        "train.log_every": 50,
        "train.save_every": 400,
        "train.keep": 1,
        "train.validate_every": 0,
        "train.validate_samples": 16,
    },
)
TINY = Size(
    preset="toy",
    num_prompts=(24, 4),
    samples=2,
    eval_samples=2,
    settings={
        "generate.max_new_tokens": 64,
        "store.shard_bytes": 1 << 18,
        "train.epochs": 2,
        "train.log_every": 2,
        "train.save_every": 10,
        "train.keep": 1,
        "train.validate_every": 0,
        "train.validate_samples": 4,
    },
)
REHEARSAL = Size(
    preset="smollm2",
    num_prompts=(5, 2),
    samples=2,
    eval_samples=2,
    settings={
        "data.max_len": 256,
        "generate.max_new_tokens": 16,
        "store.shard_bytes": 1 << 22,
        "drafter.num_layers": 2,
        "train.epochs": 2,
        "train.log_every": 2,
        "train.save_every": 10,
        "train.keep": 1,
        "train.validate_every": 0,
        "train.validate_samples": 2,
    },
)
"""The full one's target and files on a small machine without a GPU: whether all of it runs."""
SIZES = {"full": FULL, "tiny": TINY, "rehearsal": REHEARSAL}


def config_text(size: Size) -> str:
    """The `dflash.toml` that each command of the study reads."""
    sections: dict[str, list[str]] = {}
    for key, value in size.settings.items():
        section, _, name = key.partition(".")
        sections.setdefault(section, []).append(f"{name} = {json.dumps(value)}")
    lines = [f'preset = "{size.preset}"']
    for section, entries in sections.items():
        lines += ["", f"[{section}]", *entries]
    return "\n".join(lines) + "\n"


@dataclass(frozen=True, slots=True)
class AnswerJob:
    """One `dflash generate`: its file in the study's folder, its prompts, how often each."""

    name: str
    files: tuple[str, ...]
    samples: int
    """0: greedy."""

    def words(self) -> list[str]:
        """The command, run in the study's folder."""
        words = ["generate", "--out", f"answers/{self.name}.jsonl"]
        for file in self.files:
            words += ["--data", f"prompts/{file}.jsonl"]
        if self.samples:
            words += ["--samples", str(self.samples), "--temperature", str(TEMPERATURE)]
        return words


def answer_jobs(size: Size) -> list[AnswerJob]:
    """Greedy and sampled answers of training and held-out prompts; the longest jobs first.

    Sampled answers are a job of each domain: a long one begun last would be waited for alone.
    """
    train, held_out = ([f"{split}_{domain}" for domain in DOMAINS] for split in ("train", "eval"))
    return [
        *(AnswerJob(_sampled(file), (file,), size.samples) for file in train),
        AnswerJob("train-greedy", tuple(train), 0),
        *(AnswerJob(_sampled(file), (file,), size.eval_samples) for file in held_out),
        AnswerJob("eval-greedy", tuple(held_out), 0),
    ]


def _sampled(file: str) -> str:
    return file.replace("_", "-sampled-")


def prompt_of(key: str) -> str:
    """The prompt that an answer is of: answers of one prompt are drawn again together."""
    return key.partition("#")[0]


def is_sampled(key: str) -> bool:
    """Whether an answer was sampled: its id ends in its number."""
    return "#" in key
