"""Before a worker's first commit: do the stored bytes hold what the target gives, sample by sample?

Each sample is computed again alone, without padding, through the whole causal language model and
its own `output_hidden_states` - another path than the hooks'. Rows read back from the shard file
must agree with it within the noise of the compute type and what int8 or int4 makes of these very
rows, and each fault that has bitten other pipelines (a layer off by one, rows off by one, the norm
missing or done twice), made on purpose, must not. A fault that provably changes nothing for this
target is reported as not applicable.
Letters: T tokens, M rows of `last`, K layers, H hidden, V vocabulary.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from dflash_pipeline.capture.target import Target
from dflash_pipeline.store.calibration import Calibrated
from dflash_pipeline.store.quantise import Calibration
from dflash_pipeline.store.rows import decode, encode
from dflash_pipeline.store.spec import StoreSpec
from dflash_pipeline.store.table import teacher_positions

Bytes = NDArray[np.uint8]
ReadBack = Callable[[int], tuple[Bytes, Bytes]]
Tokens = Callable[[int], tuple[NDArray[np.uint32], Bytes]]

ROUNDING = 2.0**-7
"""Twice the largest relative error of rounding to bf16."""
SLACK = 1.2
"""A median, or the worst, of other samples may be so much larger."""
UNRELATED = 0.5
"""Relative error from which a row has nothing to do with what it should be."""
LOGIT_ROWS = 256


def noise_bound(dtype: torch.dtype, depth: int) -> float:
    """Largest relative error of a state `depth` layers deep that batching may cause.

    In fp32 what is left is the store's rounding. In bf16 each layer rounds the residual stream
    once more, and rounding errors of n layers add up as the root of n.
    """
    if dtype == torch.float32:
        return ROUNDING
    return ROUNDING * (1 + math.sqrt(depth))


@dataclass
class _Errors:
    """Relative errors of rows, collected over the samples."""

    parts: list[torch.Tensor] = field(default_factory=list)
    rounding: list[torch.Tensor] = field(default_factory=list)
    """What the store's mode alone makes of the true rows; bf16: nothing, it is in ROUNDING."""
    is_noop: bool = True
    """Whether the fault left the truth as it is in every row seen."""

    def add(self, found_NH: torch.Tensor, truth_NH: torch.Tensor) -> None:
        if len(found_NH):
            self.parts.append(_relative(found_NH, truth_NH))

    def add_rounding(self, stored_NH: torch.Tensor, truth_NH: torch.Tensor) -> None:
        """The same rows with no other error than that of being stored."""
        if len(stored_NH):
            self.rounding.append(_relative(stored_NH, truth_NH))

    @property
    def typical(self) -> float:
        """Their median; NaN counts as infinite."""
        return _median(self.parts)

    @property
    def typical_rounding(self) -> float:
        """The median of the rounding."""
        return _median(self.rounding)

    def worst(self, dtype: torch.dtype) -> float:
        """The largest in fp32; in bf16 one in twenty may differ, as experts are chosen anew."""
        return float(_all(self.parts).quantile(1.0 if dtype == torch.float32 else 0.95))

    @property
    def worst_rounding(self) -> float:
        """The largest of the rounding."""
        return float(_all(self.rounding).max()) if self.rounding else 0.0


def _relative(found_NH: torch.Tensor, truth_NH: torch.Tensor) -> torch.Tensor:
    norm_N = truth_NH.norm(dim=-1).clamp_min(1e-30)
    relative_N: torch.Tensor = (found_NH - truth_NH).norm(dim=-1) / norm_N
    return relative_N


def _median(parts: list[torch.Tensor]) -> float:
    return float(_all(parts).median()) if parts else 0.0


def _all(parts: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat(parts).nan_to_num(nan=torch.inf, posinf=torch.inf).cpu()


@dataclass(frozen=True, slots=True, eq=False)
class _Truth:
    """One sample computed alone."""

    states: list[torch.Tensor]
    """[T, H] each: the embedding, then every layer's own output, all before the final norm."""
    last_TH: torch.Tensor
    """After the final norm."""
    logits_TV: torch.Tensor


class Gate:
    """Compares samples, then judges them all together."""

    def __init__(self, target: Target, spec: StoreSpec, calibrated: Calibrated) -> None:
        self._target, self._spec, self._calibrated = target, spec, calibrated
        self._true: dict[str, _Errors] = defaultdict(_Errors)
        self._faults: dict[tuple[str, str], _Errors] = defaultdict(_Errors)
        self._depth: dict[str, int] = {}
        self._logit_noise = 0.0

    def add(
        self, ids_T: NDArray[np.uint32], mask_T: Bytes, hidden_TKR: Bytes, last_MR: Bytes
    ) -> dict[str, torch.Tensor]:
        """Compare one sample's stored rows with the target's own states.

        Relative error of each of its rows, [T] of a layer and [M] of `last` and the logits.
        """
        before = {name: len(errors.parts) for name, errors in self._true.items()}
        self._compare(ids_T, mask_T, hidden_TKR, last_MR)
        parts = {name: errors.parts[before.get(name, 0) :] for name, errors in self._true.items()}
        return {name: _all(added) for name, added in parts.items() if added}

    def _compare(
        self, ids_T: NDArray[np.uint32], mask_T: Bytes, hidden_TKR: Bytes, last_MR: Bytes
    ) -> None:
        target, spec = self._target, self._spec
        truth = self._compute(ids_T)
        hidden = self._calibrated.hidden
        hidden_TKH = self._decoded(hidden_TKR, spec.hidden_mode, hidden)
        for place, layer_id in enumerate(spec.layer_ids):
            name, true_TH = f"layer {layer_id}", truth.states[layer_id + 1].float()
            self._depth[name] = layer_id + 1
            found_TH = hidden_TKH[:, place]
            self._true[name].add(found_TH, true_TH)
            if hidden:
                stored_TH = self._stored(true_TH, spec.hidden_mode, hidden[place : place + 1])
                self._true[name].add_rounding(stored_TH, true_TH)
            for other in (layer_id - 1, layer_id + 1):
                fault = f"layer {other}" if other >= 0 else "embedding"
                self._fault(name, fault, found_TH, truth.states[other + 1].float(), true_TH)
            self._fault(name, "the next token's row", found_TH[:-1], true_TH[1:], true_TH[:-1])
        if spec.has_last:
            positions = torch.from_numpy(teacher_positions(mask_T, spec.last_rows)).to(
                target.device
            )
            last_MH = self._decoded(last_MR, spec.last_mode, self._calibrated.last)
            self._add_last(truth, last_MH, positions)

    def _add_last(self, truth: _Truth, last_MH: torch.Tensor, position_M: torch.Tensor) -> None:
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
        self._fault("last", "the next token's row", last_MH[inner], shifted_MH, true_MH)
        for begin in range(0, len(position_M), LOGIT_ROWS):
            part = slice(begin, begin + LOGIT_ROWS)
            found_MH = last_MH[part].to(target.dtype)
            raw_MH = truth.states[-1][position_M[part]]
            true_MV = truth.logits_TV[position_M[part]].float()
            self._true["logits"].add(target.head_logits(found_MH), true_MV)
            rounded_MH = stored_MH[part].to(target.dtype)
            rounding = _Errors()
            rounding.add(target.head_logits(rounded_MH), true_MV)
            self._logit_noise = max(self._logit_noise, rounding.worst(target.dtype))
            if last:
                self._true["logits"].rounding += rounding.parts
            logits_MV = target.head_logits(raw_MH)
            self._fault("logits", "the norm missing", logits_MV, true_MV, None)
            once_MH = target.norm(raw_MH)
            self._faults["logits", "the norm missing"].is_noop &= _same(once_MH, raw_MH)
            logits_MV = target.head_logits(target.norm(found_MH))
            self._fault("logits", "the norm done twice", logits_MV, true_MV, None)
            self._faults["logits", "the norm done twice"].is_noop &= _same(
                target.norm(once_MH), once_MH
            )

    def _fault(
        self,
        name: str,
        fault: str,
        found: torch.Tensor,
        wrong: torch.Tensor,
        truth: torch.Tensor | None,
    ) -> None:
        errors = self._faults[name, fault]
        errors.add(found, wrong)
        if truth is not None:
            errors.is_noop &= torch.equal(wrong, truth)

    def verdict(self) -> list[str]:
        """One line for each thing compared; ValueError that names all that do not hold."""
        lines, wrong = self.findings()
        if wrong:
            raise ValueError(
                "the gate refuses this capture, nothing was committed: " + "; ".join(wrong)
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
            told = self._told_apart(name, wrong)
            lines.append(
                f"{name}: error {typical:.2g}, allowed {bound:.2g}; if it were " + "; ".join(told)
            )
        return lines, wrong

    def is_noise(self, name: str, typical: float, worst: float) -> bool:
        """Whether a median and a largest relative error are what computing and storing make."""
        bound, worst_bound = self.allowed(name)
        return typical <= bound and worst <= worst_bound

    def allowed(self, name: str) -> tuple[float, float]:
        """Largest median, and largest single, relative error that is noise."""
        dtype, errors = self._target.dtype, self._true[name]
        noise, rounding = noise_bound(dtype, self._depth[name]), errors.typical_rounding
        # two independent errors add up as the root of their squares
        bound = math.hypot(noise, SLACK * rounding)
        worst_bound = max(bound, math.hypot(noise, SLACK * errors.worst_rounding))
        if name == "logits":
            # a head may make more of the store's rounding: what it makes of it was measured
            bound = worst_bound = 2 * max(bound, self._logit_noise)
        if dtype != torch.float32:
            worst_bound = max(UNRELATED, worst_bound)
        return bound, worst_bound

    def _told_apart(self, name: str, wrong: list[str]) -> list[str]:
        """How far the faults made on purpose are from what is stored; adds those that are not."""
        errors, (bound, _) = self._true[name], self.allowed(name)
        rounding = errors.typical_rounding
        # a fault must stand out of what was measured, not only of what is allowed
        excess = math.sqrt(max(errors.typical**2 - rounding**2, 0.0))
        threshold = min(bound, math.hypot(SLACK * rounding, max(3 * excess, ROUNDING)))
        told = []
        for (of, fault), fault_errors in self._faults.items():
            if of != name or not fault_errors.parts:
                continue
            if fault_errors.is_noop:
                told.append(f"{fault}: not applicable, it changes nothing here")
                continue
            told.append(f"{fault}: {fault_errors.typical:.2g}")
            if fault_errors.typical <= threshold:
                wrong.append(
                    f"{name} cannot be told from {fault} (error {fault_errors.typical:.2g})"
                )
        return told

    @torch.inference_mode()
    def _compute(self, ids_T: NDArray[np.uint32]) -> _Truth:
        target = self._target
        raw: list[torch.Tensor] = []
        hook = target.norm.register_forward_pre_hook(lambda _norm, inputs: raw.append(inputs[0]))
        try:
            ids_1T = torch.from_numpy(ids_T.astype(np.int64))[None].to(target.device)
            output = target.model(input_ids=ids_1T, use_cache=False, output_hidden_states=True)
        finally:
            hook.remove()
        states = output.hidden_states
        if len(raw) != 1 or len(states) != len(target.layers) + 1:
            raise ValueError(
                f"the gate does not know this family: {len(states)} hidden states for "
                f"{len(target.layers)} layers, {len(raw)} final norms"
            )
        # HF's last one is after the norm; the raw output of the last layer is what the norm got
        own = [*states[:-1], raw[0], states[-1], output.logits]
        *inner, last_TH, logits_TV = (state[0].to(target.device) for state in own)
        return _Truth(inner, last_TH, logits_TV)

    def _decoded(self, rows: Bytes, mode: str, calibrations: Sequence[Calibration]) -> torch.Tensor:
        return torch.from_numpy(decode(rows, mode, calibrations)).to(self._target.device)

    def _stored(
        self, states_NH: torch.Tensor, mode: str, calibrations: Sequence[Calibration]
    ) -> torch.Tensor:
        """The states after a trip through rows of this mode."""
        rows = encode(states_NH.float().cpu().numpy(), mode, calibrations)
        return self._decoded(rows, mode, calibrations)


def _same(found: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal but for rounding."""
    return bool(torch.allclose(found.float(), other.float(), rtol=ROUNDING, atol=1e-6))


def check(
    target: Target,
    spec: StoreSpec,
    calibrated: Calibrated,
    samples: Sequence[int],
    tokens: Tokens,
    read_back: ReadBack,
) -> list[str]:
    """Judge the stored rows of `samples`; the lines of the verdict, or ValueError.

    tokens: sample -> ids and loss mask; read_back: sample -> its stored bytes, [T, K, R] of
    hidden and [M, R] of last, out of the finished file.
    """
    gate = Gate(target, spec, calibrated)
    with torch.inference_mode():
        for sample in samples:
            gate.add(*tokens(sample), *read_back(sample))
    return gate.verdict()
