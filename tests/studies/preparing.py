"""What a study's folder holds before its first command: prompts, configuration, what it is of."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from dflash_pipeline.capture import toytext
from studies.sizes import DOMAINS, SIZES, Size, config_text

TOY_SEED = 3
_PROMPT_FILES = [f"{split}_{domain}" for split in ("train", "eval") for domain in DOMAINS]


def prepare(folder: Path, size_name: str, seeds: Sequence[int], prompts: Path | None) -> None:
    """Copy the prompts and write the configuration, or find that this study's are there.

    ValueError where the folder holds another study, or prompts are missing or too many.
    """
    size = SIZES[size_name]
    if size.preset == "toy" and prompts is not None:
        raise ValueError(f"size {size_name} writes its own prompts: leave --prompts out")
    if size.preset != "toy" and prompts is None and not (folder / "prompts").is_dir():
        raise ValueError(f"size {size_name} needs --prompts, a folder of {_PROMPT_FILES}")
    folder.mkdir(parents=True, exist_ok=True)
    kept = folder / "prompts"
    if not kept.is_dir():
        aside = folder / ".prompts"
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir()
        for name in _PROMPT_FILES:
            _write_prompts(aside / f"{name}.jsonl", prompts, size)
        aside.rename(kept)
    digest = hashlib.sha256()
    for name in _PROMPT_FILES:
        digest.update((kept / f"{name}.jsonl").read_bytes())
    now = {
        "size": size_name,
        "settings": asdict(size),
        "seeds": list(seeds),
        "prompts": digest.hexdigest()[:16],
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
        path.write_text(json.dumps(now, indent=1) + "\n", encoding="utf-8")
    (folder / "dflash.toml").write_text(config_text(size), encoding="utf-8")


def _write_prompts(path: Path, prompts: Path | None, size: Size) -> None:
    """One file: a copy, or the toy's own of the same name."""
    if prompts is not None:
        shutil.copyfile(prompts / path.name, path)
        return
    split, _, domain = path.stem.partition("_")
    count = size.toy_prompts[split == "eval"]
    rows = toytext.rows(domain, split, count, TOY_SEED)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
