"""What the processes of test_reduction.py and test_ranks.py do; each function is one that `launch`
calls. `extra` holds what the test chose."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dflash_pipeline.configs.place import Place
from dflash_pipeline.configs.schema import OptimConfig, Run
from dflash_pipeline.train import reduction, window, worker
from dflash_pipeline.train.feed import Batch
from dflash_pipeline.train.finite import first_not_finite
from dflash_pipeline.train.follow import Draw, Order
from dflash_pipeline.train.group import Group
from dflash_pipeline.train.journal import Journal
from dflash_pipeline.train.optim import Optimizer

# batches of each rank of three in a window: alike, uneven, none at all, one alone
WINDOWS = ((1, 1, 1), (2, 2, 2), (3, 1, 2), (0, 2, 1), (1, 0, 0), (3, 3, 3))
BAD_WINDOW = 1
WIDTH = 24


class _Part(nn.Module):
    """Some matrices and vectors; a batch may leave the second half out."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(6))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH, bias=False) for _ in range(6))

    def forward(self, rows: Tensor, num_layers: int) -> Tensor:
        for layer, norm in zip(self.layers[:num_layers], self.norms[:num_layers], strict=True):
            rows = rows + norm(layer(rows))
        return rows


def _model() -> _Part:
    torch.manual_seed(0)
    return _Part()


def sums(run: Run, place: Place, extra: dict[str, Any]) -> None:
    """Windows of batches in three ways: sums begun within backward, all of them after it, and the
    sum of all ranks' gradients formed here. Masters after each window go to extra["out"]."""
    # every parameter or two is a bucket
    reduction.BUCKET_NUMBERS = 2 * WIDTH * WIDTH
    group, alone = Group(place, 60.0), Group(replace(place, rank=0, world=1), 60.0)
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[extra["dtype"]]
    ways = {name: _model() for name in ("within", "after", "plain")}
    optimizers = {
        name: Optimizer(
            model.named_parameters(),
            OptimConfig(clip=0.5, weight_decay=0.1),
            alone if name == "plain" else group,
            len(WINDOWS),
            dtype,
        )
        for name, model in ways.items()
    }
    told, num_begun = dict[str, list[Tensor]](), list[int]()
    for turn, counts in enumerate(WINDOWS):
        for name, optimizer in optimizers.items():
            for number in range(counts[place.rank]):
                is_last = number == counts[place.rank] - 1
                if name == "within" and is_last:
                    optimizer.expect_last()
                _learn(ways[name], optimizer, dtype, (turn, place.rank, number))
            if name == "within":
                num_begun.append(optimizer._reduction.num_started)
            optimizer.sum_up(wants_stop=False)
            if name == "plain":
                _sum_here(optimizer)
            optimizer.step(0.01)
            flat = torch.cat([master.flatten() for master in optimizer.masters().values()])
            told.setdefault(name, []).append(flat.clone())
    health = {
        name: optimizer.health(optimizer.vector()).first_bad
        for name, optimizer in optimizers.items()
    }
    num_bad = float(optimizers["within"].vector()[1])
    torch.save(
        {"masters": told, "begun": num_begun, "bad": health, "num_bad": num_bad},
        Path(extra["out"]) / f"{place.rank}.pt",
    )
    group.close()


def _learn(
    model: _Part, optimizer: Optimizer, dtype: torch.dtype, seed: tuple[int, int, int]
) -> None:
    turn, rank, number = seed
    generator = torch.Generator().manual_seed(100 * turn + 10 * rank + number)
    # a batch without a row, and one that leaves layers out, among them
    num_rows = 0 if (rank, number) == (1, 1) else 5
    rows = torch.randn(num_rows, WIDTH, generator=generator).to(dtype)
    if turn == BAD_WINDOW and rank == 0 and number == 0:
        rows = rows * float("nan")
    loss = model(rows, 3 if (rank, number) == (0, 2) else 6).float().square().sum()
    loss.backward()
    where = first_not_finite(rows, loss.detach())
    optimizer.add(loss.detach(), torch.tensor(float(num_rows)), where)


def _sum_here(optimizer: Optimizer) -> None:
    """What `sum_up` of one rank alone left, added up over ranks in their order."""
    parts = [torch.zeros_like(optimizer._gradient) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, optimizer._gradient)
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    optimizer._gradient.copy_(total)
    optimizer._length = torch.linalg.vector_norm(total[: optimizer._size])


def train(run: Run, place: Place, extra: dict[str, Any]) -> None:
    """`dflash train`, whose samples of each step go to extra["record"]/RANK, and which at step 3 of
    rank extra["rank"] does what extra["at_step"] names. extra["empties"]: some batches lose their
    anchors, the same ones whichever rank gets them. extra["late_s"]: that rank comes to its order
    so much later than the others."""
    learn, note, order = window.learn, Journal.note, worker.Order
    acts: dict[str, Callable[[], None]] = {
        "": lambda: None,
        "is slow": lambda: time.sleep(2.5),
        "hangs": lambda: time.sleep(60),
        "is killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
        "fails": _fail,
    }
    num_steps = 0

    def learns(batch: Batch, *others: Any) -> None:
        if num_steps == 3 and place.rank == extra.get("rank"):
            acts[extra["at_step"]]()
        if extra.get("empties") and int(batch.samples.min()) % 2 == 0:
            batch = _without_anchors(batch)
        learn(batch, *others)

    def orders(*arguments: Any) -> Order:
        if place.rank == extra.get("rank"):
            time.sleep(extra.get("late_s", 0.0))
        return order(*arguments)

    def notes(self: Journal, step: int, draw: Draw) -> None:
        nonlocal num_steps
        num_steps += 1
        drawn = [int(sample) for batch in draw.batches for sample in batch]
        with (Path(extra["record"]) / str(place.rank)).open("a") as file:
            file.write(json.dumps([draw.epoch, drawn]) + "\n")
        note(self, step, draw)

    window.learn, Journal.note = learns, notes
    setattr(worker, "Order", orders)  # noqa: B010
    worker.main(run, place, extra)


def _fail() -> None:
    raise ValueError("a reason of its own")


def _without_anchors(batch: Batch) -> Batch:
    none = slice(0, 0)
    return replace(
        batch,
        anchor_A=batch.anchor_A[none],
        start_A=batch.start_A[none],
        token_A=batch.token_A[none],
        row_R=batch.row_R[none],
        slot_R=batch.slot_R[none],
        label_R=batch.label_R[none],
        weight_R=batch.weight_R[none],
        num_blocks=0,
    )
