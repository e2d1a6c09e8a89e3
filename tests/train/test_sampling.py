"""Sampled verification is lossless: what it gives is distributed as plain sampling, exactly.

The target is small enough to write down the chance of every answer; thousands of answers are
counted and held against those chances. Seeds are fixed: a test passes always or never.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import product

import pytest
import torch
from torch import Tensor
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from dflash_pipeline.train import sampling as module
from dflash_pipeline.train.decode import Task, decode, decode_plainly
from dflash_pipeline.train.drafter import Drafter
from dflash_pipeline.train.drafting import Drafting, LookupDrafting, ModelDrafting
from dflash_pipeline.train.head import TargetHead
from dflash_pipeline.train.sampling import Draws, Proposal, Sampling, Verdict, drawn
from dflash_pipeline.train.tally import Answer
from shapes import small_shape

VOCAB, WIDTH, NUM_NEW, NUM_ANSWERS = 5, 16, 3, 3000
PROMPT = (1, 2, 1, 3, 1)
EOS = frozenset({0})
SHAPE = small_shape(
    hidden_size=WIDTH,
    intermediate_size=24,
    num_layers=1,
    vocab_size=VOCAB,
    mask_token_id=4,
    layer_ids=(0, 1),
    num_target_layers=4,
    max_position_embeddings=64,
    init_std=0.3,
)
KINDS = [
    Sampling(temperature=1.0),
    Sampling(temperature=0.6, top_k=3),
    Sampling(temperature=1.5, top_p=0.8),
]


class MarkovTarget:
    """The last two tokens decide what comes next; a token's features are drawn once for it."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        self.logits_VVV = 1.5 * torch.randn(VOCAB, VOCAB, VOCAB, generator=generator)
        self.feature_VKH = torch.randn(VOCAB, 2, WIDTH, generator=generator)
        self.texts: list[list[int]] = []

    def prefill(self, prompts: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        self.texts = [ids_T.tolist() for ids_T in prompts]
        last = torch.tensor([text[-2:] for text in self.texts])
        return self.logits_VVV[last[:, 0], last[:, 1]], [self.feature_VKH[t] for t in prompts]

    def verify(self, ids_BS: Tensor) -> tuple[Tensor, Tensor]:
        last_B1 = torch.tensor([text[-1:] for text in self.texts])
        before_BS = torch.cat((last_B1, ids_BS[:, :-1]), dim=1)
        for text, ids in zip(self.texts, ids_BS.tolist(), strict=True):
            text += ids
        return self.logits_VVV[before_BS, ids_BS], self.feature_VKH[ids_BS]

    def crop(self, prompts: Sequence[int], num_tokens: Sequence[int]) -> None:
        pairs = zip(prompts, num_tokens, strict=True)
        self.texts = [self.texts[prompt][:num] for prompt, num in pairs]


def drafter() -> Drafting:
    made = Drafter(SHAPE)
    made.initialise(seed=0)
    generator = torch.Generator().manual_seed(1)
    head = TargetHead(torch.randn(VOCAB, WIDTH, generator=generator), None, SHAPE)
    return ModelDrafting(made, head, None)


def lookup() -> Drafting:
    return LookupDrafting(3, 1)


def answers(
    make: Callable[[], Drafting] | None, sampling: Sampling, num: int = NUM_ANSWERS
) -> list[Answer]:
    """Many samples of one prompt; None: decoded plainly."""
    found, target = list[Answer](), MarkovTarget()
    for begin in range(0, num, 500):
        tasks = [
            Task(
                ids_T=torch.tensor(PROMPT), max_new_tokens=NUM_NEW, draws=Draws(7, f"answer {key}")
            )
            for key in range(begin, min(begin + 500, num))
        ]
        if make is None:
            found += decode_plainly(target, tasks, EOS, sampling)
        else:
            found += decode(target, make(), tasks, EOS, sampling)
    return found


def chances_by_hand(logits_V: Tensor, sampling: Sampling) -> list[float]:
    """The distribution one token is drawn from, written down without the module's own code."""
    scores = [value / sampling.temperature for value in logits_V.tolist()]
    if sampling.top_k:
        least = sorted(scores)[-sampling.top_k]
        scores = [score if score >= least else -math.inf for score in scores]
    weights = [math.exp(score) for score in scores]
    order = sorted(range(VOCAB), key=lambda token: -weights[token])
    kept, reached = set[int](), 0.0
    for token in order:
        if reached < sampling.top_p:
            kept.add(token)
        reached += weights[token] / sum(weights)
    weights = [weight if token in kept else 0.0 for token, weight in enumerate(weights)]
    return [weight / sum(weights) for weight in weights]


def expected(sampling: Sampling) -> dict[tuple[int, ...], float]:
    """The chance of every answer; one that ends early is shorter."""
    logits_VVV = MarkovTarget().logits_VVV
    chances = dict[tuple[int, ...], float]()
    for tokens in product(range(VOCAB), repeat=NUM_NEW):
        end = tokens.index(0) + 1 if 0 in tokens else NUM_NEW
        text, chance = [*PROMPT], 1.0
        for token in tokens[:end]:
            chance *= chances_by_hand(logits_VVV[text[-2], text[-1]], sampling)[token]
            text.append(token)
        if chance > 0:
            chances[tokens[:end]] = chance
    return chances


def excess(found: Sequence[Answer], sampling: Sampling) -> float:
    """Chi-square against the exact chances, in standard deviations above its mean.

    Answers that are expected fewer than five times are counted together.
    """
    chances, counts = expected(sampling), Counter(tuple(one.tokens) for one in found)
    assert set(counts) <= set(chances), "an answer that has no chance"
    rare = [answer for answer, chance in chances.items() if chance * len(found) < 5]
    cells = [(counts[one], chance) for one, chance in chances.items() if one not in set(rare)]
    if rare:
        cells.append((sum(counts[one] for one in rare), sum(chances[one] for one in rare)))
    statistic = sum((seen - len(found) * p) ** 2 / (len(found) * p) for seen, p in cells)
    degrees = len(cells) - 1
    # Wilson and Hilferty: the cube root of a chi-square is close to normal
    spread = 2 / (9 * degrees)
    return ((statistic / degrees) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)


@pytest.mark.parametrize("sampling", KINDS, ids=lambda one: f"T{one.temperature}")
@pytest.mark.parametrize("make", [None, drafter, lookup], ids=["plain", "drafter", "lookup"])
def test_answers_are_distributed_as_plain_sampling(
    make: Callable[[], Drafting] | None, sampling: Sampling
) -> None:
    found = answers(make, sampling)
    # 3 standard deviations: one correct sampler in 700 would be refused
    assert -3 < excess(found, sampling) < 3
    accepted = sum(cycle.accepted for answer in found for cycle in answer.cycles)
    refused = sum(cycle.kept == 1 for answer in found for cycle in answer.cycles)
    # else the verification would not have been tried
    assert make is None or (accepted > 300 and refused > 300)


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param("keeps all", id="every draft is kept"),
        pytest.param("other chances", id="drafted chances are another sampling's"),
        pytest.param("not replaced", id="a refused draft is replaced from p"),
    ],
)
def test_a_wrong_verification_is_found_by_the_same_test(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = module._verified

    def wrong(chance_SV: Tensor, proposal: Proposal, draws: Draws) -> Verdict:
        if fault == "other chances":
            even_NV = torch.full_like(chance_SV[:-1], 1 / VOCAB)
            return right(chance_SV, Proposal(proposal.tokens, even_NV), draws)
        last = drawn(chance_SV[-1:], draws.take(1))
        return Verdict([*proposal.tokens, *last], len(proposal.tokens))

    if fault == "not replaced":
        monkeypatch.setattr(module, "_left_over", lambda chance_V, *_: chance_V)
    else:
        monkeypatch.setattr(module, "_verified", wrong)
    assert excess(answers(drafter, KINDS[0]), KINDS[0]) > 10


def test_an_answer_does_not_depend_on_the_batch_it_was_in() -> None:
    together = answers(drafter, KINDS[0], 20)
    alone = []
    for key in range(20):
        task = Task(
            ids_T=torch.tensor(PROMPT), max_new_tokens=NUM_NEW, draws=Draws(7, f"answer {key}")
        )
        alone += decode(MarkovTarget(), drafter(), [task], EOS, KINDS[0])
    assert together == alone
    assert len({tuple(answer.tokens) for answer in together}) > 5


@pytest.mark.parametrize("top_k", [0, 1, 7, 99])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.3, 1e-6])
def test_the_distribution_is_that_of_generate(top_k: int, top_p: float) -> None:
    logits_NV = 4 * torch.randn(6, 40, generator=torch.Generator().manual_seed(0))
    found = Sampling(temperature=0.7, top_k=top_k, top_p=top_p).chances(logits_NV)
    nothing = torch.zeros(6, 1, dtype=torch.long)
    scores = TemperatureLogitsWarper(0.7)(nothing, logits_NV)
    if top_k:
        scores = TopKLogitsWarper(top_k)(nothing, scores)
    if top_p < 1:
        scores = TopPLogitsWarper(top_p)(nothing, scores)
    assert torch.equal(found, scores.softmax(-1))


def test_a_token_without_a_chance_is_never_drawn() -> None:
    chance_NV = torch.tensor([[0.0, 0.5, 0.0, 0.5, 0.0]]).expand(4, -1)
    assert drawn(chance_NV, [0.0, 0.5 - 1e-9, 0.5, 1 - 2**-53]) == [1, 1, 3, 3]
    # rare tokens of a large vocabulary keep their share: in fp32 sums theirs would be lost
    many_1V = torch.full((1, 1 << 20), 1e-9)
    many_1V[0, 0] = 1.0
    assert drawn(many_1V, [1 - 1e-4]) != [0]


def test_draws_are_a_prompts_own_and_uniform() -> None:
    one, same = Draws(0, "a"), Draws(0, "a")
    numbers = one.take(4000)
    assert numbers[:10] == same.take(3) + same.take(7)
    assert numbers[:4] != Draws(1, "a").take(4)
    assert numbers[:4] != Draws(0, "b").take(4)
    assert min(numbers) >= 0
    assert max(numbers) < 1
    assert abs(sum(numbers) / 4000 - 0.5) < 0.02


def test_greedy_keeps_what_agrees() -> None:
    logits_BSV = torch.eye(VOCAB)[torch.tensor([[1, 2, 3], [1, 2, 3]])]
    proposals = [Proposal([1, 2], None), Proposal([1, 4], None)]
    verdicts = Sampling().verify(logits_BSV, proposals, [])
    assert verdicts == [Verdict([1, 2, 3], 2), Verdict([1, 2], 1)]
