"""What a step of `dflash generate` takes, and which kernels take it, beside transformers' generate.

    python tests/bench/decode.py [--shape 135m|8b|tiny] [--batches 128,512,1024,2048]

A random target of the shape answers prompts of even and of uneven length (0.5 to 1.5 of 150
tokens), greedily and at T 0.7; no row ends. A step is what 64 tokens more take, divided by 64:
medians of three. Beside it: the floor (weights, keys and values read once at an H200's bandwidth),
the time in which the device works and its launches a step by torch's profiler, and what takes most
of it. Prints each figure once it is known; decode.json goes into $OUT where that is set.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from dflash_pipeline.capture.decode_attention import grouped
from dflash_pipeline.capture.decode_loop import LOOK_EVERY, decode
from dflash_pipeline.capture.decode_norm import fused_norms
from dflash_pipeline.capture.decode_rope import fused_rope
from dflash_pipeline.capture.draw import Draw
from dflash_pipeline.capture.roomy_cache import roomy
from dflash_pipeline.configs.schema import GenerateConfig

# hidden, middle, layers, heads, key-value heads, width of a head, vocabulary
SHAPES = {
    "135m": (576, 1536, 30, 9, 3, 64, 49152),
    "8b": (4096, 12288, 36, 32, 8, 128, 151936),
    "tiny": (64, 96, 4, 4, 2, 16, 512),
}
PROMPT, FEW, MANY = 150, 16, 80
BYTES_PER_S = 4.8e12
"""Of an H200's memory, by its data sheet."""
ROUNDS, NUM_TOLD = 3, 8


def target(shape: str, device: str) -> LlamaForCausalLM:
    """Random weights in bf16 on a GPU, fp32 on a CPU."""
    hidden, middle, layers, heads, groups, width, vocabulary = SHAPES[shape]
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=middle,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        head_dim=width,
        vocab_size=vocabulary,
        max_position_embeddings=2048,
        tie_word_embeddings=shape == "135m",
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = LlamaForCausalLM(config).eval()
    return model.to(torch.bfloat16 if device == "cuda" else torch.float32)


class Bench:
    """Figures by name, printed as they come."""

    def __init__(self, shape: str) -> None:
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.shape, self.model = shape, target(shape, self.device)
        self.figures: dict[str, dict[str, float | str]] = {}

    def keep(self, name: str, **values: float | str) -> None:
        """Print and write a figure."""
        self.figures[name] = values
        told = [f"{k} {v:,.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in values.items()]
        print(f"{name:44} {', '.join(told)}", flush=True)
        if os.environ.get("OUT"):
            device = torch.cuda.get_device_name() if self.device == "cuda" else "CPU"
            about = {"device": device, "torch": torch.__version__, "shape": self.shape}
            text = json.dumps(about | {"figures": self.figures}, indent=1) + "\n"
            Path(os.environ["OUT"], "decode.json").write_text(text)

    def seconds(self, work: Callable[[], object]) -> float:
        """Of work whose end is waited for."""
        begin = time.perf_counter()
        work()
        if self.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - begin

    def floor_s(self, num_rows: int) -> float:
        """Of a step half way through what is timed, on an H200."""
        _, _, layers, _, groups, width, _ = SHAPES[self.shape]
        weights = sum(one.numel() for one in self.model.parameters())
        cache = num_rows * (PROMPT + (FEW + MANY) / 2) * layers * 2 * groups * width
        return 2 * (weights + cache) / BYTES_PER_S

    def figure(self, name: str, num_rows: int, answer: Callable[[int], object]) -> None:
        """A step of `answer`, which is told how many tokens to make of each row."""
        answer(FEW)
        taken = [
            (self.seconds(lambda: answer(FEW)), self.seconds(lambda: answer(MANY)))
            for _ in range(ROUNDS)
        ]
        step_s = statistics.median((many - few) / (MANY - FEW) for few, many in taken)
        found = {"ms": 1e3 * step_s, "tokens_per_s": num_rows / step_s}
        if self.device == "cuda":
            found["times_floor"] = step_s / self.floor_s(num_rows)
        self.keep(name, **found, first_ms=1e3 * statistics.median(few for few, _ in taken))

    def profiled(self, name: str, answer: Callable[[int], object]) -> None:
        """Where a step's time on the device goes: of many tokens less of few."""
        if self.device != "cuda":
            return
        spent: list[Counter[str]] = []
        launches: list[int] = []
        for count in (FEW, MANY):
            with profile(activities=[ProfilerActivity.CUDA]) as found:
                answer(count)
                torch.cuda.synchronize()
            times, number = Counter[str](), 0
            for event in found.key_averages():
                times[event.key] += event.self_device_time_total
                number += event.count if event.self_device_time_total else 0
            spent.append(times)
            launches.append(number)
        few, many = spent
        steps = MANY - FEW
        a_step = {key: (many[key] - few[key]) / steps / 1e3 for key in many}
        total, number = sum(a_step.values()), (launches[1] - launches[0]) / steps
        self.keep(f"{name}: device", ms=total, launches=number)
        for key, ms in sorted(a_step.items(), key=lambda item: -item[1])[:NUM_TOLD]:
            self.keep(f"{name}: {key[:70]}", ms=ms)


def prompts_of(num_rows: int, is_even: bool) -> list[list[int]]:
    """Token ids; uneven ones are 0.5 to 1.5 of `PROMPT` long."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.full((num_rows,), PROMPT)
    if not is_even:
        lengths = torch.randint(PROMPT // 2, PROMPT * 3 // 2, (num_rows,), generator=generator)
    return [torch.randint(1, 500, (int(n),), generator=generator).tolist() for n in lengths]


def own(bench: Bench, prompts: list[list[int]], temperature: float) -> Callable[[int], object]:
    """The loop of `dflash generate`."""
    config = GenerateConfig(temperature=temperature)
    look_every = LOOK_EVERY if bench.device == "cuda" else 1

    @torch.inference_mode()
    def answer(count: int) -> object:
        model, num = bench.model, len(prompts)
        with grouped(model), fused_norms(model), fused_rope(model), roomy(model):
            draw = Draw(config, range(num))
            rooms, device = [count] * num, bench.device
            return decode(model, prompts, rooms, (), draw, device, look_every, lambda _count: None)

    return answer


def theirs(bench: Bench, prompts: list[list[int]]) -> Callable[[int], object]:
    """transformers' generate, greedily."""
    length = max(map(len, prompts))
    ids_BT = torch.zeros((len(prompts), length), dtype=torch.long)
    for row, prompt in enumerate(prompts):
        ids_BT[row, length - len(prompt) :] = torch.tensor(prompt)
    ids_BT = ids_BT.to(bench.device)
    mask_BT = (ids_BT > 0).long()

    @torch.inference_mode()
    def answer(count: int) -> object:
        config = GenerationConfig(max_new_tokens=count, do_sample=False, pad_token_id=0)
        return bench.model.generate(ids_BT, attention_mask=mask_BT, generation_config=config)

    return answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    is_cuda = torch.cuda.is_available()
    parser.add_argument("--shape", choices=list(SHAPES), default="135m" if is_cuda else "tiny")
    parser.add_argument("--batches", default="128,512,1024,2048" if is_cuda else "4,8")
    options = parser.parse_args()
    bench = Bench(options.shape)
    for num_rows in map(int, options.batches.split(",")):
        uneven = prompts_of(num_rows, is_even=False)
        bench.figure(f"{num_rows} uneven, T 0.7", num_rows, own(bench, uneven, 0.7))
        bench.figure(f"{num_rows} uneven, greedy", num_rows, own(bench, uneven, 0.0))
        even = own(bench, prompts_of(num_rows, is_even=True), 0.0)
        bench.figure(f"{num_rows} even, greedy", num_rows, even)
        if num_rows <= 512:
            bench.figure(f"{num_rows} uneven, transformers", num_rows, theirs(bench, uneven))
        bench.profiled(f"{num_rows} uneven, T 0.7", own(bench, uneven, 0.7))


if __name__ == "__main__":
    main()
