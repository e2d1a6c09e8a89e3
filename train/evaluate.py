"""`dflash eval`: the drafter, an untrained one and prompt lookup in one table.

With prompts the target decodes for real, and every output is compared with plain greedy decoding;
without, the held-out samples of a store are replayed and no target is needed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from dflash_pipeline.configs.errors import UsageError
from dflash_pipeline.configs.mounts import root_of
from dflash_pipeline.configs.place import Place, dtype_name
from dflash_pipeline.configs.schema import Run
from dflash_pipeline.store import Store, open_store
from dflash_pipeline.store.runlog import RunLog
from dflash_pipeline.store.table import HELD_OUT
from dflash_pipeline.train.decode import (
    EXEMPT_GAP,
    Answer,
    DecodeTarget,
    Drafting,
    LookupDrafting,
    ModelDrafting,
    Tally,
    as_stored,
    decode,
    decode_plainly,
    first_difference,
)
from dflash_pipeline.train.drafter import Drafter
from dflash_pipeline.train.export import Checkpoint, read_checkpoint, rendering
from dflash_pipeline.train.head import TargetHead
from dflash_pipeline.train.lookup import PromptLookup
from dflash_pipeline.train.preflight import twin_shape
from dflash_pipeline.train.replay import held_out, replay, replay_lookup
from dflash_pipeline.train.report import (
    ALL,
    RESERVED,
    Arm,
    Mismatch,
    Report,
    table,
    to_json,
    write_json,
)
from dflash_pipeline.train.shape import DrafterShape

# of the rehearsal: more than one cycle over a short prompt
_TRIAL_PROMPT_TOKENS, _TRIAL_TOKENS = 16, 4
TRAINED, UNTRAINED, LOOKUP = "trained", "untrained", "lookup"


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
    check_rendering(checkpoint, opened.rendering, "this command")
    rounding = _rounding(run, shape) if run.eval.as_stored else None
    trained, untrained = drafters(checkpoint, run.train.seed, opened.device, opened.dtype)
    rehearse(run, shape, opened, rounding, log)
    loaded = opened.load()
    head = TargetHead(loaded.embed_VH, loaded.head_VH, shape)
    draftings: dict[str, Drafting] = {
        TRAINED: ModelDrafting(trained, head, rounding),
        UNTRAINED: ModelDrafting(untrained, head, rounding),
        LOOKUP: LookupDrafting(PromptLookup(shape.block_size - 1, run.eval.lookup_ngram)),
    }
    total = len(opened.prompts) * (1 + len(draftings))
    prompts_T = [torch.tensor(prompt.ids, device=opened.device) for prompt in opened.prompts]
    plain = list[Answer]()
    began = time.perf_counter()
    for prompt, prompt_T in zip(opened.prompts, prompts_T, strict=True):
        plain.append(decode_plainly(loaded.target, prompt_T, prompt.max_new_tokens, opened.eos_ids))
        log.progress(len(plain), total, "answers")
    plain_seconds = time.perf_counter() - began
    arms, mismatches = dict[str, Arm](), list[Mismatch]()
    num_done = len(plain)
    for name, drafting in draftings.items():
        tallies = _tallies([prompt.domain for prompt in opened.prompts], shape)
        began = time.perf_counter()
        for prompt, prompt_T, reference in zip(opened.prompts, prompts_T, plain, strict=True):
            answer = decode(
                loaded.target, drafting, prompt_T, prompt.max_new_tokens, opened.eos_ids
            )
            tallies[prompt.domain].add(answer.cycles)
            found = first_difference(reference, answer)
            if found is not None:
                mismatches.append(_mismatch(name, prompt.key, found, reference))
            num_done += 1
            log.progress(num_done, total, "answers", tau=tallies[prompt.domain].tau)
        arms[name] = _arm(tallies, time.perf_counter() - began, shape)
    return Report(
        mode="decode",
        arms=arms,
        num_prompts=len(plain),
        plain_tokens=sum(len(answer.tokens) for answer in plain),
        plain_seconds=plain_seconds,
        mismatches=mismatches,
        is_judged=opened.dtype == torch.float32,
    )


def by_replay(run: Run, place: Place, checkpoint: Checkpoint, log: RunLog) -> Report:
    """The held-out samples of `run.store.path`, at most `run.eval.limit` a domain."""
    shape = checkpoint.shape
    store = open_store(run.store.path)
    spec, names = store.spec, store.table.domains
    check_fits(checkpoint, spec.num_target_layers, spec.hidden_size, spec.vocab_size, frozenset())
    check_layers(shape, store)
    check_rendering(checkpoint, rendering(spec), f"store {store.path}")
    samples: dict[str, list[int]] = {}
    for index in held_out(store):
        of_domain = samples.setdefault(names[int(store.table.domain[index])], [])
        if not run.eval.limit or len(of_domain) < run.eval.limit:
            of_domain.append(index)
    if not samples:
        raise UsageError(_none_held_out(store))
    is_bf16 = dtype_name(run.target.dtype, place.kind) == "bf16"
    dtype = torch.bfloat16 if is_bf16 else torch.float32
    head = TargetHead.from_store(store, shape, place.device, dtype)
    trained, untrained = drafters(checkpoint, run.train.seed, place.device, dtype)
    cut, ngram = run.eval.max_new_tokens, run.eval.lookup_ngram
    runners: dict[str, Callable[[int], Tally]] = {
        TRAINED: lambda index: replay(store, [index], trained, head, shape, cut),
        UNTRAINED: lambda index: replay(store, [index], untrained, head, shape, cut),
        LOOKUP: lambda index: replay_lookup(store, [index], shape.block_size - 1, ngram, cut),
    }
    num_samples = sum(len(indices) for indices in samples.values())
    arms, num_done = dict[str, Arm](), 0
    for name, runner in runners.items():
        tallies = _tallies(samples, shape)
        began = time.perf_counter()
        for domain, indices in samples.items():
            for index in indices:
                tallies[domain].merge(runner(index))
                num_done += 1
                log.progress(num_done, num_samples * len(runners), "samples")
        arms[name] = _arm(tallies, time.perf_counter() - began, shape)
    return Report(
        mode="replay",
        arms=arms,
        num_prompts=num_samples,
        plain_tokens=0,
        plain_seconds=0.0,
        mismatches=[],
        is_judged=False,
    )


def _none_held_out(store: Store) -> str:
    """Why a store has no sample to replay, and what to do."""
    is_held_out_N = store.table.split == HELD_OUT
    if num_planned := int(is_held_out_N.sum()):
        why = f"none of the {num_planned} held-out samples of {store.path} is there"
        if store.num_released:
            num_shards = len(store.layout.shard_ids())
            why += (
                f": {store.num_released} of {num_shards} shards were released, once the runs that "
                "followed the capture had used them"
            )
        return f"{why}; give --prompts and --target"
    return (
        f"store {store.path} has no held-out sample: set data.heldout at capture, or give "
        "--prompts and --target"
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
    drafter.initialise(run.train.seed)
    drafter.requires_grad_(False)
    head = TargetHead(twin.embed_VH, twin.head_VH, small)
    lookup = PromptLookup(small.block_size - 1, run.eval.lookup_ngram)
    prompt_T = torch.tensor(opened.prompts[0].ids[-_TRIAL_PROMPT_TOKENS:])
    num_new = min(run.eval.max_new_tokens, _TRIAL_TOKENS)
    decode_plainly(twin.target, prompt_T, num_new, opened.eos_ids)
    for drafting in (ModelDrafting(drafter, head, None), LookupDrafting(lookup)):
        decode(twin.target, drafting, prompt_T, num_new, opened.eos_ids)


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


def check_layers(shape: DrafterShape, store: Store) -> None:
    """Raise UsageError unless the store holds every layer that the drafter reads."""
    if missing := sorted(set(shape.layer_ids) - set(store.spec.layer_ids)):
        raise UsageError(
            f"the drafter reads layers {missing}, store {store.path} holds {store.spec.layer_ids}"
        )


def check_fits(
    checkpoint: Checkpoint,
    num_target_layers: int,
    hidden_size: int,
    vocab_size: int,
    reserved_ids: Set[int],
) -> None:
    """Raise UsageError unless the drafter was made for a target of these dimensions."""
    shape = checkpoint.shape
    pairs = [
        ("hidden size", shape.hidden_size, hidden_size),
        ("vocabulary", shape.vocab_size, vocab_size),
    ]
    # the speculators layout of others does not say how many layers its target has
    if checkpoint.layout == "zlab":
        pairs.append(("number of target layers", shape.num_target_layers, num_target_layers))
    problems = [
        f"{name} {mine}, the target's is {theirs}" for name, mine, theirs in pairs if mine != theirs
    ]
    if max(shape.layer_ids) > num_target_layers - 2:
        problems.append(f"layers {shape.layer_ids}, the target has {num_target_layers}")
    if shape.mask_token_id in reserved_ids:
        problems.append(f"mask token {shape.mask_token_id}, an end or padding token of the target")
    if problems:
        listed = "; it has ".join(problems)
        raise UsageError(f"drafter {checkpoint.path} does not fit the target: it has {listed}")


def check_rendering(checkpoint: Checkpoint, found: Mapping[str, str], whose: str) -> None:
    """Raise UsageError if prompts are made in another way than the store that was trained on.

    A drafter knows what its target says under one template and one set of arguments; under others
    (thinking on instead of off) tau is that of another task. whose: what `found` is of.
    """
    trained_on = checkpoint.trained_on
    differing = [
        f"{name} {trained_on[name]!r}, {whose} has {value!r}"
        for name, value in found.items()
        if name in trained_on and trained_on[name] != value
    ]
    if differing:
        raise UsageError(
            f"drafter {checkpoint.path} was trained on a store of {'; '.join(differing)}: its tau "
            "would be that of another task. Set --thinking, --template-arg and --system-prompt, or "
            "the target, to those of the store"
        )


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


def _tallies(domains: Iterable[str], shape: DrafterShape) -> dict[str, Tally]:
    return {domain: Tally(num_drafts=shape.block_size - 1) for domain in sorted(set(domains))}


def _arm(tallies: Mapping[str, Tally], seconds: float, shape: DrafterShape) -> Arm:
    pooled = Tally(num_drafts=shape.block_size - 1)
    for tally in tallies.values():
        pooled.merge(tally)
    named = {f"{name}_" if name in RESERVED else name: tally for name, tally in tallies.items()}
    return Arm(tallies={ALL: pooled} | named, seconds=seconds)


def _mismatch(arm: str, key: str, place: int, reference: Answer) -> Mismatch:
    # an answer that goes on where the plain one ended has no gap of its own there
    gap = reference.gaps[min(place, len(reference.gaps) - 1)]
    return Mismatch(arm=arm, key=key, place=place, gap=gap, is_exempt=gap < EXEMPT_GAP)
