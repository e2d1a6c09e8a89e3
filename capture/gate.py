"""Before a worker's first commit, and the first of rows by other compiled code: do the stored bytes
hold what the target gives, sample by sample?

Each sample is computed again by another path than the hooks' (`truth.py`). Rows read back from the
shard file must agree with it within the noise of the compute type (of compiled layers: measured on
this target) and what int8 or int4 makes of these very rows, and each fault that has bitten other
pipelines (a layer off by one, rows off by one, the norm missing or done twice), made on purpose,
must not. Rows in which a fault changes nothing tell nothing of it: tokens that repeat, a layer
without effect. A fault without any other row is reported as not applicable, one that is lost in the
noise of int8 or int4 as not separable: it decides nothing, unless the rows are nearer to it than to
the truth.
Letters: T tokens, M rows of `last`, K layers, H hidden, V vocabulary.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from dflash_pipeline.capture.row_errors import (
    ROUNDING,
    SLACK,
    RowErrors,
    concatenated,
    noise_bound,
    relative,
    threshold,
)
from dflash_pipeline.capture.target import Target
from dflash_pipeline.capture.times import SampleTime
from dflash_pipeline.capture.truth import Truth, compute, swayed
from dflash_pipeline.configs.threads import Threads
from dflash_pipeline.store.calibration import Calibrated
from dflash_pipeline.store.quantise import Calibration
from dflash_pipeline.store.rows import decode, encode
from dflash_pipeline.store.spec import StoreSpec
from dflash_pipeline.store.table import teacher_positions

Bytes = NDArray[np.uint8]
ReadBack = Callable[[int], tuple[Bytes, Bytes]]
Tokens = Callable[[int], tuple[NDArray[np.uint32], Bytes]]

UNRELATED = 0.5
"""Relative error from which a row has nothing to do with what it should be."""
LOGIT_ROWS = 256
_ONE = Threads()
NUM_SWAYED = 4
"""Samples on which the noise of the compute type is measured."""


class GateRefused(ValueError):
    """Stored rows are not those of the target; its text says in what."""


class Gate:
    """Compares samples, then judges them all together."""

    def __init__(
        self,
        target: Target,
        spec: StoreSpec,
        calibrated: Calibrated,
        threads: Threads = _ONE,
        *,
        by_other_code: bool,
    ) -> None:
        """by_other_code: other kernels than the truth's may have computed the rows, as compiled
        layers or those of another machine; then their noise is measured on the target."""
        self._target, self._spec, self._calibrated = target, spec, calibrated
        self._threads, self._by_other_code = threads, by_other_code
        self._true: dict[str, RowErrors] = defaultdict(RowErrors)
        self._faults: dict[tuple[str, str], RowErrors] = defaultdict(RowErrors)
        self._depth: dict[str, int] = {}
        self._logit_noise = 0.0
        # what another rounding in each layer makes of the same states
        self._swayed: dict[str, RowErrors] = defaultdict(RowErrors)
        self._num_swayed = 0

    def add(
        self, ids_T: NDArray[np.uint32], mask_T: Bytes, hidden_TKR: Bytes, last_MR: Bytes
    ) -> dict[str, torch.Tensor]:
        """Compare one sample's stored rows with the target's own states.

        Relative error of each of its rows, [T] of a layer and [M] of `last` and the logits.
        """
        before = {name: len(errors.parts) for name, errors in self._true.items()}
        self._compare(ids_T, mask_T, hidden_TKR, last_MR)
        parts = {name: errors.parts[before.get(name, 0) :] for name, errors in self._true.items()}
        return {name: concatenated(added) for name, added in parts.items() if added}

    def _compare(
        self, ids_T: NDArray[np.uint32], mask_T: Bytes, hidden_TKR: Bytes, last_MR: Bytes
    ) -> None:
        target, spec = self._target, self._spec
        self._threads.sign()
        truth = compute(target, ids_T)
        is_rounded = self._by_other_code and target.dtype != torch.float32
        if is_rounded and self._num_swayed < NUM_SWAYED:
            self._add_sway(truth, swayed(target, ids_T))
        hidden = self._calibrated.hidden
        hidden_TKH = self._decoded(hidden_TKR, spec.hidden_mode, hidden)
        for place, layer_id in enumerate(spec.layer_ids):
            name, true_TH = f"layer {layer_id}", truth.states[layer_id + 1].float()
            self._depth[name] = layer_id + 1
            found_TH, stored_TH = hidden_TKH[:, place], None
            self._true[name].add(found_TH, true_TH)
            if hidden:
                stored_TH = self._stored(true_TH, spec.hidden_mode, hidden[place : place + 1])
                self._true[name].add_rounding(stored_TH, true_TH)
            for other in (layer_id - 1, layer_id + 1):
                fault = f"layer {other}" if other >= 0 else "embedding"
                wrong_TH = truth.states[other + 1].float()
                self._fault(name, fault, found_TH, stored_TH, wrong_TH, true_TH)
            inner_TH = None if stored_TH is None else stored_TH[:-1]
            self._fault(
                name, "the next token's row", found_TH[:-1], inner_TH, true_TH[1:], true_TH[:-1]
            )
        if spec.has_last:
            positions = torch.from_numpy(teacher_positions(mask_T, spec.last_rows)).to(
                target.device
            )
            last_MH = self._decoded(last_MR, spec.last_mode, self._calibrated.last)
            self._add_last(truth, last_MH, positions)

    def _add_sway(self, truth: Truth, moved: Truth) -> None:
        self._num_swayed += 1
        for layer_id in self._spec.layer_ids:
            states = (one.states[layer_id + 1].float() for one in (moved, truth))
            self._swayed[f"layer {layer_id}"].add(*states)
        self._swayed["last"].add(moved.last_TH.float(), truth.last_TH.float())

    def _noise(self, name: str) -> float:
        """Relative error that computing alone may cause; never that of an unrelated row."""
        bound = noise_bound(self._target.dtype, self._depth[name])
        swayed = self._swayed["last" if name == "logits" else name].typical
        return min(max(bound, SLACK * swayed), UNRELATED)

    def _add_last(self, truth: Truth, last_MH: torch.Tensor, position_M: torch.Tensor) -> None:
        target, mode, last = self._target, self._spec.last_mode, self._calibrated.last
        self._depth["last"] = self._depth["logits"] = len(target.layers)
        all_MH = truth.last_TH[position_M].float()
        stored_MH = self._stored(all_MH, mode, last)
        self._true["last"].add(last_MH, all_MH)
        if last:
            self._true["last"].add_rounding(stored_MH, all_MH)
        inner = position_M < len(truth.last_TH) - 1
        shifted_MH = truth.last_TH[position_M[inner] + 1].float()
        true_MH = truth.last_TH[position_M[inner]].float()
        inner_MH = stored_MH[inner] if last else None
        self._fault("last", "the next token's row", last_MH[inner], inner_MH, shifted_MH, true_MH)
        for begin in range(0, len(position_M), LOGIT_ROWS):
            part = slice(begin, begin + LOGIT_ROWS)
            found_MH = last_MH[part].to(target.dtype)
            raw_MH = truth.states[-1][position_M[part]]
            true_MV = truth.logits_TV[position_M[part]].float()
            found_MV = target.head_logits(found_MH)
            self._true["logits"].add(found_MV, true_MV)
            rounded_MH = stored_MH[part].to(target.dtype)
            rounded_MV = target.head_logits(rounded_MH)
            rounding = RowErrors()
            rounding.add(rounded_MV, true_MV)
            self._logit_noise = max(self._logit_noise, rounding.worst(target.dtype))
            if last:
                self._true["logits"].rounding += rounding.parts
            ideal_MV = rounded_MV if last else None
            once_MH = target.norm(raw_MH)
            faults = {"the norm missing": raw_MH, "the norm done twice": target.norm(once_MH)}
            for fault, wrong_MH in faults.items():
                wrong_MV = target.head_logits(wrong_MH).float()
                self._fault("logits", fault, found_MV, ideal_MV, wrong_MV, None)
                self._faults["logits", fault].is_noop &= _same(wrong_MH, once_MH)

    def _fault(
        self,
        name: str,
        fault: str,
        found: torch.Tensor,
        stored: torch.Tensor | None,
        wrong: torch.Tensor,
        truth: torch.Tensor | None,
    ) -> None:
        errors = self._faults[name, fault]
        if truth is not None:
            tells_N = relative(wrong, truth) > ROUNDING
            errors.is_noop &= not bool(tells_N.any())
            found, wrong = found[tells_N], wrong[tells_N]
            stored = None if stored is None else stored[tells_N]
        errors.add(found, wrong)
        if stored is not None:
            errors.add_rounding(stored, wrong)

    def verdict(self) -> list[str]:
        """One line for each thing compared; GateRefused that names all that do not hold."""
        lines, wrong = self.findings()
        if wrong:
            raise GateRefused(
                "the gate refuses these rows, they are not committed: " + "; ".join(wrong)
            )
        return lines

    def findings(self) -> tuple[list[str], list[str]]:
        """One line for each thing compared, and what does not hold."""
        lines, wrong = [], []
        for name, errors in self._true.items():
            if not errors.parts:
                continue
            bound, _ = self.allowed(name)
            typical, worst = errors.typical, errors.worst(self._target.dtype)
            if not self.is_noise(name, typical, worst):
                wrong.append(
                    f"{name} differs from the target's own by {typical:.2g} (at most {bound:.2g} "
                    f"is noise), worst {worst:.2g}"
                )
            must_exceed, told = self._told_apart(name, wrong)
            lines.append(
                f"{name}: error {typical:.2g}, allowed {bound:.2g}; if it were another "
                f"(must exceed {must_exceed:.2g}): " + "; ".join(told)
            )
        return lines, wrong

    def is_noise(self, name: str, typical: float, worst: float) -> bool:
        """Whether a median and a largest relative error are what computing and storing make."""
        bound, worst_bound = self.allowed(name)
        return typical <= bound and worst <= worst_bound

    def allowed(self, name: str) -> tuple[float, float]:
        """Largest median, and largest single, relative error that is noise."""
        dtype, errors = self._target.dtype, self._true[name]
        noise, rounding = self._noise(name), errors.typical_rounding
        # two independent errors add up as the root of their squares
        bound = math.hypot(noise, SLACK * rounding)
        worst_bound = max(bound, math.hypot(noise, SLACK * errors.worst_rounding))
        if name == "logits":
            # a head may make more of the store's rounding: what it makes of it was measured
            bound = worst_bound = 2 * max(bound, self._logit_noise)
        if dtype != torch.float32:
            worst_bound = max(UNRELATED, worst_bound)
        return bound, worst_bound

    def _told_apart(self, name: str, wrong: list[str]) -> tuple[float, list[str]]:
        """What each fault made on purpose must exceed, and how far each is; adds those in doubt."""
        errors, (bound, _) = self._true[name], self.allowed(name)
        rounding = errors.typical_rounding
        # a fault must stand out of what was measured, not only of what is allowed
        excess = math.sqrt(max(errors.typical**2 - rounding**2, 0.0))
        must_exceed = threshold(bound, rounding, excess)
        # rows that are wrong themselves must not make a fault look lost in the mode's noise
        computing = min(excess, self._noise(name))
        separable_from = threshold(bound, rounding, computing)
        mode = self._spec.hidden_mode if name.startswith("layer") else self._spec.last_mode
        told = []
        for (of, fault), fault_errors in self._faults.items():
            if of != name:
                continue
            if fault_errors.is_noop:
                told.append(f"{fault}: not applicable, it changes nothing here")
                continue
            distance, ideal = fault_errors.typical, fault_errors.typical_rounding
            is_lossy = bool(errors.rounding)
            # true rows in this mode may lie as near to a fault as to the truth: then none decides
            is_nearer = distance < errors.typical and ideal > (1 + ROUNDING) * rounding
            if is_lossy and is_nearer:
                wrong.append(
                    f"{name} is nearer to {fault} (error {distance:.2g}) than to the target's own "
                    f"({errors.typical:.2g})"
                )
            if is_lossy and ideal <= separable_from:
                told.append(f"{fault}: {distance:.2g}, not separable at {mode}")
                continue
            told.append(f"{fault}: {distance:.2g}")
            if distance <= must_exceed and not (is_lossy and is_nearer):
                wrong.append(
                    f"{name} cannot be told from {fault} (error {distance:.2g}, must exceed "
                    f"{must_exceed:.2g})"
                )
        return must_exceed, told

    def _decoded(self, rows: Bytes, mode: str, calibrations: Sequence[Calibration]) -> torch.Tensor:
        values = decode(rows, mode, calibrations, self._threads)
        return torch.from_numpy(values).to(self._target.device)

    def _stored(
        self, states_NH: torch.Tensor, mode: str, calibrations: Sequence[Calibration]
    ) -> torch.Tensor:
        """The states after a trip through rows of this mode."""
        rows = encode(states_NH.float().cpu().numpy(), mode, calibrations, self._threads)
        return self._decoded(rows, mode, calibrations)


def _same(found: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal but for rounding."""
    return bool(torch.allclose(found.float(), other.float(), rtol=ROUNDING, atol=1e-6))


def chosen_samples(samples: Sequence[int], most: int) -> list[int]:
    """Of a shard's samples, those to be judged: spread, so that batches and places in them vary."""
    count = min(most, len(samples))
    return [samples[place] for place in np.linspace(0, len(samples) - 1, count, dtype=int)]


def check(
    target: Target,
    spec: StoreSpec,
    calibrated: Calibrated,
    samples: Sequence[int],
    tokens: Tokens,
    read_back: ReadBack,
    threads: Threads = _ONE,
    *,
    by_other_code: bool,
    times: list[SampleTime] | None = None,
) -> list[str]:
    """Judge the stored rows of `samples`; the lines of the verdict, or GateRefused.

    tokens: sample -> ids and loss mask; read_back: sample -> its stored bytes, [T, K, R] of
    hidden and [M, R] of last, out of the finished file; by_other_code: as `Gate` says;
    times: what each sample took is added to it.
    """
    gate = Gate(target, spec, calibrated, threads, by_other_code=by_other_code)
    with torch.inference_mode():
        for sample in samples:
            begin = time.perf_counter()
            ids_T, mask_T = tokens(sample)
            gate.add(ids_T, mask_T, *read_back(sample))
            if times is not None:
                times.append(SampleTime(len(ids_T), time.perf_counter() - begin))
    return gate.verdict()
