"""What is refused before anything large is made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from dflash_pipeline.configs.errors import UsageError
from dflash_pipeline.configs.place import Place
from dflash_pipeline.configs.schema import LossConfig, Run
from dflash_pipeline.store.reader import Store, open_store
from dflash_pipeline.train.preflight import check_stores, rehearse
from dflash_pipeline.train.shape import DrafterShape


def test_every_kind_of_drafter_is_rehearsed(
    train_run: Callable[..., Run], place: Place, shape: DrafterShape
) -> None:
    loss = LossConfig(ce=0.5, kl=0.5, temperature=2.0, tv=0.3, cap_lambda=0.1, slot_weights="dpace")
    run = replace(train_run(), loss=loss)
    for block_size, window in ((2, 0), (16, 0), (10, 6)):
        kinds = ("sliding_attention",) * 4 + ("full_attention",) if window else shape.layer_types
        changed = replace(
            shape,
            block_size=block_size,
            num_layers=len(kinds),
            layer_types=kinds,
            sliding_window=window,
            final_logit_softcapping=30.0,
        )
        rehearse(run, changed, place)


def test_numbers_that_overflow_are_found(
    train_run: Callable[..., Run], place: Place, shape: DrafterShape
) -> None:
    run = replace(train_run(), loss=LossConfig(kl=1.0, temperature=1e-45))
    with pytest.raises(ValueError, match="rehearsal"):
        rehearse(run, shape, place)


def test_stores_of_different_targets_are_refused_with_the_differences(
    train_run: Callable[..., Run], whole_store: Store
) -> None:
    other = Store(whole_store.path, None)
    other.spec = replace(other.spec, tokenizer_hash="other")
    with pytest.raises(UsageError, match="tokenizer_hash"):
        check_stores(train_run(), [whole_store, other], is_resumed=False)


def test_stores_that_hold_out_other_prompts_are_refused(
    train_run: Callable[..., Run], whole_store: Store
) -> None:
    """Also where one of them was merged: none of its parts may hold out another share."""
    run: dict[str, object]
    for run in ({"data": {"heldout": 0.5}}, {"merged": [{}, {"data": {"heldout": 0.5}}]}):
        other = Store(whole_store.path, None)
        other.plan_hash = "another"
        check_stores(train_run(), [whole_store, other], is_resumed=False)
        other.attributes = replace(other.attributes, run=run)
        with pytest.raises(UsageError, match=r"data\.heldout: \[\] and \[0\.5\]"):
            check_stores(train_run(), [whole_store, other], is_resumed=False)


def test_one_store_under_two_names_is_refused(
    train_run: Callable[..., Run], whole_store: Store, tmp_path: Path
) -> None:
    (tmp_path / "again").symlink_to(whole_store.path)
    again = open_store(tmp_path / "again")
    with pytest.raises(UsageError, match=r"hs and .*again are the same store"):
        check_stores(train_run(), [whole_store, again], is_resumed=False)


@pytest.mark.parametrize("loss", [LossConfig(kl=1.0), LossConfig(kl=0.0, tv=1.0)])
def test_the_targets_distribution_needs_last_states(
    loss: LossConfig, train_run: Callable[..., Run], whole_store: Store
) -> None:
    whole_store.spec = replace(whole_store.spec, last_mode="none")
    run = replace(train_run(), loss=loss)
    with pytest.raises(UsageError, match=r"loss\.kl is .*loss\.tv .*--last-mode bf16.*loss\.ce=1 "):
        check_stores(run, [whole_store], is_resumed=False)
