"""`dflash eval` with a store: its held-out samples are replayed, and no target is needed."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence

import torch

from dflash_pipeline.configs.errors import UsageError
from dflash_pipeline.configs.place import Place, dtype_name
from dflash_pipeline.configs.schema import Run
from dflash_pipeline.store import open_store
from dflash_pipeline.store.runlog import RunLog
from dflash_pipeline.train.arms import (
    drafters,
    tokens_by_domain,
)
from dflash_pipeline.train.fits import check_fits, check_layers, say_if_foreign
from dflash_pipeline.train.head import TargetHead
from dflash_pipeline.train.loading import Checkpoint
from dflash_pipeline.train.remembered import check_rendering, rendering
from dflash_pipeline.train.replay import Replayed, held_out, replayed, replayed_lookup
from dflash_pipeline.train.report import Arm, Pace, Report, Scored, scored
from dflash_pipeline.train.results import LOOKUP, REPLAY, TRAINED, UNTRAINED, settings
from dflash_pipeline.train.selection import none_held_out
from dflash_pipeline.train.tally import Tally


def by_replay(run: Run, place: Place, checkpoint: Checkpoint, log: RunLog) -> Report:
    """The held-out samples of `run.store.path`, at most `run.eval.limit` a domain."""
    if run.eval.temperature:
        raise UsageError(
            f"eval.temperature is {run.eval.temperature:g}: a replay takes the stored answers as "
            "they are and is greedy; give --prompts to decode with sampling"
        )
    shape = checkpoint.shape
    store = open_store(run.store.path)
    spec, names = store.spec, store.table.domains
    check_fits(checkpoint, spec.num_target_layers, spec.hidden_size, spec.vocab_size, frozenset())
    check_layers(shape, store)
    say_if_foreign(checkpoint, store.embed(), f"store {store.path}", log)
    check_rendering(checkpoint.path, checkpoint.trained_on, rendering(spec), f"store {store.path}")
    samples: dict[str, list[int]] = {}
    for index in held_out(store):
        of_domain = samples.setdefault(names[int(store.table.domain[index])], [])
        if not run.eval.limit or len(of_domain) < run.eval.limit:
            of_domain.append(index)
    if not samples:
        raise UsageError(none_held_out(store))
    is_bf16 = dtype_name(run.target.dtype, place.kind) == "bf16"
    dtype = torch.bfloat16 if is_bf16 else torch.float32
    head = TargetHead.from_store(store, shape, place.device, dtype)
    trained, untrained = drafters(checkpoint, run.eval.seed, place.device, dtype)
    cut, ngram, num_drafts = run.eval.max_new_tokens, run.eval.lookup_ngram, shape.block_size - 1
    runners: dict[str, Callable[[Sequence[int]], Replayed]] = {
        TRAINED: lambda indices: replayed(store, indices, trained, head, cut),
        UNTRAINED: lambda indices: replayed(store, indices, untrained, head, cut),
        LOOKUP: lambda indices: replayed_lookup(store, indices, num_drafts, ngram, cut),
    }
    num_samples = sum(len(indices) for indices in samples.values())
    arms, taus, num_done = dict[str, Arm](), dict[str, float](), 0
    for name, runner in runners.items():
        prompts, seconds = list[Scored](), defaultdict[str, float](float)
        pooled = Tally(num_drafts=num_drafts)
        for domain, indices in sorted(samples.items()):
            began = time.perf_counter()
            for index, answers in runner(indices):
                key = store.table.key(index)
                prompts.append(scored(key, domain, answers, num_drafts))
                num_done += 1
                pooled.merge(prompts[-1].whole)
                taus[f"tau_{name}"] = pooled.tau
                log.progress(num_done, num_samples * len(runners), "samples", **taus)
            seconds[prompts[-1].domain] = time.perf_counter() - began
        arms[name] = Arm(
            prompts=prompts, pace=Pace(tokens=tokens_by_domain(prompts), seconds=seconds)
        )
    return Report(
        mode=REPLAY,
        settings=settings(run) | {"rendering": rendering(spec)},
        arms=arms,
        plain=None,
        mismatches=[],
        is_judged=False,
        seed=run.eval.seed,
    )
