import numpy as np
import pytest

from dflash_pipeline.capture.batches import Plan, bucket_bounds, plan
from dflash_pipeline.store.table import claim_order

NUM_SAMPLES = 20_000


def lognormal(seed: int, num_samples: int = NUM_SAMPLES) -> np.ndarray:
    draws = np.random.default_rng(seed).lognormal(6.3, 0.8, num_samples)
    return np.clip(draws, 8, 3072).astype(np.int64)


def planned(lengths: np.ndarray, **changes: int) -> Plan:
    settings = {
        "num_buckets": 6,
        "token_budget": 49152,
        "pad_multiple": 16,
        "shard_rows": 26_000,
        "seed": 0,
    }
    return plan(lengths, **(settings | changes))


def groups(found: Plan) -> dict[tuple[int, int, int], np.ndarray]:
    batches: dict[tuple[int, int, int], list[int]] = {}
    columns = zip(found.bucket_M, found.shard_M, found.batch_M, found.order_M, strict=True)
    for bucket, shard, batch, sample in columns:
        batches.setdefault((int(bucket), int(shard), int(batch)), []).append(int(sample))
    return {key: np.array(samples) for key, samples in batches.items()}


def test_every_sample_stands_in_the_plan_once_and_in_plan_order():
    lengths = lognormal(0)
    found = planned(lengths)
    assert sorted(found.order_M) == list(range(NUM_SAMPLES))
    columns = np.stack([found.bucket_M, found.shard_M, found.batch_M], axis=1).tolist()
    assert columns == sorted(columns)
    assert all(lengths[found.order_M] <= np.array(found.bucket_bounds)[found.bucket_M])


def test_a_batch_keeps_to_the_budget_and_to_one_shard():
    lengths = lognormal(1)
    found = planned(lengths)
    batches = groups(found)
    assert len(batches) == found.num_batches
    padded = [len(s) * (-(-lengths[s].max() // 16) * 16) for s in batches.values()]
    assert max(padded) <= 49152
    assert sum(padded) == found.num_padded_tokens


@pytest.mark.parametrize(("pad_multiple", "of_lengths"), [(16, 1.02), (64, 1.05)])
def test_lognormal_lengths_pad_by_the_rounding_alone(pad_multiple: int, of_lengths: float):
    lengths = lognormal(2)
    rounded = (-(-lengths // pad_multiple) * pad_multiple).sum()
    found = planned(lengths, pad_multiple=pad_multiple)
    assert found.num_padded_tokens < 1.007 * rounded
    assert found.num_padded_tokens < of_lengths * lengths.sum()


def test_a_shard_is_the_fewest_batches_that_reach_its_rows():
    lengths = lognormal(3)
    found = planned(lengths, shard_rows=150_000)
    rows: dict[tuple[int, int], list[int]] = {}
    for (bucket, shard, _), samples in groups(found).items():
        rows.setdefault((bucket, shard), []).append(int(lengths[samples].sum()))
    for (bucket, shard), batch_rows in rows.items():
        assert sum(batch_rows[:-1]) < 150_000
        assert sum(batch_rows) >= 150_000 or shard == found.num_shards[bucket] - 1
    assert found.num_rows_per_shard_max == max(sum(batch_rows) for batch_rows in rows.values())


def test_any_prefix_of_the_claim_order_has_the_lengths_of_the_whole():
    lengths = lognormal(4)
    edges = np.quantile(lengths, np.linspace(0, 1, 11)[1:-1])
    found = planned(lengths, token_budget=8192, shard_rows=8000)
    members = {}
    for (bucket, shard, _), samples in groups(found).items():
        members.setdefault((bucket, shard), []).append(samples)
    order = [np.concatenate(members[tuple(shard)]) for shard in claim_order(found.num_shards)]
    worst: dict[float, float] = {}
    for share in (0.1, 0.25, 0.5, 0.75):
        prefix = np.concatenate(order[: int(share * len(order))])
        deciles = np.bincount(np.searchsorted(edges, lengths[prefix]), minlength=10) / len(prefix)
        worst[share] = np.abs(deciles - 0.1).max()
        assert abs(lengths[prefix].mean() / lengths.mean() - 1) < 0.05
    # a shard is one batch of one length here: the coarsest case
    assert worst[0.1] < 0.05
    assert max(worst.values()) == worst[0.1]
    assert worst[0.5] < 0.01


def test_the_same_input_gives_the_same_plan_and_another_seed_another():
    lengths = lognormal(5, 3000)
    first, again, other = planned(lengths), planned(lengths), planned(lengths, seed=1)
    assert first.order_M.tolist() == again.order_M.tolist()
    assert first.order_M.tolist() != other.order_M.tolist()


def test_the_order_of_batches_is_fixed_for_all_releases():
    found = planned(np.arange(1, 13) * 64, num_buckets=1, token_budget=1536, shard_rows=2000)
    assert found.order_M.tolist() == [11, 4, 5, 6, 9, 10, 0, 1, 2, 3, 7, 8]
    assert found.shard_M.tolist() == [0] * 6 + [1] * 6


def test_bucket_bounds_are_the_cheapest_by_exhaustion():
    lengths = np.array([10] * 50 + [20] * 5 + [30] * 40 + [90] * 3 + [100] * 2)

    def cost(bounds: tuple[int, ...]) -> int:
        return int(np.array(bounds)[np.searchsorted(np.array(bounds), lengths)].sum())

    levels = [10, 20, 30, 90]
    every = [(a, b, 100) for i, a in enumerate(levels) for b in levels[i + 1 :]]
    assert cost(bucket_bounds(lengths, 3, 1)) == min(cost(bounds) for bounds in every)
    assert bucket_bounds(lengths, 9, 1) == (10, 20, 30, 90, 100)
    assert bucket_bounds(lengths, 1, 64) == (128,)


def test_one_sample_is_one_batch_of_one_shard():
    found = planned(np.array([5]))
    assert (found.num_shards, found.num_batches, found.bucket_bounds) == ((1,), 1, (16,))


def test_too_long_a_sample_and_no_sample_are_refused():
    with pytest.raises(ValueError, match=r"pads to 80 tokens, capture\.token_budget is 79"):
        planned(np.array([65]), token_budget=79)
    with pytest.raises(ValueError, match="nothing to capture"):
        planned(np.array([], dtype=np.int64))
