"""What a study's folder holds before its first command: prompts, configuration, what it is of."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from dflash_pipeline.capture import toytext
from dflash_pipeline.configs.sizes import size_text
from studies import cost
from studies.sizes import DOMAINS, SIZES, Size, config_text

TOY_SEED = 3
PROMPT_FILES = [f"{split}_{domain}" for split in ("train", "eval") for domain in DOMAINS]


def prepare(
    folder: Path,
    size_name: str,
    seeds: Sequence[int],
    prompts: Path | None,
    memory: Path | None = None,
) -> None:
    """Copy the prompts and write the configuration, or find that this study's are there.

    ValueError where the folder holds another study, prompts are missing or too many, or a new study
    will not fit into `folder` and `memory`.
    """
    size = SIZES[size_name]
    if size.preset == "toy" and prompts is not None:
        raise ValueError(f"size {size_name} writes its own prompts: leave --prompts out")
    if size.preset != "toy" and prompts is None and not (folder / "prompts").is_dir():
        raise ValueError(
            f"size {size_name} needs --prompts, a folder of {PROMPT_FILES}, or --answers"
        )
    folder.mkdir(parents=True, exist_ok=True)
    kept = folder / "prompts"
    if not kept.is_dir():
        aside = folder / ".prompts"
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir()
        for name in PROMPT_FILES:
            _write_prompts(aside / f"{name}.jsonl", prompts, size)
        aside.rename(kept)
    now = {
        "size": size_name,
        "settings": asdict(size),
        "seeds": list(seeds),
        "prompts": prompts_digest(kept),
        "memory": str(memory or ""),
    }
    path = folder / "settings.json"
    if path.exists():
        before = json.loads(path.read_text(encoding="utf-8"))
        changed = [name for name in now if before.get(name) != json.loads(json.dumps(now))[name]]
        if changed:
            raise ValueError(
                f"{folder} holds a study with other {', '.join(changed)}: go on with the "
                "same ones, or name another folder"
            )
    else:
        check_room(cost.most_bytes(size, len(seeds), memory is not None), folder, memory)
        path.write_text(json.dumps(now, indent=1) + "\n", encoding="utf-8")
    (folder / "dflash.toml").write_text(config_text(size), encoding="utf-8")


def prompts_digest(prompts: Path) -> str:
    """Of all prompts in a study's folder of them."""
    digest = hashlib.sha256()
    for name in PROMPT_FILES:
        digest.update((prompts / f"{name}.jsonl").read_bytes())
    return digest.hexdigest()[:16]


def check_room(needed: cost.Bytes, folder: Path, memory: Path | None) -> None:
    """ValueError where a file system has less room than the study takes of it."""
    places = [(folder, needed.disk)]
    if memory is not None:
        memory.mkdir(parents=True, exist_ok=True)
        places.append((memory, needed.memory))
    for place, size_bytes in places:
        free = shutil.disk_usage(place).free
        if free < size_bytes:
            raise ValueError(
                f"{place} has {size_text(free)} free, the study takes {size_text(size_bytes)} of "
                "it: make room, or give half of the stores another file system by --memory"
            )


def _write_prompts(path: Path, prompts: Path | None, size: Size) -> None:
    """One file: of a real target's, or the toy's own of the same name."""
    split, _, domain = path.stem.partition("_")
    count = size.num_prompts[split == "eval"]
    if prompts is not None:
        # bytes: text would also be split at separators that stand inside of a row
        lines = (prompts / path.name).read_bytes().splitlines(keepends=True)
        path.write_bytes(b"".join(lines[:count] if count else lines))
        return
    rows = toytext.rows(domain, split, count, TOY_SEED)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
