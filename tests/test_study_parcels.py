"""Parcels: what comes back from a machine is whole, or is named."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from studies import parcels
from studies.parcels import pack, unpack

# no compressor makes it smaller
NOISE = random.Random(5).randbytes(5000)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parcels, "PART_BYTES", 2000)
    # a chunk ends inside of a part, a part inside of a chunk
    monkeypatch.setattr(parcels, "_CHUNK_BYTES", 3000)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    found = tmp_path / "out"
    found.mkdir()
    return found


def test_files_come_back_from_their_parts_as_they_were(tmp_path: Path, out: Path) -> None:
    (tmp_path / "one").write_bytes(NOISE)
    paths = pack(out, "answers", {"a/one.jsonl": tmp_path / "one", "facts.json": b"{}"})
    assert sorted(out.iterdir()) == paths
    assert [path.name.split(".")[1] for path in paths] == ["1-of-3", "2-of-3", "3-of-3"]
    assert max(path.stat().st_size for path in paths) <= parcels.PART_BYTES
    unpack(out, "answers", tmp_path / "into")
    assert (tmp_path / "into" / "a" / "one.jsonl").read_bytes() == NOISE
    assert (tmp_path / "into" / "facts.json").read_bytes() == b"{}"


def test_a_parcel_takes_the_place_of_the_one_before_and_of_no_other(out: Path) -> None:
    pack(out, "drafter", {"x": b"x"})
    first = pack(out, "answers", {"x": NOISE})
    assert pack(out, "answers", {"x": NOISE}) == first
    second = pack(out, "answers", {"x": b"less"})
    assert [path.name.partition(".")[0] for path in sorted(out.iterdir())] == ["answers", "drafter"]
    assert second[0] in out.iterdir()


def test_more_than_is_taken_back_is_not_packed(out: Path) -> None:
    with pytest.raises(ValueError, match=r"answers is .* compressed, more than 4 parts of"):
        pack(out, "answers", {"x": NOISE + NOISE})
    assert not list(out.iterdir())


def _lost(paths: list[Path]) -> None:
    paths[1].unlink()


def _torn(paths: list[Path]) -> None:
    paths[1].write_bytes(paths[1].read_bytes()[:-1])


def _changed(paths: list[Path]) -> None:
    part = paths[1].read_bytes()
    paths[1].write_bytes(part[:-1] + bytes([part[-1] ^ 1]))


def _mixed(paths: list[Path]) -> None:
    """Beside parts of three, one of another three."""
    (paths[0].parent / f"answers.2-of-3.{'0' * 16}.tar.xz").write_bytes(b"x")


def _of_two(paths: list[Path]) -> None:
    (paths[0].parent / f"answers.1-of-2.{'0' * 16}.tar.xz").write_bytes(b"x")


def _foreign(paths: list[Path]) -> None:
    """A part of another parcel in place of the second, whole in itself."""
    paths[1].unlink()
    part = NOISE[:2000]
    (paths[0].parent / f"answers.2-of-3.{parcels._digest(part)}.tar.xz").write_bytes(part)


def _empty(paths: list[Path]) -> None:
    for path in paths:
        path.unlink()


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (_lost, r"lacks part 2 of 3 of answers: found answers\.1-of-3"),
        (_torn, r"answers\.2-of-3\..*tar\.xz is torn or changed: its 1,999 bytes have the digest"),
        (_changed, r"answers\.2-of-3\..*tar\.xz is torn or changed: its 2,000 bytes"),
        (_mixed, r"holds parts of several parcels: .*answers\.2-of-3\.0000"),
        (_of_two, r"holds parts of several parcels: answers\.1-of-2\.0000"),
        (_foreign, r"are no parts of one parcel"),
        (_empty, r"out holds no part of answers \(answers\.1-of-N"),
    ],
)
def test_a_part_that_will_not_do_is_named(
    harm: Callable[[list[Path]], None], message: str, tmp_path: Path, out: Path
) -> None:
    harm(pack(out, "answers", {"x": NOISE}))
    with pytest.raises(ValueError, match=message):
        unpack(out, "answers", tmp_path / "into")
    assert not (tmp_path / "into").exists()


def test_a_folder_that_is_not_there_holds_no_part(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nowhere holds no part of answers"):
        unpack(tmp_path / "nowhere", "answers", tmp_path / "into")
