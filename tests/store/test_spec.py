"""Identity and layout: what they refuse, and how they differ."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from types import ModuleType
from typing import Any

import pytest

from dflash_pipeline.store.spec import Layout, ShardId, StoreSpec


def test_importing_the_store_loads_no_torch_and_no_zarr() -> None:
    code = "import sys, dflash_pipeline.store; print(sorted({'torch', 'zarr'} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_records_survive_json(tiny: ModuleType, plan: Any) -> None:
    assert StoreSpec.from_dict(plan.spec.to_dict()) == plan.spec
    assert Layout.from_dict(plan.layout.to_dict()) == plan.layout
    assert plan.layout.shard_ids()[:2] == [ShardId(0, 0), ShardId(1, 0)]


def test_differences_name_each_field(tiny: ModuleType) -> None:
    mine, theirs = tiny.make_spec(), tiny.make_spec(layer_ids=(1, 3, 6), template_args="{}")
    assert mine.differences(mine) == []
    assert [text.split(":")[0] for text in mine.differences(theirs)] == [
        "layer_ids",
        "template_args",
    ]
    assert mine.differences(theirs)[0] == "layer_ids: (1, 3, 5) and (1, 3, 6)"
    # of a hash what tells it apart, on one line with all the rest
    theirs = tiny.make_spec(tokenizer_hash="0123456789abcdef" * 4)
    assert mine.differences(theirs)[0].endswith(" and '0123456789ab'")


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("format", 2, "update dflash-pipeline"),
        ("hidden_mode", "int2", "update dflash-pipeline"),
        ("layer_ids", [1, 1], "repeats"),
        ("layer_ids", [9], "outside 0..7"),
        ("layer_ids", "1,3", "must be a list"),
        ("hidden_size", 1 << 40, "hidden_size"),
        ("hidden_size", True, "must be int"),
        ("max_len", "200", "must be int"),
        ("hidden_mode", "int4", "hidden_size 8 is not a multiple of 16: store its rows as bf16"),
        ("calibration_hash", "0", "although all rows are bf16"),
    ],
)
def test_absurd_identities_are_refused(
    tiny: ModuleType, field: str, value: object, text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        StoreSpec.from_dict(tiny.make_spec().to_dict() | {field: value})


def test_an_identity_is_complete_once_it_is_calibrated(tiny: ModuleType) -> None:
    assert tiny.make_spec().is_calibrated
    for modes in ({"hidden_mode": "int4"}, {"last_mode": "int8"}):
        spec = tiny.make_spec(hidden_size=16, **modes)
        assert spec.is_quantised
        assert not spec.is_calibrated
        assert dataclasses.replace(spec, calibration_hash="0").is_calibrated


def test_unknown_and_missing_fields_are_refused(tiny: ModuleType) -> None:
    values = tiny.make_spec().to_dict()
    with pytest.raises(ValueError, match=r"unknown fields \['colour'\]"):
        StoreSpec.from_dict(values | {"colour": "red"})
    del values["target_id"]
    with pytest.raises(ValueError, match=r"lacks the fields \['target_id'\]"):
        StoreSpec.from_dict(values)


@pytest.mark.parametrize(
    "change",
    [
        {"rows_per_shard": 500},
        {"rows_per_shard": 1 << 40},
        {"num_shards": (0, 0)},
        {"num_shards": (1,)},
        {"num_shards": (1, 1 << 30)},
        {"num_samples_per_shard_max": (0, 1)},
        {"bucket_bounds": (200, 60)},
    ],
)
def test_absurd_layouts_are_refused(plan: Any, change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="layout"):
        dataclasses.replace(plan.layout, **change)
