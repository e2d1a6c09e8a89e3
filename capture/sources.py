"""Raw rows of data files: JSONL (also .gz), Parquet and Hugging Face data sets, streamed.

A row is either an object or the reason why it is none; a file that cannot be read at all raises.
"""

from __future__ import annotations

import gzip
import hashlib
import importlib
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from dflash_pipeline.configs.errors import UsageError
from dflash_pipeline.configs.sizes import size_text
from dflash_pipeline.store.flatfiles import sha256_of

# longer lines are skipped without ever being held in memory
LONGEST_LINE_BYTES = 8 << 20
_PARQUET_BATCH_ROWS = 256
_READ_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Row:
    """One row as it stands in its source; `fault` says why `values` is None."""

    number: int
    """Line of the file or row of the table, from 1."""
    values: Mapping[str, Any] | None
    fault: str


def stem(source: str) -> str:
    """The short name of a source: its file name without suffixes, or the data set's last part."""
    if source.startswith("hf:"):
        return source[3:].split(":")[0].rstrip("/").split("/")[-1]
    name = Path(source).name
    for suffix in (".jsonl.gz", ".jsonl", ".parquet"):
        if name.endswith(suffix):
            return name.removesuffix(suffix)
    return name


def stems(sources: Sequence[str]) -> tuple[str, ...]:
    """The short names made distinct: the second `train` becomes `train-2`."""
    names: list[str] = []
    for source in sources:
        name, num_seen = stem(source), 1
        while name in names:
            num_seen += 1
            name = f"{stem(source)}-{num_seen}"
        names.append(name)
    return tuple(names)


def rows(source: str) -> Iterator[Row]:
    """Rows of one source, in order; blank lines are no rows."""
    if source.startswith("hf:"):
        return _data_set_rows(source)
    if source.endswith(".parquet"):
        return _parquet_rows(source)
    return _line_rows(source)


def content_hash(source: str) -> str:
    """sha256 of the file's bytes; of a data set, of its name and the library's fingerprint."""
    if source.startswith("hf:"):
        name = f"{source} {_data_set(source)._fingerprint}"
        return hashlib.sha256(name.encode()).hexdigest()
    return sha256_of(Path(source))


def _line_rows(source: str) -> Iterator[Row]:
    num_rows = number = 0
    with _opened(source) as file:
        while True:
            number += 1
            try:
                line, is_whole = _line(file)
            except (EOFError, zlib.error, gzip.BadGzipFile) as error:
                raise ValueError(f"{source} is damaged at line {number}: {error}") from error
            if not line:
                break
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if not is_whole:
                num_rows += 1
                yield Row(number, None, f"line longer than {size_text(LONGEST_LINE_BYTES)}")
            elif line.strip():
                num_rows += 1
                yield _parsed(number, line)
    if num_rows == 0:
        yield Row(0, None, "file without rows")


def _opened(source: str) -> IO[bytes]:
    if source.endswith(".gz"):
        return cast("IO[bytes]", gzip.open(source, "rb"))
    return Path(source).open("rb")


def _line(file: IO[bytes]) -> tuple[bytes, bool]:
    """The next line, empty at the end; False: too long, and all of it has been read past."""
    line = file.readline(LONGEST_LINE_BYTES)
    if len(line) < LONGEST_LINE_BYTES or line.endswith(b"\n"):
        return line, True
    while (rest := file.readline(_READ_BYTES)) and not rest.endswith(b"\n"):
        pass
    return line[:1], False


def _parsed(number: int, line: bytes) -> Row:
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError:
        return Row(number, None, "not UTF-8")
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        return Row(number, None, "not JSON")
    if not isinstance(values, dict):
        return Row(number, None, "not a JSON object")
    return Row(number, values, "")


def _parquet_rows(source: str) -> Iterator[Row]:
    parquet = _optional("pyarrow.parquet", source, "parquet")
    number = 0
    try:
        with parquet.ParquetFile(source) as file:
            for batch in file.iter_batches(batch_size=_PARQUET_BATCH_ROWS):
                for values in batch.to_pylist():
                    number += 1
                    yield Row(number, values, "")
    except (OSError, ValueError) as error:
        raise ValueError(f"{source} is damaged after row {number}: {error}") from error
    if number == 0:
        yield Row(0, None, "file without rows")


def _data_set(source: str) -> Any:
    data_sets = _optional("datasets", source, "datasets")
    name, _, split = source[3:].partition(":")
    return data_sets.load_dataset(name, split=split or "train")


def _data_set_rows(source: str) -> Iterator[Row]:
    number = 0
    for values in _data_set(source):
        number += 1
        yield Row(number, values, "")
    if number == 0:
        yield Row(0, None, "file without rows")


def _optional(module: str, source: str, extra: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UsageError(
            f"{source} needs {module.split('.')[0]}: pip install 'dflash-pipeline[{extra}]'"
        ) from error
