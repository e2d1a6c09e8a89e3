"""What a study sends from its machine and takes back on another: its answers, its best drafter.

The parcel `answers` holds the prompts, each file of answers with what the product recorded of its
making, and `facts.json`: all that the answers depend on. `drafter` holds a checkpoint that servers
and `dflash eval --drafter` read, once it is unpacked.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dflash_pipeline.capture.generate import run_settings
from dflash_pipeline.capture.model import resolve
from dflash_pipeline.capture.settings import settings_path
from dflash_pipeline.configs.load import load
from studies import parcels
from studies.preparing import PROMPT_FILES, prompts_digest
from studies.sizes import SIZES, TEMPERATURE, Size, answer_jobs, config_text

ANSWERS, DRAFTER = "answers", "drafter"
_FACTS, _PROMPTS = "facts.json", "prompts"


def answer_facts(size_name: str, folder: Path) -> dict[str, Any]:
    """What the answers of a study depend on, but for its prompts; `folder` has its dflash.toml."""
    size = SIZES[size_name]
    run = load(str(folder / "dflash.toml"), (), {})
    found: dict[str, Any] = {"size": size_name, **run_settings(run, resolve(run.target))}
    found["temperature"] = TEMPERATURE
    found["answers"] = " ".join(f"{job.name}*{max(job.samples, 1)}" for job in answer_jobs(size))
    found["rows of each prompt file"] = size.num_prompts
    # as it is read back
    plain: dict[str, Any] = json.loads(json.dumps(found))
    return plain


def send_answers(folder: Path, size_name: str, out: Path) -> list[Path]:
    """Pack the answers of a study whose answers are all there."""
    facts = answer_facts(size_name, folder) | {_PROMPTS: prompts_digest(folder / "prompts")}
    files: dict[str, Path | bytes] = {_FACTS: json.dumps(facts, indent=1).encode()}
    names = [f"prompts/{name}.jsonl" for name in PROMPT_FILES]
    for job in answer_jobs(SIZES[size_name]):
        answers = f"answers/{job.name}.jsonl"
        names += [answers, str(settings_path(answers))]
    return parcels.pack(out, ANSWERS, files | {name: folder / name for name in names})


def send_drafter(run: Path, out: Path) -> list[Path]:
    """Pack the last step of a run, without the state that training would go on from."""
    last = run / "last"
    files: dict[str, Path | bytes] = {
        f"{run.name}/{path.name}": path for path in sorted(last.iterdir()) if path.is_file()
    }
    return parcels.pack(out, DRAFTER, files)


class Parcel:
    """Answers that came from another machine, unpacked beside those of a study."""

    def __init__(self, parts: Path, study: Path, size_name: str) -> None:
        """ValueError unless the parts are whole and their answers those of this size."""
        self._parts, self._study, self._size_name = parts, study, size_name
        self._aside = study / ".carried"
        self.remove()
        try:
            parcels.unpack(parts, ANSWERS, self._aside)
            self._facts = json.loads((self._aside / _FACTS).read_text(encoding="utf-8"))
            config = self._aside / "dflash.toml"
            config.write_text(config_text(SIZES[size_name]), encoding="utf-8")
            self._check(answer_facts(size_name, self._aside))
        except BaseException:
            self.remove()
            raise

    @property
    def prompts(self) -> Path:
        """The prompts that the answers are of."""
        return self._aside / "prompts"

    def take(self, done: Path) -> None:
        """Put the answers where the study keeps its own, and note them as done.

        ValueError unless the prompts that the study holds are theirs.
        """
        try:
            self._check({_PROMPTS: prompts_digest(self._study / "prompts")})
            shutil.rmtree(self._study / "answers", ignore_errors=True)
            (self._aside / "answers").rename(self._study / "answers")
            done.mkdir(exist_ok=True)
            for job in answer_jobs(SIZES[self._size_name]):
                (done / job.name).touch()
        finally:
            self.remove()

    def remove(self) -> None:
        """Whatever a call that was killed left, too."""
        shutil.rmtree(self._aside, ignore_errors=True)

    def _check(self, expected: Mapping[str, Any]) -> None:
        different = [
            f"{name} {self._facts.get(name)!r}, expected {value!r}"
            for name, value in expected.items()
            if self._facts.get(name) != value
        ]
        if different:
            raise ValueError(
                f"{self._parts} holds the answers of another study: {'; '.join(different)}"
            )


def has_answers(size: Size, done: Path) -> bool:
    """Whether every file of answers is noted as done."""
    return all((done / job.name).exists() for job in answer_jobs(size))
