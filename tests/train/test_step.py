"""One batch through the drafter: packing and padding change nothing, and nothing waits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Literal

import numpy as np
import pytest
import torch

from builds import builds
from dflash_pipeline.configs.place import Place
from dflash_pipeline.configs.schema import LossConfig, OptimConfig, TrainConfig
from dflash_pipeline.store.access import Plain
from dflash_pipeline.store.reader import Store
from dflash_pipeline.train.anchors import Tokens, pack_blocks, slot_weights
from dflash_pipeline.train.clock import Clock
from dflash_pipeline.train.drafter import Drafter
from dflash_pipeline.train.feed import Batch
from dflash_pipeline.train.forward import CompiledForward, EagerForward
from dflash_pipeline.train.group import Group
from dflash_pipeline.train.head import TargetHead
from dflash_pipeline.train.metrics import Metrics, Summary
from dflash_pipeline.train.optim import Optimizer
from dflash_pipeline.train.ring import Ring, Sizes
from dflash_pipeline.train.shape import DrafterShape
from dflash_pipeline.train.step import draft_blocks, learn, score
from dflash_pipeline.train.stored import StoredRows
from dflash_pipeline.train.teacher import Teacher
from waits import no_waits

CONFIG = TrainConfig(batch_tokens=1024, batch_anchors=64, anchors_per_sample=8)
LOSS = LossConfig(ce=0.5, kl=0.5, position_chunk=20)
BatchOf = Callable[[list[int]], "contextmanager[Batch]"]


@pytest.fixture
def batch_of(whole_store: Store) -> Callable[..., BatchOf]:
    """Batches of the store's samples, padded or not, on a device."""

    def make(
        shape: DrafterShape, padded: bool, device: torch.device, dtype: torch.dtype
    ) -> BatchOf:
        sizes = Sizes.of(CONFIG, whole_store.spec, shape, True, padded)
        hidden = StoredRows.hidden(whole_store, shape.layer_ids, device)
        last = StoredRows.last(whole_store, device)
        ring = Ring(sizes, 2, hidden, last, device, dtype, poison=True, clock=Clock(device))

        @contextmanager
        def lend(samples: list[int]) -> Iterator[Batch]:
            buffer = ring.free_buffer()
            assert buffer is not None
            buffer.wait_until_copied()
            tokens, first, first_last = [], 0, 0
            for sample in samples:
                ids_T, mask_T = whole_store.tokens(sample)
                num_last = int(whole_store.table.num_teacher[sample])
                whole_store.read_into(
                    sample,
                    buffer.hidden_NKZ[first : first + len(ids_T)],
                    buffer.last_MZ[first_last : first_last + num_last],
                    Plain(False),
                )
                first, first_last = first + len(ids_T), first_last + num_last
                tokens.append(Tokens(sample, ids_T, mask_T))
            blocks = pack_blocks(
                tokens,
                quota=8,
                seed=0,
                epoch=0,
                block_size=shape.block_size,
                weight_S=slot_weights(shape.block_size, 4.0),
                last_rows="teacher",
            )
            buffer.write(blocks, LOSS.position_chunk)
            with ring.on_device(buffer) as lent:
                yield Batch(
                    lent.feature_NKH,
                    lent.position_N,
                    lent.anchor_A,
                    lent.start_A,
                    lent.token_A,
                    lent.row_R,
                    lent.slot_R,
                    lent.label_R,
                    lent.weight_R,
                    Teacher(lent.teacher_UH, lent.teacher_index_R, buffer.spans),
                    len(blocks.anchor_A),
                    np.array(samples),
                )

        return lend

    return make


def _samples(store: Store) -> list[int]:
    return np.flatnonzero(store.table.num_anchors > 0)[:6].tolist()


@pytest.mark.parametrize("window", [0, 5])
@pytest.mark.parametrize("slot_weights", ["gamma", "dpace"])
def test_packing_and_padding_change_neither_loss_nor_gradient(
    slot_weights: Literal["gamma", "dpace"],
    window: int,
    whole_store: Store,
    shape: DrafterShape,
    batch_of: Callable[..., BatchOf],
) -> None:
    config = replace(LOSS, slot_weights=slot_weights)
    if window:
        kinds = ("sliding_attention", "full_attention")
        shape = replace(shape, layer_types=kinds, sliding_window=window)
    samples = _samples(whole_store)
    head = TargetHead.from_store(whole_store, shape, "cpu", torch.float32)
    ways = [(False, [[sample] for sample in samples]), (False, [samples]), (True, [samples])]
    results = []
    for padded, batches in ways:
        drafter = Drafter(shape)
        drafter.initialise(0)
        lend = batch_of(shape, padded, torch.device("cpu"), torch.float32)
        total = 0.0
        for members in batches:
            with lend(members) as batch:
                assert len(batch.anchor_A) == (64 if padded else batch.num_blocks)
                scored = score(batch, EagerForward(drafter), head, config)
                loss = (scored.loss_R * scored.weight_R).sum()
                loss.backward()
                total += float(loss.detach())
        grads = [parameter.grad.clone() for parameter in drafter.parameters()]
        results.append((total, grads))
    for total, grads in results[1:]:
        assert total == pytest.approx(results[0][0], rel=1e-5)
        for one, two in zip(grads, results[0][1], strict=True):
            torch.testing.assert_close(one, two, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("window", [0, 5])
def test_a_block_is_trained_as_decoding_drafts_it(
    window: int, whole_store: Store, shape: DrafterShape, batch_of: Callable[..., BatchOf]
) -> None:
    """From its anchor's token, masks, and what stands before the anchor in its own document."""
    if window:
        kinds = ("sliding_attention", "full_attention")
        shape = replace(shape, layer_types=kinds, sliding_window=window)
    drafter = Drafter(shape)
    drafter.initialise(0)
    head = TargetHead.from_store(whole_store, shape, "cpu", torch.float32)
    lend = batch_of(shape, False, torch.device("cpu"), torch.float32)
    samples = _samples(whole_store)
    with torch.no_grad(), lend(samples) as batch:
        hidden_QH = draft_blocks(batch, EagerForward(drafter), head)
        trained_ASH = hidden_QH.unflatten(0, (-1, shape.block_size))
        starts = batch.start_A.unique().tolist()
        assert len(starts) == len(samples)
        for block, anchor in enumerate(batch.anchor_A.tolist()):
            start = int(batch.start_A[block])
            sample = whole_store.sample(samples[starts.index(start)])
            position = anchor - start
            feature_NKH = torch.from_numpy(np.array(sample.hidden_TKH[:position]))
            context_NH = drafter.context(feature_NKH)
            pairs = drafter.context_keys_values(context_NH, torch.arange(position))
            ids_S = torch.full((1, shape.block_size), shape.mask_token_id)
            ids_S[0, 0] = int(sample.ids_T[position])
            drafted_1SH = drafter.draft(
                [(key[None], value[None]) for key, value in pairs], [position], head.embed(ids_S)
            )
            torch.testing.assert_close(trained_ASH[block], drafted_1SH[0], rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")
def test_steps_on_cuda_wait_for_nothing_compile_and_tune_once_and_equal_the_cpu(
    whole_store: Store, shape: DrafterShape, batch_of: Callable[..., BatchOf], place: Place
) -> None:
    kinds = ("sliding_attention", "full_attention")
    shape = replace(shape, head_dim=16, layer_types=kinds, sliding_window=40, block_size=16)

    def trained(device: torch.device) -> tuple[Summary, dict[str, torch.Tensor]]:
        drafter = Drafter(shape)
        drafter.initialise(0)
        drafter.to(device)
        forward = CompiledForward(drafter) if device.type == "cuda" else EagerForward(drafter)
        optimizer = Optimizer(
            drafter.named_parameters(), OptimConfig(clip=0.5), Group(place, 5.0), 50, torch.float32
        )
        head = TargetHead.from_store(whole_store, shape, device, torch.float32)
        metrics, clock = Metrics(shape.block_size, device), Clock(device)
        lend = batch_of(shape, device.type == "cuda", device, torch.float32)
        samples = _samples(whole_store)
        rounds = [samples[:2], samples[:6], samples[:1], samples[2:5], samples[:4]]
        built = list[str]()
        with ExitStack() as after_first_round:
            for repeat in range(5):
                for members in rounds:
                    with lend(members) as batch:
                        learn(batch, forward, head, LOSS, optimizer, metrics, clock)
                    optimizer.sum_up(wants_stop=False)
                    optimizer.step(1e-3)
                if device.type == "cuda" and repeat == 0:
                    built = after_first_round.enter_context(builds())
                    after_first_round.enter_context(no_waits())
        assert built == []
        assert optimizer.health(optimizer.vector().cpu()).num_bad == 0
        return metrics.summary(metrics.sums.cpu()), optimizer.masters()

    summary, masters = trained(torch.device("cuda"))
    wanted, wanted_masters = trained(torch.device("cpu"))
    assert summary.ce == pytest.approx(wanted.ce, rel=1e-2)
    for name, master in wanted_masters.items():
        torch.testing.assert_close(masters[name].cpu(), master, rtol=5e-2, atol=5e-3)
