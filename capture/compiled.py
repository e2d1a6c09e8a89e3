"""The target's decoder layers compiled: norms, rotations and gates joined into few kernels.

A layer is one region without a break, the same code for all layers of a class, for any number of
sequences above one and any padded length; hooks stay outside. It is compiled in the warm-up, by the
main thread; what would need another version later runs as it was, and is counted. Only `Target.run`
goes through it: the gate computes its truth by the plain layers, and so judges the compiled ones.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch._dynamo.backends.registry import lookup_backend
from torch.fx.experimental import _config as symbols

from dflash_pipeline.capture.shapes import Shape
from dflash_pipeline.capture.target import Target
from dflash_pipeline.configs.errors import UsageError, first_line

SPREAD = (
    "capture.compile does not go with --gpus-per-target: tensors move between GPUs within a layer; "
    "leave one of them out"
)
LEAST_TOKENS = 20_000_000
"""Tokens of a plan from which compiling pays even where eight GPUs share them: an 8B target (one
H200: 30.8 K tok/s plain, 41.6 K compiled) then has 81 s of work on each plain, and 60 s compiled
after 12.6 s of compiling."""
Later = Literal["eager_on_recompile", "fail_on_recompile"]


@dataclass(slots=True)
class Served:
    """How often the layers ran, and how often by what was compiled."""

    calls: int = 0
    compiled_calls: int = 0

    @property
    def share(self) -> float:
        """Of the calls, those that went through compiled code."""
        return self.compiled_calls / self.calls if self.calls else 0.0


def is_wanted(setting: str, kind: str, is_spread: bool, num_tokens: int) -> bool:
    """Whether a capture compiles its target: by `capture.compile`, where it runs (cuda or cpu),
    whether the target is spread over several GPUs, and the tokens of the whole plan."""
    if setting == "auto":
        return kind == "cuda" and not is_spread and num_tokens >= LEAST_TOKENS
    return setting == "on"


def compile_layers(
    target: Target,
    shapes: Sequence[Shape],
    *,
    backend: str = "inductor",
    later: Later = "eager_on_recompile",
) -> Served:
    """Compile the layers of `target` by the extremes of the planned shapes; later, nothing more is.

    Layers of linear attention stay as they are. later: what becomes of a shape that the code does
    not serve. One such target a process. Returns the counts from here on. UsageError for a family
    that cannot be compiled without a break, and for a target that is spread over several GPUs.
    `target.is_compiled` switches them all, `target.versions` tells which of them ran.
    """
    if target.spread:
        raise UsageError(SPREAD)
    target.is_compiled = True
    # the compiler keeps few versions of a function: those for another target must go
    torch._dynamo.reset()
    torch.compiler.set_stance("default")
    served = Served()
    compiled = {
        kind: _compiled(target, kind, backend, served) for kind in set(map(type, target.layers))
    }
    kinds = getattr(target.model.config.get_text_config(decoder=True), "layer_types", None)
    for layer, kind in zip(target.layers, kinds or [""] * len(target.layers), strict=True):
        # its scan over chunks is another function for each length, or kernels of their own
        if kind != "linear_attention":
            layer.forward = _switched(target, layer, compiled[type(layer)], served)
    several = [shape for shape in shapes if shape[0] > 1]
    # sliding layers have a mask only where a batch is longer than their window
    chosen = [pick(several, key=_width) for pick in (min, max)] if several else []
    try:
        for num_sequences, width in chosen:
            ids_BT = torch.zeros((num_sequences, width), dtype=torch.int64, device=target.device)
            # a batch that does not fit is left to the capture, which halves it
            with _own_lengths(), contextlib.suppress(torch.OutOfMemoryError):
                target.run(ids_BT, lambda _place, _hidden_BTH: None)
    except torch._dynamo.exc.TorchDynamoException as error:
        raise UsageError(
            f"capture.compile: the layers of {type(target.model).__name__} cannot be compiled "
            f"({first_line(error)}): set capture.compile to off, or to auto"
        ) from error
    # one sequence alone is another version: rare, and not worth its compiling
    torch.compiler.set_stance(later)
    served.calls = served.compiled_calls = 0
    target.versions.clear()
    return served


@contextlib.contextmanager
def _own_lengths() -> Iterator[None]:
    """What is traced within takes lengths that happen to be equal for two lengths."""
    before, symbols.use_duck_shape = symbols.use_duck_shape, False
    try:
        yield
    finally:
        symbols.use_duck_shape = before


def _width(shape: Shape) -> tuple[int, int]:
    return shape[1], shape[0]


def code_of(target: Target) -> str:
    """Names what is compiled: equal for processes that can use one another's results."""
    is_cuda = target.device.type == "cuda"
    device = torch.cuda.get_device_name(target.device) if is_cuda else "cpu"
    parts = (torch.__version__, device, target.dtype, target.model.config.to_json_string())
    return " ".join(map(str, parts))


def num_compiled() -> int:
    """Regions that this process has compiled so far, all versions counted."""
    found: int = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    return found


def _compiled(target: Target, kind: type[nn.Module], backend: str, served: Served) -> Any:
    """One for all layers of a class, whose function keeps what was made for it."""
    make = lookup_backend(backend)

    def counted(graph: torch.fx.GraphModule, inputs: Any, **options: Any) -> Callable[..., Any]:
        made = make(graph, inputs, **options)
        version = num_compiled()

        def run(*inputs: Any) -> Any:
            served.compiled_calls += 1
            target.versions.add(version)
            return made(*inputs)

        return run

    return torch.compile(kind.forward, dynamic=True, fullgraph=True, backend=counted)


def _switched(target: Target, layer: nn.Module, compiled: Any, served: Served) -> Any:
    """A layer's forward: compiled while the target is and runs over batches, else as it was."""
    plain = layer.forward

    def forward(*inputs: Any, **named: Any) -> Any:
        if not (target.is_running and target.is_compiled):
            return plain(*inputs, **named)
        served.calls += 1
        _mark_static(inputs)
        _mark_static(tuple(named.values()))
        return compiled(layer, *inputs, **named)

    return forward


def _mark_static(values: tuple[Any, ...]) -> None:
    """Sequences and positions vary; widths of states and heads, [B, T, width], do not."""
    for value in values:
        if isinstance(value, tuple):
            _mark_static(value)
        elif isinstance(value, torch.Tensor) and value.ndim == 3:
            torch._dynamo.mark_static(value, 2)
