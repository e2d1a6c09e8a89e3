"""Drafters written in the z-lab and speculators layouts, aside and renamed.

Servers skip a tensor whose name they do not know without a word, so the exact set of names and
shapes is asserted, and what was written is read back.
"""

from __future__ import annotations

import json
import shlex
import shutil
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file

from dflash_pipeline.configs.disk import writing
from dflash_pipeline.configs.errors import UsageError
from dflash_pipeline.configs.place import Place
from dflash_pipeline.configs.schema import PACKAGED, Run
from dflash_pipeline.store import durable, open_store
from dflash_pipeline.store.runlog import RunLog
from dflash_pipeline.train import layout
from dflash_pipeline.train.loading import WEIGHTS, read_checkpoint
from dflash_pipeline.train.remembered import TRAINED_ON
from dflash_pipeline.train.shape import DrafterShape, tensor_shapes
from dflash_pipeline.train.tensorfile import write_tensors


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
    known_id = checkpoint.trained_on.get("target_id")
    if run.target.id and known_id and known_id != run.target.id:
        log.say(
            f"the drafter was trained for target {known_id}, this command names {run.target.id}: "
            "with another model than that under another name it proposes badly"
        )
    is_servable = run.target.id not in ("", *PACKAGED)
    commands = serving_commands(checkpoint.shape, out, run.target.id if is_servable else "TARGET")
    scale = checkpoint.shape.input_embedding_scale
    if extra["layout"] == "speculators":
        # SGLang knows no speculators layout
        commands = commands[:1]
    elif scale != 1.0:
        # SGLang takes rows from the target's own module, which has multiplied them
        commands = commands[1:]
        log.say(
            f"this target multiplies its embedding by {scale:g}; vLLM does not do so for a "
            "drafter, which would propose badly there: no line for it"
        )
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
        with writing(aside / "config.json"):
            (aside / "config.json").write_text(json.dumps(dict(config), indent=2) + "\n")
        write_tensors(aside / WEIGHTS, tensors, {"format": "pt"})
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
    for name, tensor in load_file(directory / WEIGHTS).items():
        one, other = tensor.contiguous().view(torch.uint8), written[name].view(torch.uint8)
        if tensor.dtype != written[name].dtype or not torch.equal(one, other):
            raise ValueError(f"{name} came back from the disk changed: is the disk sound?")
