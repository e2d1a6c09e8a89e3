"""inspect: what it counts, that it never fails on data, and that its snippets run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from dflash_pipeline.configs.errors import UsageError
from dflash_pipeline.configs.status import new_status, write_status
from dflash_pipeline.store import paths
from dflash_pipeline.store.describe import describe, main
from dflash_pipeline.store.reader import Store, open_store
from dflash_pipeline.store.report import render
from dflash_pipeline.store.snippet import NUMPY_DECODER, QUANTISED_DECODER, snippet
from dflash_pipeline.store.text import decoder_of


def test_a_whole_store_is_described(store: Store, plan: Any) -> None:
    found = describe(store.path)
    num_tokens = int(plan.table.num_tokens.sum())
    assert found["state"] == "sealed"
    assert found["samples"] == {
        "all": 24,
        "held_out": 5,
        "readable": 24,
        "domains": {"chat": 12, "code": 12},
    }
    total = found["total"]
    assert (total["tokens"], total["committed_tokens"]) == (num_tokens, num_tokens)
    assert (total["shards"], total["committed_shards"]) == (8, 8)
    assert total["bytes"] == sum(b["bytes"] for b in found["buckets"])
    assert found["progress"]["tokens_left"] == 0
    peak = max(float(np.abs(plan.rows_of(i)[0][:, 1]).max()) for i in range(24))
    assert found["layers"][1] == {"layer": "3", "amax": peak, "clipped": 0}
    assert [row["layer"] for row in found["layers"]] == ["1", "3", "5", "last"]
    assert sum(row["samples"] for row in found["lengths"]) == 24
    assert found["dropped"] == {"empty": 2}
    assert found["sample"]["ids"] == plan.tokens_of(0)[0][:48].tolist()
    assert found["problems"] == []
    json.dumps(found)


def test_only_what_quantising_saves_is_called_smaller(store: Store) -> None:
    """A small bf16 store is larger than its rows: 0.96x smaller, it said."""
    found = describe(store.path)
    assert "smaller" not in render(found)
    found["identity"]["hidden_mode"] = "int4"
    for ratio, is_told in ((3.42, True), (0.96, False)):
        found["total"]["ratio_to_bf16"] = ratio
        assert (f"{ratio:.2f}x smaller than bf16" in render(found)) == is_told


def test_rows_by_compiled_layers_are_told_where_there_are_some(store: Store) -> None:
    found = describe(store.path)
    assert "rows by compiled layers" not in render(found)
    for count, told in ((3, "3 of 8 shards; those of the others by plain ones"), (8, "all shards")):
        found["total"]["compiled_shards"] = count
        assert f"rows by compiled layers: {told}" in render(found)


def test_a_growing_store_says_how_far_it_is(empty_store: Store) -> None:
    found = describe(empty_store.path)
    assert found["state"] == "growing"
    assert found["progress"]["eta_s"] is None
    assert "speed and time left not known yet" in render(found)
    found["progress"] |= {"eta_s": 5025.0, "tokens_per_s": 43210.0}
    assert "captured at 43,210 tokens/s, 1:23:45 left" in render(found)
    assert found["sample"] is None


def test_a_stopped_capture_is_not_said_to_have_time_left(
    empty_store: Store, plan: Any, tiny: ModuleType
) -> None:
    tiny.capture(plan, empty_store, most=5)
    for number, name in enumerate(sorted(empty_store.path.glob("b*/commit/c/*/0"))):
        os.utime(name, (1000.0 + number, 1000.0 + number))
    log_dir = str(paths.log_directory(empty_store.path))
    status = new_status("capture", 0, "cpu")
    status.state = "running"
    write_status(log_dir, status)
    found = describe(empty_store.path)
    assert found["state"] == "growing"
    assert " left" in render(found)
    # killed: it has not said how it ended
    status.start_ticks -= 1
    write_status(log_dir, status)
    found = describe(empty_store.path)
    assert (found["state"], found["progress"]["eta_s"]) == ("stopped", None)
    text = render(found)
    assert "stopped, 5 of 8 shards" in text
    assert "no capture is at work" in text
    assert " left" not in text
    tiny.capture(plan, open_store(empty_store.path))
    assert describe(empty_store.path)["state"] == "complete, not sealed, stopped"
    open_store(empty_store.path).seal()
    assert describe(empty_store.path)["state"] == "sealed"


def test_text_and_json_come_out_on_their_own(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    main(None, None, {"path": str(store.path), "json": False, "sample": ""})
    text = capsys.readouterr().out
    for part in ("sealed, 8 of 8 shards", "layers 1 3 5 of 8", "rms p99", "in a notebook"):
        assert part in text
    assert "amax and clipped: of all committed rows; the others sample 0's alone" in text
    # a sample that is asked for comes alone
    main(None, None, {"path": str(store.path), "json": False, "sample": "3"})
    assert capsys.readouterr().out.startswith(f"sample 3 {store.table.key(3)!r} ")
    main(None, None, {"path": str(store.path), "json": True, "sample": ""})
    assert json.loads(capsys.readouterr().out)["state"] == "sealed"


def test_no_damage_makes_it_fail(
    small_store: Store,
    flip: Callable[[Path, int], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    random, store = np.random.default_rng(3), small_store
    for file in sorted(file for file in store.path.rglob("*") if file.is_file()):
        if file.stat().st_size == 0 or (file.name == "zarr.json" and file.parent != store.path):
            continue
        place = int(random.integers(file.stat().st_size))
        flip(file, place)
        main(None, None, {"path": str(store.path), "json": False, "sample": ""})
        flip(file, place)
    capsys.readouterr()
    (store.path / "samples" / "bucket" / "c" / "0").unlink()
    main(None, None, {"path": str(store.path), "json": False, "sample": ""})
    assert "samples/bucket/c/0 is missing" in capsys.readouterr().out


def test_the_tokenizer_of_the_target_gives_text(tiny: ModuleType, plan: Any, store: Store) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {f"w{i}": i for i in range(tiny.VOCAB)}
    model = tokenizers.models.WordLevel(vocabulary, unk_token="w0")
    content = tokenizers.Tokenizer(model).to_str().encode()
    found = store.files() | {"tokenizer.json": content}
    store.files = lambda: found
    ids = plan.tokens_of(0)[0][:3].tolist()
    decode = decoder_of(store)
    assert decode is not None
    assert decode(ids) == " ".join(f"w{i}" for i in ids)
    found["tokenizer.json"] = b"{broken"
    assert decoder_of(store) is None


def test_one_sample_is_shown_whole_by_key_or_number(store: Store, plan: Any) -> None:
    key = store.table.key(20)
    for name in (key, "20"):
        found = describe(store.path, name)
        assert found["sample"]["key"] == key
        ids_T, mask_T = plan.tokens_of(20)
        assert found["sample"]["ids"] == ids_T.tolist()
        begin = int(np.flatnonzero(mask_T)[0])
        (span,) = found["sample"]["supervised"]
        assert (span["from"], span["to"]) == (begin, len(ids_T))
        assert f"{key!r}" in render(found)
    with pytest.raises(UsageError, match=r"--sample sample-9é: no key .*did you mean 'sample-9-é'"):
        describe(store.path, "sample-9é")
    with pytest.raises(UsageError, match="no number below 24"):
        describe(store.path, "24")


def test_the_notebook_lines_run(store: Store, plan: Any) -> None:
    names: dict[str, Any] = {}
    exec(snippet(str(store.path), "bf16"), names)
    hidden_TKH = plan.rows_of(0)[0]
    assert (names["sample"].hidden_TKH == hidden_TKH).all()
    assert (names["hidden"] == hidden_TKH[:10]).all()
    assert (names["raw"].view("<u2") == store.hidden(0)[:10].view("<u2")).all()
    assert (names["hidden_TKH"] == hidden_TKH).all()


def test_the_notebook_lines_show_a_sample_that_is_there(
    empty_store: Store, plan: Any, tiny: ModuleType
) -> None:
    """Zarr shows rows of a shard that is not there as zeros, and numpy finds no file."""
    tiny.capture(plan, empty_store)
    first = empty_store.table.shard_id(0)
    for name in (paths.commit_file(first), paths.hidden_file(first)):
        (empty_store.path / name).unlink()
    store = open_store(empty_store.path)
    found = describe(store.path)
    i = found["sample"]["sample"]
    assert i > 0
    names: dict[str, Any] = {}
    exec(found["snippet"], names)
    hidden_TKH = plan.rows_of(i)[0]
    assert (names["sample"].hidden_TKH == hidden_TKH).all()
    assert (names["hidden"] == hidden_TKH[:10]).all()
    assert (names["raw"].view("<u2") == store.hidden(i)[:10].view("<u2")).all()
    assert (names["hidden_TKH"] == hidden_TKH).all()


def test_twelve_lines_of_numpy_read_a_store_without_the_package(store: Store, plan: Any) -> None:
    code = NUMPY_DECODER.format(path=store.path, sample=0)
    assert len(code.splitlines()) == 12
    code = code.replace(f'"{store.path}", 0', f'"{store.path}", 17', 1)
    assert _run_without_the_package(code, store.path) == plan.rows_of(17)[0].tobytes()


@pytest.mark.parametrize("mode", ["int8", "int4"])
def test_numpy_alone_reads_quantised_rows(mode: str) -> None:
    path = Path(__file__).parent.parent / "golden" / f"store-v1-{mode}"
    code = snippet(str(path), mode).split("# numpy alone\n")[1]
    assert code == QUANTISED_DECODER.format(path=path, sample=0)
    found = np.frombuffer(_run_without_the_package(code, path), np.float32)
    wanted = open_store(path).sample(0).hidden_TKH
    # the rotation as a product adds up in another order
    np.testing.assert_allclose(found.reshape(wanted.shape), wanted, atol=1e-5)


def _run_without_the_package(code: str, path: Path) -> bytes:
    """The bytes of hidden_TKH after `code`."""
    check = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("dflash_pipeline", "zarr", "numcodecs", "google_crc32c"):
            raise ImportError(name)
sys.meta_path.insert(0, Absent())
"""
    end = "\nprint(hidden_TKH.tobytes().hex())\n"
    found = subprocess.run(
        [sys.executable, "-c", check + code + end],
        capture_output=True,
        text=True,
        check=True,
        cwd=path,
    )
    return bytes.fromhex(found.stdout.strip())
