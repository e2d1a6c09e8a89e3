"""The draft and verify loop on a scripted target: what is kept, counted, cut and shown."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from dflash_pipeline.train.decode import (
    Answer,
    Cycle,
    LookupDrafting,
    ModelDrafting,
    Tally,
    as_stored,
    decode,
    decode_plainly,
    first_difference,
)
from dflash_pipeline.train.drafter import Drafter
from dflash_pipeline.train.head import TargetHead
from dflash_pipeline.train.lookup import PromptLookup
from dflash_pipeline.train.shape import DrafterShape

VOCAB = 32
NONE: frozenset[int] = frozenset()


class ScriptedTarget:
    """After token t at position p comes `script[p + 1]` if the text so far is the script's, else 0.

    The feature of a position is its token, so that a test can tell which features were given on.
    """

    def __init__(self, script: Sequence[int]) -> None:
        self.script = list(script)
        self.cache: list[int] = []
        self.num_verified: list[int] = []

    def prefill(self, ids_T: Tensor) -> tuple[Tensor, Tensor]:
        self.cache = []
        logits_TV, feature_TKH = self._read(ids_T)
        return logits_TV[-1], feature_TKH

    def verify(self, ids_S: Tensor) -> tuple[Tensor, Tensor]:
        self.num_verified.append(len(ids_S))
        return self._read(ids_S)

    def crop(self, num_tokens: int) -> None:
        assert num_tokens <= len(self.cache)
        del self.cache[num_tokens:]

    def _read(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        logits = torch.zeros(len(ids), VOCAB)
        for place, token in enumerate(ids.tolist()):
            self.cache.append(token)
            end = len(self.cache)
            on_script = self.cache == self.script[:end] and end < len(self.script)
            logits[place, self.script[end] if on_script else 0] = 1.0
            logits[place, 31] += 0.25
        return logits, ids[:, None, None].float()


class ScriptedDrafting:
    """Proposes the script's next tokens, the first `num_right` of each block unspoilt."""

    def __init__(self, script: Sequence[int], num_drafts: int, num_right: Sequence[int]) -> None:
        self.script, self.num_drafts, self.num_right = list(script), num_drafts, list(num_right)
        self.settled: list[int] = []
        self.features: list[int] = []

    def begin(self) -> None:
        self.settled, self.features = [], []

    def extend(self, ids: Sequence[int], feature_NKH: Tensor) -> None:
        self.settled += ids
        self.features += [int(value) for value in feature_NKH[:, 0, 0]]

    def propose(self, anchor_id: int) -> list[int]:
        start = len(self.settled) + 1
        assert [*self.settled, anchor_id] == self.script[:start]
        drafts = (self.script + [9] * self.num_drafts)[start : start + self.num_drafts]
        right = self.num_right.pop(0)
        return [token if place < right else 30 for place, token in enumerate(drafts)]


SCRIPT = [5, 6, 7, 10, 11, 12, 13, 14, 15, 16, 17, 18]
PROMPT = torch.tensor(SCRIPT[:3])


def run(num_right: list[int], max_new_tokens: int, eos_ids: frozenset[int]) -> tuple[Answer, list]:
    target, drafting = ScriptedTarget(SCRIPT), ScriptedDrafting(SCRIPT, 3, num_right)
    answer = decode(target, drafting, PROMPT, max_new_tokens, eos_ids)
    assert drafting.settled == drafting.features
    # the target holds what was settled, never the anchor
    assert target.cache == drafting.settled
    plain = decode_plainly(ScriptedTarget(SCRIPT), PROMPT, max_new_tokens, eos_ids)
    assert answer.tokens == plain.tokens
    return answer, target.num_verified


def test_a_cycle_keeps_the_agreed_drafts_and_the_bonus() -> None:
    answer, num_verified = run([2, 0, 3, 0], 9, NONE)
    assert answer.tokens == SCRIPT[3:12]
    assert answer.cycles == [Cycle(3, 2), Cycle(1, 0), Cycle(4, 3)]
    assert num_verified == [4, 4, 4]


def test_the_length_limit_cuts_the_last_cycle() -> None:
    answer, _ = run([3, 3], 7, NONE)
    assert answer.tokens == SCRIPT[3:10]
    assert answer.cycles == [Cycle(4, 3), Cycle(2, 2)]
    # cut before the bonus: it is not kept, the drafts are
    answer, _ = run([3], 4, NONE)
    assert answer.cycles == [Cycle(3, 3)]


def test_nothing_is_kept_after_an_end_token() -> None:
    # 12 is accepted as the second draft, 13 would have been the third
    answer, _ = run([3], 9, frozenset({12}))
    assert answer.tokens == [10, 11, 12]
    assert answer.cycles == [Cycle(2, 2)]
    # as a bonus it counts too
    answer, _ = run([1], 9, frozenset({12}))
    assert answer.cycles == [Cycle(2, 1)]


def test_an_answer_of_the_prefills_own_token_has_no_cycle() -> None:
    assert run([], 9, frozenset({10}))[0] == Answer(tokens=[10], cycles=[], gaps=[])
    assert run([], 1, NONE)[0].cycles == []


def test_a_drafting_without_proposals_decodes_plainly() -> None:
    target = ScriptedTarget(SCRIPT)
    answer = decode(target, LookupDrafting(PromptLookup(3, 3)), PROMPT, 4, NONE)
    assert answer.tokens == SCRIPT[3:7]
    assert answer.cycles == [Cycle(1, 0)] * 3
    assert target.num_verified == [1, 1, 1]


def test_lookup_accepts_a_repetition() -> None:
    script = [5, 6, 7, 8, 5, 6, 7, 8, 5, 6, 7, 8, 5]
    drafting = LookupDrafting(PromptLookup(3, 3))
    answer = decode(ScriptedTarget(script), drafting, torch.tensor(script[:5]), 8, NONE)
    assert answer.tokens == script[5:13]
    assert answer.cycles == [Cycle(4, 3), Cycle(3, 3)]


def test_plain_decoding_records_the_gap_of_each_token() -> None:
    answer = decode_plainly(ScriptedTarget(SCRIPT), PROMPT, 3, NONE)
    assert answer.gaps == pytest.approx([0.75] * 3)


def test_the_first_difference_counts_new_tokens() -> None:
    plain = Answer(tokens=[1, 2, 3], cycles=[])
    assert first_difference(plain, Answer(tokens=[1, 2, 3], cycles=[Cycle(2, 1)])) is None
    assert first_difference(plain, Answer(tokens=[1, 9, 3], cycles=[])) == 1
    assert first_difference(plain, Answer(tokens=[1, 2], cycles=[])) == 2


def test_tau_is_pooled_over_cycles_and_also_averaged_over_prompts() -> None:
    tally = Tally(num_drafts=3)
    tally.add([Cycle(4, 3), Cycle(1, 0), Cycle(1, 0)])
    tally.add([Cycle(3, 2)])
    tally.add([])
    assert (tally.num_prompts, tally.num_cycles, tally.num_kept) == (2, 4, 9)
    assert tally.tau == pytest.approx(9 / 4)
    assert tally.tau_per_prompt == pytest.approx((2 + 3) / 2)
    assert tally.accepted_by_slot == pytest.approx([0.5, 0.5, 0.25])
    both = Tally(num_drafts=3)
    both.merge(tally)
    both.merge(tally)
    assert (both.tau, both.tau_per_prompt) == (tally.tau, tally.tau_per_prompt)
    assert both.accepted_by_slot == tally.accepted_by_slot
    assert Tally(num_drafts=3).tau == 0.0


def test_as_stored_rounds_to_bf16() -> None:
    feature = torch.randn(4, 3, 8)
    assert torch.equal(as_stored(feature, "bf16", ()), feature.bfloat16().float())
    half = feature.bfloat16()
    assert torch.equal(as_stored(half, "bf16", ()), half.float())


@pytest.mark.parametrize("window", [0, 5])
def test_a_drafter_fed_in_pieces_proposes_what_it_would_at_once(window: int) -> None:
    torch.set_num_threads(1)
    kind = "sliding_attention" if window else "full_attention"
    shape = DrafterShape(
        hidden_size=16,
        intermediate_size=24,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        vocab_size=VOCAB,
        block_size=4,
        mask_token_id=31,
        layer_ids=(0, 1),
        num_target_layers=4,
        rms_norm_eps=1e-6,
        rope_theta=1e4,
        rope_scaling=None,
        max_position_embeddings=64,
        layer_types=(kind, kind),
        sliding_window=window,
        input_embedding_scale=1.0,
        output_multiplier=1.0,
        final_logit_softcapping=0.0,
        init_std=0.3,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    drafter = Drafter(shape)
    drafter.initialise(seed=0)
    generator = torch.Generator().manual_seed(1)
    head = TargetHead(torch.randn(VOCAB, 16, generator=generator), None, shape)
    feature_TKH = torch.randn(12, 2, 16, generator=generator)
    whole, pieces = ModelDrafting(drafter, head, None), ModelDrafting(drafter, head, None)
    whole.begin()
    whole.extend(range(12), feature_TKH)
    # what an earlier text left behind must not matter
    pieces.extend(range(3), feature_TKH[:3])
    pieces.begin()
    for start, end in ((0, 7), (7, 8), (8, 12)):
        pieces.extend(range(start, end), feature_TKH[start:end])
        drafts = pieces.propose(5)
    assert drafts == whole.propose(5)
    assert len(drafts) == 3
    rounded = ModelDrafting(drafter, head, lambda feature: feature * 0)
    rounded.begin()
    rounded.extend(range(12), feature_TKH)
    assert rounded.propose(5) != drafts
