"""Files that outlive the machine they were made on: a tar, compressed by xz, in parts that a tool
which takes back a few files of a bounded size takes back.

NAME.1-of-2.DIGEST.tar.xz: the digest is of the part's own bytes, so that a torn one can be named.
`cat NAME.*.tar.xz | tar xJ` unpacks a parcel without this module.
"""

from __future__ import annotations

import hashlib
import io
import lzma
import os
import re
import tarfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from dflash_pipeline.configs.disk import write_whole
from dflash_pipeline.configs.sizes import size_text

# files of 16 MiB are taken back; a little is left for what a tool may add
PART_BYTES = 15 << 20
MOST_PARTS = 4
# each a stream of its own: all cores compress at the same time, which one stream does not allow
_CHUNK_BYTES = 4 << 20
# of 52 MB of answers 8.2 MB in 4 s of a core; the best preset makes 6.3 of them in 38
_PRESET = 1
_DIGEST_LETTERS = 16


def pack(out: Path, name: str, files: Mapping[str, Path | bytes]) -> list[Path]:
    """Write `files`, by their names in the parcel, in place of any parcel of this name in `out`.

    ValueError where they are too many bytes for MOST_PARTS parts.
    """
    raw = _tar(files)
    chunks = [raw[begin : begin + _CHUNK_BYTES] for begin in range(0, len(raw), _CHUNK_BYTES)]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        data = b"".join(pool.map(lambda chunk: lzma.compress(chunk, preset=_PRESET), chunks))
    count = -(-len(data) // PART_BYTES)
    if count > MOST_PARTS:
        raise ValueError(
            f"{name} is {size_text(len(data))} compressed, more than {MOST_PARTS} parts of "
            f"{size_text(PART_BYTES)}: it does not travel"
        )
    for old in out.glob(f"{name}.*-of-*.tar.xz"):
        old.unlink()
    paths = list[Path]()
    for number in range(1, count + 1):
        part = data[(number - 1) * PART_BYTES : number * PART_BYTES]
        paths.append(out / f"{name}.{number}-of-{count}.{_digest(part)}.tar.xz")
        write_whole(paths[-1], part)
    return paths


def unpack(folder: Path, name: str, into: Path) -> None:
    """Write the files of a parcel into a folder.

    ValueError that names the part which is missing, torn, or of another parcel.
    """
    parts = _parts(folder, name)
    data = bytearray()
    for path, digest in parts:
        part = path.read_bytes()
        if _digest(part) != digest:
            raise ValueError(
                f"{path} is torn or changed: its {len(part):,} bytes have the digest "
                f"{_digest(part)}, its name says {digest}; copy it once more"
            )
        data += part
    try:
        with tarfile.open(fileobj=io.BytesIO(lzma.decompress(data))) as archive:
            archive.extractall(into, filter="data")
    except (lzma.LZMAError, tarfile.TarError, EOFError) as error:
        names = ", ".join(path.name for path, _ in parts)
        raise ValueError(f"{folder}: {names} are no parts of one parcel: {error}") from error


def _parts(folder: Path, name: str) -> list[tuple[Path, str]]:
    """The parts in their order, each with the digest that its name tells."""
    pattern = re.compile(
        rf"{re.escape(name)}\.(\d+)-of-(\d+)\.([0-9a-f]{{{_DIGEST_LETTERS}}})\.tar\.xz"
    )
    found = [
        (int(match[1]), int(match[2]), path, match[3])
        for path in (sorted(folder.iterdir()) if folder.is_dir() else [])
        if (match := pattern.fullmatch(path.name))
    ]
    if not found:
        raise ValueError(f"{folder} holds no part of {name} ({name}.1-of-N.DIGEST.tar.xz)")
    names = ", ".join(path.name for _, _, path, _ in found)
    counts = {count for _, count, _, _ in found}
    numbers = sorted(number for number, _, _, _ in found)
    if len(counts) > 1 or len(set(numbers)) < len(numbers):
        raise ValueError(f"{folder} holds parts of several parcels: {names}; leave one there")
    wanted = range(1, counts.pop() + 1)
    if missing := [str(number) for number in wanted if number not in numbers]:
        raise ValueError(
            f"{folder} lacks part {', '.join(missing)} of {len(wanted)} of {name}: found {names}"
        )
    return [(path, digest) for _, _, path, digest in sorted(found)]


def _tar(files: Mapping[str, Path | bytes]) -> bytes:
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w") as archive:
        for name, source in files.items():
            data = source if isinstance(source, bytes) else source.read_bytes()
            # no owner and no time: the same files are the same parcel
            about = tarfile.TarInfo(name)
            about.size = len(data)
            archive.addfile(about, io.BytesIO(data))
    return raw.getvalue()


def _digest(part: bytes) -> str:
    return hashlib.sha256(part).hexdigest()[:_DIGEST_LETTERS]
