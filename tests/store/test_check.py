"""verify: a whole store has no faults; each damaged byte is found and named."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from dflash_pipeline.store import paths
from dflash_pipeline.store.check import Report, fail, main, verify
from dflash_pipeline.store.checksum import crc32c
from dflash_pipeline.store.commitlog import write_commit
from dflash_pipeline.store.describe import describe
from dflash_pipeline.store.lease import Leases
from dflash_pipeline.store.reader import Store, open_store
from dflash_pipeline.store.spec import ShardId

Flip = Callable[[Path, int], None]


@pytest.mark.parametrize("deep", [False, True])
def test_a_whole_store_has_no_faults(store: Store, deep: bool) -> None:
    report = verify(store.path, deep=deep)
    assert report.problems == []
    assert report.notes == []
    assert (report.num_committed, report.num_shards) == (8, 8)


@pytest.mark.parametrize("deep", [False, True])
def test_a_growing_store_has_no_faults(empty_store: Store, deep: bool) -> None:
    report = verify(empty_store.path, deep=deep)
    assert report.problems == []
    assert report.num_committed == 0


def test_each_flipped_byte_is_found_and_its_file_is_named(small_store: Store, flip: Flip) -> None:
    """A byte of each file that holds data, of each kind of record, and of 15 documents."""
    random = np.random.default_rng(0)
    store = small_store
    files = [f for f in sorted(store.path.rglob("*")) if f.is_file() and f.stat().st_size]
    data = [file for file in files if file.name != "zarr.json" and "raw" not in file.parts]
    documents = [file for file in files if file.name == "zarr.json"]
    chosen = data + [documents[k] for k in random.permutation(len(documents))[:15]]
    assert len(chosen) >= 50
    for file in chosen:
        place = int(random.integers(file.stat().st_size))
        flip(file, place)
        problems = verify(store.path, deep=True).problems
        assert any(str(file) in problem for problem in problems), (file, place, problems)
        flip(file, place)
    assert verify(store.path, deep=True).problems == []


def test_a_file_that_cannot_be_read_is_named_and_the_rest_is_looked_at(small_store: Store) -> None:
    """A directory stands for what a failing disk or a foreign owner does: OSError on reading."""
    root = small_store.path
    files = [f for f in sorted(root.rglob("*")) if f.is_file() and "raw" not in f.parts]
    files += sorted((root / "raw").glob("*/zarr.json"))
    assert len(files) >= 60
    for file in files:
        content = file.read_bytes()
        file.unlink()
        file.mkdir()
        for deep in (False, True):
            problems = verify(root, deep=deep).problems
            if deep or file.name == "zarr.json":
                assert any(str(file) in problem for problem in problems), (file, problems)
        json.dumps(describe(root), allow_nan=False)
        file.rmdir()
        file.write_bytes(content)
    assert verify(root, deep=True).problems == []


def test_each_single_bit_of_the_root_document_matters(small_store: Store) -> None:
    store = small_store
    file = store.path / "zarr.json"
    content = file.read_bytes()
    random = np.random.default_rng(1)
    for place in random.integers(0, len(content), 40):
        changed = bytearray(content)
        changed[place] ^= 1 << int(random.integers(8))
        file.write_bytes(changed)
        assert verify(store.path, deep=True).problems, (place, bytes(changed[place : place + 1]))


def test_a_truncated_shard_is_named(store: Store) -> None:
    file = store.path / paths.last_file(ShardId(1, 4))
    os.truncate(file, file.stat().st_size - 1)
    (problem,) = verify(store.path, deep=False).problems
    assert str(file) in problem
    assert "bytes, expected" in problem


def test_the_damaged_chunk_is_named(store: Store, flip: Flip) -> None:
    flip(store.path / paths.hidden_file(ShardId(1, 4)), 256 * 48)
    assert verify(store.path, deep=False).problems == []
    (problem,) = verify(store.path, deep=True).problems
    assert problem.endswith("b1/hidden/c/4/0/0 (shard b1/4): chunk 1 does not match its checksum")


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (lambda p: (p / "b1/hidden/c/2/0/0").unlink(), "b1/hidden/c/2/0/0 is committed but"),
        (lambda p: (p / "b1/commit/c/2/0").unlink(), "b1/commit/c/2/0 is missing although"),
        (lambda p: (p / "b1/input_ids/c/2").unlink(), "b1/input_ids/c/2 is missing"),
        (lambda p: (p / "b1/hidden/zarr.json").unlink(), "b1/hidden/zarr.json is missing"),
        (lambda p: (p / "b1/hidden/zarr.json").write_text("{"), "b1/hidden/zarr.json is no JSON"),
        (lambda p: (p / "b1/notes.txt").write_text("x"), "b1/notes.txt does not belong"),
        (lambda p: (p / "raw/b1/last/c").unlink(), "raw/b1/last/c is not a link"),
        (lambda p: (p / "samples/bucket/c/0").unlink(), "samples/bucket/c/0 is missing"),
        (lambda p: (p / "commit_sealed/c/0").write_bytes(b"123"), "commit_sealed/c/0 has 3 bytes"),
    ],
)
def test_what_is_missing_or_foreign_is_named(
    store: Store, damage: Callable[[Path], None], text: str
) -> None:
    damage(store.path)
    assert any(text in problem for problem in verify(store.path, deep=False).problems)


def test_a_changed_array_is_compared_with_the_plan(store: Store) -> None:
    file = store.path / "b1" / "hidden" / "zarr.json"
    document = json.loads(file.read_bytes())
    document["shape"][0] *= 2
    file.write_text(json.dumps(document))
    assert "differs from the plan in shape" in verify(store.path, deep=False).problems[0]


def test_leftovers_of_an_interrupted_capture_are_notes(empty_store: Store) -> None:
    file = empty_store.path / paths.hidden_file(ShardId(0, 0))
    file.parent.mkdir(parents=True)
    file.write_bytes(b"half")
    file.with_name(".0.abc.tmp").write_bytes(b"half")
    report = verify(empty_store.path, deep=True)
    assert report.problems == []
    assert "data without a commit record" in report.notes[0]
    assert "interrupted" in report.notes[1]


@pytest.mark.parametrize(
    ("value", "text"),
    [(0x7FC0, "NaN or Inf"), (0xFF80, "NaN or Inf"), (0x4F00, "larger values"), (0, "all-zero")],
)
def test_rows_with_a_fitting_checksum_must_still_be_sound(
    tiny: ModuleType, plan: Any, store: Store, value: int, text: str
) -> None:
    """What a faulty capture, not a faulty disk, would leave."""
    shard_id = ShardId(1, 0)
    file = store.path / paths.hidden_file(shard_id)
    content = np.fromfile(file, np.uint8)
    row = content[48:64].view("<u2")
    row[:] = value
    content.tofile(file)
    record = store.commit_of(shard_id)
    assert record is not None
    record.hidden_crcs.setflags(write=True)
    record.hidden_crcs[0] = crc32c(content[: 256 * 48])
    (store.path / paths.SEALED_FILE).unlink()
    with Leases(store.path, plan.layout, heartbeat_s=1, hung_s=9) as leases:
        lease = leases.acquire(shard_id)
        assert lease is not None
        write_commit(store.path, store.spec, store.layout, record, lease)
    (problem,) = verify(store.path, deep=True).problems
    assert "b1/hidden/c/0/0/0 (shard b1/0): chunk 0" in problem
    assert text in problem


def test_a_store_with_bad_samples_is_whole(tiny: ModuleType, plan: Any, empty_store: Store) -> None:
    from dflash_pipeline.store.writer import StoreWriter

    first = plan.table.of_shard(ShardId(1, 0)).start
    with (
        Leases(empty_store.path, plan.layout, heartbeat_s=1, hung_s=9) as leases,
        StoreWriter(empty_store, leases, depth=2) as writer,
    ):
        amax = tiny.put_shard(plan, writer, leases.acquire(ShardId(1, 0)))
        writer.submit(amax, np.zeros(4, np.uint32), {first: "zero_rows"}, halved=False)
    assert verify(empty_store.path, deep=True).problems == []


def test_the_command_lists_faults_and_fails(
    store: Store, flip: Flip, capsys: pytest.CaptureFixture[str]
) -> None:
    extra = {"path": str(store.path), "deep": True, "json": False}
    main(None, None, extra)
    assert "8 of 8 shards committed" in capsys.readouterr().out
    flip(store.path / paths.hidden_file(ShardId(1, 4)), 0)
    flip(store.path / paths.last_file(ShardId(0, 0)), 0)
    remedy = (
        r"2 problems in .*: dflash verify --deep --repair .* \(shards b0/0, b1/4\), and the same"
    )
    with pytest.raises(ValueError, match=remedy):
        main(None, None, extra)
    out = capsys.readouterr().out
    assert len(out.splitlines()) == 3
    assert out.index("b0/last/c/0/0") < out.index("b1/hidden/c/4/0/0")
    with pytest.raises(ValueError, match="2 problems"):
        main(None, None, extra | {"json": True})
    assert len(json.loads(capsys.readouterr().out)["problems"]) == 2
    with pytest.raises(ValueError, match="no store at"):
        main(None, None, extra | {"path": str(store.path / "b7")})
    with pytest.raises(ValueError, match="nothing else was looked at"):
        main(None, None, extra | {"path": str(store.path / "b0")})
    assert "not that of a hidden-state store" in capsys.readouterr().out


def test_a_fault_that_is_of_no_shard_is_not_said_to_be_repaired(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    (store.path / "stray").touch()
    with pytest.raises(ValueError, match=r"1 problem in .* so --repair does not help"):
        main(None, None, {"path": str(store.path), "deep": False, "json": False})
    assert "does not belong into a store" in capsys.readouterr().out


def test_opening_after_verify_is_unchanged(tiny: ModuleType, store: Store) -> None:
    before = tiny.digest(store.path)
    verify(store.path, deep=True)
    assert tiny.digest(store.path) == before
    assert open_store(store.path).is_complete


HOSTILE_DOCUMENTS: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda _: b"",
    "cut": lambda content: content[:-1],
    "null": lambda _: b"null",
    "a list": lambda content: b"[" + content + b"]",
    "nested without end": lambda _: b"[" * 100_000,
    "any size": lambda content: content.replace(b'"shape":[', b'"shape":[4611686018427387904,'),
    "a number too large": lambda content: content.replace(
        b'"zarr_format":3', b'"zarr_format":1e999'
    ),
    "no number": lambda content: content.replace(b'"zarr_format":3', b'"zarr_format":NaN'),
    "code to run": lambda content: content.replace(
        b'"attributes":{', b'"attributes":{"__reduce__":["os.system","false"],'
    ),
    "a path": lambda content: content.replace(b'"separator":"/"', b'"separator":"/../"'),
}
DOCUMENTS = ("b1", "b1/hidden", "b1/input_ids", "raw/b1/last", "samples/start", "calibration")


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_hostile_document_is_named_and_does_no_harm(name: str, tmp_path: Path) -> None:
    golden = Path(__file__).parent.parent / "golden" / "store-v1-int4"
    root = Path(shutil.copytree(golden, tmp_path / "hs", symlinks=True))
    file = root / name / "zarr.json"
    sound = file.read_bytes()
    for what, change in HOSTILE_DOCUMENTS.items():
        hostile = change(sound)
        if hostile == sound:
            # groups have no shape, and few arrays a separator
            continue
        file.write_bytes(hostile)
        problems = verify(root, deep=False).problems
        assert any(str(file) in problem for problem in problems), (what, problems)
        json.dumps(describe(root), allow_nan=False)
        # rows are found by arithmetic, so a reader asks none of these but the calibration
        with contextlib.suppress(ValueError):
            assert len(open_store(root).hidden(0)) > 0
    file.write_bytes(sound)
    assert verify(root, deep=True).problems == []


def test_the_line_that_repairs_can_be_typed_whatever_the_store_is_called() -> None:
    report = Report("/my stores/hs", True, ["torn"], damaged_shards=[ShardId(0, 3)])
    with pytest.raises(ValueError, match=r"--deep --repair '/my stores/hs' uncommits"):
        fail(report)
