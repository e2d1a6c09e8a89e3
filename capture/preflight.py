"""The whole capture on a tiny random twin of the target, before anything large is read.

The first conversations go through template, plan, forward, pack, store, gate and verify in a
temporary directory. What a setting breaks, it breaks here, in seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from dflash_pipeline.capture import twin
from dflash_pipeline.capture.compiled import compile_layers
from dflash_pipeline.capture.construction import NothingLeftError, build_store
from dflash_pipeline.capture.model import TargetFiles
from dflash_pipeline.capture.samples import Conversation, Dropped
from dflash_pipeline.capture.shapes import planned_shapes
from dflash_pipeline.capture.stop import Stop
from dflash_pipeline.capture.target import Target
from dflash_pipeline.capture.voice import Silence
from dflash_pipeline.capture.worker import capture, seal
from dflash_pipeline.configs.schema import Run
from dflash_pipeline.store.check import verify

MAX_LEN = 256
# in case the first rows of the data are none that can be used
CONVERSATION = (
    {"role": "user", "content": "Count to three."},
    {"role": "assistant", "content": "One, two, three."},
)


def check(
    run: Run,
    files: TargetFiles,
    conversations: Sequence[Conversation],
    say: Callable[[str], None],
) -> None:
    """Raise ValueError if `run` would not get through a capture. Takes seconds, on the CPU.

    say: told when the target's own code makes no twin, so that nothing can be tried.
    """
    with twin.made(run, files, say) as small:
        if small is None:
            return
        trial = replace(
            small.run,
            data=replace(
                run.data,
                max_len=min(run.data.max_len, MAX_LEN),
                overlong="truncate",
                heldout=0.0,
                max_bad_share=1.0,
            ),
            store=replace(run.store, path=str(small.directory / "store"), shard_bytes=1),
            # random rows say nothing about the errors of int8 and int4
            capture=replace(
                run.capture,
                max_bad_share=0.0,
                force=True,
                calibration_from="",
                quota="",
                num_consumers=1,
            ),
        )
        dropped = Dropped(num_rows=len(conversations) + 1)
        tried = [*conversations, _conversation()]
        try:
            _capture(trial, small.files, tried, dropped)
        except NothingLeftError as error:
            # all too short a cut: the plan goes on to the rows after these
            if dropped.num_bad:
                raise ValueError(
                    f"target {files.name}: neither the first {len(conversations)} rows nor a plain "
                    f"question and answer can be rendered: {'; '.join(sorted(dropped.counts))}"
                ) from error


def _conversation() -> Conversation:
    return Conversation(
        key="preflight",
        source=0,
        row=0,
        domain="",
        messages=CONVERSATION,
        text="",
        token_ids=(),
        loss_spans=(),
    )


def _capture(
    run: Run, files: TargetFiles, conversations: Sequence[Conversation], dropped: Dropped
) -> None:
    store = build_store(run, files, "cpu", conversations, dropped, "", 1, Silence().say)
    target = Target.load(files, store.spec.layer_ids, "cpu", torch.float32)
    # auto runs plain what cannot be compiled
    if run.capture.compile == "on":
        # the tracer alone: whether this family's layers can be compiled whole
        planned = planned_shapes(store.table, store.layout)
        shapes = [shape for found in planned for shape in found]
        compile_layers(target, shapes, backend="eager")
    with Stop() as stop:
        store = capture(store, target, run.capture, Silence(), stop)
    seal(store, run.capture)
    problems = verify(store.path, deep=True).problems
    if problems:
        raise ValueError(f"preflight: the trial store is damaged: {'; '.join(problems)}")
