"""AdamW over fp32 masters, whatever type the parameters have.

The trap: every number that decides a step (finite? how long is the gradient?) stays on the device.
A bad step is skipped there and counted there; the host learns of it at the next log line.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from dflash_pipeline.configs.schema import OptimConfig
from dflash_pipeline.train.finite import GRADIENT, PLACES
from dflash_pipeline.train.group import Group
from dflash_pipeline.train.reduction import Reduction, length_of

# weight sum, loss sum, request to stop: they travel at the end of the flat gradient
_NUM_SUMS = 3
_ALIGNMENT = 64


def _has_kernel(flat: Tensor) -> bool:
    return flat.is_cuda


def _add_two(first: Tensor, second: Tensor, out: Tensor) -> None:
    """Their sum in fp32, each number read and written once."""
    if not _has_kernel(out):
        out.copy_(first).add_(second)
        return
    # triton has no build for each platform that has a CPU
    from dflash_pipeline.train.optim_kernel import add_two

    add_two(first, second, out)


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
    """Owns the masters, the moments and the accumulated gradient, each flat and fp32.

    Matrices, which decay, come first. Each parameter begins at a multiple of 64 numbers, since
    products read their operands in whole lines.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[str, nn.Parameter]],
        config: OptimConfig,
        group: Group,
        log_every: int,
        dtype: torch.dtype,
    ) -> None:
        """`parameters` are fp32; from here on they hold the masters, rounded to `dtype`."""
        named = dict(sorted(parameters, key=lambda pair: pair[1].dim() == 1))
        self._config, self._group = config, group
        self._names, self._parameters = list(named), list(named.values())
        device = self._parameters[0].device
        rooms = [-(-parameter.numel() // _ALIGNMENT) * _ALIGNMENT for parameter in named.values()]
        self._size = sum(rooms)
        num_matrices = sum(one.dim() > 1 for one in self._parameters)
        self._num_decayed = sum(rooms[:num_matrices])
        self._master, self._average, self._square = (
            torch.zeros(self._size, dtype=torch.float32, device=device) for _ in range(3)
        )
        self._gradient = torch.zeros(self._size + _NUM_SUMS, dtype=torch.float32, device=device)
        self._reduction = Reduction(self._gradient, rooms, num_matrices, group)
        self._is_last = self._is_summed = False
        # of fp32 the parameters are the masters
        self._rounded = self._master if dtype == torch.float32 else self._master.to(dtype)

        def views(flat: Tensor) -> list[Tensor]:
            return [
                part[: one.numel()].view(one.shape)
                for part, one in zip(flat.split(rooms), self._parameters, strict=True)
            ]

        self._masters, self._averages = views(self._master), views(self._average)
        self._squares, self._gradients = views(self._square), views(self._gradient[: self._size])
        self._step = torch.zeros((), device=device)
        self._counts = torch.zeros(4, dtype=torch.float64, device=device)
        self._flags = torch.zeros(log_every, dtype=torch.float64, device=device)
        self._where = torch.zeros((), dtype=torch.float64, device=device)
        self._num_flags = 0
        self._fresh = set(range(len(named)))
        """Parameters whose gradient is still that of the last step."""
        self._firsts: dict[int, Tensor] = {}
        """Gradients of a window's first batch, until there is a second."""
        self._length = torch.zeros((), device=device)
        for index, rounded in enumerate(views(self._rounded)):
            parameter = self._parameters[index]
            self._masters[index].copy_(parameter.detach())
            rounded.copy_(self._masters[index])
            parameter.data = rounded
            self._hook(parameter, index)

    def _hook(self, parameter: nn.Parameter, index: int) -> None:
        gradient = self._gradients[index]

        def accumulate(finished: Tensor) -> None:
            assert finished.grad is not None
            own, finished.grad = finished.grad, None
            if index in self._firsts:
                _add_two(self._firsts.pop(index), own, gradient)
            elif index not in self._fresh:
                gradient.add_(own)
            elif self._is_last:
                gradient.copy_(own)
            else:
                # written once, together with the second
                self._firsts[index] = own
            self._fresh.discard(index)
            if self._is_last:
                self._reduction.note(index)

        parameter.register_post_accumulate_grad_hook(accumulate)

    def expect_last(self) -> None:
        """The next backward is the last before `sum_up`: each gradient that it finishes may leave
        for the other ranks at once. Left out, all of them leave at `sum_up`; the sums are equal."""
        self._is_last = True

    @torch.no_grad()
    def add(self, loss_sum: Tensor, weight_sum: Tensor, where: Tensor) -> None:
        """Tell the sums of a batch whose backward has run, and `first_not_finite` of it."""
        self._gradient[self._size] += weight_sum
        self._gradient[self._size + 1] += loss_sum
        self._where.copy_(torch.where(self._where == 0, where, self._where))

    @torch.no_grad()
    def sum_up(self, wants_stop: bool) -> Tensor:
        """Add up over ranks all that was added since the last step; how many ranks want to stop.

        Every rank calls it once a step, whether it had a batch or not. Nothing waits for the
        device.
        """
        flat, sums = self._gradient[: self._size], self._gradient[self._size :]
        for index in self._fresh:
            self._gradients[index].zero_()
        for index, first in self._firsts.items():
            self._gradients[index].copy_(first)
        self._firsts.clear()
        sums[2].fill_(float(wants_stop))
        own_loss = sums[1].clone()
        self._length = own_length = self._reduction.finish()
        self._flag_own(own_length, own_loss)
        if self._group.world > 1:
            self._length = length_of(flat)
        self._is_summed = True
        return sums[2].clone()

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """One update from what `sum_up` has summed, the same on every rank.

        A loss or gradient that is not finite on any rank leaves masters and moments as they were
        on every rank. Nothing waits for the device.
        """
        assert self._is_summed, "step comes after sum_up"
        flat, sums = self._gradient[: self._size], self._gradient[self._size :]
        weight, loss, _ = sums.unbind()
        norm = self._length / weight
        is_bad = ~(norm.isfinite() & loss.isfinite())
        scale = weight.clone()
        if self._config.clip > 0:
            scale = weight * (norm / self._config.clip).clamp(min=1.0)
        # a step without any loss row (weight 0 gives a norm that is not finite) is skipped alike
        update = self._update_by_kernel if _has_kernel(flat) else self._update_plainly
        update(lr, scale, is_bad)
        self._count(norm, is_bad)
        self._step += 1 - is_bad.to(torch.float32)
        sums.zero_()
        self._fresh = set(range(len(self._names)))
        self._is_last = self._is_summed = False

    def _flag_own(self, length: Tensor, loss: Tensor) -> None:
        is_fine = length.isfinite() & loss.isfinite()
        # what nothing before has explained is the gradient's own
        where = torch.where(self._where == 0, GRADIENT, self._where)
        self._flags[self._num_flags % len(self._flags)] = torch.where(is_fine, 0, where)
        self._num_flags += 1
        self._where.zero_()

    def _update_by_kernel(self, lr: float, scale: Tensor, is_bad: Tensor) -> None:
        # triton has no build for each platform that has a CPU
        from dflash_pipeline.train.optim_kernel import adamw_step

        config = self._config
        step = self._step.double() + 1
        first, second = 1 - config.beta1**step, 1 - config.beta2**step
        numbers = torch.stack((is_bad.double(), 1 / scale.double(), lr / first, second.rsqrt()))
        adamw_step(
            self._master,
            self._average,
            self._square,
            self._gradient,
            self._rounded,
            numbers.float(),
            self._num_decayed,
            lr,
            config,
        )

    def _update_plainly(self, lr: float, scale: Tensor, is_bad: Tensor) -> None:
        config, end = self._config, self._num_decayed
        for part, decay in (
            (slice(0, end), config.weight_decay),
            (slice(end, self._size), 0.0),
        ):
            adamw(
                [self._master[part]],
                [self._gradient[: self._size][part]],
                [self._average[part]],
                [self._square[part]],
                [],
                [self._step.clone()],
                fused=True,
                grad_scale=scale,
                found_inf=is_bad.to(torch.float32),
                amsgrad=False,
                beta1=config.beta1,
                beta2=config.beta2,
                lr=lr,
                weight_decay=decay,
                eps=config.eps,
                maximize=False,
            )
        self.publish()

    @torch.no_grad()
    def publish(self) -> None:
        """Round the masters into the parameters; fp32 parameters are the masters."""
        if self._rounded is not self._master:
            self._rounded.copy_(self._master)

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
        state = {"step": self._step, "counts": self._counts[1:3].clone()}
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
        self._step.copy_(state["step"])
        self._counts[1:3] = state["counts"]
        self._counts[3] = self._counts[2]
        self.publish()

    def connect(self) -> None:
        """Make the connections that sums over ranks need, before the first step."""
        self._reduction.connect()

    @property
    def connection_bytes(self) -> int:
        """What they hold of the device, outside of torch's memory."""
        return self._reduction.connection_bytes

    def sizes(self) -> dict[str, int]:
        """Bytes of each kind of tensor that it holds or fills."""
        own_weights = [one for one in self._parameters if one.dtype != torch.float32]
        return {
            "weights": sum(parameter.nbytes for parameter in own_weights),
            "fp32 masters": self._master.nbytes,
            "moments": self._average.nbytes + self._square.nbytes,
            "gradient": self._gradient.nbytes,
            "first gradients of a window": sum(one.nbytes for one in self._firsts.values()),
        }

    def masters(self) -> dict[str, Tensor]:
        """The parameters in fp32, by name."""
        return dict(zip(self._names, self._masters, strict=True))

    def _state_tensors(self) -> dict[str, list[Tensor]]:
        return {"master": self._masters, "average": self._averages, "square": self._squares}
