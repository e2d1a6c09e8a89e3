"""`dflash generate`: the target's own answers into one JSONL file, resumable by id.

Run again with the same settings it adds what is missing; ids in the file are not answered twice.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Set
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path

from dflash_pipeline.capture import endpoint, settings, twin
from dflash_pipeline.capture.answer_file import AnswerFile
from dflash_pipeline.capture.answerer import LEFT_OUT, Answerer
from dflash_pipeline.capture.answers import Dialogue, dialogues
from dflash_pipeline.capture.model import TargetFiles, resolve
from dflash_pipeline.capture.samples import Dropped
from dflash_pipeline.capture.template import RenderError
from dflash_pipeline.configs.errors import UsageError
from dflash_pipeline.configs.place import Place
from dflash_pipeline.configs.schema import Run
from dflash_pipeline.store.runlog import RunLog

# dialogues sorted by length at a time, in batches: little padding at constant memory
_WINDOW_BATCHES = 16
# of the rehearsal: a batch with padding in it, and more than one step with the cache
_TRIAL_PROMPTS, _TRIAL_TOKENS = 2, 3


def main(run: Run, place: Place, extra: dict[str, object]) -> None:
    """Answer this rank's share of the prompts, here or through servers, into `generate.out`."""
    log = RunLog(place)
    files = resolve(run.target) if run.target.id else None
    if not run.generate.endpoints and files is None:
        raise UsageError("no target: give --target, or servers with --endpoint")
    own = None if run.generate.endpoints else files
    is_new = not Path(run.generate.out).exists()
    if is_new and checked_count(run, place, set()) and own is not None:
        # before the first file is made: a command that cannot work leaves none
        rehearse(run, place, own, log)
    settings.claim(run.generate.out, run_settings(run, files))
    out = AnswerFile(run.generate.out)
    try:
        done = out.ids()
        num_todo = checked_count(run, place, done)
        dropped = Dropped()
        fresh = _fresh(run, place, done, dropped)
        if own is None:
            num_new = endpoint.answer_all(fresh, out, run, files, num_todo, dropped, log)
        else:
            if num_todo and not is_new:
                rehearse(run, place, own, log)
            answerer = Answerer(own, run.target, run.generate, run.data, place)
            num_new = _answer_here(fresh, out, run, answerer, num_todo, dropped, log)
        for line in dropped.lines():
            log.say(f"left out {line}")
        log.say(f"{num_new} answers added to {run.generate.out}; {len(done)} were there before")
    finally:
        out.close()


def rehearse(run: Run, place: Place, files: TargetFiles, log: RunLog) -> None:
    """The first prompts through the whole path on a tiny random twin of the target, on the CPU.

    Whatever a setting breaks, it breaks here, before real weights load. Writes nothing.
    """
    with twin.made(run, files, log.say) as small:
        if small is None:
            return
        config = replace(
            run.generate, max_new_tokens=min(_TRIAL_TOKENS, run.generate.max_new_tokens)
        )
        here = replace(place, kind="cpu", device="cpu")
        answerer = Answerer(small.files, small.run.target, config, run.data, here)
        fresh = dialogues(run.data, run.generate.samples, 0, 1, Dropped())
        batch = [one for _, one in islice(_sized(fresh, answerer, Dropped()), _TRIAL_PROMPTS)]
        if batch:
            answerer.answer(batch, lambda _count: None)
            json.dumps([dialogue.line(config) for dialogue in batch])


def run_settings(run: Run, files: TargetFiles | None) -> dict[str, object]:
    """What answers depend on besides their prompts; runs that agree may share a file."""
    found = settings.told_settings(run)
    found["target"] = files.directory.name if files is not None else ""
    if files is not None:
        found["tokenizer_hash"] = files.tokenizer_hash()
        found["template_hash"] = files.template_hash()
    if files is not None and not run.generate.endpoints:
        # names and sizes: every rank would have to read all weights for a hash
        found["weights"] = {path.name: path.stat().st_size for path in files.weight_paths()}
    return found


def checked_count(run: Run, place: Place, done: Set[str]) -> int:
    """Answers that this rank still has to give; counted so that the end can be foretold.

    Raises ValueError when too many rows are unusable.
    """
    dropped = Dropped()
    num_todo = sum(1 for _ in _fresh(run, place, done, dropped))
    dropped.check(run.data.max_bad_share)
    return num_todo


def _fresh(run: Run, place: Place, done: Set[str], dropped: Dropped) -> Iterator[Dialogue]:
    todo = dialogues(run.data, run.generate.samples, place.rank, place.world, dropped)
    return (dialogue for dialogue in todo if dialogue.key not in done)


def _answer_here(
    fresh: Iterator[Dialogue],
    out: AnswerFile,
    run: Run,
    answerer: Answerer,
    num_todo: int,
    dropped: Dropped,
    log: RunLog,
) -> int:
    """Answer with the loaded target; the number of new answers."""
    num_new = num_tokens = 0
    # from here on answers are counted, and the time that they take
    log.part(0, num_todo, "answers", tokens_written=0)
    sized = _sized(fresh, answerer, dropped)
    while window := list(islice(sized, _WINDOW_BATCHES * run.generate.batch_size)):
        # the longest first: memory that will not do is found out at once
        window.sort(key=lambda item: -item[0])
        while window:
            batch = [dialogue for _, dialogue in window[: answerer.batch_size]]
            del window[: answerer.batch_size]
            tell = partial(_tell, log, num_new, num_todo, num_tokens)
            num_tokens += answerer.answer(batch, tell)
            out.append([dialogue.line(run.generate) for dialogue in batch])
            num_new += len(batch)
            log.part(num_new, num_todo, "answers", tokens_written=num_tokens)
    return num_new


def _tell(log: RunLog, num_new: int, num_todo: int, num_before: int, num_batch: int) -> None:
    """The first batch may take minutes: its tokens are counted while it is under way."""
    log.part(num_new, num_todo, "answers", tokens_written=num_before + num_batch)


def _sized(
    fresh: Iterator[Dialogue], answerer: Answerer, dropped: Dropped
) -> Iterator[tuple[int, Dialogue]]:
    """Each dialogue with the length of its first prompt, in tokens."""
    for dialogue in fresh:
        try:
            first = {"role": "user", "content": dialogue.questions[0]}
            yield len(answerer.prompt([*dialogue.messages, first])), dialogue
        except RenderError as error:
            dropped.add(str(error), dialogue.key, is_bad=str(error) not in LEFT_OUT)
