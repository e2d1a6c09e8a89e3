"""What int8 and int4 make of a real target's rows: errors by layer, and of its own head.

    python tests/bench/quantise_error.py STORE [--samples 64] [--head-rows 8192]

STORE is of bf16 rows of a target whose head neither scales nor caps. Calibrates on some samples as
`dflash capture` does and judges on as many others; prints a line for each layer and mode, and
writes quantise_error.json into $OUT where that is set.
"""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dflash_pipeline.store.calibration import calibrate, calibration_positions
from dflash_pipeline.store.guard import head_report, layer_reports, violations
from dflash_pipeline.store.quantise import MODES
from dflash_pipeline.store.reader import Store, open_store

Ints = npt.NDArray[np.int64]
Float = npt.NDArray[np.float32]


def rows_of(store: Store, samples: Ints, is_spread: bool) -> tuple[Float, Float]:
    """fp32 rows of all layers, and of `last`; `is_spread`: at calibration's positions alone."""
    found = [store.sample(int(sample)) for sample in samples]
    positions = calibration_positions([len(one.hidden_TKH) for one in found])
    hidden = [
        one.hidden_TKH[at] if is_spread else one.hidden_TKH
        for one, at in zip(found, positions, strict=True)
    ]
    return np.concatenate(hidden), np.concatenate([one.last_MH for one in found])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("store")
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--head-rows", type=int, default=8192)
    options = parser.parse_args()
    store = open_store(options.store)
    if store.spec.hidden_mode != "bf16" or store.spec.last_mode != "bf16":
        raise SystemExit(f"{options.store} is not of bf16 rows, which are the truth here")
    readable = np.random.default_rng(0).permutation(np.flatnonzero(store.readable_N))
    learnt, judged = readable[: options.samples], readable[options.samples : 2 * options.samples]
    hidden_NKH, last_NH = rows_of(store, learnt, True)
    judged_NKH, judged_NH = rows_of(store, judged, False)
    results: dict[str, Any] = {
        "hidden_size": store.spec.hidden_size,
        "rows": {"calibrated": len(hidden_NKH), "judged": len(judged_NKH)},
    }
    for mode in MODES:
        calibrations = calibrate(hidden_NKH, last_NH, mode, mode)
        layers = layer_reports(judged_NKH, judged_NH, store.spec.layer_ids, calibrations)
        last = calibrations[-1]
        assert last is not None
        rows_NH = judged_NH[: options.head_rows]
        head = head_report(rows_NH, last, store.head(), 1.0, 0.0)
        results[mode] = {
            "layers": [asdict(layer) for layer in layers],
            "head": asdict(head),
            "violations": violations(layers, head),
        }
        for layer in layers:
            errors = f"median {layer.error_median:.4f}, p99 {layer.error_p99:.4f}"
            print(f"{mode} {layer.name}: error {errors}, cosine {layer.cosine_median:.6f}")
        print(f"{mode} head on {head.num_rows} rows: top-1 {head.top1:.4f}, KL {head.kl:.5f} nats")
    if "OUT" in os.environ:
        path = Path(os.environ["OUT"]) / "quantise_error.json"
        path.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
