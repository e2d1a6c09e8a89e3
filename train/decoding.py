"""`dflash eval` with prompts: the target decodes, plainly and with each arm, in the same loop.

Greedy outputs are compared with plain decoding's, which is timed in the same run.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby

import torch
from torch import Tensor

from dflash_pipeline.configs.errors import UsageError
from dflash_pipeline.configs.memory import host_told_alike
from dflash_pipeline.configs.mounts import root_of
from dflash_pipeline.configs.place import Place
from dflash_pipeline.configs.schema import Run
from dflash_pipeline.store import open_store
from dflash_pipeline.store.runlog import RunLog
from dflash_pipeline.train.arms import (
    drafters,
    tokens_by_domain,
)
from dflash_pipeline.train.decode import (
    EXEMPT_GAP,
    DecodeTarget,
    Task,
    decode,
    decode_plainly,
    first_difference,
)
from dflash_pipeline.train.drafter import Drafter
from dflash_pipeline.train.drafting import Drafting, LookupDrafting, ModelDrafting, as_stored
from dflash_pipeline.train.evaltarget import EvalTarget, OpenTarget, Prompt
from dflash_pipeline.train.fits import bf16_bits, check_fits, check_layers, say_if_foreign
from dflash_pipeline.train.head import TargetHead
from dflash_pipeline.train.loading import Checkpoint
from dflash_pipeline.train.preflight import twin_shape
from dflash_pipeline.train.remembered import check_rendering
from dflash_pipeline.train.report import Arm, Mismatch, Pace, Report, Scored, scored
from dflash_pipeline.train.results import DECODE, LOOKUP, PLAIN, TRAINED, UNTRAINED, settings
from dflash_pipeline.train.sampling import Draws, Sampling
from dflash_pipeline.train.shape import DrafterShape
from dflash_pipeline.train.tally import Answer, Tally

# of the rehearsal: more than one cycle over a short prompt
_TRIAL_PROMPTS, _TRIAL_PROMPT_TOKENS, _TRIAL_TOKENS = 2, 16, 4


def by_decoding(
    run: Run, place: Place, checkpoint: Checkpoint, open_target: OpenTarget, log: RunLog
) -> Report:
    """Every prompt plainly, then with each of the three, all in the same loop."""
    shape = checkpoint.shape
    opened = open_target(run, place, shape.layer_ids)
    for line in opened.dropped:
        log.say(f"not used: {line}")
    check_fits(
        checkpoint,
        opened.num_layers,
        opened.hidden_size,
        opened.vocab_size,
        opened.reserved_ids,
    )
    check_rendering(checkpoint.path, checkpoint.trained_on, opened.rendering, "this command")
    rounding = _rounding(run, shape) if run.eval.as_stored else None
    trained, untrained = drafters(checkpoint, run.eval.seed, opened.device, opened.dtype)
    rehearse(run, shape, opened, rounding, log)
    loaded = opened.load()
    say_if_foreign(checkpoint, bf16_bits(loaded.embed_VH), run.target.id, log)
    head = TargetHead(loaded.embed_VH, loaded.head_VH, shape)
    draftings: dict[str, Drafting] = {
        TRAINED: ModelDrafting(trained, head, rounding),
        UNTRAINED: ModelDrafting(untrained, head, rounding),
        LOOKUP: LookupDrafting(shape.block_size - 1, run.eval.lookup_ngram),
    }
    return _decoded(run, opened, loaded.target, draftings, shape.block_size - 1, log)


def _decoded(
    run: Run,
    opened: EvalTarget,
    target: DecodeTarget,
    draftings: Mapping[str, Drafting],
    num_drafts: int,
    log: RunLog,
) -> Report:
    sampling, eos_ids = sampling_of(run), opened.eos_ids
    rounds: dict[str, Callable[[Sequence[Task]], list[Answer]]] = {
        PLAIN: lambda tasks: decode_plainly(target, tasks, eos_ids, sampling)
    }
    for name, drafting in draftings.items():
        rounds[name] = partial(decode, target, drafting, eos_ids=eos_ids, sampling=sampling)
    batches = batched(opened.prompts, run.eval.batch_size)
    # kernels are chosen and memory is taken before the clock starts
    for answer_all in rounds.values():
        answer_all(_tasks(batches[0], opened.device, run.eval.seed, _TRIAL_TOKENS))
    total, num_done = len(opened.prompts) * len(rounds), 0
    plain, plain_pace = dict[str, Answer](), Pace(tokens={}, seconds={})
    arms, taus, mismatches = dict[str, Arm](), dict[str, float](), list[Mismatch]()
    for name, answer_all in rounds.items():
        seconds, prompts = defaultdict[str, float](float), list[Scored]()
        pooled = Tally(num_drafts=num_drafts)
        for batch in batches:
            # plain decoding has numbers of its own: its answers are no copies of an arm's
            seed = run.eval.seed if name != PLAIN else ~run.eval.seed
            tasks = _tasks(batch, opened.device, seed, run.eval.max_new_tokens)
            began = time.perf_counter()
            answers = _answered(answer_all, tasks)
            elapsed_s = time.perf_counter() - began
            for prompt, answer in zip(batch, answers, strict=True):
                found = scored(prompt.key, prompt.domain, [answer], num_drafts)
                prompts.append(found)
                pooled.merge(found.whole)
                if name == PLAIN:
                    plain[prompt.key] = answer
                elif sampling.is_greedy:
                    mismatches += _mismatches(name, prompt.key, plain[prompt.key], answer)
            seconds[prompts[-1].domain] += elapsed_s
            num_done += len(batch)
            if name != PLAIN:
                taus[f"tau_{name}"] = pooled.tau
            log.progress(num_done, total, "answers", **taus)
        pace = Pace(tokens=tokens_by_domain(prompts), seconds=seconds)
        if name == PLAIN:
            plain_pace = pace
        else:
            arms[name] = Arm(prompts=prompts, pace=pace)
    return Report(
        mode=DECODE,
        settings=settings(run) | {"rendering": dict(opened.rendering)},
        arms=arms,
        plain=plain_pace,
        mismatches=mismatches,
        is_judged=opened.dtype == torch.float32 and sampling.is_greedy,
        seed=run.eval.seed,
    )


def batched(prompts: Sequence[Prompt], batch_size: int) -> list[list[Prompt]]:
    """Prompts of one domain and of similar length together, so that each domain has its time."""
    ordered = sorted(prompts, key=lambda prompt: (prompt.domain, len(prompt.ids)))
    batches = list[list[Prompt]]()
    for _, group in groupby(ordered, key=lambda prompt: prompt.domain):
        of_domain = list(group)
        batches += [of_domain[i : i + batch_size] for i in range(0, len(of_domain), batch_size)]
    return batches


def sampling_of(run: Run) -> Sampling:
    """How `eval` chooses tokens."""
    config = run.eval
    return Sampling(temperature=config.temperature, top_k=config.top_k, top_p=config.top_p)


def rehearse(
    run: Run,
    shape: DrafterShape,
    opened: EvalTarget,
    rounding: Callable[[Tensor], Tensor] | None,
    log: RunLog,
) -> None:
    """A few tokens with random twins of target and drafter on the CPU, before real weights load."""
    twin = opened.load_twin(log.say)
    if twin is None:
        return
    if rounding is not None:
        rounding(torch.zeros(1, shape.num_features, shape.hidden_size))
    vocab_size, hidden_size = twin.embed_VH.shape
    small = replace(
        twin_shape(shape),
        hidden_size=hidden_size,
        vocab_size=vocab_size,
        mask_token_id=shape.mask_token_id,
        layer_ids=tuple(twin.layer_ids),
    )
    drafter = Drafter(small)
    drafter.initialise(run.eval.seed)
    drafter.requires_grad_(False)
    head = TargetHead(twin.embed_VH, twin.head_VH, small)
    lookup = LookupDrafting(small.block_size - 1, run.eval.lookup_ngram)
    sampling = sampling_of(run)
    tasks = [
        Task(
            ids_T=torch.tensor(prompt.ids[-_TRIAL_PROMPT_TOKENS:]),
            max_new_tokens=min(run.eval.max_new_tokens, _TRIAL_TOKENS),
            draws=Draws(run.eval.seed, prompt.key),
        )
        for prompt in opened.prompts[: min(run.eval.batch_size, _TRIAL_PROMPTS)]
    ]
    decode_plainly(twin.target, tasks, opened.eos_ids, sampling)
    for drafting in (ModelDrafting(drafter, head, None), lookup):
        decode(twin.target, drafting, tasks, opened.eos_ids, sampling)


def _rounding(run: Run, shape: DrafterShape) -> Callable[[Tensor], Tensor]:
    """The trip through a store's rows for the features of this drafter."""
    path, mode = run.store.path, run.store.hidden_mode
    if not path or (mode == "bf16" and not root_of(path).exists()):
        if mode != "bf16":
            raise UsageError(
                f"--as-stored with store.hidden_mode={mode} needs the calibration: give --store"
            )
        return partial(as_stored, mode=mode, calibrations=())
    store = open_store(path)
    check_layers(shape, store)
    if not store.spec.is_calibrated:
        raise UsageError(f"--as-stored: {path} is not calibrated yet, wait for its capture")
    places = [store.spec.layer_ids.index(layer_id) for layer_id in shape.layer_ids]
    hidden = store.calibration.hidden
    calibrations = [hidden[place] for place in places] if hidden else []
    return partial(as_stored, mode=store.spec.hidden_mode, calibrations=calibrations)


def _tasks(
    batch: Sequence[Prompt], device: torch.device, seed: int, max_new_tokens: int
) -> list[Task]:
    return [
        Task(
            ids_T=torch.tensor(prompt.ids, device=device),
            max_new_tokens=min(prompt.max_new_tokens, max_new_tokens),
            draws=Draws(seed, prompt.key),
        )
        for prompt in batch
    ]


def _answered(
    answer_all: Callable[[Sequence[Task]], list[Answer]], tasks: Sequence[Task]
) -> list[Answer]:
    try:
        with host_told_alike(torch):
            return answer_all(tasks)
    except torch.OutOfMemoryError as error:
        longest = max(len(task.ids_T) for task in tasks)
        raise ValueError(
            f"no memory to decode {len(tasks)} prompts of up to {longest} tokens together: lower "
            "eval.batch_size, eval.max_new_tokens or data.max_len"
        ) from error


def _mismatches(arm: str, key: str, reference: Answer, answer: Answer) -> list[Mismatch]:
    """None or one."""
    place = first_difference(reference, answer)
    if place is None:
        return []
    # an answer that goes on where the plain one ended has no gap of its own there
    gap = reference.gaps[min(place, len(reference.gaps) - 1)]
    return [Mismatch(arm=arm, key=key, place=place, gap=gap, is_exempt=gap < EXEMPT_GAP)]
