"""int8 and int4 on a GPU: first that the kernels repeat numpy bit for bit, then how long they take.

    python tests/bench/quantise.py [--tokens 49152] [--hidden-size 4096] [--layers 6]

Prints a line for each figure; writes quantise.json into $OUT where that is set. The floor is the
bytes read and written at the rate at which this GPU copies 8 GB. The shares are of a prefill at
36,000 tokens a second, and of a drafter's step of 125 ms for each 3,072 tokens.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from dflash_pipeline.capture.quantise import Quantiser
from dflash_pipeline.store.calibration import calibrate
from dflash_pipeline.store.quantise import MODES, decode, encode
from dflash_pipeline.train.dequantise import Dequantiser

PREFILL_TOKENS_PER_S = 36_000
STEP_S_PER_TOKEN = 0.125 / 3072
NUM_TIMED = 20


def states(num_rows: int, hidden_size: int, seed: int) -> torch.Tensor:
    """Heavy-tailed rows on the GPU, with massive channels and a sink; fp32."""
    generator = torch.Generator("cuda").manual_seed(seed)
    rows_NH = torch.randn(num_rows, hidden_size, device="cuda", generator=generator)
    rows_NH *= torch.randn(hidden_size, device="cuda", generator=generator).exp()
    rows_NH += torch.randn(hidden_size, device="cuda", generator=generator)
    rows_NH[:, [5, 30]] *= 300
    rows_NH[0, 5] = 25_000
    return rows_NH


def check(hidden_size: int, mode: str, dtype: torch.dtype, seed: int) -> int:
    """Compare 512 rows of two layers; the bytes and values compared."""
    rows_MH = states(600, hidden_size, seed)
    # what a capture never stores, and what it seldom meets
    rows_MH[1], rows_MH[2, 7], rows_MH[3, 8] = 0, torch.nan, torch.inf
    rows_MH[4] *= 1e-40
    rows_MH[5] *= 1e24
    hidden_MH = rows_MH.to(dtype)
    sane_MH = hidden_MH[6:].float().cpu().numpy()
    calibrations = calibrate(np.stack([sane_MH, sane_MH[::-1] * 2], axis=1), None, mode, "none")
    index_N = torch.randperm(600, device="cuda")[:512]
    rows_NKR = torch.full((512, 2, calibrations[0].row_bytes), 0xFF, dtype=torch.uint8).cuda()
    largest_NK = torch.full((512, 2), torch.nan, device="cuda")
    chosen_NH = hidden_MH[index_N].float().cpu().numpy()
    for place, calibration in enumerate(calibrations):
        out = rows_NKR[:, place], largest_NK[:, place]
        Quantiser(calibration, "cuda").encode(hidden_MH, index_N, *out)
        expected_NR = encode(chosen_NH, calibration)
        wrong = int((rows_NKR[:, place].cpu().numpy() != expected_NR).sum())
        assert not wrong, f"H {hidden_size} {mode} {dtype}: {wrong} bytes differ from numpy's"
        magnitude_NH = np.abs(chosen_NH)
        bound_N = np.where(magnitude_NH <= 2.0**100, magnitude_NH, np.inf).max(axis=1)
        assert np.array_equal(largest_NK[:, place].cpu().numpy(), bound_N)
    dequantiser = Dequantiser(calibrations, "cuda")
    feature_NKH = torch.full((512, 2, hidden_size), torch.nan, dtype=dtype, device="cuda")
    dequantiser.decode(rows_NKR, feature_NKH)
    for place, calibration in enumerate(calibrations):
        rows_NR = rows_NKR[:, place].cpu().numpy()
        truth_NH = torch.from_numpy(decode(rows_NR, calibration)).to(dtype)
        same = torch.equal(feature_NKH[:, place].cpu(), truth_NH)
        assert same, f"H {hidden_size} {mode} {dtype}: values differ from numpy's"
    return rows_NKR.numel() + feature_NKH.numel()


def median_s(work: Callable[[], None]) -> float:
    """Seconds of one call on the GPU, the median of NUM_TIMED."""
    work()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(NUM_TIMED + 1)]
    marks[0].record()
    for mark in marks[1:]:
        work()
        mark.record()
    torch.cuda.synchronize()
    spans = [begin.elapsed_time(end) for begin, end in itertools.pairwise(marks)]
    return statistics.median(spans) / 1000


def copy_bytes_per_s() -> float:
    """Bytes read and written a second by a copy of 8 GB."""
    source = torch.randint(0, 255, (1 << 33,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)

    def copy() -> None:
        target.copy_(source)

    return 2 * source.numel() / median_s(copy)


def figure(
    name: str, mode: str, size_bytes: int, work: Callable[[], None], bytes_per_s: float, of_s: float
) -> dict[str, object]:
    """Time `work`, which reads and writes `size_bytes`, against the copy floor and `of_s`."""
    seconds = median_s(work)
    ratio = seconds * bytes_per_s / size_bytes
    print(
        f"{name:14} {mode}: {seconds * 1e3:6.2f} ms, {size_bytes / seconds / 1e9:5.0f} GB/s, "
        f"{ratio:.2f}x the copy floor, {seconds / of_s:.2%} of the "
        f"{'step' if name.startswith('decode') else 'prefill'}",
        flush=True,
    )
    return {
        "name": name,
        "mode": mode,
        "ms": seconds * 1e3,
        "gb_per_s": size_bytes / seconds / 1e9,
        "ratio_to_copy_floor": ratio,
        "share": seconds / of_s,
    }


def pack_figure(hidden_KMH: list[torch.Tensor], bytes_per_s: float) -> dict[str, object]:
    """What bf16 rows cost: gather, copy and bound, as `capture.pack` does it."""
    num_tokens, hidden_size = hidden_KMH[0].shape
    index_N = torch.arange(num_tokens, device="cuda")
    shape = (num_tokens, len(hidden_KMH), hidden_size)
    rows_NKH = torch.empty(shape, dtype=torch.bfloat16, device="cuda")
    largest_NK = torch.empty(shape[:2], device="cuda")

    def pack() -> None:
        for place, hidden_MH in enumerate(hidden_KMH):
            rows_NKH[:, place].copy_(hidden_MH.index_select(0, index_N))
            largest_NK[:, place].copy_(rows_NKH[:, place].abs().amax(dim=1))

    size_bytes = 4 * rows_NKH.numel()
    return figure("pack", "bf16", size_bytes, pack, bytes_per_s, num_tokens / PREFILL_TOKENS_PER_S)


def mode_figures(
    mode: str, hidden_KMH: list[torch.Tensor], bytes_per_s: float
) -> list[dict[str, object]]:
    """Encode and decode."""
    num_tokens, hidden_size = hidden_KMH[0].shape
    num_layers = len(hidden_KMH)
    sample_NKH = np.stack([hidden_MH[:512].float().cpu().numpy() for hidden_MH in hidden_KMH], 1)
    calibrations = calibrate(sample_NKH, None, mode, "none")
    quantisers = [Quantiser(calibration, "cuda") for calibration in calibrations]
    dequantiser = Dequantiser(calibrations, "cuda")
    index_N = torch.arange(num_tokens, device="cuda")
    largest_NK = torch.empty(num_tokens, num_layers, device="cuda")
    shape = (num_tokens, num_layers, calibrations[0].row_bytes)
    rows_NKR = torch.empty(shape, dtype=torch.uint8, device="cuda")
    shape = (num_tokens, num_layers, hidden_size)
    feature_NKH = torch.empty(shape, dtype=torch.bfloat16, device="cuda")

    def encode_all() -> None:
        for place, quantiser in enumerate(quantisers):
            out = rows_NKR[:, place], largest_NK[:, place]
            quantiser.encode(hidden_KMH[place], index_N, *out)

    def decode_all() -> None:
        dequantiser.decode(rows_NKR, feature_NKH)

    size_bytes = 2 * feature_NKH.numel() + rows_NKR.numel()
    prefill_s = num_tokens / PREFILL_TOKENS_PER_S
    step_s = num_tokens * STEP_S_PER_TOKEN
    return [
        figure(name, mode, size_bytes, work, bytes_per_s, of_s)
        for name, work, of_s in (
            ("encode", encode_all, prefill_s),
            ("decode", decode_all, step_s),
        )
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=49_152)
    parser.add_argument("--hidden-size", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=6)
    options = parser.parse_args()
    num_checked = 0
    for hidden_size in (96, 576, 2880, 4096, 5120):
        for mode in MODES:
            for seed, dtype in enumerate((torch.bfloat16, torch.float32)):
                num_checked += check(hidden_size, mode, dtype, seed)
    print(f"kernels equal numpy bit for bit in {num_checked:,} bytes and values", flush=True)
    bytes_per_s = copy_bytes_per_s()
    print(f"copy: {bytes_per_s / 1e9:.0f} GB/s read and written", flush=True)
    hidden_KMH = [
        states(options.tokens, options.hidden_size, seed).bfloat16()
        for seed in range(options.layers)
    ]
    figures = [pack_figure(hidden_KMH, bytes_per_s)]
    for mode in MODES:
        figures += mode_figures(mode, hidden_KMH, bytes_per_s)
    result = {
        "device": torch.cuda.get_device_name(),
        "tokens": options.tokens,
        "hidden_size": options.hidden_size,
        "layers": options.layers,
        "num_equal": num_checked,
        "copy_gb_per_s": bytes_per_s / 1e9,
        "figures": figures,
    }
    if os.environ.get("OUT"):
        Path(os.environ["OUT"], "quantise.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
