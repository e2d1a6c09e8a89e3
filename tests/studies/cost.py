"""What the study costs on H200s, before it is run: seconds of each stage, bytes of each place.

Measured on one H200 (tests/bench/real_target.json) are the rates of single processes; how they
share a GPU is assumed, and every line says which it is. Assumed is that kernels of several
processes take turns, which costs a quarter on top: a GPU is busy for the sum of their device times,
and none is faster than alone.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dflash_pipeline.store.rows import row_bytes
from dflash_pipeline.train.floor import H200_FLOP_PER_S, StepSize, step_flop
from studies.arms import BASE_STORE, EVAL_STORE, MODES, Arm, later_arms, objective_arms
from studies.decoding import BATCH, Way
from studies.sizes import DOMAINS, Size, answer_jobs

MEASURED = Path(__file__).parents[1] / "bench" / "real_target.json"
# rows of training and of held-out prompts that stand in the shared files
PROMPTS = {
    "train_math": 1499,
    "train_code": 564,
    "train_chat": 1433,
    "eval_math": 80,
    "eval_code": 140,
    "eval_chat": 40,
}
# assumed: small products reach so much of the GPU's best rate (8,192 rows of a hidden size of 576)
EFFICIENCY = 0.25
# assumed: what it costs that processes take turns on a GPU
TURNS = 1.25
# assumed: a step of decoding a batch of 512 with its cache, device time with the turns
DECODE_STEP_S = 0.015
# measured, of all answers: batches of 1,024, 53 ms a step, while each step copied the cache and
# expanded it to all heads; not measured since
DATA_BEFORE_S = 326
# assumed: a process with imports, rehearsal, and compiling or loading the target
START_S = 30.0
# assumed: a tenth of the 0.16 s of a core that an answer took while each was replayed alone
# (measured on an H200: 22 runs of 2,080 answers by 22 processes in 460 s). Replayed together, they
# are 151 operations an answer in place of 1,707 (toy drafter, passes of 512 blocks, counted on a
# CPU); that way was not measured on a GPU yet
REPLAY_S = 0.016
# assumed: the rate that each of three captures keeps beside the others and three trainers
CAPTURE_SHARE = 0.7
# measured in fp32 on one H200, one prompt at a time: 923 cycles, plain steps among them, in 28.8 s;
# assumed of batches, as both wait for launches
CYCLE_S = 0.031
# assumed of the trained drafter and of lookup; the untrained one's is 1
DECODE_TAU = 1.7
# cores and trainers of a GPU
CORES, PER_GPU = 16, 9


@dataclass(frozen=True, slots=True)
class Dimensions:
    """Of the drafter, as `train/floor.py` reads them."""

    hidden_size: int = 576
    num_heads: int = 9
    num_kv_heads: int = 3
    head_dim: int = 64
    intermediate_size: int = 1536
    num_layers: int = 3
    vocab_size: int = 49152
    layer_ids: tuple[int, ...] = (1, 8, 14, 20, 27)

    @property
    def num_parameters(self) -> int:
        """Of its matrices."""
        width = self.hidden_size
        attention = 2 * width * self.head_dim * (self.num_heads + self.num_kv_heads)
        a_layer = attention + 3 * width * self.intermediate_size
        return len(self.layer_ids) * width * width + self.num_layers * a_layer


@dataclass(frozen=True, slots=True)
class Cost:
    """One stage on so many GPUs."""

    name: str
    seconds: float
    how: str


@dataclass(frozen=True, slots=True)
class Bytes:
    """Of each place, at one moment."""

    disk: float
    memory: float


def costs(size: Size, num_seeds: int, num_gpus: int) -> list[Cost]:
    """Each stage of the full study, in its order."""
    objectives = objective_arms(tuple(range(num_seeds)))
    later = later_arms("ce-kl-gamma", tuple(range(num_seeds)))
    return [
        _data(size, num_gpus),
        _store(size, num_seeds, num_gpus),
        training("arms: the losses", size, objectives, num_gpus),
        # with the runs that followed the capture, prompt lookup and an untrained drafter
        scoring(size, _num_runs(objectives) + num_seeds + 2, num_gpus),
        training("arms: of the best loss", size, later, num_gpus),
        scoring(size, _num_runs(later), num_gpus),
    ]


def num_runs(num_seeds: int) -> int:
    """All that are trained."""
    seeds = tuple(range(num_seeds))
    return _num_runs([*objective_arms(seeds), *later_arms("ce-kl-gamma", seeds)]) + num_seeds


def _num_runs(arms: Sequence[Arm]) -> int:
    return sum(len(arm.seeds) for arm in arms)


def num_answers(size: Size, split: str) -> int:
    """Of all jobs of `train` or of `eval`."""
    jobs = [job for job in answer_jobs(size) if job.name.startswith(split)]
    return sum(sum(PROMPTS[file] for file in job.files) * max(job.samples, 1) for job in jobs)


def _data(size: Size, num_gpus: int) -> Cost:
    measured = _measured()["generate"]
    per_answer = measured["tokens"] / measured["answers"]
    batch, steps = _number(size, "generate.batch_size"), _number(size, "generate.max_new_tokens")
    answers = num_answers(size, "train") + num_answers(size, "eval")
    rounds = sum(
        math.ceil(sum(PROMPTS[file] for file in job.files) * max(job.samples, 1) / batch)
        for job in answer_jobs(size)
    )
    return Cost(
        "data",
        rounds * steps * DECODE_STEP_S / num_gpus + START_S,
        f"{answers:,} answers of {per_answer:.0f} tokens (measured, greedy) are "
        f"{answers * per_answer / 1e6:.1f} M; {rounds} batches of {steps} steps, "
        f"{DECODE_STEP_S * 1e3:.0f} ms each (assumed: measured were {DATA_BEFORE_S} s, in batches "
        "of 1,024 and while the cache was copied and expanded at each step)",
    )


def _store(size: Size, num_seeds: int, num_gpus: int) -> Cost:
    context, rate = num_context(size, "train"), _measured()["capture"]["tokens_per_s"]
    capture_s = context / (rate * CAPTURE_SHARE)
    # the plan, then the followers start, then the capture does; it ends a little before they do
    followed_s = 3 * START_S + capture_s + START_S / 2
    # two at a time beside it
    num_others = len(MODES) - 1
    others_s = math.ceil(num_others / (3 * num_gpus - 1)) * (capture_s + START_S)
    return Cost(
        "store",
        max(followed_s, others_s),
        f"{context / 1e6:.1f} M tokens at {CAPTURE_SHARE:.0%} (assumed) of {rate:,.0f} a second "
        f"(measured): bf16, followed by {num_seeds} runs, in {followed_s:.0f} s, the modes "
        f"beside it in {others_s:.0f} s",
    )


def training(name: str, size: Size, arms: Sequence[Arm], num_gpus: int) -> Cost:
    """All runs of these arms, as many at a time as a GPU takes."""
    device_s, kinds = 0.0, dict[str, int]()
    alone_s, longest_s = 1 / _measured()["train"]["steps_per_s"], 0.0
    for arm in filter(lambda arm: arm.seeds, arms):
        own = replace(size, settings={**size.settings, **arm.settings})
        blocks = num_answers(own, "train") * _number(own, "train.anchors_per_sample")
        batch = _number(own, "train.batch_anchors")
        steps = _number(own, "train.epochs") * blocks / batch
        dimensions = Dimensions(num_layers=_number(own, "drafter.num_layers"))
        flop = step_flop(dimensions, _step_size(own)).total
        a_step_s = TURNS * flop / H200_FLOP_PER_S / EFFICIENCY
        device_s += len(arm.seeds) * steps * a_step_s
        longest_s = max(longest_s, steps * alone_s)
        kind = f"{steps:,.0f} steps of {batch:,} blocks: {flop / 1e12:.2f} TFLOP a step, "
        kind += f"{a_step_s * 1e3:.1f} ms of the device"
        kinds[kind] = kinds.get(kind, 0) + len(arm.seeds)
    if not kinds:
        return Cost(name, 0.0, "nothing is left")
    waves = math.ceil(_num_runs(arms) / (PER_GPU * num_gpus))
    told = "; ".join(f"{count} runs of {kind}" for kind, count in kinds.items())
    return Cost(
        name,
        max(device_s / num_gpus, waves * longest_s) + waves * START_S,
        f"{told} (at {EFFICIENCY:.0%} of its rate and with the turns, assumed; {alone_s * 1e3:.0f} "
        f"ms alone, measured, of half the blocks): {PER_GPU} share a GPU",
    )


def scoring(size: Size, runs: int, num_gpus: int) -> Cost:
    """Replay of so many runs."""
    held_out = num_answers(size, "eval")
    return Cost(
        "score",
        runs * held_out * REPLAY_S / CORES / num_gpus + START_S,
        f"{runs} x {held_out:,} answers x {REPLAY_S * 1e3:.0f} ms (assumed) on {CORES} cores",
    )


def decoding_of(size: Size, way: Way) -> Cost:
    """One `dflash eval`: plainly, untrained, trained and by lookup."""
    counts = [PROMPTS[f"eval_{domain}"] for domain in DOMAINS]
    batches = sum(math.ceil(min(count, way.limit or count) / BATCH) for count in counts)
    length = _number(size, "generate.max_new_tokens")
    cycles = batches * length * (2 + 2 / DECODE_TAU)
    return Cost(
        f"decode {way.name}",
        cycles * CYCLE_S + START_S,
        f"{batches} batches of {length} tokens, {cycles:,.0f} cycles of {CYCLE_S * 1e3:.0f} ms "
        f"(measured of single prompts, assumed of these), tau {DECODE_TAU} (assumed)",
    )


def num_context(size: Size, split: str) -> float:
    """Tokens of a store, prompts included."""
    measured = _measured()["capture"]
    return float(num_answers(size, split) * measured["tokens"] / measured["samples"])


def store_sizes(size: Size) -> dict[str, float]:
    """Bytes of each store of the full study."""
    measured = _measured()["generate"]
    per_answer = measured["tokens"] / measured["answers"]
    found = {}
    for name in (*MODES, EVAL_STORE):
        split = "eval" if name == EVAL_STORE else "train"
        mode = BASE_STORE if name == EVAL_STORE else name
        generated = num_answers(size, split) * per_answer
        found[name] = _bytes(num_context(size, split), generated, mode)
    return found


def most_bytes(size: Size, num_seeds: int, has_memory: bool) -> Bytes:
    """At the moment of the most; 0 for a size that is not estimated: it takes next to nothing."""
    if not size.is_estimated:
        return Bytes(0, 0)
    found = moments(size, num_seeds, has_memory).values()
    return Bytes(max(one.disk for one in found), max(one.memory for one in found))


def moments(size: Size, num_seeds: int, has_memory: bool) -> dict[str, Bytes]:
    """What lies in each place as the study goes on."""
    sizes, parameters = store_sizes(size), Dimensions().num_parameters
    # bf16 weights; masters and moments, which go once a round is trained
    kept, state = 2 * parameters, 12 * parameters
    first = _num_runs(objective_arms(tuple(range(num_seeds)))) + num_seeds
    every = num_runs(num_seeds)
    lasting = (BASE_STORE, EVAL_STORE)
    found = {
        "all stores captured": (sum(sizes.values()), num_seeds * (kept + state)),
        "the losses trained": (sum(sizes.values()), (first + PER_GPU) * (kept + state)),
        "all trained": (
            sum(sizes.values()),
            every * kept + (every - first + PER_GPU) * state,
        ),
        "at the end": (sum(sizes[name] for name in lasting), every * kept),
    }
    share = 0.5 if has_memory else 1.0
    return {
        name: Bytes(stores * share + runs, stores * (1 - share))
        for name, (stores, runs) in found.items()
    }


def lines(size: Size, num_seeds: int, num_gpus: int, has_memory: bool) -> list[str]:
    """For people; only the full size was made for this estimate."""
    if not size.is_estimated:
        return ["the estimate is of the full size, and of no other"]
    found = costs(size, num_seeds, num_gpus)
    told = [f"{one.name:22} {one.seconds:5.0f} s  {one.how}" for one in found]
    total = sum(one.seconds for one in found)
    told.append(f"{'all':22} {total:5.0f} s  on {num_gpus} GPU{'s' * (num_gpus > 1)}, not measured")
    sizes = ", ".join(f"{name} {value / 1e9:.1f}" for name, value in store_sizes(size).items())
    told.append(f"GB of stores (computed): {sizes}")
    for name, place in moments(size, num_seeds, has_memory).items():
        told.append(
            f"{name}: {place.disk / 1e9:.0f} GB on disk, {place.memory / 1e9:.0f} in memory"
        )
    return told


def _measured() -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = json.loads(MEASURED.read_text(encoding="utf-8"))["one_gpu"]
    return found


def _number(size: Size, key: str) -> int:
    value = size.settings[key]
    assert isinstance(value, int)
    return value


def _bytes(num_tokens: float, num_teachers: float, mode: str) -> float:
    dimensions, kept = Dimensions(), MODES[mode]
    hidden = len(dimensions.layer_ids) * row_bytes(kept.hidden, dimensions.hidden_size)
    last = row_bytes(kept.last, dimensions.hidden_size)
    return num_tokens * hidden + num_teachers * last


def _step_size(size: Size) -> StepSize:
    per_sample = num_context(size, "train") / num_answers(size, "train")
    blocks, slots = _number(size, "train.batch_anchors"), _number(size, "drafter.block_size")
    context = round(blocks / _number(size, "train.anchors_per_sample") * per_sample)
    return StepSize(
        num_context=context,
        num_rows=blocks * slots,
        num_visible=round(blocks * slots * (per_sample / 2 + slots)),
        num_scored=blocks * (slots - 1),
        num_teachers=min(blocks * (slots - 1), context),
    )
