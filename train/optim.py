"""AdamW over fp32 masters, whatever type the parameters have.

The trap: every number that decides a step (finite? how long is the gradient?) stays on the device.
A bad step is skipped there and counted there; the host learns of it at the next log line.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from dflash_pipeline.configs.schema import OptimConfig
from dflash_pipeline.train.finite import GRADIENT, PLACES
from dflash_pipeline.train.group import Group

# weight sum, loss sum, request to stop: they travel at the end of the flat gradient, one
# collective for all
_NUM_SUMS = 3


def learning_rate(step: int, num_steps: int, config: OptimConfig) -> float:
    """Of the 0-based `step` of `num_steps`; a pure function, so a resumed run needs no state."""
    warmup_steps = math.ceil(config.warmup * num_steps)
    if step < warmup_steps:
        return config.lr * (step + 1) / warmup_steps
    floor = config.min_lr_share
    if config.schedule == "wsd":
        decay_steps = max(math.ceil(config.decay * num_steps), 1)
        share = min(max(num_steps - step, 0) / decay_steps, 1.0)
    else:
        done = min((step - warmup_steps) / max(num_steps - warmup_steps, 1), 1.0)
        linear = config.schedule == "linear"
        share = 1 - done if linear else 0.5 * (1 + math.cos(math.pi * done))
    return config.lr * (floor + (1 - floor) * share)


@dataclass(frozen=True, slots=True)
class Health:
    """What the host may know about the steps since it last asked."""

    gradient_norm: float
    """Of the last step, before clipping."""
    num_bad: int
    """Skipped steps since the run began."""
    longest_streak: int
    """Most skipped steps in a row since the host last asked, the streak before included."""
    first_bad: tuple[str, ...]
    """Step by step since the host last asked: where the first number of this very rank was that is
    not finite; empty: loss and gradient are."""


class Optimizer:
    """Owns the masters, the moments and the accumulated gradient, each flat and fp32."""

    def __init__(
        self,
        parameters: Iterable[tuple[str, nn.Parameter]],
        config: OptimConfig,
        group: Group,
        log_every: int,
        dtype: torch.dtype,
    ) -> None:
        """`parameters` are fp32; from here on they hold the masters, rounded to `dtype`."""
        named = dict(parameters)
        self._config, self._group = config, group
        self._parameters = list(named.values())
        device = self._parameters[0].device
        sizes = [parameter.numel() for parameter in self._parameters]
        self._size = sum(sizes)
        self._master = torch.empty(self._size, dtype=torch.float32, device=device)
        self._average = torch.zeros_like(self._master)
        self._square = torch.zeros_like(self._master)
        self._gradient = torch.zeros(self._size + _NUM_SUMS, dtype=torch.float32, device=device)
        self._names = list(named)
        shapes = [parameter.shape for parameter in self._parameters]
        self._masters, self._averages, self._squares, self._gradients = (
            [part.view(shape) for part, shape in zip(flat.split(sizes), shapes, strict=True)]
            for flat in (
                self._master,
                self._average,
                self._square,
                self._gradient[: self._size],
            )
        )
        # one counter a parameter is what the fused kernel wants; they are always equal
        self._steps = [torch.zeros((), device=device) for _ in named]
        self._counts = torch.zeros(4, dtype=torch.float64, device=device)
        self._flags = torch.zeros(log_every, dtype=torch.float64, device=device)
        self._where = torch.zeros((), dtype=torch.float64, device=device)
        self._num_flags = 0
        for parameter, master, gradient in zip(
            self._parameters, self._masters, self._gradients, strict=True
        ):
            master.copy_(parameter.detach())
            parameter.data = master.to(dtype)  # of fp32: the master itself
            self._hook(parameter, gradient)

    @staticmethod
    def _hook(parameter: nn.Parameter, gradient: Tensor) -> None:
        def accumulate(finished: Tensor) -> None:
            assert finished.grad is not None
            gradient.add_(finished.grad)
            finished.grad = None

        parameter.register_post_accumulate_grad_hook(accumulate)

    @torch.no_grad()
    def add(self, loss_sum: Tensor, weight_sum: Tensor, where: Tensor) -> None:
        """Tell the sums of a batch whose backward has run, and `first_not_finite` of it."""
        self._gradient[self._size] += weight_sum
        self._gradient[self._size + 1] += loss_sum
        self._where.copy_(torch.where(self._where == 0, where, self._where))

    @torch.no_grad()
    def step(self, lr: float, wants_stop: bool) -> Tensor:
        """One update from all that was added on all ranks; returns how many ranks want to stop.

        A loss or gradient that is not finite on any rank leaves masters and moments as they were
        on every rank. Nothing waits for the device.
        """
        flat, sums = self._gradient[: self._size], self._gradient[self._size :]
        sums[2].fill_(float(wants_stop))
        self._flag_own(flat, sums)
        self._group.add_up(self._gradient)
        weight, loss, stop = sums.clone().unbind()
        norm = torch.linalg.vector_norm(flat) / weight
        is_bad = ~(norm.isfinite() & loss.isfinite())
        scale = weight
        if self._config.clip > 0:
            scale = weight * (norm / self._config.clip).clamp(min=1.0)
        # a step without any loss row (weight 0 gives a norm that is not finite) is skipped alike
        self._update(lr, scale, is_bad.to(torch.float32))
        self._count(norm, is_bad)
        self._gradient.zero_()
        return stop

    def _flag_own(self, flat: Tensor, sums: Tensor) -> None:
        is_fine = torch.linalg.vector_norm(flat).isfinite() & sums[1].isfinite()
        # what nothing before has explained is the gradient's own
        where = torch.where(self._where == 0, GRADIENT, self._where)
        self._flags[self._num_flags % len(self._flags)] = torch.where(is_fine, 0, where)
        self._num_flags += 1
        self._where.zero_()

    def _update(self, lr: float, scale: Tensor, is_bad: Tensor) -> None:
        config = self._config
        for is_matrix in (True, False):
            chosen = [
                index
                for index, master in enumerate(self._masters)
                if (master.dim() > 1) == is_matrix
            ]
            adamw(
                [self._masters[index] for index in chosen],
                [self._gradients[index] for index in chosen],
                [self._averages[index] for index in chosen],
                [self._squares[index] for index in chosen],
                [],
                [self._steps[index] for index in chosen],
                fused=True,
                grad_scale=scale,
                found_inf=is_bad,
                amsgrad=False,
                beta1=config.beta1,
                beta2=config.beta2,
                lr=lr,
                weight_decay=config.weight_decay if is_matrix else 0.0,
                eps=config.eps,
                maximize=False,
            )
        self.publish()

    @torch.no_grad()
    def publish(self) -> None:
        """Round the masters into the parameters; fp32 parameters are the masters."""
        if self._parameters[0].dtype != torch.float32:
            torch._foreach_copy_([parameter.data for parameter in self._parameters], self._masters)

    def _count(self, norm: Tensor, is_bad: Tensor) -> None:
        counts, bad = self._counts, is_bad.double()
        counts[0] = norm
        counts[1] += bad
        counts[2] = (counts[2] + 1) * bad
        counts[3] = torch.maximum(counts[3], counts[2])

    def vector(self) -> Tensor:
        """What `health` wants, still on the device."""
        return torch.cat((self._counts, self._flags))

    def health(self, vector: Tensor) -> Health:
        """`vector` brought to the host; begins the next stretch between log lines."""
        norm, num_bad, _streak, longest = vector[:4].tolist()
        flags = vector[4 : 4 + self._num_flags].tolist()
        self._num_flags = 0
        self._counts[3] = self._counts[2]
        return Health(
            gradient_norm=norm,
            num_bad=int(num_bad),
            longest_streak=int(longest),
            first_bad=tuple(PLACES[int(flag)] for flag in flags),
        )

    def state(self) -> dict[str, Tensor]:
        """Everything that a later process needs to go on bit by bit."""
        state = {"step": self._steps[0], "counts": self._counts[1:3].clone()}
        for kind, tensors in self._state_tensors().items():
            state |= {
                f"{kind}.{name}": tensor for name, tensor in zip(self._names, tensors, strict=True)
            }
        return state

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take over what `state` gave. KeyError names a missing tensor."""
        for kind, tensors in self._state_tensors().items():
            for name, tensor in zip(self._names, tensors, strict=True):
                tensor.copy_(state[f"{kind}.{name}"])
        for step in self._steps:
            step.copy_(state["step"])
        self._counts[1:3] = state["counts"]
        self._counts[3] = self._counts[2]
        self.publish()

    def sizes(self) -> dict[str, int]:
        """Bytes of each kind of tensor that it holds or fills."""
        own_weights = [one for one in self._parameters if one.dtype != torch.float32]
        return {
            "weights": sum(parameter.nbytes for parameter in own_weights),
            "fp32 masters": self._master.nbytes,
            "moments": self._average.nbytes + self._square.nbytes,
            "gradient": self._gradient.nbytes,
        }

    def masters(self) -> dict[str, Tensor]:
        """The parameters in fp32, by name."""
        return dict(zip(self._names, self._masters, strict=True))

    def _state_tensors(self) -> dict[str, list[Tensor]]:
        return {"master": self._masters, "average": self._averages, "square": self._squares}
