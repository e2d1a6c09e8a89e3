"""The draft and verify loop on a scripted target: what is kept, counted, cut and shown."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from dflash_pipeline.train import drafting
from dflash_pipeline.train.decode import (
    GREEDY,
    Task,
    decode,
    decode_plainly,
    first_difference,
)
from dflash_pipeline.train.drafter import Drafter
from dflash_pipeline.train.drafting import LookupDrafting, ModelDrafting, as_stored
from dflash_pipeline.train.head import TargetHead
from dflash_pipeline.train.sampling import Draws, Proposal, Sampling
from dflash_pipeline.train.tally import Answer, Cycle
from shapes import small_shape

VOCAB = 32
NONE: frozenset[int] = frozenset()


class ScriptedTarget:
    """After token t at position p comes `script[p + 1]` if the text so far is the script's, else 0.

    Each prompt of a batch has the script that it begins. The feature of a position is its token, so
    that a test can tell which features were given on.
    """

    def __init__(self, *scripts: Sequence[int]) -> None:
        self.scripts = [list(script) for script in scripts]
        self.going = list(range(len(scripts)))
        self.caches: list[list[int]] = []
        self.num_verified: list[int] = []

    def prefill(self, prompts: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        self.caches = [[] for _ in prompts]
        read = [self._read(row, ids_T) for row, ids_T in enumerate(prompts)]
        return torch.stack([logits_TV[-1] for logits_TV, _ in read]), [f for _, f in read]

    def verify(self, ids_BS: Tensor) -> tuple[Tensor, Tensor]:
        assert len(ids_BS) == len(self.caches)
        self.num_verified.append(ids_BS.shape[1])
        read = [self._read(row, ids_S) for row, ids_S in enumerate(ids_BS)]
        return torch.stack([logits_SV for logits_SV, _ in read]), torch.stack([f for _, f in read])

    def crop(self, prompts: Sequence[int], num_tokens: Sequence[int]) -> None:
        for prompt, num in zip(prompts, num_tokens, strict=True):
            assert num <= len(self.caches[prompt])
        self.going = [self.going[prompt] for prompt in prompts]
        self.caches = [
            self.caches[prompt][:num] for prompt, num in zip(prompts, num_tokens, strict=True)
        ]

    def _read(self, row: int, ids: Tensor) -> tuple[Tensor, Tensor]:
        cache, script = self.caches[row], self.scripts[self.going[row]]
        logits = torch.zeros(len(ids), VOCAB)
        for place, token in enumerate(ids.tolist()):
            cache.append(token)
            end = len(cache)
            on_script = cache == script[:end] and end < len(script)
            logits[place, script[end] if on_script else 0] = 1.0
            logits[place, 31] += 0.25
        return logits, ids[:, None, None].float()


class ScriptedDrafting:
    """Proposes each script's next tokens, the first `num_right` of each block unspoilt."""

    def __init__(
        self, scripts: Sequence[Sequence[int]], num_drafts: int, num_right: Sequence[Sequence[int]]
    ) -> None:
        self.scripts, self.num_drafts = [list(script) for script in scripts], num_drafts
        self.num_right = [list(right) for right in num_right]
        self.going: list[int] = []
        self.settled: list[list[int]] = []
        self.features: list[list[int]] = []

    def begin(self, num_prompts: int) -> None:
        self.going = list(range(num_prompts))
        self.settled, self.features = ([[] for _ in range(num_prompts)] for _ in range(2))

    def extend(self, ids: Sequence[Sequence[int]], features: Sequence[Tensor]) -> None:
        for row, own, feature_NKH in zip(self.going, ids, features, strict=True):
            self.settled[row] += own
            self.features[row] += [int(value) for value in feature_NKH[:, 0, 0]]

    def propose(
        self, anchors: Sequence[int], sampling: Sampling, draws: Sequence[Draws]
    ) -> list[Proposal]:
        return [
            Proposal(self._drafts(row, anchor), None)
            for row, anchor in zip(self.going, anchors, strict=True)
        ]

    def keep(self, prompts: Sequence[int]) -> None:
        self.going = [self.going[prompt] for prompt in prompts]

    def _drafts(self, row: int, anchor_id: int) -> list[int]:
        script, start = self.scripts[row], len(self.settled[row]) + 1
        assert [*self.settled[row], anchor_id] == script[:start]
        drafts = (script + [9] * self.num_drafts)[start : start + self.num_drafts]
        right = self.num_right[row].pop(0)
        return [token if place < right else 30 for place, token in enumerate(drafts)]


SCRIPT = [5, 6, 7, 10, 11, 12, 13, 14, 15, 16, 17, 18]
PROMPT = torch.tensor(SCRIPT[:3])


def run(num_right: list[int], max_new_tokens: int, eos_ids: frozenset[int]) -> tuple[Answer, list]:
    target, drafting = ScriptedTarget(SCRIPT), ScriptedDrafting([SCRIPT], 3, [num_right])
    task = Task(ids_T=PROMPT, max_new_tokens=max_new_tokens)
    (answer,) = decode(target, drafting, [task], eos_ids)
    assert drafting.settled == drafting.features
    # what was given on is what was settled, never the anchor
    settled = [*SCRIPT[:3], *answer.tokens][: len(drafting.settled[0])]
    assert drafting.settled == [settled]
    (plain,) = decode_plainly(ScriptedTarget(SCRIPT), [task], eos_ids)
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
    task = Task(ids_T=PROMPT, max_new_tokens=4)
    (answer,) = decode(target, LookupDrafting(3, 3), [task], NONE)
    assert answer.tokens == SCRIPT[3:7]
    assert answer.cycles == [Cycle(1, 0)] * 3
    assert target.num_verified == [1, 1, 1]


def test_lookup_accepts_a_repetition() -> None:
    script = [5, 6, 7, 8, 5, 6, 7, 8, 5, 6, 7, 8, 5]
    task = Task(ids_T=torch.tensor(script[:5]), max_new_tokens=8)
    (answer,) = decode(ScriptedTarget(script), LookupDrafting(3, 3), [task], NONE)
    assert answer.tokens == script[5:13]
    assert answer.cycles == [Cycle(4, 3), Cycle(3, 3)]


def test_plain_decoding_records_the_gap_of_each_token() -> None:
    task = Task(ids_T=PROMPT, max_new_tokens=3)
    (answer,) = decode_plainly(ScriptedTarget(SCRIPT), [task], NONE)
    assert answer.gaps == pytest.approx([0.75] * 3)


def test_the_first_difference_counts_new_tokens() -> None:
    plain = Answer(tokens=[1, 2, 3], cycles=[])
    assert first_difference(plain, Answer(tokens=[1, 2, 3], cycles=[Cycle(2, 1)])) is None
    assert first_difference(plain, Answer(tokens=[1, 9, 3], cycles=[])) == 1
    assert first_difference(plain, Answer(tokens=[1, 2], cycles=[])) == 2


def test_prompts_of_a_batch_are_answered_as_they_would_be_alone() -> None:
    scripts = [SCRIPT, [5, 6, 20, 21, 22, 23, 24, 25], [8, 12, 13, 14, 15, 16, 17, 18, 19, 20]]
    tasks = [
        Task(ids_T=torch.tensor(script[:size]), max_new_tokens=limit)
        for script, size, limit in zip(scripts, (3, 2, 1), (9, 4, 9), strict=True)
    ]
    # the second ends by its limit, the third by its end token, each in another cycle
    num_right = [[2, 0, 3, 0], [1, 3], [0, 3, 1]]
    eos_ids = frozenset({19})
    target, drafting = ScriptedTarget(*scripts), ScriptedDrafting(scripts, 3, num_right)
    together = decode(target, drafting, tasks, eos_ids)
    alone = [
        decode(ScriptedTarget(script), ScriptedDrafting([script], 3, [right]), [task], eos_ids)[0]
        for script, right, task in zip(scripts, num_right, tasks, strict=True)
    ]
    assert together == alone
    assert [len(answer.cycles) for answer in together] == [3, 2, 3]
    assert drafting.settled == drafting.features
    plain = decode_plainly(ScriptedTarget(*scripts), tasks, eos_ids)
    assert [answer.tokens for answer in plain] == [answer.tokens for answer in alone]
    assert [len(answer.gaps) for answer in plain] == [9, 4, 8]


def test_blocks_of_different_lengths_are_padded_with_what_is_never_kept() -> None:
    # lookup proposes for the first prompt alone; the padding repeats what would be right
    scripts = [[5, 6, 7, 8, 5, 6, 7, 8, 5, 6, 7, 8, 5], [3, 9, 9, 9, 9, 9, 9, 9]]
    tasks = [
        Task(ids_T=torch.tensor(scripts[0][:5]), max_new_tokens=8),
        Task(ids_T=torch.tensor(scripts[1][:1]), max_new_tokens=3),
    ]
    target = ScriptedTarget(*scripts)
    answers = decode(target, LookupDrafting(3, 3), tasks, NONE)
    assert answers[0].cycles == [Cycle(4, 3), Cycle(3, 3)]
    assert answers[1].tokens == [9, 9, 9]
    assert answers[1].cycles[0] == Cycle(1, 0)


def test_as_stored_rounds_to_bf16() -> None:
    feature = torch.randn(4, 3, 8)
    assert torch.equal(as_stored(feature, "bf16", ()), feature.bfloat16().float())
    half = feature.bfloat16()
    assert torch.equal(as_stored(half, "bf16", ()), half.float())


@pytest.mark.parametrize("room", [1, 256])
@pytest.mark.parametrize("window", [0, 5])
def test_a_drafter_fed_in_pieces_proposes_what_it_would_at_once(
    window: int, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """room: positions by which its caches grow at least; with few they grow again and again."""
    monkeypatch.setattr(drafting, "_ROOM", room)
    torch.set_num_threads(1)
    kind = "sliding_attention" if window else "full_attention"
    shape = small_shape(
        hidden_size=16,
        intermediate_size=24,
        num_heads=4,
        num_kv_heads=2,
        vocab_size=VOCAB,
        mask_token_id=31,
        layer_ids=(0, 1),
        num_target_layers=4,
        max_position_embeddings=64,
        layer_types=(kind, kind),
        sliding_window=window,
        init_std=0.3,
    )
    drafter = Drafter(shape)
    drafter.initialise(seed=1)
    generator = torch.Generator().manual_seed(1)
    head = TargetHead(torch.randn(VOCAB, 16, generator=generator), None, shape)
    feature_TKH = torch.randn(12, 2, 16, generator=generator)
    whole, pieces = ModelDrafting(drafter, head, None), ModelDrafting(drafter, head, None)
    whole.begin(1)
    whole.extend([range(12)], [feature_TKH])
    (wanted,) = whole.propose([5], GREEDY, [])
    # what an earlier text left behind must not matter
    pieces.begin(1)
    pieces.extend([range(3)], [feature_TKH[:3]])
    # a shorter and a longer text stand beside it, for a while
    pieces.begin(3)
    for start, end in ((0, 7), (7, 8)):
        pieces.extend(
            [range(2), range(start, end), range(9)],
            [feature_TKH[:2], feature_TKH[start:end], feature_TKH[3:]],
        )
    pieces.keep([2, 1])
    pieces.extend([range(4), range(8, 10)], [feature_TKH[:4], feature_TKH[8:10]])
    pieces.keep([1])
    pieces.extend([range(10, 12)], [feature_TKH[10:12]])
    (drafts,) = pieces.propose([5], GREEDY, [])
    assert drafts == wanted
    assert len(drafts.tokens) == 3
    rounded = ModelDrafting(drafter, head, lambda feature: feature * 0)
    rounded.begin(1)
    rounded.extend([range(12)], [feature_TKH])
    assert rounded.propose([5], GREEDY, [])[0] != drafts
