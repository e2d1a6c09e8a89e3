"""Checkpoints in the z-lab and speculators layouts, written aside and renamed, read with suspicion.

Servers skip a tensor whose name they do not know without a word, so the exact set of names and
shapes is asserted on both ways. Only safetensors is read.
"""

from __future__ import annotations

import hashlib
import json
import shlex
import shutil
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from dflash_pipeline.configs.errors import UsageError
from dflash_pipeline.configs.place import Place
from dflash_pipeline.configs.schema import PACKAGED, Run
from dflash_pipeline.store import Store, durable, open_store
from dflash_pipeline.store.runlog import RunLog
from dflash_pipeline.train import layout
from dflash_pipeline.train.remembered import (
    TRAINED_ON,
    checkpoint_directory,
    inside,
    remembered,
    rendering,
)
from dflash_pipeline.train.shape import DrafterShape, tensor_shapes
from dflash_pipeline.train.tensorfile import write_tensors

_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
# the format's own limit; a longer header is a broken or hostile file
_MAX_HEADER_BYTES = 100_000_000
_HASHED_ROWS = 256
_FLOATS = {"BF16", "F16", "F32"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """A drafter read from disk."""

    path: Path
    """The directory that held it: a run directory leads to one of its steps."""
    layout: str
    """`zlab` or `speculators`."""
    shape: DrafterShape
    tensors: dict[str, torch.Tensor]
    """Under `Drafter`'s names, in the dtype of the file (bf16 when written here)."""
    trained_on: Mapping[str, str]
    """`trained_on` of the store it was trained on; empty where nobody wrote it down."""


def trained_on(store: Store) -> dict[str, str]:
    """What a drafter remembers of its store: `rendering`, and which target's states it holds."""
    named = {"target_id": store.spec.target_id, "embedding_hash": embedding_hash(store.embed())}
    return rendering(store.spec) | named


def embedding_hash(bits_VH: npt.NDArray[np.uint16]) -> str:
    """sha256 of rows from all over an embedding, bits of bf16: tells targets apart in whatever
    files they came, and costs nothing."""
    rows = bits_VH[:: max(1, len(bits_VH) // _HASHED_ROWS)]
    return hashlib.sha256(np.ascontiguousarray(rows).tobytes()).hexdigest()


def write_zlab(
    path: Path,
    shape: DrafterShape,
    tensors: Mapping[str, torch.Tensor],
    trained_on: Mapping[str, str] | None = None,
) -> None:
    """Write a directory that vLLM, SGLang and z-lab's code load. `tensors`: `Drafter`'s names.

    Rounded to bf16, read back and compared bit for bit before the directory gets its name.
    `trained_on` is kept in a file that servers do not read.
    ValueError names each wrong tensor, and a path that exists.
    """
    body = _body(shape, tensors)
    config, expected = layout.zlab_config(shape), layout.zlab_tensors(shape)
    _write(path, shape, config, body, expected, trained_on)


def write_speculators(
    path: Path,
    shape: DrafterShape,
    tensors: Mapping[str, torch.Tensor],
    embed_VH: torch.Tensor,
    head_VH: torch.Tensor,
    target_id: str,
    target_architectures: Sequence[str],
    trained_on: Mapping[str, str] | None = None,
) -> None:
    """Write the speculators layout, which also carries the target's embedding and head."""
    config = layout.speculators_config(shape, target_id, target_architectures)
    body = _body(shape, tensors) | {
        "embed_tokens.weight": embed_VH.to("cpu", torch.bfloat16).contiguous(),
        # a tied head shares memory with the embedding, which safetensors refuses
        "lm_head.weight": head_VH.to("cpu", torch.bfloat16).clone(
            memory_format=torch.contiguous_format
        ),
    }
    _write(path, shape, config, body, layout.speculators_tensors(shape), trained_on)


def read_checkpoint(path: str | Path) -> Checkpoint:
    """A run directory (its best step, else its last), a step, a z-lab or a speculators checkpoint.

    ValueError, in one line with the path, for anything that is not exactly that.
    """
    directory = checkpoint_directory(Path(path))
    maps: dict[str, tuple[int, ...]] = {}
    try:
        config = _read_json(directory / "config.json")
        architecture = (config.get("architectures") or ["none"])[0]
        if architecture == layout.ZLAB_ARCHITECTURE:
            name, shape = "zlab", layout.shape_from_zlab(config)
            expected = layout.zlab_tensors(shape)
        elif architecture == layout.SPECULATORS_ARCHITECTURE:
            name, shape = "speculators", layout.shape_from_speculators(config)
            expected = layout.speculators_tensors(shape)
            maps = layout.vocabulary_maps(shape)
        else:
            raise ValueError(
                f"architecture {architecture}, expected {layout.ZLAB_ARCHITECTURE} or "
                f"{layout.SPECULATORS_ARCHITECTURE}"
            )
        tensors = _read_tensors(directory, expected, maps)
        trained_on = remembered(directory)
    except KeyError as error:
        raise ValueError(f"{directory}/config.json has no key {error}: not a DFlash drafter") from (
            error
        )
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{directory} is not a drafter that can be read: {error}") from error
    if name == "speculators":
        for extra in ("embed_tokens.weight", "lm_head.weight"):
            del tensors[extra]
        # an offset from the drafter's id to the target's, and which of the target's it knows
        offset_V, known_V = tensors.pop("d2t", None), tensors.pop("t2d", None)
        is_mapped = offset_V is not None and bool(offset_V.any())
        if is_mapped or (known_V is not None and not bool(known_V.all())):
            raise ValueError(f"{directory} maps its vocabulary: only full vocabularies are read")
    for tensor_name, tensor in tensors.items():
        if not torch.isfinite(tensor).all():
            raise ValueError(f"{directory}: {tensor_name} holds NaN or Inf: no use as a drafter")
    return Checkpoint(
        path=directory,
        layout=name,
        shape=shape,
        tensors=layout.split(tensors, shape),
        trained_on=trained_on,
    )


def serving_commands(shape: DrafterShape, path: Path, target_id: str) -> list[str]:
    """The lines that serve `target_id` with the drafter at `path`, as a shell reads them."""
    speculative = json.dumps(
        {"method": "dflash", "model": str(path), "num_speculative_tokens": shape.block_size - 1}
    )
    target, drafter = shlex.quote(target_id), shlex.quote(str(path))
    return [
        f"vllm serve {target} --speculative-config {shlex.quote(speculative)}",
        f"python -m sglang.launch_server --model-path {target} --speculative-algorithm DFLASH "
        f"--speculative-draft-model-path {drafter} "
        f"--speculative-num-draft-tokens {shape.block_size}",
    ]


def main(run: Run, place: Place, extra: Mapping[str, object]) -> None:
    """`dflash export`: extra holds checkpoint, out, layout (zlab or speculators) and store."""
    log = RunLog(place)
    checkpoint = read_checkpoint(str(extra["checkpoint"]))
    out = Path(str(extra["out"]))
    if extra["layout"] == "zlab":
        write_zlab(out, checkpoint.shape, checkpoint.tensors, checkpoint.trained_on)
    else:
        store_path = str(extra["store"] or run.store.path)
        if not store_path:
            raise UsageError(
                "the speculators layout carries the target's embedding and head: name a store "
                "of that target with --store"
            )
        store = open_store(store_path)
        write_speculators(
            out,
            checkpoint.shape,
            checkpoint.tensors,
            _bf16(store.embed()),
            _bf16(store.head()),
            run.target.id or store.spec.target_id,
            store.target_config().get("architectures") or [],
            checkpoint.trained_on,
        )
    log.say(f"{checkpoint.path} is now {out} ({extra['layout']} layout), read back bit for bit")
    is_servable = run.target.id not in ("", *PACKAGED)
    commands = serving_commands(checkpoint.shape, out, run.target.id if is_servable else "TARGET")
    # SGLang knows no speculators layout
    commands = commands if extra["layout"] == "zlab" else commands[:1]
    if not is_servable:
        known = f"{run.target.id} is a name of this package alone; " if run.target.id else ""
        log.say(
            f"{known}TARGET stands for the target's directory or hub name, as a server loads it"
        )
    log.say("next: serve it with one of" if len(commands) > 1 else "next: serve it with")
    for command in commands:
        log.say(f"  {command}")


def _bf16(bits: npt.NDArray[np.uint16]) -> torch.Tensor:
    return torch.from_numpy(np.array(bits)).view(torch.bfloat16)


def _body(shape: DrafterShape, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if problems := layout.differences(tensor_shapes(shape), found):
        raise ValueError(f"this is not the drafter of that shape: {'; '.join(problems)}")
    plain = {name: tensor.detach().to("cpu", torch.bfloat16) for name, tensor in tensors.items()}
    for name, tensor in plain.items():
        if not torch.isfinite(tensor).all():
            raise ValueError(f"{name} holds NaN or Inf: nothing is exported")
    return {name: tensor.contiguous() for name, tensor in layout.joined(plain, shape).items()}


def _write(
    path: Path,
    shape: DrafterShape,
    config: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
    expected: Mapping[str, tuple[int, ...]],
    trained_on: Mapping[str, str] | None,
) -> None:
    if path.exists():
        raise UsageError(f"{path} exists: choose another --out or remove it")
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if problems := layout.differences(expected, found):
        raise ValueError(f"{path} would be incomplete: {'; '.join(problems)}")
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.parent / f".{path.name}.{uuid.uuid4().hex}"
    aside.mkdir()
    try:
        (aside / "config.json").write_text(json.dumps(dict(config), indent=2) + "\n")
        write_tensors(aside / _WEIGHTS, tensors, {"format": "pt"})
        if trained_on:
            told = json.dumps(dict(trained_on), indent=2)
            durable.write_durably(aside / TRAINED_ON, told.encode())
        for file in (aside / "config.json", aside):
            durable.sync(file)
        if (again := read_checkpoint(aside).shape) != shape:
            raise ValueError(f"{path} reads back as {again}, expected {shape}")
        _compare(aside, tensors)
        aside.rename(path)
        durable.sync(path.parent)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def _compare(directory: Path, written: Mapping[str, torch.Tensor]) -> None:
    for name, tensor in load_file(directory / _WEIGHTS).items():
        one, other = tensor.contiguous().view(torch.uint8), written[name].view(torch.uint8)
        if tensor.dtype != written[name].dtype or not torch.equal(one, other):
            raise ValueError(f"{name} came back from the disk changed: is the disk sound?")


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ValueError(f"{path.name} is missing")
    content = json.loads(path.read_text())
    if not isinstance(content, dict):
        raise ValueError(f"{path.name} does not hold a JSON object")
    return content


def _read_tensors(
    directory: Path,
    expected: Mapping[str, tuple[int, ...]],
    optional: Mapping[str, tuple[int, ...]],
) -> dict[str, torch.Tensor]:
    """Check every header first, then load; some writers put `model.` before each name."""
    if (directory / _INDEX).is_file():
        names = sorted(set(_read_json(directory / _INDEX)["weight_map"].values()))
    else:
        names = [_WEIGHTS]
    files = [inside(directory, name) for name in names]
    found: dict[str, tuple[int, ...]] = {}
    for file in files:
        for name, (dtype, size) in _header(file).items():
            plain = name.removeprefix("model.")
            if plain in found:
                raise ValueError(f"{name} stands in it twice")
            if dtype not in _FLOATS and plain not in optional:
                raise ValueError(f"{name} has dtype {dtype}, expected one of {sorted(_FLOATS)}")
            found[plain] = size
    there = {name: size for name, size in optional.items() if name in found}
    if problems := layout.differences({**expected, **there}, found):
        raise ValueError("; ".join(problems))
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        tensors |= {name.removeprefix("model."): t for name, t in load_file(file).items()}
    return tensors


def _header(file: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Name -> (dtype, shape), without loading."""
    if not file.is_file():
        raise ValueError(f"{file.name} is missing")
    size_bytes = file.stat().st_size
    with file.open("rb") as stream:
        header_bytes = int.from_bytes(stream.read(8), "little")
        if size_bytes < 8 or header_bytes > min(size_bytes - 8, _MAX_HEADER_BYTES):
            raise ValueError(
                f"{file.name} ({size_bytes} bytes) claims a header of {header_bytes}: truncated"
            )
        try:
            # every size, offset and type that it claims is held against the file
            with safe_open(file, framework="pt"):
                header = json.loads(stream.read(header_bytes))
        except SafetensorError as error:
            raise ValueError(f"{file.name} is truncated or damaged ({error})") from error
    tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
    return {name: (entry["dtype"], tuple(entry["shape"])) for name, entry in tensors.items()}
