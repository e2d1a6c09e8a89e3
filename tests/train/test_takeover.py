"""A drafter that begins with the weights of another."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_pipeline.configs.errors import UsageError
from dflash_pipeline.train.drafter import Drafter
from dflash_pipeline.train.export import write_speculators, write_zlab
from dflash_pipeline.train.shape import DrafterShape
from dflash_pipeline.train.takeover import take_over


def test_a_run_may_begin_from_a_speculators_checkpoint_of_others(
    shape: DrafterShape, tmp_path: Path
) -> None:
    first, second = Drafter(shape), Drafter(shape)
    first.initialise(1)
    matrix_VH = torch.zeros(shape.vocab_size, shape.hidden_size)
    path = tmp_path / "theirs"
    write_speculators(path, shape, first.state_dict(), matrix_VH, matrix_VH, "org/target", [])
    config = json.loads((path / "config.json").read_text())
    # no key of that layout
    del config["transformer_layer_config"]["num_target_layers"]
    (path / "config.json").write_text(json.dumps(config))
    take_over(second, str(path))
    for mine, theirs in zip(second.parameters(), first.parameters(), strict=True):
        assert torch.equal(mine, theirs.bfloat16().float())
    config["transformer_layer_config"]["rms_norm_eps"] = 1e-5
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UsageError, match="rms_norm_eps 1e-05, wanted 1e-06"):
        take_over(second, str(path))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("rope_scaling", {"rope_type": "yarn", "factor": 4.0}),
        ("rope_theta", 5e5),
        ("input_embedding_scale", 3.0),
        ("output_multiplier", 0.5),
        ("final_logit_softcapping", 30.0),
        ("mask_token_id", 5),
        ("num_target_layers", 9),
    ],
)
def test_weights_of_another_arithmetic_are_not_taken_over(
    name: str, value: Any, shape: DrafterShape, tmp_path: Path
) -> None:
    """Every tensor fits; what is computed with it would not be what it was trained for."""
    first = Drafter(replace(shape, **{name: value}))
    first.initialise(1)
    write_zlab(tmp_path / "theirs", replace(shape, **{name: value}), first.state_dict())
    with pytest.raises(UsageError, match=f"{name} .*, wanted") as caught:
        take_over(Drafter(shape), str(tmp_path / "theirs"))
    # what differs is named once, and nothing else
    assert str(caught.value).count(", wanted") == 1


def test_blocks_of_another_length_are_learned_from_the_same_weights(
    shape: DrafterShape, tmp_path: Path
) -> None:
    first, second = Drafter(replace(shape, block_size=shape.block_size + 2)), Drafter(shape)
    first.initialise(1)
    write_zlab(
        tmp_path / "theirs", replace(shape, block_size=shape.block_size + 2), first.state_dict()
    )
    take_over(second, str(tmp_path / "theirs"))
    for mine, theirs in zip(second.parameters(), first.parameters(), strict=True):
        assert torch.equal(mine, theirs.bfloat16().float())
