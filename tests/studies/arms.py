"""The arms of the study: what each asks, what it changes, and what it is paired with."""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from dflash_pipeline.store.reader import Store

BASE_STORE = "bf16"
EVAL_STORE = "eval"
CAP_LAMBDA = 0.1
"""No value was published with CAP; a tenth keeps the entropy term well below the cross-entropy."""
FOLLOWING = "following"
LOSSES: Mapping[str, Mapping[str, object]] = {
    "ce": {"loss.ce": 1.0, "loss.kl": 0.0},
    "kl": {"loss.ce": 0.0, "loss.kl": 1.0},
    "ce-kl": {"loss.ce": 0.5, "loss.kl": 0.5},
}
WEIGHTS = ("gamma", "dpace")
FOLLOWED = "ce-gamma"
"""What the arm trains that follows a capture: the papers' objective, to which all are compared."""
LONGER: Mapping[str, object] = {
    "drafter.num_layers": 5,
    "train.epochs": 6,
    "train.anchors_per_sample": 96,
    "train.batch_anchors": 2048,
    "train.batch_tokens": 32768,
}
"""What the long arms change."""
RATES = {"rate-5e-4": 5e-4, "rate-1e-3": 1e-3, "rate-2e-3": 2e-3, "rate-4e-3": 4e-3}
"""Learning rates about the preset's, which is meant for batches a thirtieth of the long arms'."""
RATE = "rate-1e-3"
"""The preset's."""
BF16_LOGITS = "bf16-logits"
"""The arm whose logits are rounded, which no setting of the product does: its name tells."""


@dataclass(frozen=True, slots=True)
class Mode:
    """How a store keeps its rows."""

    hidden: str
    last: str


MODES = {
    "bf16": Mode("bf16", "bf16"),
    "int8": Mode("int8", "int8"),
    "int4": Mode("int4", "int8"),
    "int4-last": Mode("int4", "int4"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Arm:
    """One way to train, with as many runs as it has seeds."""

    name: str
    question: str
    """objective, order, cap, logits, modes, shape, length or rate."""
    against: str
    """The arm it is paired with; empty: with none of its question."""
    settings: Mapping[str, object]
    """`section.key` -> value over the size's."""
    seeds: tuple[int, ...]
    store: str = BASE_STORE
    follows: bool = False

    @property
    def has_bf16_logits(self) -> bool:
        """Whether its logits are rounded; otherwise they are fp32."""
        return self.name == BF16_LOGITS

    def run_name(self, seed: int) -> str:
        """Its folder in arms/, and its variant of a sweep."""
        return f"{self.name}-s{seed}"

    def table(self, seed: int) -> dict[str, dict[str, object]]:
        """What one run changes, as the sections of a sweep file."""
        sections: dict[str, dict[str, object]] = {"train": {"seed": seed}}
        for key, value in {**self.settings, "train.stores": [f"stores/{self.store}"]}.items():
            section, _, name = key.partition(".")
            sections.setdefault(section, {})[name] = value
        return sections

    def command(self, seed: int) -> str:
        """The line that trains it, in the study's folder; the bf16 logits are no setting of it."""
        words = ["dflash", "train", "--store", f"stores/{self.store}"]
        words += ["--out", f"arms/{self.run_name(seed)}", "--set", f"train.seed={seed}"]
        for key, value in self.settings.items():
            words += ["--set", f"{key}={value}"]
        return shlex.join(words) + (" (logits rounded to bf16)" if self.has_bf16_logits else "")


def objective_arms(seeds: Sequence[int]) -> list[Arm]:
    """Each loss with each weighting of slots; differences are to `FOLLOWED`."""
    return [
        Arm(
            name=f"{loss}-{weights}",
            question="objective",
            against="" if f"{loss}-{weights}" == FOLLOWED else FOLLOWED,
            settings={**LOSSES[loss], "loss.slot_weights": weights},
            seeds=tuple(seeds),
        )
        for loss in LOSSES
        for weights in WEIGHTS
    ]


def following_arm(seeds: Sequence[int]) -> Arm:
    """`FOLLOWED`, begun while its store is still being captured."""
    (base,) = (one for one in objective_arms(seeds) if one.name == FOLLOWED)
    return Arm(
        name=FOLLOWING,
        question="order",
        against=FOLLOWED,
        settings=base.settings,
        seeds=tuple(seeds),
        follows=True,
    )


def later_arms(best: str, seeds: Sequence[int]) -> list[Arm]:
    """What is asked of the best objective, in the order of what matters most."""
    (base,) = (one for one in objective_arms(seeds) if one.name == best)
    uses_last = bool(base.settings["loss.kl"])
    modes = [mode for mode in MODES if mode != BASE_STORE and (uses_last or mode != "int4-last")]
    arms = [
        Arm(
            name=mode,
            question="modes",
            against=best,
            settings=base.settings,
            seeds=base.seeds,
            store=mode,
        )
        for mode in modes
    ]
    arms.append(
        Arm(
            name="cap",
            question="cap",
            against=best,
            settings={**base.settings, "loss.cap_lambda": CAP_LAMBDA},
            seeds=base.seeds,
        )
    )
    arms.append(
        Arm(
            name=BF16_LOGITS,
            question="logits",
            against=best,
            settings=base.settings,
            seeds=base.seeds,
        )
    )
    shapes: dict[str, Mapping[str, object]] = {
        "block-16": {"drafter.block_size": 16, "loss.gamma": 7.0},
        "layers-1": {"drafter.num_layers": 1},
        "layers-5": {"drafter.num_layers": 5},
    }
    arms += [
        Arm(
            name=name,
            question="shape",
            against=best,
            settings={**base.settings, **changed},
            seeds=base.seeds[:1],
        )
        for name, changed in shapes.items()
    ]
    return arms


def long_arms(seeds: Sequence[int], rate: float = 0.0) -> list[Arm]:
    """Each weighting of slots with KL, a larger drafter, and fifteen times the blocks.

    rate: the learning rate at most; 0: the preset's.
    """
    own = {"optim.lr": rate} if rate else {}
    return [
        Arm(
            name=f"long-{weights}",
            question="length",
            against="" if weights == WEIGHTS[0] else f"long-{WEIGHTS[0]}",
            settings={**LOSSES["kl"], "loss.slot_weights": weights, **LONGER, **own},
            seeds=tuple(seeds),
        )
        for weights in WEIGHTS
    ]


def rate_arms(seeds: Sequence[int]) -> list[Arm]:
    """One epoch of a long arm at each of `RATES`, by one seed: their losses can be compared."""
    return [
        Arm(
            name=name,
            question="rate",
            against="" if name == RATE else RATE,
            settings={
                **LOSSES["kl"],
                "loss.slot_weights": "dpace",
                **LONGER,
                "train.epochs": 1,
                "optim.lr": rate,
            },
            seeds=tuple(seeds)[:1],
        )
        for name, rate in RATES.items()
    ]


def is_of_bf16_logits(run: str) -> bool:
    """Whether a run's folder is one of that arm's."""
    return run.rpartition("-s")[0] == BF16_LOGITS


def needed_stores(arms: Sequence[Arm]) -> list[str]:
    """The stores that arms train on, each once, in their order."""
    return list(dict.fromkeys(arm.store for arm in arms))


@dataclass(frozen=True, slots=True)
class StoreFacts:
    """What a result must say of a store."""

    data: str
    """Of the samples, their tokens and which are held out; the same for every mode."""
    num_samples: int
    num_distinct: int
    """Of different tokens: a target that is sure of itself samples its greedy answer again."""
    num_tokens: int
    num_supervised: int
    bytes_per_token: float
    guard: object = field(default=None)
    """What calibration measured, for int8 and int4."""


def fingerprint(store: Store) -> str:
    """Of what a store would train a drafter on, whatever its mode and its order."""
    table = store.table
    order = np.argsort(table.sample_id, kind="stable")
    digest = hashlib.sha256()
    for column in (table.sample_id, table.token_hash, table.num_tokens, table.split):
        digest.update(np.ascontiguousarray(np.asarray(column)[order]).tobytes())
    # where rows could not be captured, the store trains on less
    digest.update(np.ascontiguousarray(store.readable_N[order]).tobytes())
    return digest.hexdigest()[:16]
