"""`dflash eval`: the drafter, an untrained one and prompt lookup in one table.

With prompts the target decodes for real, greedy or sampled, and every greedy output is compared
with plain decoding, which is timed in the same run; without, the held-out samples of a store are
replayed and no target is needed.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from dflash_pipeline.configs.errors import UsageError
from dflash_pipeline.configs.mounts import root_of
from dflash_pipeline.configs.place import Place, dtype_name
from dflash_pipeline.configs.schema import Run
from dflash_pipeline.store import open_store
from dflash_pipeline.store.runlog import RunLog
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
from dflash_pipeline.train.export import Checkpoint, read_checkpoint
from dflash_pipeline.train.fits import (
    bf16_bits,
    check_fits,
    check_layers,
    say_if_foreign,
)
from dflash_pipeline.train.head import TargetHead
from dflash_pipeline.train.plot import draw
from dflash_pipeline.train.preflight import twin_shape
from dflash_pipeline.train.remembered import check_rendering, rendering
from dflash_pipeline.train.replay import held_out, replayed, replayed_lookup
from dflash_pipeline.train.report import (
    Arm,
    Mismatch,
    Pace,
    Report,
    Scored,
    scored,
    table,
    to_json,
    write_json,
)
from dflash_pipeline.train.sampling import Draws, Sampling
from dflash_pipeline.train.selection import none_held_out
from dflash_pipeline.train.shape import DrafterShape
from dflash_pipeline.train.tally import Answer, Tally

# of the rehearsal: more than one cycle over a short prompt
_TRIAL_PROMPTS, _TRIAL_PROMPT_TOKENS, _TRIAL_TOKENS = 2, 16, 4
PLAIN, TRAINED, UNTRAINED, LOOKUP = "plain", "trained", "untrained", "lookup"


class Prompt(Protocol):
    """What the target is given to answer."""

    @property
    def key(self) -> str: ...
    @property
    def domain(self) -> str: ...
    @property
    def ids(self) -> Sequence[int]: ...
    @property
    def max_new_tokens(self) -> int: ...


class LoadedTarget(Protocol):
    """A target that decodes."""

    @property
    def target(self) -> DecodeTarget: ...
    @property
    def layer_ids(self) -> Sequence[int]: ...
    @property
    def embed_VH(self) -> Tensor: ...
    @property
    def head_VH(self) -> Tensor: ...


class EvalTarget(Protocol):
    """What is known of a target before it is loaded; `capture/decoder.py` has one."""

    @property
    def prompts(self) -> Sequence[Prompt]: ...
    @property
    def dropped(self) -> Sequence[str]: ...
    @property
    def eos_ids(self) -> Set[int]: ...
    @property
    def reserved_ids(self) -> Set[int]: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def rendering(self) -> Mapping[str, str]: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def device(self) -> torch.device: ...
    def load(self) -> LoadedTarget: ...
    def load_twin(self, say: Callable[[str], None]) -> LoadedTarget | None: ...


OpenTarget = Callable[[Run, Place, Sequence[int]], EvalTarget]


def main(run: Run, place: Place, extra: Mapping[str, object], open_target: OpenTarget) -> None:
    """Measure, print the table, write `run.eval.json`.

    Raises ValueError, after both, when outputs differ in fp32.
    """
    if place.world != 1:
        raise UsageError(f"eval runs on one device, --gpus names {place.world}")
    if not run.eval.drafter:
        raise UsageError("eval needs --drafter: a run, one of its steps, or a checkpoint")
    log = RunLog(place)
    checkpoint = read_checkpoint(run.eval.drafter)
    log.say(f"drafter {checkpoint.path} ({checkpoint.layout} layout)")
    if run.eval.prompts:
        report = by_decoding(run, place, checkpoint, open_target, log)
    elif run.store.path:
        report = by_replay(run, place, checkpoint, log)
    else:
        raise UsageError("eval needs --prompts to decode, or --store to replay held-out samples")
    for line in table(report):
        log.say(line)
    if run.eval.json:
        write_json(Path(run.eval.json), to_json(report))
        log.say(f"results are in {run.eval.json}")
    if run.eval.plot:
        draw(Path(run.eval.plot), report)
        log.say(f"figure is in {run.eval.plot}")
    if report.is_judged and not report.is_identical:
        first = next(found for found in report.mismatches if not found.is_exempt)
        raise ValueError(
            f"outputs differ from plain greedy decoding: {first.arm} on prompt {first.key} at new "
            f"token {first.place}, where the top-2 gap is {first.gap:.4f}"
        )


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
        pace = Pace(tokens=_tokens(prompts), seconds=seconds)
        if name == PLAIN:
            plain_pace = pace
        else:
            arms[name] = Arm(prompts=prompts, pace=pace)
    return Report(
        mode="decode",
        settings=_settings(run) | {"rendering": dict(opened.rendering)},
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
    runners: dict[str, Callable[[int], list[Answer]]] = {
        TRAINED: lambda index: replayed(store, index, trained, head, shape, cut),
        UNTRAINED: lambda index: replayed(store, index, untrained, head, shape, cut),
        LOOKUP: lambda index: replayed_lookup(store, index, num_drafts, ngram, cut),
    }
    num_samples = sum(len(indices) for indices in samples.values())
    arms, taus, num_done = dict[str, Arm](), dict[str, float](), 0
    for name, runner in runners.items():
        prompts, seconds = list[Scored](), defaultdict[str, float](float)
        pooled = Tally(num_drafts=num_drafts)
        for domain, indices in sorted(samples.items()):
            began = time.perf_counter()
            for index in indices:
                key = store.table.key(index)
                prompts.append(scored(key, domain, runner(index), num_drafts))
                num_done += 1
                pooled.merge(prompts[-1].whole)
                taus[f"tau_{name}"] = pooled.tau
                log.progress(num_done, num_samples * len(runners), "samples", **taus)
            seconds[prompts[-1].domain] = time.perf_counter() - began
        arms[name] = Arm(prompts=prompts, pace=Pace(tokens=_tokens(prompts), seconds=seconds))
    return Report(
        mode="replay",
        settings=_settings(run) | {"rendering": rendering(spec)},
        arms=arms,
        plain=None,
        mismatches=[],
        is_judged=False,
        seed=run.eval.seed,
    )


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


def drafters(
    checkpoint: Checkpoint, seed: int, device: torch.device | str, dtype: torch.dtype
) -> tuple[Drafter, Drafter]:
    """The checkpoint's drafter, and one of the same shape with fresh weights."""
    trained, untrained = Drafter(checkpoint.shape), Drafter(checkpoint.shape)
    trained.load_state_dict(checkpoint.tensors)
    untrained.initialise(seed)
    for drafter in (trained, untrained):
        drafter.to(device, dtype).requires_grad_(False)
    return trained, untrained


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
        return answer_all(tasks)
    except torch.OutOfMemoryError as error:
        longest = max(len(task.ids_T) for task in tasks)
        raise ValueError(
            f"no memory to decode {len(tasks)} prompts of up to {longest} tokens together: lower "
            "eval.batch_size, eval.max_new_tokens or data.max_len"
        ) from error


def _tokens(prompts: Sequence[Scored]) -> dict[str, int]:
    tokens = defaultdict[str, int](int)
    for one in prompts:
        tokens[one.domain] += one.num_tokens
    return tokens


def _settings(run: Run) -> dict[str, Any]:
    """What two evaluations must share to be compared."""
    names = ("max_new_tokens", "temperature", "top_p", "top_k", "as_stored")
    return {name: getattr(run.eval, name) for name in names}


def _mismatches(arm: str, key: str, reference: Answer, answer: Answer) -> list[Mismatch]:
    """None or one."""
    place = first_difference(reference, answer)
    if place is None:
        return []
    # an answer that goes on where the plain one ended has no gap of its own there
    gap = reference.gaps[min(place, len(reference.gaps) - 1)]
    return [Mismatch(arm=arm, key=key, place=place, gap=gap, is_exempt=gap < EXEMPT_GAP)]
