"""verify --sample: rows that the target no longer gives are named and traced to their text."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_pipeline.capture import toytext, worker
from dflash_pipeline.capture.construction import build_store
from dflash_pipeline.capture.model import resolve
from dflash_pipeline.capture.recheck import main, recheck
from dflash_pipeline.capture.samples import Conversation, Dropped
from dflash_pipeline.configs.errors import UsageError
from dflash_pipeline.configs.place import Place
from dflash_pipeline.configs.schema import (
    CaptureConfig,
    DataConfig,
    Run,
    StoreConfig,
    TargetConfig,
)
from dflash_pipeline.store import paths
from dflash_pipeline.store.bf16 import bf16_bits, bf16_to_float32
from dflash_pipeline.store.merge import merge
from dflash_pipeline.store.reader import Store, open_store
from places import cpu_place


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return cpu_place(tmp_path / "logs", "verify")


@pytest.fixture(params=[("bf16", "bf16"), ("int8", "int4"), ("int4", "none")])
def store(request: pytest.FixtureRequest, tmp_path: Path, target_dir: Path, place: Place) -> Store:
    hidden_mode, last_mode = request.param
    run = Run(
        target=TargetConfig(id=str(target_dir), layer_ids=(0, 2, 4)),
        data=DataConfig(files=("data.jsonl",), max_len=96),
        store=StoreConfig(path=str(tmp_path / "hs"), hidden_mode=hidden_mode, last_mode=last_mode),
        capture=CaptureConfig(token_budget=192, pad_multiple=16, num_buckets=2, force=True),
    )
    conversations = [
        _conversation(
            row,
            {"role": "user", "content": f"Say {row}"},
            {"role": "assistant", "content": "abcdefghij"[row:] * 3},
        )
        for row in range(8)
    ]
    return _captured(run, conversations, place)


def _conversation(row: int, *messages: dict[str, str]) -> Conversation:
    return Conversation(
        key=f"sample-{row}",
        source=0,
        row=row,
        domain="chat",
        messages=messages,
        text="",
        token_ids=(),
        loss_spans=(),
    )


def _captured(run: Run, conversations: list[Conversation], place: Place) -> Store:
    dropped = Dropped(num_rows=len(conversations))
    build_store(run, resolve(run.target), "cpu", conversations, dropped, "", 1, lambda _text: None)
    worker.main(run, place, {})
    return open_store(run.store.path)


@pytest.fixture
def toy_store(tmp_path: Path, place: Place) -> Store:
    """The toy's second norm moves its logits by less than int4 does."""
    run = Run(
        target=TargetConfig(id="toy", layer_ids=(0, 1, 2, 3)),
        data=DataConfig(files=("data.jsonl",), max_len=256),
        store=StoreConfig(path=str(tmp_path / "toy"), hidden_mode="int4", last_mode="int4"),
        capture=CaptureConfig(token_budget=4096, force=True),
    )
    texts = islice(toytext.conversations("chat", "train", 1), 24)
    return _captured(run, [_conversation(row, *one) for row, one in enumerate(texts)], place)


def _write_rows(store: Store, i: int, rows: np.ndarray) -> None:
    """The sample's hidden rows, in its shard file."""
    shard_id, row_bytes = store.table.shard_id(i), store.hidden_shape.row_bytes
    first = int(store.table.start[i]) - shard_id.shard * store.layout.rows_per_shard
    with (store.path / paths.hidden_file(shard_id)).open("r+b") as stream:
        stream.seek(first * row_bytes)
        stream.write(rows.tobytes())


def _extra(store: Store, **changes: Any) -> dict[str, object]:
    return {"path": str(store.path), "sample": 5, "json": False} | changes


def test_a_sound_store_agrees_and_a_row_is_traced_to_its_text(
    store: Store, place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    # the target is the one that the capture named
    main(Run(), place, _extra(store))
    out = capsys.readouterr().out
    assert "layer 4: error" in out
    assert "5 samples, " in out
    main(Run(), place, _extra(store, json=True, sample=100))
    found = json.loads(capsys.readouterr().out)
    assert found["num_samples"] == 8
    assert found["num_rows"] == int(store.table.num_tokens.sum())
    assert found["problems"] == []
    assert ": token " in found["trace"]
    assert "of 'sample-" in found["trace"]


def test_a_whole_int4_store_is_not_called_wrong_and_a_wrong_one_is(
    toy_store: Store, place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    for num_samples in (4, 16):
        main(Run(), place, _extra(toy_store, sample=num_samples))
        assert ", not separable at int4" in capsys.readouterr().out
    true = [np.array(toy_store.hidden(i)) for i in range(len(toy_store.table))]
    for i, rows in enumerate(true):
        _write_rows(toy_store, i, np.roll(rows, -1, 0))
    with pytest.raises(ValueError, match="layer 2 is nearer to the next token's row"):
        main(Run(), place, _extra(toy_store, sample=4))
    for i, rows in enumerate(true):
        _write_rows(toy_store, i, np.roll(rows, -1, 1))
    with pytest.raises(ValueError, match="layer 1 is nearer to layer 2"):
        main(Run(), place, _extra(toy_store, sample=16))


def test_rows_of_other_tokens_are_named(store: Store, place: Place) -> None:
    """In one sample of eight, which the median over all would not show."""
    i = store.table.find("sample-3")
    shard_id, row_bytes = store.table.shard_id(i), store.hidden_shape.row_bytes
    first = int(store.table.start[i]) - shard_id.shard * store.layout.rows_per_shard
    with (store.path / paths.hidden_file(shard_id)).open("r+b") as stream:
        rows = np.array(store.hidden(i))[::-1].copy()
        stream.seek(first * row_bytes)
        stream.write(rows.tobytes())
    with pytest.raises(ValueError, match=rf"sample {i} \(sample-3\): layer 2 differs by") as error:
        main(Run(), place, _extra(store, sample=8))
    text = str(error.value)
    assert "(sample-4)" not in text
    assert paths.hidden_file(shard_id) in text
    assert "of 'sample-3', " in text


@pytest.mark.parametrize("store", [("bf16", "bf16")], indirect=True)
def test_one_wrong_row_is_enough(store: Store, place: Place) -> None:
    i = store.table.find("sample-6")
    shard_id, row_bytes = store.table.shard_id(i), store.hidden_shape.row_bytes
    first = int(store.table.start[i]) - shard_id.shard * store.layout.rows_per_shard
    row_KR = np.array(store.hidden(i))[5]
    row_KR[1] = bf16_bits(bf16_to_float32(row_KR[1].view("<u2")) * np.float32(1.1)).view(np.uint8)
    with (store.path / paths.hidden_file(shard_id)).open("r+b") as stream:
        stream.seek((first + 5) * row_bytes)
        stream.write(row_KR.tobytes())
    with pytest.raises(ValueError, match=rf"sample {i} .*layer 2 .*row {first + 5} of .*: token 5"):
        main(Run(), place, _extra(store, sample=8))


def test_a_target_over_several_devices_agrees_too(
    store: Store, place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    main(Run(target=TargetConfig(num_gpus=2)), place, _extra(store))
    assert "samples, " in capsys.readouterr().out


def test_the_target_of_merged_stores_is_that_of_either(
    store: Store, place: Place, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    again = Run(
        target=TargetConfig(id=str(store.attributes.run["target"]["id"]), layer_ids=(0, 2, 4)),
        data=DataConfig(files=("data.jsonl",), max_len=96),
        store=StoreConfig(
            path=str(tmp_path / "more"),
            hidden_mode=store.spec.hidden_mode,
            last_mode=store.spec.last_mode,
        ),
        capture=CaptureConfig(
            token_budget=192,
            pad_multiple=16,
            num_buckets=2,
            force=True,
            calibration_from=str(store.path) if store.spec.is_quantised else "",
        ),
    )
    turns = {"role": "user", "content": "more"}, {"role": "assistant", "content": "of it " * 3}
    more = _captured(again, [_conversation(row, *turns) for row in (90, 91)], place)
    parts = [str(store.path), str(more.path)]
    both = merge(tmp_path / "both", parts, deep=False, say=print, progress=lambda _d, _t: None)
    capsys.readouterr()
    main(Run(), place, _extra(both))
    assert "samples, " in capsys.readouterr().out


def test_another_target_or_none_is_refused(
    store: Store, place: Place, make_target_dir: Callable[..., Path]
) -> None:
    other = make_target_dir("qwen3", tie_word_embeddings=True)
    with pytest.raises(UsageError, match="was planned for other weights") as refused:
        main(Run(target=TargetConfig(id=str(other))), place, _extra(store))
    # of the command's own: its store is an argument, and what is captured stays
    assert str(refused.value).endswith(": name the target of before, or another store")
    run = Run(target=TargetConfig(id=str(make_target_dir("qwen3"))))
    target = worker.load_target(run, place, store, resolve(run.target))
    many = Run(target=replace(run.target, num_gpus=9))
    with pytest.raises(UsageError) as refused:
        main(many, place, _extra(store))
    assert "remove" not in str(refused.value)
    store.readable_N[:] = False
    with pytest.raises(UsageError, match="has no sample that can be read yet"):
        recheck(store, target, 3)
