"""Replay walks a stored answer as decoding would: cycle by cycle, on a real store and target."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional
from transformers import Qwen3Config, Qwen3ForCausalLM

from dflash_pipeline.capture.decoder import Decoder
from dflash_pipeline.capture.target import Target
from dflash_pipeline.store import open_store
from dflash_pipeline.store.bf16 import bf16_bits
from dflash_pipeline.store.build import StoreBuilder, plan_lock
from dflash_pipeline.store.lease import Leases
from dflash_pipeline.store.reader import Store
from dflash_pipeline.store.rows import encode
from dflash_pipeline.store.spec import Attributes, Layout, ShardId, StoreSpec
from dflash_pipeline.store.table import build_table, teacher_positions, valid_anchors
from dflash_pipeline.store.writer import StoreWriter
from dflash_pipeline.train import replay as replay_module
from dflash_pipeline.train.decode import Task, decode, decode_plainly
from dflash_pipeline.train.drafter import Drafter
from dflash_pipeline.train.drafting import LookupDrafting, ModelDrafting, as_stored
from dflash_pipeline.train.head import TargetHead
from dflash_pipeline.train.mask import Visibility, dense_attend, grouped_attend
from dflash_pipeline.train.replay import (
    answer_runs,
    held_out,
    replay,
    replayed,
    replayed_lookup,
    walk,
)
from dflash_pipeline.train.shape import DrafterShape
from dflash_pipeline.train.stored import UnusableRows
from dflash_pipeline.train.tally import Answer, Cycle, Tally
from shapes import small_shape

VOCAB, WIDTH, NUM_NEW, LAYER_IDS = 64, 32, 28, (0, 2)
CONFIG: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "eos_token_id": None,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
EOS = frozenset({7})


def test_runs_are_the_supervised_stretches_cut_to_length() -> None:
    mask_T = np.array([1, 1, 0, 0, 1, 1, 1, 0, 1], np.uint8)
    # nothing stands before token 0: it cannot be the first token of an answer
    assert answer_runs(mask_T, None) == [(1, 2), (4, 7), (8, 9)]
    assert answer_runs(mask_T, 2) == [(1, 2), (4, 6), (8, 9)]
    assert answer_runs(np.zeros(3, np.uint8), None) == []


def test_the_next_anchor_is_the_last_one_and_what_was_accepted_and_one() -> None:
    ids = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    asked = []

    def propose(anchor: int) -> list[int]:
        asked.append(anchor)
        right = {2: 2, 5: 0, 6: 3}[anchor]
        return [ids[anchor + 1 + k] if k < right and anchor + 1 + k < 9 else 0 for k in range(3)]

    # tokens 2..8: 2 is the prefill's own, 6 are kept in 3 cycles, the last is cut at the end
    assert walk(ids, 2, 9, propose) == [Cycle(3, 2), Cycle(1, 0), Cycle(2, 2)]
    assert asked == [2, 5, 6]
    assert walk(ids, 2, 3, propose) == []


@dataclass(frozen=True)
class World:
    """A tiny target, its greedy answers, a store of them, a drafter that knows them a little."""

    decoder: Decoder
    prompts: list[torch.Tensor]
    answers: list[Answer]
    store: Store
    drafter: Drafter
    head: TargetHead
    shape: DrafterShape


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**CONFIG))
    with torch.no_grad():
        for parameter in model.parameters():
            # the store keeps embedding and head in bf16
            parameter.copy_(parameter.bfloat16())
    target = Target(model, LAYER_IDS)
    decoder = Decoder(Target(model, ()), LAYER_IDS)
    prompts = [torch.randint(8, VOCAB, (length,)) for length in (3, 9, 17, 5)]
    tasks = [Task(ids_T=prompt_T, max_new_tokens=NUM_NEW) for prompt_T in prompts]
    answers = [decode_plainly(decoder, [task], EOS)[0] for task in tasks]
    path = tmp_path_factory.mktemp("replay") / "store"
    store = build_store(path, target, prompts, answers)
    shape = drafter_of()
    head = TargetHead.from_store(store, shape, "cpu", torch.float32)
    return World(decoder, prompts, answers, store, overfitted(store, head, shape), head, shape)


def build_store(
    path: Path, target: Target, prompts: list[torch.Tensor], answers: list[Answer]
) -> Store:
    spec = StoreSpec(
        format=1,
        target_id="tiny",
        target_hash="0",
        target_dtype="fp32",
        quantisation="",
        layer_ids=LAYER_IDS,
        num_target_layers=5,
        hidden_size=WIDTH,
        vocab_size=VOCAB,
        hidden_mode="bf16",
        last_mode="none",
        last_rows="teacher",
        calibration_hash="",
        tokenizer_hash="0",
        template_hash="0",
        template_args="{}",
        max_len=64,
        overlong="truncate",
    )
    num = len(prompts)
    layout = Layout(
        rows_per_shard=256,
        chunk_rows=256,
        token_budget=64,
        pad_multiple=1,
        bucket_bounds=(64,),
        num_shards=(1,),
        num_samples_per_shard_max=(num,),
        seed=0,
    )
    ids = [
        np.array([*prompt.tolist(), *answer.tokens], np.uint32)
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    masks = [
        (np.arange(len(ids_T)) >= len(prompt)).astype(np.uint8)
        for ids_T, prompt in zip(ids, prompts, strict=True)
    ]
    zeros = np.zeros(num, np.int64)
    columns: dict[str, Any] = dict.fromkeys(("source", "bucket", "shard", "domain"), zeros)
    columns |= {
        "source_row": np.arange(num),
        "split": np.array([1, 0, 1, 1]),
        "num_tokens": [len(ids_T) for ids_T in ids],
        "num_teacher": [len(teacher_positions(mask_T, "teacher")) for mask_T in masks],
        "num_anchors": [len(valid_anchors(mask_T)) for mask_T in masks],
        "token_hash": zeros,
        "batch": np.arange(num),
    }
    table = build_table([f"s{i}" for i in range(num)], columns, layout, ["text"], ["file"])
    attributes = Attributes(data_hash="0", mask_token_id=VOCAB - 1, dropped={}, run={})
    matrices = [
        bf16_bits(module.weight.detach().numpy())
        for module in (target.model.get_input_embeddings(), target.head)
    ]
    with (
        plan_lock(path, wait_s=1),
        StoreBuilder(path, spec, layout, table, attributes, 0) as builder,
    ):
        builder.write_target(*matrices, {"config.json": json.dumps(CONFIG).encode()})
        builder.write_tokens(ShardId(0, 0), np.concatenate(ids), np.concatenate(masks))
        store = builder.publish()
    with (
        Leases(path, layout, heartbeat_s=10, hung_s=60) as leases,
        StoreWriter(store, leases, depth=2) as writer,
    ):
        lease = leases.claim(store.is_open, max_failures=1)
        assert lease is not None
        writer.begin(lease)
        amax_K = np.zeros(2, np.float32)
        for ids_T in ids:
            hidden_KBTH, _ = target.forward(torch.from_numpy(ids_T.astype(np.int64))[None])
            feature_TKH = torch.stack([hidden[0] for hidden in hidden_KBTH], dim=1).numpy()
            amax_K = np.maximum(amax_K, np.abs(feature_TKH).max((0, 2)))
            writer.put(encode(feature_TKH, "bf16"), None, lambda: None)
        writer.finish(amax_K, np.zeros(2, np.uint32), {}, halved=False)
        writer.commit()
    return open_store(path)


def drafter_of() -> DrafterShape:
    return small_shape(
        hidden_size=WIDTH,
        intermediate_size=48,
        num_heads=4,
        num_kv_heads=2,
        vocab_size=VOCAB,
        block_size=5,
        mask_token_id=VOCAB - 1,
        layer_ids=LAYER_IDS,
        num_target_layers=5,
        max_position_embeddings=128,
        layer_types=("sliding_attention", "full_attention"),
        sliding_window=12,
        init_std=0.1,
    )


def overfitted(store: Store, head: TargetHead, shape: DrafterShape) -> Drafter:
    """Enough steps on the stored answers that some drafts are accepted and some are not."""
    drafter = Drafter(shape)
    drafter.initialise(seed=0)
    optimizer = torch.optim.Adam(drafter.parameters(), lr=3e-3)
    slots = torch.arange(shape.block_size)
    for step in range(60):
        sample = store.sample(step % 4)
        ids_T = torch.from_numpy(sample.ids_T.astype(np.int64))
        anchor_A = torch.from_numpy(valid_anchors(sample.mask_T))
        position_AS = anchor_A[:, None] + slots
        ids_AS = torch.full_like(position_AS, shape.mask_token_id)
        ids_AS[:, 0] = ids_T[anchor_A]
        visibility = Visibility(
            anchor_A=anchor_A.int(),
            start_A=torch.zeros_like(anchor_A).int(),
            num_context=len(ids_T),
            block_size=shape.block_size,
            window=shape.sliding_window,
        )
        hidden_QH = drafter(
            drafter.context(torch.from_numpy(sample.hidden_TKH)),
            torch.arange(len(ids_T)),
            head.embed(ids_AS.flatten()),
            position_AS.flatten(),
            grouped_attend(visibility, shape.layer_types),
        )
        label_Q = functional.pad(ids_T, (0, shape.block_size), value=-100)[position_AS].flatten()
        label_Q[:: shape.block_size] = -100
        loss = functional.cross_entropy(head.logits(hidden_QH), label_Q, ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return drafter.requires_grad_(False)


def test_replay_takes_decodings_own_cycles(world: World) -> None:
    def rounding(feature_NKH: torch.Tensor) -> torch.Tensor:
        return as_stored(feature_NKH, world.store.spec.hidden_mode, ())

    drafting = ModelDrafting(world.drafter, world.head, rounding)
    sum_kept = 0
    for index, (prompt_T, plain) in enumerate(zip(world.prompts, world.answers, strict=True)):
        task = Task(ids_T=prompt_T, max_new_tokens=NUM_NEW)
        (answer,) = decode(world.decoder, drafting, [task], EOS)
        assert answer.tokens == plain.tokens
        decoded = Tally(num_drafts=4)
        decoded.add(answer.cycles)
        replayed = replay(world.store, [index], world.drafter, world.head, None)
        assert replayed == decoded
        sum_kept += sum(cycle.accepted > 0 for cycle in answer.cycles)
    # else the test would hold for any drafter
    assert sum_kept > 10


def test_replay_cuts_answers_as_decoding_does(world: World) -> None:
    drafting = ModelDrafting(world.drafter, world.head, lambda f: as_stored(f, "bf16", ()))
    for max_new_tokens in (1, 2, 11):
        decoded = Tally(num_drafts=4)
        for prompt_T in world.prompts:
            task = Task(ids_T=prompt_T, max_new_tokens=max_new_tokens)
            (answer,) = decode(world.decoder, drafting, [task], EOS)
            decoded.add(answer.cycles)
        samples = range(len(world.prompts))
        found = replay(world.store, samples, world.drafter, world.head, max_new_tokens)
        assert found == decoded


def plainly(
    store: Store, index: int, drafter: Drafter, head: TargetHead, max_new_tokens: int | None
) -> list[Answer]:
    """The answers of a sample one by one and block by block, every row against every key."""
    shape, sample = drafter.shape, store.sample(index)
    ids_T = torch.from_numpy(sample.ids_T.astype(np.int64))

    def propose(anchor: int) -> list[int]:
        ids_S = torch.full((shape.block_size,), shape.mask_token_id)
        ids_S[0] = ids_T[anchor]
        anchor_A = torch.tensor([anchor], dtype=torch.int32)
        visibility = Visibility(
            anchor_A, torch.zeros_like(anchor_A), anchor, shape.block_size, shape.sliding_window
        )
        hidden_SH = drafter(
            drafter.context(torch.from_numpy(sample.hidden_TKH[:anchor])),
            torch.arange(anchor),
            head.embed(ids_S),
            anchor + torch.arange(shape.block_size),
            dense_attend({kind: visibility.dense(kind) for kind in shape.layer_types}),
        )
        return head.logits(hidden_SH[1:]).argmax(-1).tolist()

    ids = ids_T.tolist()
    return [
        Answer(tokens=ids[start:end], cycles=walk(ids, start, end, propose))
        for start, end in answer_runs(sample.mask_T, max_new_tokens)
    ]


class Turns:
    """The store as if some of its tokens were no answer: then a sample has several, short ones
    among them, or none."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def tokens(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        ids_T, mask_T = self._store.tokens(index)
        mask_T = mask_T.copy()
        begin = int(mask_T.argmax())
        # answers of 1, 5 and the other tokens; of 4 and the others; none; of 1 and all
        for first, end in {0: [(1, 2), (7, 12)], 1: [(4, 5)], 2: [(0, 64)], 3: []}[index]:
            mask_T[begin + first : begin + end] = 0
        # nothing stands before it: an answer begins behind it at the earliest
        mask_T[:2] |= index == 3
        return ids_T, mask_T

    def sample(self, index: int) -> Any:
        ids_T, mask_T = self.tokens(index)
        return replace(self._store.sample(index), ids_T=ids_T, mask_T=mask_T)


@pytest.mark.parametrize("max_new_tokens", [None, 1, 6])
@pytest.mark.parametrize(
    ("num_blocks", "num_neighbours", "most_bytes"),
    # as shipped; less than a sample each, of more rows than a batch may have, so alone and a
    # logit at a time; two batches of two
    [(128, 16, 1 << 29), (1, 3, 1), (4, 2, 1 << 29), (2, 16, 1 << 29)],
)
def test_answers_walked_together_are_those_walked_alone(
    num_blocks: int,
    num_neighbours: int,
    most_bytes: int,
    max_new_tokens: int | None,
    world: World,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(replay_module, "_CPU_BLOCKS", num_blocks)
    monkeypatch.setattr(replay_module, "_MOST_NEIGHBOURS", num_neighbours)
    monkeypatch.setattr(replay_module, "_MOST_BYTES", most_bytes)
    store: Any = Turns(world.store)
    arguments = (world.drafter, world.head, max_new_tokens)
    found = list(replayed(store, [3, 1, 0, 2], *arguments))
    assert found == [(index, plainly(store, index, *arguments)) for index in (3, 1, 0, 2)]
    assert [len(answers) for _, answers in found] == [2, 2, 3, 0]
    assert max_new_tokens or [len(answer.tokens) for answer in found[2][1]][:2] == [1, 5]


def test_lookup_replays_its_decoding(world: World) -> None:
    decoded = Tally(num_drafts=4)
    for prompt_T in world.prompts:
        task = Task(ids_T=prompt_T, max_new_tokens=NUM_NEW)
        decoded.add(decode(world.decoder, LookupDrafting(4, 2), [task], EOS)[0].cycles)
    found = Tally(num_drafts=4)
    samples = range(len(world.answers))
    for index, (answer,) in replayed_lookup(world.store, samples, 4, 2, None):
        assert answer.tokens == world.answers[index].tokens
        found.add(answer.cycles)
    assert found == decoded
    assert decoded.num_kept > decoded.num_cycles


def test_a_layer_that_is_not_its_own_lowers_acceptance(world: World) -> None:
    """The walk reads the drafter's layers, not the store's first ones."""
    shape = drafter_of()
    right = replay(world.store, range(4), world.drafter, world.head, None)
    swapped = Drafter(shape)
    swapped.load_state_dict(world.drafter.state_dict())
    swapped.fc[0].weight.data, swapped.fc[1].weight.data = (
        swapped.fc[1].weight.data,
        swapped.fc[0].weight.data,
    )
    wrong = replay(world.store, range(4), swapped, world.head, None)
    assert wrong.tau < right.tau


def test_held_out_samples_come_in_the_order_of_their_hash(world: World) -> None:
    chosen = held_out(world.store)
    assert sorted(chosen) == [0, 2, 3]
    ids = world.store.table.sample_id[chosen].tolist()
    assert ids == sorted(ids)


@pytest.mark.parametrize("bits", [0x7FC0, 0x7F80])
def test_a_sample_that_is_not_finite_is_named_and_no_tau_is_given(
    bits: int, world: World, tmp_path: Path
) -> None:
    shutil.copytree(world.store.path, tmp_path / "hs", symlinks=True)
    store = open_store(tmp_path / "hs")
    place = store.place_of(2, "hidden")
    with place.file.open("r+b") as file:
        file.seek(place.offset + place.num_bytes - 2)
        file.write(bits.to_bytes(2, "little"))
    arguments = (world.drafter, world.head, None)
    with pytest.raises(UnusableRows, match=r"sample 2 \(s2, shard b0/0 .* has NaN or Inf at token"):
        replay(store, range(4), *arguments)
    # the others of its batch are replayed as if it were not there
    told: list[UnusableRows] = []
    found = list(replayed(store, range(4), *arguments, told.append))
    assert found == list(replayed(world.store, [0, 1, 3], *arguments))
    (error,) = told
    assert str(error).startswith("sample 2 (s2, ")
