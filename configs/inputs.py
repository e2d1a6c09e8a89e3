"""What a line names must be there, and where it writes must be free: found before anything loads.

The stages check again, with all they know; this spares a person the wait for their imports.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from dflash_pipeline.configs.errors import UsageError
from dflash_pipeline.configs.jsonfile import read_object
from dflash_pipeline.configs.mounts import root_of

# every store has it, and nothing else does that this package writes
STORE_FILE = "zarr.json"
EXPECTED_DRAFTER = "name a run, one of its steps, or a checkpoint with config.json and safetensors"
_KINDS_OF_DATA = ".jsonl, .jsonl.gz or .parquet, or hf:NAME[:SPLIT]"
_EXPECTED = "expected a directory that dflash capture wrote"
# entries of a directory that is no store
_NAMED = 3


def need(value: Sequence[str], flag: str, key: str) -> str:
    """The value itself, or UsageError naming both places to set it."""
    if not value:
        raise UsageError(f"no {flag}: give it, or set {key} in dflash.toml")
    return str(value)


def check_data(sources: Sequence[str]) -> None:
    """Raise UsageError unless every source exists and has a known kind."""
    if not sources:
        raise UsageError("no data: data.files is empty; name files with --data or in dflash.toml")
    for source in sources:
        if source.startswith("hf:"):
            if not source[3:].split(":")[0]:
                raise UsageError(f"data source {source!r} names no data set: write hf:NAME[:SPLIT]")
            continue
        path = Path(source)
        if not path.is_file():
            raise UsageError(
                f"data file {source} does not exist or is not a file: name one that is there, "
                f"{_KINDS_OF_DATA}"
            )
        if not path.name.endswith((".jsonl", ".jsonl.gz", ".parquet")):
            raise UsageError(f"data file {source}: expected {_KINDS_OF_DATA}")


def check_store(path: str) -> None:
    """What only reads a store needs one; whether it is whole is the stage's to say."""
    root = root_of(path)
    if not os.path.lexists(root):
        raise UsageError(f"there is no store {path}: name the directory that dflash capture wrote")
    refuse_other(root)
    if not (root / STORE_FILE).is_file():
        raise UsageError(f"{path} is an empty directory, {_EXPECTED}")


def refuse_other(root: Path) -> None:
    """UsageError where something stands that no capture fills; an empty directory may be filled."""
    if not os.path.lexists(root) or (root / STORE_FILE).is_file():
        return
    if not root.is_dir():
        raise UsageError(f"no store at {root}: it is not a directory; {_EXPECTED}")
    try:
        found = sorted(one.name for one in root.iterdir())
    except OSError as error:
        raise UsageError(f"{root} cannot be read ({error.strerror}): {_EXPECTED}") from None
    # it may have appeared in the meantime
    if found and not (root / STORE_FILE).is_file():
        if rows := next(root.glob("b[0-9]*/hidden/c"), None):
            raise UsageError(
                f"{root} is no store, it holds rows ({rows.relative_to(root)}) of one that lies on "
                "several mounts, and no record of which: name that store's own directory, the "
                "first of those that dflash capture was given as --store A,B"
            )
        more = ", ..." if len(found) > _NAMED else ""
        raise UsageError(
            f"no store at {root} (no {STORE_FILE} in it, but {', '.join(found[:_NAMED])}{more}): "
            f"{_EXPECTED}"
        )


def check_checkpoint(path: str, flag: str) -> None:
    """Refuse a drafter that is no directory; `flag` names the option, empty: an argument."""
    if not Path(path).is_dir():
        where = f"{flag} {path}" if flag else path
        raise UsageError(
            f"{where}: there is no such run, step or checkpoint directory; {EXPECTED_DRAFTER} "
            "(one of a hub is downloaded first)"
        )


def check_target(name: str) -> None:
    """Refuse a target that is written as a place in the file system where nothing stands."""
    path = Path(name).expanduser()
    if name.endswith(".gguf"):
        if not path.is_file():
            raise UsageError(f"target {name}: no such file")
    elif name.startswith(("/", ".", "~")) or name.count("/") > 1:
        if not path.is_dir():
            raise UsageError(
                f"target {name}: there is no such directory; expected one with config.json and "
                ".safetensors files, a .gguf file, a hub name, toy or smollm2"
            )
        if not (path / "config.json").is_file():
            raise UsageError(f"target {name}: {path} holds no config.json")


def check_store_place(store: str) -> None:
    """Refuse a path where no store can be made and none stands."""
    path = Path(store)
    if path.name in ("", ".."):
        raise UsageError(f"--store {store}: the store needs a directory of its own; name a new one")
    if path.is_symlink():
        # its logs and leases stand beside it: a second name would mean a second set of leases
        raise UsageError(
            f"--store {store} is a symbolic link: name the directory that it leads to, "
            f"{os.path.realpath(path)}"
        )
    if os.path.lexists(path):
        if not path.is_dir():
            raise UsageError(f"--store {store} is not a directory: name a new one")
        if path.is_mount():
            # it appears by a rename, which cannot replace a mount point
            raise UsageError(f"--store {store} is a mount point: name a directory inside it")
        if any(path.iterdir()) and not (path / STORE_FILE).is_file():
            raise UsageError(
                f"--store {store} is not empty and holds no store (no zarr.json): name a new "
                "directory"
            )
    _check_writable(path.absolute().parent, f"--store {store}")


def check_further_mount(mount: str) -> None:
    """Refuse a path where no shards of a striped store can be put."""
    path = Path(mount)
    if os.path.lexists(path) and not path.is_dir():
        raise UsageError(f"--store ...,{mount} is not a directory: name another one")
    _check_writable(path.absolute() if path.is_dir() else path.absolute().parent, "--store")


def listed(entries: Sequence[str], flag: str) -> tuple[str, ...]:
    """The entries, with lines of FILE in place of each `@FILE`; blank lines are left out."""
    found: list[str] = []
    for entry in entries:
        if not entry.startswith("@"):
            found.append(entry)
            continue
        try:
            lines = Path(entry[1:]).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"{flag} {entry}: the file cannot be read: {error}") from None
        found += [line.strip() for line in lines if line.strip()]
    return tuple(dict.fromkeys(found))


def check_out_file(out: str, flag: str) -> None:
    """Refuse a path that no file can be written to."""
    path = Path(out)
    if path.name in ("", "..") or path.is_dir():
        raise UsageError(f"{flag} {out} is a directory: name a file")
    if path.exists() and not os.access(path, os.W_OK):
        raise UsageError(f"{flag} {out}: the file cannot be written; name another one")
    _check_writable(path.absolute().parent, f"{flag} {out}")


def check_new_directory(out: str, flag: str) -> None:
    """Refuse a path where something stands already, or where no directory can be made."""
    if os.path.lexists(out):
        raise UsageError(f"{flag} {out} exists: choose another {flag} or remove it")
    _check_writable(Path(out).absolute().parent, f"{flag} {out}")


def is_free_for_run(out: str) -> bool:
    """Whether a new run may begin in a directory: it is not there, or holds only the logs of a
    start that failed, where nothing is worth a question."""
    path = Path(out)
    if not os.path.lexists(path):
        return True
    return path.is_dir() and all(one.name == "logs" for one in path.iterdir())


def check_run_directory(out: str) -> None:
    """Refuse a path where no run can be written."""
    path = Path(out)
    if os.path.lexists(path) and not path.is_dir():
        raise UsageError(f"--out {out} is not a directory: name another one")
    _check_writable(path.absolute(), f"--out {out}")


def _is_store(folder: Path) -> bool:
    """A group of Zarr that is ours; others may hold stores."""
    try:
        return "dflash" in read_object(folder / STORE_FILE)["attributes"]
    except (OSError, ValueError, TypeError, KeyError):
        return False


def _check_writable(folder: Path, what: str) -> None:
    """The folder, or the nearest one above it that exists, takes new entries; and no store does."""
    real = Path(os.path.realpath(folder))
    for one in (real, *real.parents):
        if _is_store(one):
            # what no capture wrote is damage to a store
            raise UsageError(
                f"{what}: {one} is a store, nothing else goes into it; choose another place"
            )
    while not os.path.lexists(folder):
        folder = folder.parent
    if not folder.is_dir():
        raise UsageError(f"{what}: {folder} is not a directory; choose another place")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError(f"{what}: {folder} cannot be written to; choose another place")
    try:
        # /proc and its like grant it and refuse each entry
        os.rmdir(tempfile.mkdtemp(prefix=".dflash-", dir=folder))
    except OSError as error:
        raise UsageError(
            f"{what}: nothing can be made in {folder} ({error.strerror}); choose another place"
        ) from None
